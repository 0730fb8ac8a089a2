"""Deadlines that a busy machine does not miss."""

from __future__ import annotations

import os
import time

BUSY = 0.2
"""A machine is where less than this part of its cores' time was left over."""

LONGEST = 4.0
"""How many times as far away a deadline is where the machine is busy until then."""


class Patience:
    """A deadline some seconds from now, later if the machine is busy until then: who waits may not have had a turn.

    What hangs waits on an idle machine, and meets its deadline there on time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began, self._idle = time.monotonic(), idle_seconds()

    def left(self) -> float:
        """Seconds until it may be over; at most 0 if it is."""
        passed, unused = time.monotonic() - self._began, idle_seconds() - self._idle
        is_busy = unused < BUSY * passed * (os.cpu_count() or 1)
        return self.seconds - (passed / LONGEST if is_busy else passed)

    @property
    def is_over(self) -> bool:
        return self.left() <= 0


def idle_seconds() -> float:
    """Of all cores together, since the machine was started; where it does not tell, as if they were idle."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            idle, waiting_for_disks = file.readline().split()[4:6]
    except (OSError, ValueError):
        return time.monotonic() * (os.cpu_count() or 1)
    return (int(idle) + int(waiting_for_disks)) / os.sysconf("SC_CLK_TCK")
