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

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def read(end: Callable[[int], object], **options: Any) -> list[int] | str:
    """What a loader reads whose process is told to ``end`` after its first row; its error, if it raises."""
    read: list[int] = []
    try:
        for pid in DataLoader(Readers(), batch_size=None, num_workers=1, prefetch_factor=1, **options):
            if not read:
                end(pid)
            read.append(pid)
    except RuntimeError as error:
        return str(error)
    finally:
        gc.collect()  # the loader's iterator, and its threads
    return read


def by_another(pid: int) -> None:
    subprocess.run(["kill", "-TERM", str(pid)], check=True)


def by_its_parent(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def test_it_goes_on_reading() -> None:
    found = read(by_another, worker_init_fn=ts.data.outlive_preemption)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_without_it_the_training_process_would_raise() -> None:
    assert "DataLoader worker" in str(read(by_another))


def test_its_own_parent_can_end_it() -> None:
    assert "DataLoader worker" in str(read(by_its_parent, worker_init_fn=ts.data.outlive_preemption))
