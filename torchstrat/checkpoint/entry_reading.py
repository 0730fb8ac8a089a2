"""Reading one entry of a checkpoint's file: from its first byte to its last, checked on the way."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any, BinaryIO, NamedTuple

import torch

from torchstrat.checkpoint.manifest import Entry, contents_differ
from torchstrat.core.errors import InvalidArgumentError

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
            raise InvalidArgumentError(contents_differ(File(stream.name), crc, entry.crc32, f", at {self.key}"))

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

    def _unpickled(self, stream: BinaryIO, packed: bytearray) -> Any:
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
