"""The process that hosts the store stands still for a while, as one does whose machine is moved or swaps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchstrat as ts
from torchstrat.testing import Workers

STOPPED_SECONDS = 6.0
"""Longer than a rank waits for one answer of the store."""

_HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host() -> Iterator[tuple[int, int]]:
    """The process's number, and the store's port."""
    with subprocess.Popen([sys.executable, "-c", _HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.send_signal(signal.SIGCONT)
        process.stdin.close()


class StopsTheHost(Dataset[Any]):
    """Its last row cannot be read, and from then on the store does not answer for a while."""

    def __init__(self, host: int) -> None:
        self.host = host

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 23:
            os.kill(self.host, signal.SIGSTOP)
            threading.Timer(STOPPED_SECONDS, os.kill, (self.host, signal.SIGCONT)).start()
            raise ValueError("the last row is damaged")
        return torch.ones(1)


def go_through(host: int, port: int) -> tuple[int, str]:
    os.environ["MASTER_PORT"] = str(port)
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=120))
    steps, error = 0, ""
    try:
        for _ in strategy.distribute_dataset(DataLoader(StopsTheHost(host), 4)):
            steps += 1
    except (ValueError, ts.errors.CommunicationError) as raised:
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    strategy.close()
    return steps, error


def test_a_rank_hears_of_anothers_bad_row_once_the_store_answers_again(host: tuple[int, int]) -> None:
    with Workers(2) as workers:
        (steps, told), (others_steps, error) = workers.run(go_through, *host)
    assert (steps, others_steps) == (6, 5)
    assert error == "ValueError: the last row is damaged"
    assert "rank 1 could not read its rows of a batch: ValueError: the last row is damaged" in told
