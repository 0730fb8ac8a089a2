"""A folder that is there whole or not at all: written under another name, then put in its place in one step."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from torchstrat.checkpoint.manifest import sync_folder
from torchstrat.errors import InvalidArgumentError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields an empty folder to write to, beside ``path``; it becomes ``path`` when the block ends without an error.

    What was at ``path`` before stays there until that moment, also when the block or the process ends half-way. A
    process that is killed leaves the half-written folder behind, under a name that begins with a dot.

    Raises `InvalidArgumentError` where the folder cannot be made, or ``path`` is something else than a checkpoint.
    """
    if path.exists() and not is_checkpoint(path) and not _is_empty_folder(path):
        raise InvalidArgumentError(f"{path} is there already and is no checkpoint; give a path of its own to save to.")
    writing = path.with_name(f".{path.name}.writing-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _take_back(path)
        writing.mkdir()
    except OSError as error:
        raise InvalidArgumentError(f"no checkpoint can be written to {path}: {error}") from error
    try:
        yield writing
        sync_folder(writing)
        _put_in_place(writing, path)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def existing(path: Path) -> Path:
    """Where the checkpoint of this name is. Raises `InvalidArgumentError` when there is none."""
    if is_checkpoint(path):
        return path
    if not path.exists() and is_checkpoint(_aside(path)):
        return _aside(path)
    if not path.exists():
        raise InvalidArgumentError(f"there is no checkpoint at {path}: no such folder.")
    raise InvalidArgumentError(
        f"{path} holds no complete checkpoint: its metadata is missing. A checkpoint is a folder that ts.Checkpoint(…)."
        "save or torch.distributed.checkpoint has written; if writing was interrupted, use an earlier one."
    )


def is_checkpoint(path: Path) -> bool:
    """Whether all of it is there: metadata is written last."""
    return (path / ".metadata").is_file()


def _put_in_place(writing: Path, path: Path) -> None:
    if path.exists() and not _exchange(writing, path):
        # Two steps, where the file system knows no exchange. Between them, `existing` finds the old one aside.
        shutil.rmtree(_aside(path), ignore_errors=True)
        path.rename(_aside(path))
        writing.rename(path)
        shutil.rmtree(_aside(path), ignore_errors=True)
    elif not path.exists():
        writing.rename(path)
    sync_folder(path.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names at once. False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    result = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    return bool(result == 0)


def _take_back(path: Path) -> None:
    """A process was killed between the two steps of `_put_in_place`."""
    if not path.exists() and is_checkpoint(_aside(path)):
        _aside(path).rename(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
