"""Every change that a checkpoint makes on the disk: one function for each, and nothing changes a disk but through them.

None of them is sure to outlive a power failure by itself. A file's bytes do once `NewFile.sync` has returned, the names
in a folder (of new files, after a rename, without what was deleted) once `sync_folder` has; before that a disk may have
any part of them, in any order. Tests put something in the place of these functions: what kills the process before a
change, and a disk that forgets all that was not synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import TracebackType

_WRITE_BACK_BYTES = 16 << 20
_SYNC_FILE_RANGE_WRITE = 2
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class NewFile:
    """A file that is not there yet, written from its beginning to its end. Raises `OSError`.

    The disk is told to begin early: waiting for a full page cache, or for the sync at the end, would leave it idle
    while the bytes are made and their checksums are computed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._begun = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """All of it; unbuffered, so give it large parts."""
        left = memoryview(data).cast("B")
        with _naming(self.path):
            while left.nbytes:
                written = os.write(self._descriptor, left)
                self.bytes += written
                left = left[written:]
        if self.bytes - self._begun >= _WRITE_BACK_BYTES:
            _begin_to_write_back(self._descriptor, self._begun, self.bytes - self._begun)
            self._begun = self.bytes

    def sync(self) -> None:
        """What was written is on the disk when this returns; the file's name may not be, see `sync_folder`."""
        with _naming(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with _naming(self.path):
                os.close(descriptor)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of calls that know a descriptor only get the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def make_folder(path: Path) -> None:
    path.mkdir()


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk when this returns. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, new: Path) -> None:
    """``new`` is not there, or is an empty folder where ``path`` is a folder."""
    os.rename(path, new)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step. False where the system, or the file system, cannot: nothing has changed then."""
    swap = _system_call("renameat2")
    if swap is None:
        return False
    result = swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    return bool(result == 0)


def reserve(path: Path) -> None:
    """All of a file has its place on the disk when this returns, holes in it too: what is written to it through a
    mapping finds no full disk, of which the process would die. Raises `OSError`."""
    if sys.platform.startswith("linux"):
        with path.open("r+b") as stream:
            try:
                os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # file systems that cannot
                    raise


def remove_file(path: Path) -> None:
    path.unlink()


def remove_folder(path: Path) -> None:
    """An empty one."""
    path.rmdir()


def make_folders(path: Path) -> None:
    """``path`` and what is missing above it, all of it on the disk when this returns."""
    missing = [path]
    while not missing[-1].exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing[:-1]):
        try:
            make_folder(folder)
        except FileExistsError:  # another process makes the same folders
            continue
        sync_folder(folder.parent)


def remove_tree(folder: Path) -> None:
    """A folder with all that is in it; of a link only the link. Raises `OSError`; what is gone by then stays gone."""
    if folder.is_symlink():
        remove_file(folder)
        return
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path))
            else:
                remove_file(Path(entry.path))
    remove_folder(folder)


def _begin_to_write_back(descriptor: int, offset: int, length: int) -> None:
    call = _system_call("sync_file_range")
    if call is not None:
        # Only a hint, so whatever it answers is fine: errors of the disk come from fsync.
        call(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


@cache
def _system_call(name: str) -> Callable[..., object] | None:
    """What Python has no function for; None where the system does not have it either."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform.startswith("linux") else None
