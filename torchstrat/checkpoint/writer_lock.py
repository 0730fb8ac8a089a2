"""One writer per directory: a lock that the system frees when its holder is gone, however it went."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import warnings
import weakref
from pathlib import Path

from torchstrat.core.errors import InvalidArgumentError

NAME = ".writer.lock"

_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class WriterLock:
    """``flock`` on a file in ``directory``, which is made if need be. The file stays; it says who held it last.

    Not a file whose mere presence locks: that would outlive a killed holder. Not ``lockf``: it does not keep apart two
    managers of one process. On NFS, Linux turns ``flock`` into a lock at the server, for all machines (a mount with
    ``local_lock=flock`` or ``all`` keeps it to one machine). Where a file system knows no locks, a warning says so.
    ``writer``: what holds it, for messages.
    """

    def __init__(self, directory: Path, writer: str = "CheckpointManager") -> None:
        self._directory = directory
        self._writer = writer
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def take(self) -> None:
        """Nothing happens where it is held already. Does not wait.

        Raises `InvalidArgumentError` naming who holds it, or where the directory cannot be written to.
        """
        if self._descriptor is not None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InvalidArgumentError(f"no checkpoints can be written to {self._directory}: {error}") from error
        try:
            _lock(descriptor, self._directory)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise InvalidArgumentError(
                f"{self._directory} is being written to by {holder}: two jobs cannot save into one directory. Stop the "
                f"other one, close its {self._writer}, or give this one a directory of its own."
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise InvalidArgumentError(f"{self._directory / NAME} cannot be written: {error}") from error
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        """May be called twice."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.release()


def _lock(descriptor: int, directory: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no POSIX system
        _warn(directory, "this system has no flock")
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        _warn(directory, str(error))


def _warn(directory: Path, reason: str) -> None:
    warnings.warn(
        f"{directory} cannot be locked ({reason}), so a second job that saves there will not be noticed; see to it "
        "that there is none.",
        stacklevel=6,
    )


def _holder(descriptor: int) -> str:
    words = os.pread(descriptor, 1024, 0).decode(errors="replace").split()
    return f"process {words[1]} on {words[0]}" if len(words) == 2 else "another process"


# A forked child (a data-loading worker, say) has the descriptor too and would keep the lock when its parent is gone.
_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
