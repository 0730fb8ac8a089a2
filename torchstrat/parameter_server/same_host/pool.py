"""Tensors in memory that other processes of this host can be shown, and that memory as they see it."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from torchstrat.core.errors import CommunicationError
from torchstrat.distributed.collectives.shared_memory.common_memory import Segment

_ALIGNED = 64  # bytes: a cache line, and what vector instructions like
_SLAB_BYTES = 4 << 20
_LARGE_BYTES = 1 << 20
"""From here on a block has a segment of its own."""


class Place(NamedTuple):
    """Where something lies: byte ``offset`` of the pool's segment number ``segment``."""

    segment: int
    offset: int


@dataclass(frozen=True)
class _Block:
    place: Place
    capacity: int
    is_kept: bool


class SharedPool:
    """Memory of this process that it can show to others. Thread-safe.

    Blocks are used again when the last tensor in them dies, and their segments stay: their size is the most that was in
    use at one time. Large blocks that were not to be kept go back to the system instead. Children that are forked see
    the same memory; what they write, everybody sees.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._segments: dict[int, Segment] = {}
        self._numbers = itertools.count()
        self._starts: list[tuple[int, int]] = []  # (address, number of the segment), ascending
        self._free: dict[int, list[_Block]] = {}  # by capacity
        self._dropped: list[int] = []
        self._given_up: list[torch.Tensor] = []
        self._slab: tuple[int, int] | None = None  # the segment that small blocks are cut from, and how far
        # What died says so here, whenever and in whatever thread that is: it must not wait for a lock.
        self._returned: deque[weakref.ref[np.ndarray]] = deque()
        self._lent: dict[int, tuple[weakref.ref[np.ndarray], _Block]] = {}  # by the id of the reference

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, keep: bool = True) -> torch.Tensor:
        """A contiguous tensor of this shape, its values arbitrary. ``keep``: the like will be needed again and again.
        Raises `NoRoomError`."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        size = count * dtype.itemsize
        with self._lock:
            block = self._take(size, keep)
            segment = self._segments[block.place.segment]
            array = np.ndarray((size,), np.uint8, buffer=segment.mapping, offset=block.place.offset)
            lent = weakref.ref(array, self._returned.append)
            self._lent[id(lent)] = lent, block
        return torch.from_numpy(array).view(dtype).view(shape)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where the first element of a contiguous tensor lies; None if it is not in this memory."""
        address = tensor.data_ptr()
        with self._lock:
            index = bisect_right(self._starts, (address, math.inf)) - 1
            if index < 0:
                return None
            start, number = self._starts[index]
            inside = address + tensor.nbytes <= start + self._segments[number].size
            return Place(number, address - start) if inside else None

    def segment(self, number: int) -> Segment:
        return self._segments[number]

    def give_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never use this memory again: somebody may write to it at any time."""
        with self._lock:
            self._given_up.extend(tensors)

    def give_back(self) -> None:
        """Free blocks that have segments of their own go back to the system."""
        with self._lock:
            self._take_back()
            for capacity in [capacity for capacity in self._free if capacity >= _LARGE_BYTES]:
                for block in self._free.pop(capacity):
                    self._drop(block)

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return sum(segment.size for segment in self._segments.values())

    def close(self) -> None:
        """Let go of the descriptors: nobody can be shown this memory any more. Tensors in it stay."""
        with self._lock:
            for segment in self._segments.values():
                segment.close()

    def has_dropped(self, count: int) -> bool:
        """Whether more than ``count`` segments went back to the system."""
        return bool(self.dropped_since(count))

    def dropped_since(self, count: int) -> Sequence[int]:
        """The numbers of the segments that went back to the system, but for the first ``count`` of them."""
        if not self._dropped[count:] and not self._returned:
            return ()
        with self._lock:
            self._take_back()
            return self._dropped[count:]

    def _take_back(self) -> None:
        while self._returned:
            _, block = self._lent.pop(id(self._returned.popleft()))
            if block.is_kept:
                self._free.setdefault(block.capacity, []).append(block)
            else:
                self._drop(block)

    def _drop(self, block: _Block) -> None:
        segment = self._segments.pop(block.place.segment)
        self._starts.remove((segment.address, block.place.segment))
        segment.close()
        self._dropped.append(block.place.segment)

    def _take(self, size: int, keep: bool) -> _Block:
        self._take_back()
        capacity = _capacity_for(size)
        if not keep and capacity >= _LARGE_BYTES:
            return _Block(Place(self._new_segment(capacity), 0), capacity, is_kept=False)
        free = self._free.get(capacity)
        if free:
            return free.pop()
        if capacity >= _LARGE_BYTES:
            return _Block(Place(self._new_segment(capacity), 0), capacity, is_kept=True)
        if self._slab is None or self._slab[1] + capacity > _SLAB_BYTES:
            self._slab = self._new_segment(_SLAB_BYTES), 0  # what is left of the one before is less than a block
        number, offset = self._slab
        self._slab = number, offset + capacity
        return _Block(Place(number, offset), capacity, is_kept=True)

    def _new_segment(self, size: int) -> int:
        segment = Segment.allocate(size, for_children=True)
        number = next(self._numbers)
        self._segments[number] = segment
        insort(self._starts, (segment.address, number))
        return number


def _capacity_for(size: int) -> int:
    """At most an eighth more than ``size``, so that requests of about one size share blocks."""
    step = max(_ALIGNED, 1 << max(0, size.bit_length() - 4))
    if size >= _LARGE_BYTES // 2:
        step = max(step, 4096)
    return -(-size // step) * step


class MappedMemory:
    """Segments of another process, by its numbers for them. For one thread."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def add(self, number: int, descriptor: int) -> None:
        """Map a segment, whose descriptor is then closed."""
        segment = Segment(descriptor, os.fstat(descriptor).st_size)
        segment.close()  # the descriptor: the memory stays as long as it is mapped
        self._segments[number] = segment

    def tensor(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What lies there, as long as the caller leaves it there. It keeps the segment mapped."""
        size = math.prod(shape) * dtype.itemsize
        segment = self._segments.get(place.segment)
        if segment is None or not 0 <= place.offset <= segment.size - size:
            raise CommunicationError(f"a message refers to {size} bytes at {place}, which its sender does not share.")
        array = np.ndarray((size,), np.uint8, buffer=segment.mapping, offset=place.offset)
        return torch.from_numpy(array).view(dtype).view(shape)

    def remove(self, number: int) -> None:
        """Its owner uses it no more. It stays mapped as long as a tensor is in it."""
        self._segments.pop(number, None)

    def clear(self) -> None:
        self._segments.clear()
