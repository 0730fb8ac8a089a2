"""Processes that a run of pytest leaves behind: fork servers that are about to end, and what a mutant did not end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator

from tests.child_processes import children_of

_PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """What children of this process leave behind, in whatever session, become its children too. On Linux alone."""
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def children() -> set[int]:
    return children_of(os.getpid())


def end(processes: set[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def wait_for_new(earlier: set[int], limit_seconds: float) -> None:
    """Until no child is left but the earlier ones, or the time is over."""
    until = time.monotonic() + limit_seconds
    while (left := children() - earlier) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
