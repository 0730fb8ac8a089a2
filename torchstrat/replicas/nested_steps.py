"""Steps within a step: of the optimizer that another one wraps, or of the class that a subclass extends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch

_TORCHS = torch.optim.Optimizer.__module__


class StepInProgress:
    """The step that this thread makes for everyone. What is stepped within it is part of it."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None

    def begin(self) -> None:
        """Called by a hook of that step."""
        self._frame = next((frame for frame in _stack() if frame.f_globals.get("__name__") == _TORCHS), None)

    def end(self) -> None:
        self._frame = None

    def is_around(self) -> bool:
        """Whether what calls this is within that step. A step that has raised is over, though nobody has said so."""
        return self._frame is not None and any(frame is self._frame for frame in _stack())

    def is_this(self) -> bool:
        """Whether a hook calls this that belongs to that step itself."""
        return self._frame is not None and self._frame is next(
            (frame for frame in _stack() if frame.f_globals.get("__name__") == _TORCHS), None
        )


def _stack() -> Iterator[FrameType]:
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
