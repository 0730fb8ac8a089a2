"""Pieces of tensors, and other values, in the files of torch.distributed.checkpoint; no process group involved.

Every process that holds something writes a file of its own into the checkpoint's folder (`write_part`); one of them
then writes, over all of it, torch's metadata (`write_metadata`) and the manifest. Whoever reads takes the manifest and
reads what it needs, whoever wrote it and however it was cut (`read`). Python values are pickled, so a checkpoint is to
be trusted like code.

Rows are cut into blocks of about `BLOCK_BYTES`: torch's own reader takes a block into memory whole even where it needs
a few rows of it, and a checksum is of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchstrat.checkpoint.disk import NewFile
from torchstrat.checkpoint.entries import BlockSource, EntryFile
from torchstrat.checkpoint.manifest import Entry, FileCheck, check_of
from torchstrat.checkpoint.pieces import KeyPath, Piece, key_of
from torchstrat.checkpoint.reading import INDEX, Stored, read
from torchstrat.core.errors import InvalidArgumentError

__all__ = ["BLOCK_BYTES", "BlockSource", "Stored", "WrittenPart", "read", "write_metadata", "write_part"]

BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class WrittenPart:
    """What one process has written: its files, and what is in them. Plain picklable data."""

    files: Mapping[str, FileCheck]


def write_part(
    folder: Path,
    number: int,
    tensors: Sequence[tuple[Piece, torch.Tensor | BlockSource]],
    values: Sequence[tuple[KeyPath, Any]] = (),
) -> WrittenPart:
    """Write a file, which no other part of the checkpoint has the ``number`` of, into ``folder``, which is there.

    First the values, then the tensors, each in its order. Memory is needed for a few MB at a time. The file is on the
    disk when this returns, but for its name: see `disk.sync_folder`. Nothing to write is no file.

    Raises:
        OSError: naming the file, and the tensor or value at which it happened.
        whatever a `BlockSource` raises, or pickling a value.
    """
    if not tensors and not values:
        return WrittenPart({})
    name = f"__{number}_0.distcp"
    file = EntryFile(folder / name)
    try:
        for path, value in values:
            file.add_value(path, value)
        written: dict[int, Sequence[Entry]] = {}  # by the source, whose rows come once
        for piece, tensor in tensors:
            before = len(file.entries)
            if id(tensor) in written:
                file.add_again(piece, written[id(tensor)])
                continue
            source = _Held(tensor.detach()) if isinstance(tensor, torch.Tensor) else tensor
            for first, stop in _blocks(source):
                file.add_block(piece, source, first, stop)
            if source is tensor:
                written[id(tensor)] = file.entries[before:]
        return WrittenPart({name: file.finish()})
    finally:
        file.close()


@dataclass(frozen=True)
class _Held:
    """A tensor that is all there."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, first: int, stop: int) -> torch.Tensor:
        return self.tensor[first:stop] if self.tensor.dim() else self.tensor


def _blocks(source: BlockSource) -> Iterator[tuple[int, int]]:
    """(first row, row after the last)."""
    shape = source.shape
    total = math.prod(shape) * source.dtype.itemsize
    if not shape or total <= BLOCK_BYTES:
        yield 0, shape[0] if shape else 1
        return
    rows = max(1, BLOCK_BYTES * shape[0] // total)
    for first in range(0, shape[0], rows):
        yield first, min(first + rows, shape[0])


def write_metadata(folder: Path, parts: Sequence[WrittenPart]) -> FileCheck:
    """Write what torch.distributed.checkpoint needs to read all of ``parts``, as the file `INDEX`.

    Raises `InvalidArgumentError` where the parts together do not make whole tensors; `OSError`.
    """
    files = {name: check for part in parts for name, check in part.files.items()}
    _require_whole(files)
    # Imported here: the package is needed by the one process that writes this, and its import takes seconds.
    from torchstrat.checkpoint.torch_index import packed_metadata

    packed = packed_metadata(files)
    with NewFile(folder / INDEX) as file:
        file.write(packed)
        file.sync()
    return check_of(packed)


def _require_whole(files: Mapping[str, FileCheck]) -> None:
    """Every row of a tensor is there once, and every name stands for one thing."""
    rows: dict[str, int] = {}
    described: dict[str, tuple[Any, ...]] = {}
    entries = [entry for check in files.values() for entry in check.entries]
    for entry in sorted(entries, key=lambda entry: (entry.first, entry.rows)):
        key, description = key_of(entry.path), (entry.path, entry.shape, entry.dtype)
        if described.setdefault(key, description) != description:
            raise InvalidArgumentError(
                f"what was written does not add up to whole tensors: {key} is {description[1:]} in one file, and "
                f"{described[key][1:]} in another."
            )
        if rows.setdefault(key, 0) != entry.first or (entry.shape is None and rows[key]):
            raise InvalidArgumentError(
                f"what was written does not add up to whole tensors: row {entry.first} of {key} follows row "
                f"{rows[key] - 1}."
            )
        rows[key] += entry.rows if entry.shape is not None else 1
    for key, (_, shape, _) in described.items():
        if shape and rows[key] != shape[0]:
            raise InvalidArgumentError(
                f"what was written does not add up to whole tensors: {rows[key]} rows of {key}, which has {shape[0]}."
            )
