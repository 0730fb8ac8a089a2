"""Lines for people that anybody on the network can cause, and that must therefore not fill a disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

INTERVAL_SECONDS = 30.0
LINES_PER_INTERVAL = 5


class Complaints:
    """Passes on a few lines per interval and counts the others. Thread-safe.

    Args:
        say: Takes the lines.
        clock: In seconds; replaced by tests.
    """

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._lock = threading.Lock()
        self._began = clock()
        self._count = 0

    def add(self, line: str) -> None:
        """Say it, unless too much was said of late."""
        with self._lock:
            if self._clock() - self._began > INTERVAL_SECONDS:
                self._began, self._count = self._clock(), 0
            self._count += 1
            count = self._count
        if count <= LINES_PER_INTERVAL:
            self._say(line)
        elif count == LINES_PER_INTERVAL + 1:
            self._say(f"more of the like is not reported for up to {INTERVAL_SECONDS:g} s.")
