"""A process whose cluster gave it up comes back as a fresh one."""

from __future__ import annotations

import multiprocessing
import os
import sys


def start_again() -> None:
    """Run this process's command line again, in its place: same process id, arguments and environment, no memory.

    Every thread ends at once, also one that is stuck in a user's function. Descriptors that Python and torch open are
    closed. Returns only in a process that `multiprocessing` started: its command line means something to its parent
    alone, which then has to start another.
    """
    if multiprocessing.parent_process() is not None:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
