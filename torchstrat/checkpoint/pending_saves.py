"""Asynchronous saves whose outcome nobody has been told yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchstrat.checkpoint.saving import SaveHandle


class PendingSaves:
    """``complaints``: errors that were not raised, for lack of somebody to catch them; to be told as warnings."""

    def __init__(self) -> None:
        self._saves: list[tuple[SaveHandle, threading.Event]] = []
        self.complaints: list[str] = []

    def add(self, handle: SaveHandle, then: Callable[[], None]) -> None:
        """``then`` is called when it has succeeded, by the thread that writes; it counts as a part of the save."""
        ended = threading.Event()

        def end(done: SaveHandle) -> None:
            try:
                if _error_of(done) is None:
                    then()
            finally:
                ended.set()

        self._saves.append((handle, ended))
        handle.add_done_callback(end)

    def raise_errors(self) -> None:
        """Wait until all have ended. Raises what one of them failed with, once."""
        first: Exception | None = None
        while self._saves:
            error = self._next_error()
            if error is not None and first is None:
                first = error
            elif error is not None:
                self.complaints.append(str(error))
        if first is not None:
            raise first

    def wait(self) -> None:
        """Until all have ended, well or not: what restores the state after a failure must not fail with it."""
        while self._saves:
            path = self._saves[0][0].path
            error = self._next_error()
            if error is not None:
                self.complaints.append(f"{path} was not saved: {error}")

    def _next_error(self) -> Exception | None:
        handle, ended = self._saves.pop(0)
        error = _error_of(handle)
        ended.wait()
        return error


def _error_of(handle: SaveHandle) -> Exception | None:
    try:
        handle.result()
    except Exception as error:
        return error
    return None
