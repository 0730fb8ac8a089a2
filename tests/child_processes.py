"""Which children a process has: to see that none is left behind, and that there are no more than before."""

from __future__ import annotations

import contextlib
import os


def children_of(parent: int) -> set[int]:
    """Process ids, those that have ended and that nobody has waited for among them; empty where there is no /proc.

    From the kernel's own list, where it keeps one: to look through all processes takes several milliseconds. The list
    may leave one out where another ends at that moment, hence two looks.
    """
    children: set[int] = set()
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        for process in filter(str.isdigit, os.listdir("/proc") if os.path.exists("/proc") else ()):
            with contextlib.suppress(OSError):  # it ended in between
                if int(_read(f"/proc/{process}/stat").rpartition(b")")[2].split()[1]) == parent:
                    children.add(int(process))
        return children
    if parent == os.getpid() and not _has_children():
        return children
    for _ in range(2):
        with contextlib.suppress(OSError):  # the process has ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):  # the thread has ended
                    children.update(map(int, _read(f"/proc/{parent}/task/{thread}/children").split()))
    return children


def _has_children() -> bool:
    """Of this process: one call, where the lists take one for each thread. It waits for nobody."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _read(file: str) -> bytes:
    """Of the kernel's files, before each test and after it: `open` of Python's takes three times as long."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, 1 << 16), b""))
    finally:
        os.close(descriptor)
