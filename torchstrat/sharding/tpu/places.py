"""Where in the user's code something happened: errors about recorded steps name the line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import FrameType

_NOT_THE_USERS = (__name__.partition(".")[0], "torch", "contextlib")


def current_place() -> str:
    """The innermost line that is being run and is neither torch's nor ours."""
    return _first_of_user(_outwards(sys._getframe(1)))


def place_of(error: BaseException) -> str:
    """The innermost such line that ``error`` came through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _first_of_user(reversed(frames), {id(f): line for f, line in traceback.walk_tb(error.__traceback__)})


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _first_of_user(frames: Iterator[FrameType], lines: dict[int, int] | None = None) -> str:
    for frame in frames:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
            continue
        number = frame.f_lineno if lines is None else lines[id(frame)]
        summary = traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        return f"{summary.filename}:{number}, in {summary.name}: {summary.line}"
    return "an unknown place"
