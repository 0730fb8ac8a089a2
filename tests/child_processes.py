"""Which children a process has: to see that none is left behind, and that there are no more than before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def children_of(parent: int) -> set[int]:
    """Process ids, those that have ended and that nobody has waited for among them; empty where there is no /proc.

    From the kernel's own list, where it keeps one: to look through all processes takes several milliseconds. The list
    may leave one out where another ends at that moment, hence two looks.
    """
    children: set[int] = set()
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended in between
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    children.add(int(folder.name))
        return children
    for _ in range(2):
        for thread in Path("/proc", str(parent), "task").glob("*"):
            with contextlib.suppress(OSError):  # the thread has ended
                children.update(map(int, (thread / "children").read_text().split()))
    return children
