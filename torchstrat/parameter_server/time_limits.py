"""How long functions run that may not run for ever, as the coordinator sees it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

GRACE_SECONDS = 0.1
"""For the news of an end that is on its way, or waits for a thread of this process."""


class _Running(NamedTuple):
    function: int
    due: float
    was_looked_at: bool = False


class TimeLimits:
    """Of the functions that workers run now: each one's first. A worker is named by its incarnation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, _Running] = {}

    @property
    def due(self) -> float:
        """When to call `passed`, by the clock; never (infinity) if no function has a limit."""
        return min((running.due for running in self._running.values()), default=math.inf)

    def look(self, first: Iterable[tuple[str, int, float]]) -> bool:
        """What runs now: (worker, function, its limit in seconds), of functions that have one. Whether `due` is earlier
        than it was."""
        before, now = self.due, self._clock()
        known = self._running
        self._running = {
            worker: known[worker]
            if worker in known and known[worker].function == function
            else _Running(function, now + limit)
            for worker, function, limit in first
        }
        return self.due < before

    def passed(self) -> list[tuple[str, int]]:
        """Workers whose functions have run for too long, with these; each once."""
        now, found = self._clock(), []
        for worker, running in list(self._running.items()):
            if running.due > now:
                continue
            if running.was_looked_at:
                found.append((worker, running.function))
                self._running[worker] = running._replace(due=math.inf)
            else:
                self._running[worker] = running._replace(due=now + GRACE_SECONDS, was_looked_at=True)
        return found
