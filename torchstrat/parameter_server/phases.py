"""Named places in the life of a worker, and of a server, so that a test can make one die exactly there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

IDLE: Final = "idle"
UNPICKLING: Final = "while unpickling"
BUILDING: Final = "while building a dataset"
INSIDE: Final = "inside a function"
PUSHED_TO_ONE: Final = "between two answers"
"""One of several servers has applied a push and said so; the others may have or not."""
PUSHED: Final = "between push and answer"
"""All servers have applied a push and said so; nothing is done with fresh values yet."""
PHASES: Final = (IDLE, UNPICKLING, BUILDING, INSIDE, PUSHED_TO_ONE, PUSHED)

WRITING_GRADIENTS: Final = "while writing gradients"
"""Some tensors of a push are in shared memory, and the server has not been told. Not where RPC carries them."""
APPLIED: Final = "between applying a push and its answer"
"""On a server, which holds the variables' locks."""
WRITING_VALUES: Final = "while writing values"
"""On a server: some of the fresh values are written, to the worker's parameters where it shares memory."""
IN_MEMORY: Final = (WRITING_GRADIENTS, APPLIED, WRITING_VALUES)

_observer: Callable[[str], None] | None = None


def observe(observer: Callable[[str], None] | None) -> None:
    """Call ``observer(phase)`` whenever this process reaches one; None ends it."""
    global _observer
    _observer = observer


def is_observed() -> bool:
    return _observer is not None


def reached(phase: str) -> None:
    if _observer is not None:
        _observer(phase)
