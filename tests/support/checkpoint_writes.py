"""For tests of saves that are under way or fail: a gate before the writing of a checkpoint's parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torchstrat.checkpoint import writing

WAIT = 60


def disk_full(*_: Any) -> Any:
    """In place of what writes."""
    raise OSError(28, "No space left on device")


class HeldWrites:
    """Writing waits at a gate."""

    def __init__(self, write: Callable[..., Any]) -> None:
        self.write, self.reached, self.go_on = write, threading.Semaphore(0), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.reached.release()
        assert self.go_on.wait(WAIT)
        return self.write(*args)

    def wait_until_reached(self) -> None:
        assert self.reached.acquire(timeout=WAIT)


@contextlib.contextmanager
def held_writes(module: Any = writing, write: Callable[..., Any] | None = None) -> Iterator[HeldWrites]:
    """What ``module`` writes (as it stands: this process's saves) waits; ``write`` is then called instead."""
    held = HeldWrites(write or module.write_part)
    with mock.patch.object(module, "write_part", held):
        try:
            yield held
        finally:
            held.go_on.set()
