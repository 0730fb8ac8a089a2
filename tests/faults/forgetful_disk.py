"""A disk in memory that loses its power: what of a list of changes may be on it afterwards.

It keeps nothing that was not synced, or any part of it, in any order: names of a folder that was not synced after they
were made, changed or deleted; bytes of a file that was not. That is what POSIX allows, and more than most file systems
do. A kill does not show this: the system still has all that a killed process has written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

from tests.faults.disk_log import Change

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
