"""What torchstrat notes of a checkpoint: what is where, checksums, the format's version, who wrote it.

``torchstrat.json``, written last::

    {
     "format": 2, "torch": "2.9.0", "byteorder": "little",
     "files": {
      ".metadata": {"bytes": 5120, "crc32": 123456},
      "__1_0.distcp": {"bytes": 67110896, "entries": [
       {"path": ["scheduler", "last_epoch"], "bytes": 752, "start": 0, "crc32": 89},
       {"path": ["model", "table.weight"], "bytes": 67110144, "start": 704, "crc32": 4567,
        "shape": [1000000, 64], "dtype": "float32", "first": 0, "rows": 262144}, …
      ]}
     },
     …,
     "crc32": 99
    }

A file of data is a row of entries, from its first byte to its last. An entry is a block of rows, or another value, as
``torch.save`` writes it; a block's numbers begin ``start`` bytes into it. So whoever reads a few blocks reads only
these, checks all that it uses, and can do that while it reads; and needs nothing of torch.distributed.checkpoint, whose
import takes seconds and tens of megabytes. (``.metadata`` is for torch's own readers.) The last ``crc32`` is of the
manifest's own content. In format 1, which is read too, every file has one checksum, and no entries.

A folder without a manifest is read as well, if torch.distributed.checkpoint wrote it: its files are then taken as they
are.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchstrat.checkpoint.disk import NewFile, sync_folder
from torchstrat.checkpoint.pieces import KeyPath
from torchstrat.core.errors import InvalidArgumentError

__all__ = [
    "FORMAT",
    "NAME",
    "Entry",
    "FileCheck",
    "check_file",
    "check_of",
    "checked",
    "contents_differ",
    "read_manifest",
    "size_differs",
    "sync_folder",
    "write_manifest",
]

NAME = "torchstrat.json"
FORMAT = 2
_BLOCK_BYTES = 1 << 20


class Entry(NamedTuple):
    """``bytes``: of all of it; ``start``: of a block's numbers within it.

    Of a block: ``shape``, of the whole tensor, the name of its ``dtype``, the number of its first row, and of rows. A
    scalar is one block of one row. Of another value, ``shape`` is None.
    """

    path: KeyPath
    bytes: int
    start: int
    crc32: int
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    first: int = 0
    rows: int = 0


@dataclass(frozen=True)
class FileCheck:
    """Of a file with ``entries``, ``crc32`` is None."""

    bytes: int
    crc32: int | None
    entries: Sequence[Entry] = ()

    def by_offset(self) -> Iterator[tuple[int, Entry]]:
        """The entries, each with where in the file it begins."""
        ends = accumulate((entry.bytes for entry in self.entries), initial=0)
        return zip(ends, self.entries, strict=False)


def check_of(content: bytes) -> FileCheck:
    """Of a file that is to hold ``content``."""
    return FileCheck(len(content), zlib.crc32(content))


def checked(file: Path) -> FileCheck:
    """Of the file as it is now, all of it under one checksum. Raises `OSError`."""
    crc = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return FileCheck(size, crc)


def check_file(file: Path, expected: FileCheck) -> None:
    """Read all of a file; raise `InvalidArgumentError` where it is not what was written."""
    try:
        size = file.stat().st_size
        if size == expected.bytes:
            with file.open("rb") as stream:
                for length, crc in _sections(expected):
                    found = 0
                    while length > 0 and (block := stream.read(min(length, _BLOCK_BYTES))):
                        found, length = zlib.crc32(block, found), length - len(block)
                    if found != crc:
                        raise InvalidArgumentError(contents_differ(file, found, crc))
    except OSError as error:
        raise InvalidArgumentError(f"{file}, a part of the checkpoint, cannot be read: {error}") from error
    if size != expected.bytes:
        raise InvalidArgumentError(size_differs(file, size, expected))


_NEEDED = "; a copy of it, or an earlier checkpoint, is needed."


def size_differs(file: Path, size: int, expected: FileCheck) -> str:
    return f"{file} is damaged: it has {size:,} bytes, and {expected.bytes:,} were written{_NEEDED}"


def contents_differ(file: Path, found: int, expected: int, what: str = "") -> str:
    sums = f"(CRC-32 {found:08x}, not {expected:08x})"
    return f"{file} is damaged: its contents are not what was written{what} {sums}{_NEEDED}"


def _sections(expected: FileCheck) -> Iterator[tuple[int, int]]:
    """(bytes, crc32)."""
    if expected.crc32 is not None:
        yield expected.bytes, expected.crc32
    else:
        yield from ((entry.bytes, entry.crc32) for entry in expected.entries)


def write_manifest(folder: Path, files: Mapping[str, FileCheck], written_by: Mapping[str, object]) -> None:
    """``written_by``: plain data about the job, for people and for later. Raises `OSError`."""
    content: dict[str, object] = {
        "format": FORMAT,
        "torch": torch.__version__,
        "byteorder": sys.byteorder,
        "files": {name: _as_json(check) for name, check in files.items()},
        **written_by,
    }
    content = json.loads(json.dumps(content))  # as it will be read: keys are strings then
    content["crc32"] = _checksum(content)
    with NewFile(folder / NAME) as stream:
        stream.write(json.dumps(content).encode())
        stream.sync()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None where there is none. Raises `InvalidArgumentError` for one that is damaged, or of a later format."""
    file = folder / NAME
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = content["format"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{file} is damaged: {error!r}.") from error
    if version not in (1, FORMAT):
        raise InvalidArgumentError(
            f"{folder} was written in format {version} of torchstrat's checkpoints, and this version reads formats "
            f"1 to {FORMAT}. Use the torchstrat that wrote it, or a later one."
        )
    if version > 1 and content.pop("crc32", None) != _checksum(content):
        raise InvalidArgumentError(f"{file} is damaged: its contents are not what was written.")
    try:
        content["files"] = {name: _from_json(check) for name, check in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(f"{file} is damaged: {error!r}.") from error
    return content


def _checksum(content: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _as_json(check: FileCheck) -> dict[str, object]:
    if check.crc32 is not None:
        return {"bytes": check.bytes, "crc32": check.crc32}
    return {"bytes": check.bytes, "entries": [_entry_as_json(entry) for entry in check.entries]}


def _entry_as_json(entry: Entry) -> dict[str, object]:
    left_out = () if entry.shape is not None else ("shape", "dtype", "first", "rows")
    return {name: value for name, value in entry._asdict().items() if name not in left_out}


def _from_json(check: Mapping[str, Any]) -> FileCheck:
    if "entries" not in check:
        return FileCheck(int(check["bytes"]), int(check["crc32"]))
    return FileCheck(int(check["bytes"]), None, tuple(_entry_from_json(**entry) for entry in check["entries"]))


def _entry_from_json(path: list[str | int], shape: list[int] | None = None, **rest: Any) -> Entry:
    return Entry(tuple(path), shape=None if shape is None else tuple(shape), **rest)
