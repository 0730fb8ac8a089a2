"""Reading pieces of tensors, and other values, out of a checkpoint that torchstrat wrote.

The numbers of a block go from the file to where they belong, and its checksum is computed on the way. So a block is
read once, whoever needs how much of it, and nothing is in memory but what was asked for. A few blocks are read at a
time: checksums take longer than a good disk does.

`prepare` is for who has no memory for the new beside the old, and must not change the old before all of the new is
known to be good: it reads and checks first, and keeps nothing; what it read is read again, into the place of the old.
The second time it comes from the system's page cache, where there is memory for that.

Reading one entry of a checkpoint's file: from its first byte to its last, checked on the way.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch

from torchstrat.checkpoint.manifest import Entry, FileCheck, contents_differ, size_differs
from torchstrat.checkpoint.pieces import KeyPath, Piece, key_of
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.tensor_bytes import memory_of

_STEP_BYTES = 1 << 20
_AT_A_TIME = 4


class Place(NamedTuple):
    """Where an entry is."""

    file: str
    offset: int
    entry: Entry


def call_all(tasks: Sequence[Callable[[], None]]) -> None:
    """In order, a few at a time; raises what the first one raises."""
    if len(tasks) == 1:
        tasks[0]()
        return
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="torchstrat-read") as pool:
        pending = [pool.submit(task) for task in tasks]
        try:
            for future in pending:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class Taking(NamedTuple):
    """For ``wanted[number]``: what begins ``begin`` bytes into a block's numbers goes to ``memory``."""

    number: int
    begin: int = 0
    memory: memoryview = memoryview(b"")


@dataclass(frozen=True)
class EntryReading:
    """One entry, to be read from its first byte to its last, and what is to be taken from it."""

    key: str
    place: Place
    takings: list[Taking]

    def read(self, stream: BinaryIO, results: list[Any]) -> None:
        """Check it, and take from it: blocks to the memory of the takings, another value to ``results``."""
        if self.place.entry.shape is None:
            self.check(stream, results)
            return
        for together in _apart(self._wanted()):
            self._read(stream, together)

    def check(self, stream: BinaryIO, results: list[Any]) -> None:
        """Check it, and take only what is no block."""
        if self.place.entry.shape is not None:
            self._read(stream, [])
            return
        packed = bytearray(self.place.entry.bytes)
        self._read(stream, [(0, memoryview(packed))])
        for taking in self.takings:
            results[taking.number] = self._unpickled(stream, packed)

    def fill(self, stream: BinaryIO) -> None:
        """Take from a block that was checked before."""
        if self.place.entry.shape is not None:
            for position, memory in self._wanted():
                for _ in self._parts(stream, memory, position):
                    pass

    def _wanted(self) -> list[tuple[int, memoryview]]:
        return [(self.place.entry.start + taking.begin, taking.memory) for taking in self.takings]

    def _read(self, stream: BinaryIO, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """``wanted``: (where in the entry, memory to fill), in order and apart. The rest is read for the checksum."""
        entry = self.place.entry
        rest = memoryview(bytearray(min(_STEP_BYTES, entry.bytes)))
        crc = position = 0
        for start, memory in [*wanted, (entry.bytes, memoryview(b""))]:
            while position < start:
                part = rest[: start - position]
                crc, position = self._summed(stream, part, crc, position)
            crc, position = self._summed(stream, memory, crc, position)
        if crc != entry.crc32:
            raise InvalidArgumentError(contents_differ(Path(stream.name), crc, entry.crc32, f", at {self.key}"))

    def _summed(self, stream: BinaryIO, memory: memoryview, crc: int, position: int) -> tuple[int, int]:
        for count in self._parts(stream, memory, position):
            crc, position, memory = zlib.crc32(memory[:count], crc), position + count, memory[count:]
        return crc, position

    def _parts(self, stream: BinaryIO, memory: memoryview, position: int) -> Iterator[int]:
        """Fill ``memory`` from ``position`` of the entry on; yields the bytes of each part once it is there."""
        while memory.nbytes:
            count = os.preadv(stream.fileno(), [memory[:_STEP_BYTES]], self.place.offset + position)
            if not count:
                raise OSError(f"it ends at byte {self.place.offset + position:,}")
            yield count
            position, memory = position + count, memory[count:]

    def _unpickled(self, stream: BinaryIO, packed: bytearray) -> object:
        try:
            return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
        except Exception as error:  # a class that is not there any more, or whatever its own unpickling raises
            raise InvalidArgumentError(
                f"{self.key} in {stream.name} cannot be unpickled by this program: {type(error).__name__}: {error}"
            ) from error


def _apart(wanted: list[tuple[int, memoryview]]) -> Iterator[list[tuple[int, memoryview]]]:
    """Groups of what can be read in one go. More than one only where the same rows are wanted twice."""
    left = sorted(wanted, key=lambda one: one[0])
    while left:
        group: list[tuple[int, memoryview]] = []
        later: list[tuple[int, memoryview]] = []
        for one in left:
            fits = not group or group[-1][0] + group[-1][1].nbytes <= one[0]
            (group if fits else later).append(one)
        yield group
        left = later


INDEX = ".metadata"


class Stored(Protocol):
    """A checkpoint that is there to be read: a folder of torchstrat's, of torch's (`torch_folder`), or a plain file
    (`stored`)."""

    @property
    def folder(self) -> Path:
        """Where it is; of a plain file that file."""

    @property
    def paths(self) -> Mapping[str, KeyPath]:
        """What is in it, by key."""

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Of a tensor; None for another value."""

    def dtype(self, key: str) -> torch.dtype | None: ...

    def under(self, name: str) -> dict[str, KeyPath]:
        """What belongs to one object of the checkpoint."""

    def place_of(self, piece: Piece) -> Piece:
        """What a process that opens the same by itself asks for."""

    def read(self, wanted: Sequence[tuple[Piece, int | None]]) -> list[Any]:
        """See the function `read`."""


def read(stored: Stored, wanted: Sequence[tuple[Piece, int | None]]) -> list[Any]:
    """The values of ``wanted``: pieces, each with its number of rows (None: the whole tensor, or another value).

    Tensors are new, on the CPU, of the stored dtype. All that is used is compared with the manifest's checksums.

    Raises:
        InvalidArgumentError: a file is missing, or not what was written; the stored blocks have a gap. The message
            names the file, and the tensor or value.
    """
    return stored.read(wanted)


class Prepared(Protocol):
    """What was asked for is there and is good. It stays so until `close`, whatever becomes of the files' names."""

    def fits(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether ``wanted[number]`` can be written into this one: same shape and dtype, contiguous, on the CPU."""

    def take(self, into: Sequence[torch.Tensor | None]) -> list[Any]:
        """The values. Tensors are written into those of ``into``, which fit; for None there is a new one.

        Raises `InvalidArgumentError` where the disk fails; some of ``into`` have changed then.
        """

    def close(self) -> None: ...


def prepare(stored: Stored, wanted: Sequence[tuple[Piece, int | None]]) -> Prepared:
    """Check what `read` would read, and raise what it would raise."""
    return stored.prepare(wanted) if isinstance(stored, StoredFolder) else _Held(read(stored, wanted))


@dataclass(frozen=True)
class StoredFolder:
    """``files``: what the manifest says of them."""

    folder: Path
    files: Mapping[str, FileCheck]
    paths: Mapping[str, KeyPath] = field(init=False)
    _places: Mapping[str, list[Place]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        places: dict[str, list[Place]] = defaultdict(list)
        for name, check in self.files.items():
            for offset, entry in check.by_offset():
                places[key_of(entry.path)].append(Place(name, offset, entry))
        object.__setattr__(self, "_places", dict(places))
        object.__setattr__(self, "paths", {key: found[0].entry.path for key, found in places.items()})

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Of a tensor; None for another value."""
        return self._places[key][0].entry.shape

    def dtype(self, key: str) -> torch.dtype | None:
        entry = self._places[key][0].entry
        if entry.shape is None:
            return None
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidArgumentError(
                f"{key} in {self.folder} is of dtype {entry.dtype}, which torch {torch.__version__} does not have. "
                "Restore it with the torch that saved it, or leave it out: restore(path, only=(…))."
            )
        return dtype

    def under(self, name: str) -> dict[str, KeyPath]:
        """What belongs to one object of the checkpoint."""
        return {key: path for key, path in self.paths.items() if path[0] == name}

    def place_of(self, piece: Piece) -> Piece:
        return piece

    def read(self, wanted: Sequence[tuple[Piece, int | None]]) -> list[Any]:
        """See the function `read`."""
        results = [self.new(*one) for one in wanted]
        for name, readings in self.readings(wanted, results).items():
            with _errors_of(self.folder / name, readings), self._open(name) as stream:
                call_all([partial(reading.read, stream, results) for reading in readings])
        return results

    def prepare(self, wanted: Sequence[tuple[Piece, int | None]]) -> Prepared:
        """See the function `prepare`."""
        results: list[Any] = [None] * len(wanted)
        streams: dict[str, BinaryIO] = {}
        try:
            for name, readings in self.readings(wanted, results).items():
                with _errors_of(self.folder / name, readings):
                    streams[name] = self._open(name)
                    call_all([partial(reading.check, streams[name], results) for reading in readings])
        except BaseException:
            _close(streams)
            raise
        return _Checked(self, wanted, results, streams)

    def _open(self, name: str) -> BinaryIO:
        stream = (self.folder / name).open("rb", buffering=0)
        size = os.fstat(stream.fileno()).st_size
        if size != self.files[name].bytes:
            stream.close()
            raise InvalidArgumentError(size_differs(self.folder / name, size, self.files[name]))
        return stream

    def _span(self, piece: Piece, rows: int | None) -> tuple[int, int]:
        """(first row, row after the last)."""
        shape = self.shape(piece.key)
        if rows is not None and piece.shape:
            return piece.start, piece.start + rows
        return 0, shape[0] if shape else 1

    def new(self, piece: Piece, rows: int | None) -> torch.Tensor | None:
        """Takes the numbers of a tensor; None for another value."""
        shape, dtype = self.shape(piece.key), self.dtype(piece.key)
        if shape is None:
            return None
        first, stop = self._span(piece, rows)
        return torch.empty((stop - first, *shape[1:]) if shape else (), dtype=dtype, device="cpu")

    def readings(
        self, wanted: Sequence[tuple[Piece, int | None]], targets: Sequence[torch.Tensor | None]
    ) -> dict[str, list[EntryReading]]:
        """By file, in the order of the entries. Where a target is None, nothing is taken from a block."""
        found: dict[str, dict[int, EntryReading]] = defaultdict(dict)
        for number, ((piece, rows), target) in enumerate(zip(wanted, targets, strict=True)):
            for place, taking in self._takings(piece, rows, number, target):
                of_file = found[place.file]
                of_file.setdefault(place.offset, EntryReading(piece.key, place, [])).takings.append(taking)
        return {name: [of_file[offset] for offset in sorted(of_file)] for name, of_file in found.items()}

    def _takings(
        self, piece: Piece, rows: int | None, number: int, target: torch.Tensor | None
    ) -> Iterator[tuple[Place, Taking]]:
        shape, dtype, places = self.shape(piece.key), self.dtype(piece.key), self._places[piece.key]
        if shape is None or dtype is None:
            yield places[0], Taking(number)
            return
        start, stop = self._span(piece, rows)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        memory = memoryview(b"") if target is None else memory_of(target)
        found = 0
        for place in places:
            first, last = max(start, place.entry.first), min(stop, place.entry.first + place.entry.rows)
            if first < last:
                found += last - first
                part = memory[(first - start) * row_bytes : (last - start) * row_bytes]
                yield place, Taking(number, (first - place.entry.first) * row_bytes, part)
        if found != stop - start:
            raise InvalidArgumentError(f"{self.folder}: rows of {piece.key} are missing in the checkpoint.")


@contextlib.contextmanager
def _errors_of(file: Path, readings: Sequence[EntryReading]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(
            f"{file}, a part of the checkpoint, cannot be read for {readings[0].key}: {error}"
        ) from error


def _close(streams: Mapping[str, BinaryIO]) -> None:
    for stream in streams.values():
        stream.close()


class _Checked:
    """`Prepared`: files that have been checked and are held open. ``values``: what is no tensor, read already."""

    def __init__(
        self,
        stored: StoredFolder,
        wanted: Sequence[tuple[Piece, int | None]],
        values: Sequence[Any],
        streams: Mapping[str, BinaryIO],
    ) -> None:
        self._stored = stored
        self._wanted = wanted
        self._values = values
        self._streams = streams
        self._close = weakref.finalize(self, _close, streams)

    def fits(self, number: int, tensor: torch.Tensor) -> bool:
        return _fits(self._stored.new(*self._wanted[number]), tensor)

    def take(self, into: Sequence[torch.Tensor | None]) -> list[Any]:
        targets = [
            self._stored.new(*one) if given is None else given for one, given in zip(self._wanted, into, strict=True)
        ]
        for name, readings in self._stored.readings(self._wanted, targets).items():
            with _errors_of(self._stored.folder / name, readings):
                call_all([partial(reading.fill, self._streams[name]) for reading in readings])
        return [value if target is None else target for value, target in zip(self._values, targets, strict=True)]

    def close(self) -> None:
        self._close()


class _Held:
    """`Prepared`: of a checkpoint of another kind. All of it is in memory."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def fits(self, number: int, tensor: torch.Tensor) -> bool:
        return _fits(self._values[number], tensor)

    def take(self, into: Sequence[torch.Tensor | None]) -> list[Any]:
        pairs = zip(self._values, into, strict=True)
        return [value if given is None else given.copy_(value) for value, given in pairs]

    def close(self) -> None:
        self._values = []


def _fits(value: object, tensor: torch.Tensor) -> bool:
    is_like = isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dtype == tensor.dtype
    return is_like and tensor.is_contiguous() and tensor.device.type == "cpu"
