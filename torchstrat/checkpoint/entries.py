"""A file of entries: blocks of rows and other values, each as ``torch.save`` writes it, with checksums on the way.

A block does not pass through ``torch.save``. That would need all of it at once, and run over it a second time for the
checksum within its archive. Instead ``torch.save`` says, once per shape, what stands before and after the numbers
(`torch.serialization.skip_data`, which is made for filling in the numbers oneself); they are then written between, a
few MB at a time, as they come. ``torch.load`` reads the outcome like any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch.serialization import skip_data

from torchstrat.checkpoint.disk import NewFile
from torchstrat.checkpoint.manifest import Entry, FileCheck
from torchstrat.checkpoint.pieces import KeyPath, Piece, key_of

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

    def add_value(self, path: KeyPath, value: Any) -> None:
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


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, of any dtype, where they are."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    held = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    held.of = tensor  # type: ignore[attr-defined]  # it stays for as long as the view is used
    return memoryview(held).cast("B")


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
