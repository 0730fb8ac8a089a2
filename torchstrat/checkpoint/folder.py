"""Atomic writes of a folder: written under another name, then put in its place in one step, by one writer at a time.

The order on the disk: what is in the folder, the names of it, the folder's own name, and only then is what was there
before deleted. So after a power failure, too, there is the old folder or the new one; the new one, once `written_whole`
has ended. The writer's lock is freed by the system when its holder is gone, however it went.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import uuid
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

from torchstrat.checkpoint import disk
from torchstrat.core.errors import InvalidArgumentError


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields an empty folder to write to, beside ``path``; it becomes ``path`` when the block ends without an error.

    What was at ``path`` before stays there until that moment, also when the block or the process ends half-way. A
    process that is killed leaves the half-written folder behind, under a name that begins with a dot; the next one that
    writes to ``path`` takes it away.

    Raises `InvalidArgumentError` where the folder cannot be made, or ``path`` is something else than a checkpoint.
    """
    if os.path.lexists(path) and not is_checkpoint(path) and not _is_empty_folder(path):
        raise InvalidArgumentError(f"{path} is there already and is no checkpoint; give a path of its own to save to.")
    try:
        disk.make_folders(path.parent)
        _take_back(path)
        _sweep(path)
        writing, lock = _new_folder(path)
    except OSError as error:
        raise InvalidArgumentError(f"no checkpoint can be written to {path}: {error}") from error
    try:
        try:
            yield writing
            with _told_of(path):
                disk.sync_folder(writing)
                old = _put_in_place(writing, path)
        except BaseException:
            _remove_if_possible(writing)
            raise
        with _told_of(path):
            # Until then the old one may be what a power failure leaves, so it stays whole.
            disk.sync_folder(path.parent)
        if old is not None:
            _remove_if_possible(old)
    finally:
        lock.close()


@contextlib.contextmanager
def _told_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(f"the checkpoint cannot be put in its place, {path}: {error}") from error


def existing(path: Path) -> Path:
    """Where the checkpoint of this name is. Raises `InvalidArgumentError` when there is none."""
    if is_checkpoint(path):
        return path
    if not path.exists() and is_checkpoint(_aside(path)):
        return _aside(path)
    if not path.exists():
        raise InvalidArgumentError(
            f"there is no checkpoint at {path}: no such folder. Give the path that Checkpoint.save wrote to; where "
            "there may be none yet, CheckpointManager.restore returns None."
        )
    raise InvalidArgumentError(
        f"{path} holds no complete checkpoint: its metadata is missing. A checkpoint is a folder that ts.Checkpoint(…)."
        "save or torch.distributed.checkpoint has written; if writing was interrupted, use an earlier one."
    )


def is_checkpoint(path: Path) -> bool:
    """Whether all of it is there: metadata is written last."""
    return (path / ".metadata").is_file()


def remove_whole(path: Path) -> None:
    """Delete a checkpoint. Its name is gone, for good, before any of its files is. Raises `OSError`."""
    going = path.with_name(f".{path.name}.deleted-{uuid.uuid4().hex}")
    disk.rename(path, going)
    disk.sync_folder(path.parent)
    disk.remove_tree(going)


def _put_in_place(writing: Path, path: Path) -> Path | None:
    """Returns where what was at ``path`` is now."""
    if not os.path.lexists(path):
        disk.rename(writing, path)
        return None
    if disk.exchange(writing, path):
        return writing
    # Two steps, where the file system knows no exchange. Between them, `existing` finds the old one aside.
    aside = _aside(path)
    if os.path.lexists(aside):
        disk.remove_tree(aside)
    disk.rename(path, aside)
    try:
        disk.rename(writing, path)
    except OSError:
        disk.rename(aside, path)
        raise
    return aside


def _remove_if_possible(folder: Path) -> None:
    """What cannot be deleted now is in nobody's way but that of the disk's space, and is swept away another time."""
    with contextlib.suppress(OSError):
        disk.remove_tree(folder)


def _take_back(path: Path) -> None:
    """A process was killed between the two steps of `_put_in_place`."""
    if not path.exists() and is_checkpoint(_aside(path)):
        disk.rename(_aside(path), path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


# -- what killed processes leave --------------------------------------------------------------------------------------


class _Lock:
    """``flock`` on a folder: nobody else sweeps it away. The system lets go of it when this process is gone.

    Where there are no such locks (some network file systems), none is held and nothing is swept.
    """

    def __init__(self, folder: Path) -> None:
        self.is_held = False
        self.is_anothers = False
        self._descriptor: int | None = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True
        except BlockingIOError:
            self.is_anothers = True
        except OSError:
            return

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _new_folder(path: Path) -> tuple[Path, _Lock]:
    while True:
        writing = path.with_name(f".{path.name}.writing-{uuid.uuid4().hex}")
        disk.make_folder(writing)
        with contextlib.suppress(FileNotFoundError):
            lock = _Lock(writing)
            if writing.exists() and not lock.is_anothers:
                return writing, lock
            lock.close()
        # Another save to the same path has taken it for abandoned, before it was locked.


def _sweep(path: Path) -> None:
    if path.exists() and os.path.lexists(_aside(path)):
        # The process was killed after its second rename, which may not be on the disk yet.
        disk.sync_folder(path.parent)
        _remove_if_possible(_aside(path))
    left = re.compile(rf"\.{re.escape(path.name)}\.(writing|deleted)-[0-9a-f]{{32}}")
    for folder in path.parent.iterdir():
        if left.fullmatch(folder.name):
            with contextlib.suppress(OSError), contextlib.closing(_Lock(folder)) as lock:
                if lock.is_held:
                    disk.remove_tree(folder)


LOCK = ".writer.lock"

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
            descriptor = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
            raise InvalidArgumentError(f"{self._directory / LOCK} cannot be written: {error}") from error
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


os.register_at_fork(after_in_child=_leave_to_the_parent)
