"""What a checkpoint does to the disk, change by change: to be killed before one of them, or to be played again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from torchstrat.checkpoint import disk, folder
from torchstrat.checkpoint.disk import NewFile


class Change(NamedTuple):
    """``kind``: the name of the function of `disk`, or "create", "write" and "sync" of a `NewFile`."""

    kind: str
    path: Path
    other: Path | None = None
    """The second name of a rename or an exchange."""
    data: bytes = b""

    @property
    def step(self) -> str:
        """Which part of saving it belongs to."""
        if "rename" in self.kind or self.kind == "exchange":
            return "rename"
        if self.kind.startswith("remove"):
            return "deletion"
        if self.path.name == "torchstrat.json":
            return "manifest"
        if self.kind.startswith("sync"):
            return "fsync"
        if self.path.suffix == ".distcp":
            return "shard write"
        return "other"

    def __str__(self) -> str:
        return f"{self.step}: {self.kind} {self.path.name}"


@contextmanager
def told(before: Callable[[Change], None]) -> Iterator[None]:
    """In this block ``before`` is called before each change."""
    init, write, sync = NewFile.__init__, NewFile.write, NewFile.sync

    def create(self: NewFile, path: Path) -> None:
        before(Change("create", path))
        init(self, path)

    def writing(self: NewFile, data: Any) -> None:
        before(Change("write", self.path, data=bytes(data)))
        write(self, data)

    def syncing(self: NewFile) -> None:
        before(Change("sync", self.path))
        sync(self)

    patches: list[Any] = [mock.patch.object(NewFile, "__init__", create)]
    patches += [mock.patch.object(NewFile, "write", writing), mock.patch.object(NewFile, "sync", syncing)]
    for name in ("make_folder", "sync_folder", "rename", "exchange", "remove_file", "remove_folder"):
        patches.append(mock.patch.object(disk, name, _telling(name, getattr(disk, name), before)))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _telling(name: str, function: Callable[..., Any], before: Callable[[Change], None]) -> Callable[..., Any]:
    def call(*paths: Path) -> Any:
        before(Change(name, *paths))
        return function(*paths)

    return call


def changes_of(call: Callable[[], None]) -> list[Change]:
    """What ``call`` changes, in order."""
    found: list[Change] = []
    with told(found.append):
        call()
    return found


def killed_before(number: int, half: bool, log: Path, call: Callable[[], None]) -> None:
    """Call it, and end this process by SIGKILL before change ``number``; ``half``: after half the bytes of that write.

    Each change is written to ``log`` before it is made.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    count = 0

    def before(change: Change) -> None:
        nonlocal count
        os.write(descriptor, f"{count} {change}\n".encode())
        if count == number:
            if half:
                with change.path.open("ab", buffering=0) as stream:
                    stream.write(change.data[: len(change.data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    with told(before):
        call()


# Each of the following goes around what is saved, within `told`: what it prevents is not told then.


@contextmanager
def no_exchange() -> Iterator[None]:
    """As on a file system that cannot swap two names."""
    with mock.patch.object(disk, "exchange", return_value=False):
        yield


@contextmanager
def no_sync_folder(which: Callable[[Path], bool]) -> Iterator[None]:
    """A control: the names in some folders are never synced."""
    sync = disk.sync_folder
    with mock.patch.object(disk, "sync_folder", lambda path: None if which(path) else sync(path)):
        yield


@contextmanager
def no_sync_of_files() -> Iterator[None]:
    """A control."""
    with mock.patch.object(NewFile, "sync"):
        yield


@contextmanager
def no_rename() -> Iterator[None]:
    """A control: files are written where they are to be in the end, in place of those that were there."""

    @contextmanager
    def in_place(path: Path) -> Iterator[Path]:
        if path.exists():
            disk.remove_tree(path)
        disk.make_folder(path)
        yield path
        disk.sync_folder(path)
        disk.sync_folder(path.parent)

    from torchstrat.checkpoint import writing

    with mock.patch.object(writing, "written_whole", in_place), mock.patch.object(folder, "written_whole", in_place):
        yield
