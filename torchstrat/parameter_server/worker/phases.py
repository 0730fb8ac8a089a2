"""Named places in a worker's life, so that a test can make one die exactly there."""

from __future__ import annotations

from collections.abc import Callable

IDLE = "idle"
UNPICKLING = "while unpickling"
BUILDING = "while building a dataset"
INSIDE = "inside a function"
PUSHED = "between push and answer"
PHASES = (IDLE, UNPICKLING, BUILDING, INSIDE, PUSHED)

_observer: Callable[[str], None] | None = None


def observe(observer: Callable[[str], None] | None) -> None:
    """Call ``observer(phase)`` whenever this process reaches one; None ends it."""
    global _observer
    _observer = observer


def reached(phase: str) -> None:
    if _observer is not None:
        _observer(phase)
