"""Whether a process of this host has ended."""

from __future__ import annotations

import os
import select


class Process:
    """The process that had this number when this was made. Where the system does not tell, it never ends."""

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:  # a sandbox that forbids it, or a process of another namespace
            self._descriptor = -1

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then, so that it writes to no memory any more."""
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
