"""The files of a checkpoint as torch.distributed.checkpoint has them, without a process group: what each process writes
of tensors and other values, and the index over all of it.

Every process that holds something writes a file of its own into the checkpoint's folder (`write_part`); one of them
then writes, over all of it, torch's metadata (`write_metadata`) and the manifest. Whoever reads takes the manifest and
reads what it needs, whoever wrote it and however it was cut (`read`). Python values are pickled, so a checkpoint is to
be trusted like code.

A file has entries: blocks of rows and other values, each as ``torch.save`` writes it, with checksums on the way. Blocks
have about `BLOCK_BYTES`: torch's own reader takes a block into memory whole even where it needs a few rows of it, and a
checksum is of a block. A block does not pass through ``torch.save``. That would need all of it at once, and run over it
a second time for the checksum within its archive. Instead ``torch.save`` says, once per shape, what stands before and
after the numbers (`torch.serialization.skip_data`, which is made for filling in the numbers oneself); they are then
written between, a few MB at a time, as they come. ``torch.load`` reads the outcome like any other.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch.serialization import skip_data

from torchstrat.checkpoint.disk import NewFile
from torchstrat.checkpoint.manifest import Entry, FileCheck, check_of
from torchstrat.checkpoint.pieces import KeyPath, Piece, key_of
from torchstrat.checkpoint.reading import INDEX, Stored, read
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.tensor_bytes import memory_of

STEP_BYTES = 2 << 20
"""About so much of a block is in memory at a time, beside what it is taken from."""


class BlockSource(Protocol):
    """The rows of a tensor that come one after another while they are written, so that they are never there at once.

    A writer asks for all rows, once each, in order, `STEP_BYTES` at a time or one row if that is more. What it was
    given has to stay as it is until the writer asks for the next rows of this or another source, or ends. Called by the
    thread that writes.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows: ``(rows, …)``; ``()`` for a scalar."""

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, first: int, stop: int) -> torch.Tensor:
        """Rows ``first`` to ``stop``: ``(stop - first, …)``, on any device. A scalar: itself, for ``rows(0, 1)``."""


class EntryFile:
    """A new file, to which entries are written one after another. Raises `OSError`, naming the file and the entry."""

    def __init__(self, path: Path) -> None:
        self._file = NewFile(path)
        self._entries: list[Entry] = []
        self._what = ""
        self._offset = self._crc = 0

    def add_block(self, piece: Piece, source: BlockSource, first: int, stop: int) -> None:
        """Write rows ``first`` to ``stop`` of ``source``, which are rows of ``piece``."""
        self._begin(f"rows {first} to {stop} of {piece.key}" if source.shape else piece.key)
        inner = source.shape[1:]
        before, after = _frame((stop - first, *inner) if source.shape else (), source.dtype)
        self._write(before)
        step = max(1, STEP_BYTES // max(1, math.prod(inner) * source.dtype.itemsize))
        for start in range(first, stop, step):
            rows = source.rows(start, min(start + step, stop)).detach()
            held = rows.cpu().resolve_conj().resolve_neg().contiguous()
            self._write(memory_of(held))
        self._write(after)
        dtype = str(source.dtype).removeprefix("torch.")
        place = {"shape": piece.shape, "dtype": dtype, "first": piece.start + first, "rows": stop - first}
        self._end(piece.path, len(before), **place)

    def add_again(self, piece: Piece, like: Sequence[Entry]) -> None:
        """Write blocks that this file has already once more, for a tensor of two names."""
        ends = list(accumulate((entry.bytes for entry in self._entries), initial=0))
        for entry in like:
            self._begin(f"rows {entry.first} to {entry.first + entry.rows} of {piece.key}")
            begin = ends[self._entries.index(entry)]
            with self._naming(), self._file.path.open("rb") as stream:
                stream.seek(begin)
                left = entry.bytes
                while left and (data := stream.read(min(left, STEP_BYTES))):
                    self._write(data)
                    left -= len(data)
            place = {"shape": entry.shape, "dtype": entry.dtype, "first": entry.first, "rows": entry.rows}
            self._end(piece.path, entry.start, **place)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def add_value(self, path: KeyPath, value: object) -> None:
        """Write anything else, pickled."""
        packed = io.BytesIO()
        torch.save(value, packed)
        self._begin(key_of(path))
        self._write(packed.getbuffer())
        self._end(path, 0)

    def finish(self) -> FileCheck:
        """Its bytes are on the disk when this returns."""
        self._what = "its end"
        with self._naming():
            self._file.sync()
            self._file.close()
        return FileCheck(self._file.bytes, None, tuple(self._entries))

    def close(self) -> None:
        self._file.close()

    def _begin(self, what: str) -> None:
        self._what = what
        self._offset, self._crc = self._file.bytes, 0

    def _write(self, data: memoryview | bytes) -> None:
        self._crc = zlib.crc32(data, self._crc)
        with self._naming():
            self._file.write(data)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"{error.strerror}, while writing {self._what}"
            raise OSError(error.errno, what, os.fspath(self._file.path)) from error

    def _end(self, path: KeyPath, start: int, **block: Any) -> None:
        self._entries.append(Entry(path, self._file.bytes - self._offset, start, self._crc, **block))


@lru_cache(maxsize=256)
def _frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the numbers of a tensor."""
    gap = _Gap()
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), cast(IO[bytes], gap))
    return bytes(gap.before), bytes(gap.after)


class _Gap(io.RawIOBase):
    """Takes what is written, and notes where a gap was left in it."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.after = bytearray()
        self._gap: int | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        (self.before if self._gap is None else self.after).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR and offset:
            self._gap = offset
        return self.tell()

    def tell(self) -> int:
        return len(self.before) + (self._gap or 0) + len(self.after)


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
    values: Sequence[tuple[KeyPath, object]] = (),
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
    from torchstrat.checkpoint.torch_folder import packed_metadata

    packed = packed_metadata(files)
    with NewFile(folder / INDEX) as file:
        file.write(packed)
        file.sync()
    return check_of(packed)


def _require_whole(files: Mapping[str, FileCheck]) -> None:
    """Every row of a tensor is there once, and every name stands for one thing."""
    rows: dict[str, int] = {}
    described: dict[str, tuple[KeyPath, tuple[int, ...] | None, str | None]] = {}
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
