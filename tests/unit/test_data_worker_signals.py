"""Data-loading processes, and a SIGTERM that everybody gets."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

import torchstrat as ts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="does nothing elsewhere")


class Readers(Dataset[int]):
    """Row n is the process that reads it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def by_another(pid: int) -> None:
    subprocess.run(["kill", "-TERM", str(pid)], check=True)


def by_its_parent(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "init", "goes_on"),
    [
        (by_another, ts.data.outlive_preemption, True),
        (by_another, None, False),
        (by_its_parent, ts.data.outlive_preemption, False),
    ],
    ids=["goes on", "the training process would raise without it", "its own parent can end it"],
)
def test_a_worker_that_is_told_to_end(end: Callable[[int], object], init: Any, goes_on: bool) -> None:
    read: list[int] = []
    error = ""
    rows = 8 if goes_on else 10**9  # a worker may read on until it comes to its end
    try:
        for pid in DataLoader(Readers(rows), None, num_workers=1, prefetch_factor=1, worker_init_fn=init):
            if not read:
                end(pid)
            read.append(pid)
    except RuntimeError as raised:
        error = str(raised)
    finally:
        gc.collect()  # the loader's iterator, and its threads
    if goes_on:
        assert (len(read), len(set(read)), error) == (8, 1, "")
    else:
        assert "DataLoader worker" in error
