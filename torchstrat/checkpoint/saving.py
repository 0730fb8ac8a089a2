"""A save that may still be under way: the handle that tells of it, and the rule that there is one at a time.

Saving has two halves. The first takes the state as it is, and holds the program up; the second writes it, either in the
same call or on a thread of its own. That thread is no daemon: a program that ends waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from pathlib import Path

from torchstrat.core.errors import CommunicationTimeoutError
from torchstrat.core.tracebacks import short_tracebacks

logger = logging.getLogger("torchstrat.checkpoint")

TURN_TIMEOUT = timedelta(hours=1)
"""How long a save or a restore waits for the save before it."""


@short_tracebacks
class SaveHandle:
    """What `Checkpoint.save` returns: the outcome of a save, once there is one. Thread-safe.

    ``path`` is where the checkpoint appears.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._outcome: Future[Path] = Future()
        self._was_told = False

    def done(self) -> bool:
        """Whether the checkpoint is on the disk, or failed to get there."""
        return self._outcome.done()

    def result(self, timeout: timedelta | float | None = None) -> Path:
        """Wait until it is on the disk; returns ``path``. ``timeout`` in seconds, None without end.

        Raises what went wrong, at every call; what was at ``path`` before is still there then. After ``timeout`` raises
        `CommunicationTimeoutError`, and the save goes on.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        try:
            error = self._outcome.exception(seconds)
        except FutureTimeoutError:
            raise CommunicationTimeoutError(
                f"the checkpoint {self.path} was not written after {seconds:g} s; it is still being written."
            ) from None
        if error is not None:
            self._was_told = True
            raise error
        return self.path

    def add_done_callback(self, fn: Callable[[SaveHandle], object]) -> None:
        """Call ``fn(handle)`` when it is done, on the thread that writes; at once if it is. What ``fn`` raises is
        logged."""
        self._outcome.add_done_callback(lambda _: fn(self))

    def raise_untold(self) -> None:
        """The error, if it has failed and nobody has been told by `result` or by this."""
        if self._outcome.done() and self._outcome.exception() is not None and not self._was_told:
            self.result()

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._outcome.set_result(self.path)
        else:
            self._outcome.set_exception(error)

    def __repr__(self) -> str:
        if not self.done():
            return f"<SaveHandle of {self.path}: being written>"
        return f"<SaveHandle of {self.path}: {'written' if self._outcome.exception() is None else 'failed'}>"


_NOT_STARTED = 0
"""No thread's number."""


class _Turns:
    """Who saves or restores: one at a time in a process, so that parameter servers hold one cut at most, and all
    processes of a job meet in the same order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._what = ""
        self._thread: int | None = None
        self._depth = 0

    def take(self, what: str) -> None:
        """Wait for what is under way. The thread that has the turn may take it again: a restore within a save, which a
        lost server brings about. Raises `CommunicationTimeoutError` naming what it waited for."""
        me = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread in (None, me), TURN_TIMEOUT.total_seconds()):
                raise CommunicationTimeoutError(
                    f"{what} waited {TURN_TIMEOUT.total_seconds():g} s for {self._what}, which is still under way."
                )
            if self._depth == 0:
                self._what = what
            self._thread = me
            self._depth += 1

    def give(self) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._thread = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        self.take(what)
        try:
            yield
        finally:
            self.give()

    def pass_to(self, thread: int) -> None:
        """The turn belongs to the thread of this number from now on; `_NOT_STARTED`: to one that will say so itself."""
        with self._changed:
            self._thread = thread


turns = _Turns()


def wait_for_saves() -> None:
    """Until no save is under way; its outcome stays with its handle. For who closes what a save still needs."""
    try:
        with turns.held("closing"):
            pass
    except CommunicationTimeoutError as error:
        logger.error("%s It will fail.", error)


def here_and_now(handle: SaveHandle, write: Callable[[], None]) -> None:
    """Write, and give the turn back, which the caller has."""
    try:
        write()
    except BaseException as error:
        turns.give()
        handle._end(error)
        raise
    turns.give()
    logger.debug("the checkpoint %s is saved.", handle.path)
    handle._end(None)


def in_background(handle: SaveHandle, write: Callable[[], None]) -> None:
    """Let a thread write, and then give the turn back, which the caller has."""

    def write_or_log() -> None:
        try:
            write()
        except BaseException as error:
            # Before anybody who waits for it is told: that may be the end of the program.
            logger.error("the checkpoint %s was not saved: %s", handle.path, error)
            raise

    def run() -> None:
        turns.pass_to(threading.get_ident())
        with contextlib.suppress(BaseException):  # the handle tells it
            here_and_now(handle, write_or_log)

    thread = threading.Thread(target=run, name=f"torchstrat-save-{handle.path.name}", daemon=False)
    turns.pass_to(_NOT_STARTED)  # before it starts: until then the caller's next save would take this one's turn
    try:
        thread.start()
    except RuntimeError:  # no more threads: then here
        here_and_now(handle, write)
