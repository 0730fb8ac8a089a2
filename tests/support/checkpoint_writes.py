"""For tests of saves that are under way or fail: what happens where files are handed to the disk."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import threading
from collections.abc import Iterator
from unittest import mock

WAIT = 60
PARTS = "*.distcp"


class HeldWrites:
    """Files of these names wait at a gate, until they are on the disk; ``full``: the disk has no space left then."""

    def __init__(self, names: str, full: bool) -> None:
        self._names, self._full, self._sync = names, full, os.fsync
        self.reached, self.go_on = threading.Semaphore(0), threading.Event()

    def __call__(self, descriptor: int) -> None:
        if fnmatch.fnmatch(os.readlink(f"/proc/self/fd/{descriptor}"), self._names):
            self.reached.release()
            assert self.go_on.wait(WAIT)
            if self._full:
                raise OSError(28, "No space left on device")
        self._sync(descriptor)

    def wait_until_reached(self) -> None:
        assert self.reached.acquire(timeout=WAIT)


@contextlib.contextmanager
def held_writes(names: str = PARTS, *, full: bool = False) -> Iterator[HeldWrites]:
    """What this process writes waits."""
    held = HeldWrites(names, full)
    with mock.patch("os.fsync", held):
        try:
            yield held
        finally:
            held.go_on.set()


@contextlib.contextmanager
def full_disk(names: str = PARTS) -> Iterator[None]:
    with held_writes(names, full=True) as held:
        held.go_on.set()
        yield
