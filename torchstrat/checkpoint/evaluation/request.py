"""A request to finish, which may come from a signal handler."""

from __future__ import annotations

import contextlib
import queue


class FinishRequest:
    """Like `threading.Event`, whose lock a signal handler cannot take while the same thread waits with it."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put is reentrant

    def set(self) -> None:
        self._is_set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, or when it is set. One thread waits at a time."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=seconds)
