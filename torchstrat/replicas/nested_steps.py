"""Steps within a step: of the optimizer that another one wraps, or of the class that a subclass extends."""

from __future__ import annotations

import sys
from types import FrameType

import torch

_TORCHS = torch.optim.Optimizer.__module__


class StepInProgress:
    """The step that this thread makes for everyone. What is stepped within it is part of it."""

    def __init__(self) -> None:
        self.frame: FrameType | None = None

    def begin(self) -> None:
        """Called by a hook of that step."""
        self.frame = _innermost_step()

    def end(self) -> None:
        self.frame = None

    def is_around(self) -> bool:
        """Whether the step whose hook calls this is another one, within that step. A step that has raised is over,
        though nobody has said so."""
        if self.frame is None:
            return False
        frame = _innermost_step()
        if frame is self.frame:
            return False
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


def _innermost_step() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != _TORCHS:
        frame = frame.f_back
    return frame
