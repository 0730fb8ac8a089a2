"""What a checkpoint does to the disk, change by change: to be killed before one of them, or to be played again.

They are played on a disk in memory that loses its power. It keeps nothing that was not synced, or any part of it, in
any order: names of a folder that was not synced after they were made, changed or deleted; bytes of a file that was not.
That is what POSIX allows, and more than most file systems do. A kill does not show this: the system still has all that
a killed process has written.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Union
from unittest import mock

from torchstrat.checkpoint import disk, writing
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


_FUNCTIONS = ("make_folder", "sync_folder", "rename", "exchange", "remove_file", "remove_folder")
_METHODS = {"create": "__init__", "write": "write", "sync": "sync"}


@contextmanager
def told(before: Callable[[Change], None]) -> Iterator[None]:
    """In this block ``before`` is called before each change."""

    def change_of(kind: str, args: Any) -> Change:
        if kind == "create":
            return Change(kind, args[1])
        if kind in _METHODS:
            return Change(kind, args[0].path, data=b"".join(map(bytes, args[1:])))
        return Change(kind, *args)

    def telling(owner: Any, name: str, kind: str) -> Any:
        function = getattr(owner, name)

        def call(*args: Any) -> Any:
            before(change_of(kind, args))
            return function(*args)

        return mock.patch.object(owner, name, call)

    with ExitStack() as stack:
        for patch in [
            *(telling(NewFile, name, kind) for kind, name in _METHODS.items()),
            *(telling(disk, name, name) for name in _FUNCTIONS),
        ]:
            stack.enter_context(patch)
        yield


def changes_of(call: Callable[[], None]) -> list[Change]:
    """What ``call`` changes, in order."""
    found: list[Change] = []
    with told(found.append):
        call()
    return found


def killed_before(number: int, half: bool, call: Callable[[], None]) -> None:
    """Call it, and end this process by SIGKILL before change ``number``; ``half``: after half of its bytes."""
    count = itertools.count()

    def before(change: Change) -> None:
        if next(count) == number:
            if half:
                with change.path.open("ab", buffering=0) as stream:
                    stream.write(change.data[: len(change.data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    with told(before):
        call()


# Each of the following goes around what is saved, within `told`: what it prevents is not told then.


def no_exchange() -> AbstractContextManager[Any]:
    """As on a file system that cannot swap two names."""
    return mock.patch.object(disk, "exchange", return_value=False)


def no_sync_folder(which: Callable[[Path], bool]) -> AbstractContextManager[Any]:
    """A control: the names in some folders are never synced."""
    sync = disk.sync_folder
    return mock.patch.object(disk, "sync_folder", lambda path: None if which(path) else sync(path))


def no_sync_of_files() -> AbstractContextManager[Any]:
    """A control."""
    return mock.patch.object(NewFile, "sync")


def no_rename() -> AbstractContextManager[Any]:
    """A control: files are written where they are to be in the end, in place of those that were there."""

    @contextmanager
    def in_place(path: Path) -> Iterator[Path]:
        if path.exists():
            disk.remove_tree(path)
        disk.make_folder(path)
        yield path
        disk.sync_folder(path)
        disk.sync_folder(path.parent)

    return mock.patch.object(writing, "written_whole", in_place)


# -- a disk that loses its power -------------------------------------------------------------------------------------


Tree = Mapping[str, Union[bytes, "Tree"]]
"""What is visible: contents of files, and folders."""

_MOST_AT_ONCE = 6


@dataclass
class _File:
    kept: bytes = b""
    written: bytes = b""


@dataclass
class _Folder:
    kept: dict[str, _File | _Folder] = field(default_factory=dict)
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[Callable[[dict[str, _File | _Folder]], None]] = field(default_factory=list)
    """What was done to the names since the folder was synced."""

    def change(self, action: Callable[[dict[str, _File | _Folder]], None]) -> None:
        action(self.now)
        self.pending.append(action)

    def sync(self) -> None:
        self.kept = dict(self.now)
        self.pending.clear()


class ForgetfulDisk:
    """``top``: a folder whose contents are on the disk already. Changes are of what is below it."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._root = _loaded(top)

    def apply(self, change: Change) -> None:
        if change.kind == "sync_folder":
            found = self._find(change.path)
            assert isinstance(found, _Folder)
            found.sync()
        elif change.kind in ("write", "sync"):
            file = self._find(change.path)
            assert isinstance(file, _File)
            if change.kind == "write":
                file.written += change.data
            else:
                file.kept = file.written
        else:
            assert change.other is None or change.other.parent == change.path.parent
            parent = self._find(change.path.parent)
            assert isinstance(parent, _Folder)
            parent.change(_on_names(change, parent.now))

    def after_power_failures(self, names: set[str]) -> Iterator[Tree]:
        """All that may be left of ``names`` in the top folder; one of them, by chance, more than once."""
        for keep_bytes in (0.0, 0.5, 1.0):
            for tree in _outcomes(self._root, keep_bytes):
                yield {name: found for name, found in tree.items() if name in names}

    def _find(self, path: Path) -> _File | _Folder:
        found: _File | _Folder = self._root
        for name in path.relative_to(self._top).parts:
            assert isinstance(found, _Folder)
            found = found.now[name]
        return found


def _loaded(path: Path) -> _Folder:
    entries: dict[str, _File | _Folder] = {}
    for entry in path.iterdir():
        if entry.is_dir():
            entries[entry.name] = _loaded(entry)
        else:
            entries[entry.name] = _File(entry.read_bytes(), entry.read_bytes())
    return _Folder(dict(entries), entries)


def _on_names(change: Change, now: Mapping[str, _File | _Folder]) -> Callable[[dict[str, _File | _Folder]], None]:
    """The same for the names as they are and for those that were kept: what is meant is fixed now."""
    name, other = change.path.name, change.other.name if change.other is not None else ""
    if change.kind in ("create", "make_folder"):
        new = _File() if change.kind == "create" else _Folder()
        return lambda names: names.update({name: new})
    node, second = now[name], now.get(other)
    if change.kind == "exchange":
        assert second is not None
        return lambda names: names.update({name: second, other: node})
    if change.kind == "rename":
        return lambda names: (names.pop(name, None), names.update({other: node}))[1]
    assert change.kind in ("remove_file", "remove_folder"), change
    return lambda names: names.pop(name, None) and None


def _outcomes(folder: _Folder, keep_bytes: float) -> Iterator[dict[str, bytes | Tree]]:
    for kept in _subsets(folder.pending):
        names = dict(folder.kept)
        for action in kept:
            action(names)
        choices = [
            [(name, _bytes_of(node, keep_bytes))]
            if isinstance(node, _File)
            else [(name, tree) for tree in _outcomes(node, keep_bytes)]
            for name, node in sorted(names.items())
        ]
        for chosen in itertools.product(*choices):
            yield dict(chosen)


def _bytes_of(file: _File, keep: float) -> bytes:
    more = len(file.written) - len(file.kept)
    return file.written[: len(file.kept) + int(more * keep)]


def _subsets(actions: list[Callable[..., None]]) -> Iterator[list[Callable[..., None]]]:
    """All of them; of many: none, all, each one alone, and all but one."""
    count = len(actions)
    if count <= _MOST_AT_ONCE:
        for chosen in itertools.product((False, True), repeat=count):
            yield [action for action, kept in zip(actions, chosen, strict=True) if kept]
        return
    yield []
    yield list(actions)
    for place in range(count):
        yield [actions[place]]
        yield actions[:place] + actions[place + 1 :]
