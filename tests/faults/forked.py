"""Programs that are expected to die: each in a fork of a process that has imported torch already and started nothing.

Starting afresh takes seconds, a fork takes none, and whatever happens to it happens to it alone.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What became of a fork."""

    how: str
    """"returned", "raised", the name of the signal that ended it, or "still running"."""
    text: str
    """What it returned, as text, or ``module.Class: message`` of what it raised."""
    seconds: float


def in_fork(seconds: float, is_over: Callable[[], bool], function: Callable[..., Any], *args: Any) -> Outcome:
    """Call ``function(*args)`` in a fork of this process; kill it after ``seconds``, or once ``is_over``.

    Nothing of it is left.
    """
    began = time.monotonic()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _report(theirs, function, args)
    os.close(theirs)
    told = _read(ours, began + seconds, is_over)
    os.close(ours)
    took = time.monotonic() - began
    if told is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if told is None:
        return Outcome("still running", "", took)
    if told:
        how, text = pickle.loads(told)
        return Outcome(how, text, took)
    return Outcome(signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exited", "", took)


def _report(pipe: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        told = ("returned", str(function(*args)))
    except BaseException as error:  # SystemExit too
        told = ("raised", f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    os.write(pipe, pickle.dumps(told))
    os._exit(0)


def _read(pipe: int, deadline: float, is_over: Callable[[], bool]) -> bytes | None:
    """Everything until the other end is closed; None if that does not happen in time."""
    text = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], 0.2)
        if not ready:
            if is_over() or time.monotonic() > deadline:
                return None
            continue
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return text
        text += piece
