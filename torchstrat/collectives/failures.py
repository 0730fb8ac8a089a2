"""What the processes of a job tell each other when one of them can no longer take part.

It goes through the store where they met, not through the process group: after a failure nobody may be listening there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 2.0  # how long a rank that gave up waits for the others to say why they did


class FailureBoard:
    """One rank's view of the notes that all ranks leave.

    The process that hosts the store may be the one that died, or that was stopped, and a stopped one never answers.
    So every visit is made on a thread of its own that is not waited for beyond a deadline; after that the store counts
    as gone.
    """

    def __init__(self, store: Any, global_rank: int) -> None:
        self._store = store
        self._rank = global_rank
        self.is_gone = False
        """Whether the store has been found not to answer."""
        self._wrote = False
        self._is_left_alone = False
        self.leaving: Callable[[bool], None] | None = None
        """Called with True when this rank will not come any more, and with False when it comes all the same."""

    def leave_alone(self) -> None:
        """Ask the store nothing any more: another thread has its connection, and waits."""
        self._is_left_alone = True

    def post(self, message: str, *, leaves: bool = False) -> None:
        """Tell the others, without waiting for them, why this rank stopped taking part. The first reason counts.

        ``leaves``: those that wait for it are not to wait any longer.
        """
        if not self._wrote:
            self._write(message)
        if leaves and self.leaving is not None:  # now that the reason can be read
            self.leaving(True)

    def _write(self, message: str) -> None:
        self._wrote = True
        self.visit(lambda: self._store.set(self._key(self._rank), message), None)

    def clear(self) -> None:
        """Take this rank's note back: it takes part again. Costs nothing where there is none."""
        if self._wrote:
            self._wrote = False
            if self.leaving is not None:
                self.leaving(False)
            self.visit(lambda: self._store.delete_key(self._key(self._rank)), None)

    def read(self, ranks: Sequence[int], seconds: float = PATIENCE_SECONDS) -> dict[int, str]:
        """The notes of ``ranks``; waits a little (``seconds``) for all of them to write one."""
        said: dict[int, str] = {}

        def collect() -> None:
            missing = list(ranks)
            deadline = time.monotonic() + seconds
            while missing and time.monotonic() < deadline:
                for rank in list(missing):
                    if self._store.check([self._key(rank)]):
                        said[rank] = self._store.get(self._key(rank)).decode()
                        missing.remove(rank)
                time.sleep(0.05)

        self.visit(collect, None, 2 * seconds)
        return dict(said)

    @staticmethod
    def _key(rank: int) -> str:
        return f"failures/{rank}"

    def visit(self, call: Callable[[], T], otherwise: T, seconds: float = 2 * PATIENCE_SECONDS) -> T:
        """What ``call`` makes of the store, if that answers in time."""
        if self.is_gone or self._is_left_alone:
            return otherwise
        results: list[T] = []

        def visit() -> None:
            try:
                results.append(call())
            except Exception:  # the store went with the process that held it; then silence has to speak
                return

        thread = threading.Thread(target=visit, name="torchstrat-failure-note", daemon=True)
        thread.start()
        thread.join(seconds)
        # A thread that still waits holds the store's only connection: nobody else may use it any more.
        self.is_gone = thread.is_alive()
        return results[0] if results else otherwise
