"""Memory without a name, and in it memory that all ranks see once and each may write to without the others' seeing it.

It exists while a process holds its descriptor or maps it, and no longer.

Every rank maps one `Segment` twice. What it *writes* through the first mapping, all see. The second one, which it is
*shown*, is private: it shows what is in the segment until this rank writes to it, and from then on a copy of the page
that was written to. So a program may do what it likes with the tensors it is shown, and what it did can be told
(`edits`), made everyone's (`publish`) or undone (`forget`). Which pages it has written to, the kernel knows
(`OwnPages`). No counter of torch's sees writes through ``.data``; the page table sees all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from torchstrat.core.memory import available_bytes

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_KEPT_FREE_BYTES = 64 << 20


class NoRoomError(OSError):
    """The memory cannot be had. Nothing was allocated."""


class Segment:
    """``size`` bytes, zero at first, mapped by every process that was given ``descriptor``.

    Processes forked from this one (workers of a data loader) have no part in it: they cannot touch it by accident, nor
    keep it. Unless it is ``for_children`` too, because what lies there may be used by them.
    """

    def __init__(self, descriptor: int, size: int, *, for_children: bool = False) -> None:
        self.descriptor, self.size = descriptor, size
        self.mapping = mmap.mmap(descriptor, size)
        if not for_children:
            self.mapping.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # an older kernel: the pages are mapped as they are touched
            self.mapping.madvise(_MADV_POPULATE_WRITE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))

    @staticmethod
    def allocate(size: int, *, for_children: bool = False) -> Segment:
        """Raises `NoRoomError`. A page that is missing later would end the process with SIGBUS, so all are there."""
        free = available_bytes()
        if free is not None and size + _KEPT_FREE_BYTES > free:
            raise NoRoomError(errno.ENOMEM, f"{size:,} bytes of shared memory are needed, and {free:,} are left")
        descriptor = os.memfd_create("torchstrat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                raise NoRoomError(
                    error.errno, f"{size:,} bytes of shared memory are needed: {os.strerror(error.errno or 0)}"
                ) from error
            # Nobody it is passed to can cut it short under the others.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return Segment(descriptor, size, for_children=for_children)
        except BaseException:
            os.close(descriptor)
            raise

    def tensor(self, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        """A view of ``count`` elements from byte ``offset`` on. It keeps the memory mapped."""
        with torch.inference_mode(False):  # it is kept, and written to in other modes too
            return torch.frombuffer(self.mapping, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        """Let go of the descriptor. The memory stays while a view of it does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


PAGE_BYTES = mmap.PAGESIZE

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module has no name for it
_ALIGNMENT_BYTES = 64

Ranges = list[tuple[int, int]]


class Kind(NamedTuple):
    """What a tensor is like whose elements have a place each, without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Place(NamedTuple):
    """Two views of one tensor. ``written``: what is written there all ranks see; ``shown``: this rank's own view."""

    memory: CommonMemory
    written: torch.Tensor
    shown: torch.Tensor


class CommonMemory:
    """One rank's two mappings of a segment that all ranks have. Raises `OSError` if the second cannot be had."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.size = segment.size
        self._map()
        weakref.finalize(self, segment.close)  # `show_anew` maps it again

    def _map(self) -> None:
        self._shown = mmap.mmap(
            self._segment.descriptor, self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        with contextlib.suppress(OSError):  # an older kernel: the pages are mapped as they are touched
            self._shown.madvise(_MADV_POPULATE_READ)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._shown))
        self._own_pages = OwnPages(self._address, self.size)

    @property
    def address(self) -> int:
        """Of what is written, which all see."""
        return self._segment.address

    def places(self, kinds: Sequence[Kind]) -> list[Place]:
        """A place for each, in the order given, from the beginning on; `size_of` them must have room."""
        places, offset = [], 0
        for kind in kinds:
            views = (_view(mapping, kind, offset) for mapping in (self._segment.mapping, self._shown))
            places.append(Place(self, *views))
            offset += _rounded(kind.bytes)
        return places

    def show_anew(self, held: Sequence[torch.Tensor]) -> None:
        """Show this rank everything elsewhere, edits included; `again` tells where. Those that it was shown and that
        are ``held`` keep the values that they have now, whatever is written later."""
        edits, before, start = self.edits(), self._shown, self._address
        self._map()
        for first, stop in edits:
            _bytes(self._shown, first, min(stop, self.size)).copy_(_bytes(before, first, min(stop, self.size)))
        for tensor in held:
            first = (tensor.data_ptr() - start) // PAGE_BYTES * PAGE_BYTES
            touched = _bytes(before, first, tensor.data_ptr() - start + tensor.nbytes)[::PAGE_BYTES]
            touched.copy_(touched.clone())

    def again(self, place: Place, kind: Kind) -> Place:
        """The same place where it is shown now."""
        return place._replace(shown=_view(self._shown, kind, place.written.data_ptr() - self.address))

    def edits(self) -> Ranges:
        """What this rank has written to the tensors that it is shown: byte ranges of whole pages."""
        return self._own_pages.ranges()

    def publish(self, ranges: Ranges) -> None:
        """Write what this rank is shown there for all to see. No other may read or write meanwhile."""
        for start, stop in ranges:
            target, source = (
                _bytes(mapping, start, min(stop, self.size)) for mapping in (self._segment.mapping, self._shown)
            )
            target.copy_(source)

    def forget(self, ranges: Ranges) -> None:
        """From now on this rank is shown there what all see."""
        for start, stop in ranges:
            self._shown.madvise(mmap.MADV_DONTNEED, start, min(stop, self.size) - start)


def size_of(kinds: Sequence[Kind]) -> int:
    """Bytes for a place for each of ``kinds``."""
    return -(-sum(_rounded(kind.bytes) for kind in kinds) // PAGE_BYTES) * PAGE_BYTES


def kind_of(tensor: torch.Tensor) -> Kind | None:
    """None for tensors that have no place for every element, or whose elements are not numbers in this memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_inference():
        return None
    if tensor.is_conj() or tensor.is_neg() or not _is_without_gaps(tensor):
        return None
    return Kind(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def why_not() -> str | None:
    """What this machine lacks to show each process memory of its own over common one; None if nothing.

    Tried out rather than looked up: whether pages are copied at a write, told apart and given back depends on the
    kernel, on what a sandbox puts in its place, and on whether the process locks its memory.
    """
    try:
        memory = CommonMemory(Segment.allocate(2 * PAGE_BYTES))
        [place] = memory.places([Kind((2 * PAGE_BYTES,), (1,), torch.uint8)])
        place.written[0] = 1
        if int(place.shown[0]) != 1 or memory.edits():
            return "private mappings do not show what others write"
        place.shown[PAGE_BYTES] = 2
        if memory.edits() != [(PAGE_BYTES, 2 * PAGE_BYTES)] or int(place.written[PAGE_BYTES]) != 0:
            return "the kernel does not tell which pages of a private mapping were written to"
        memory.forget(memory.edits())
        if int(place.shown[PAGE_BYTES]) != 0 or memory.edits():
            return "pages of a private mapping cannot be given back"
    except OSError as error:
        return f"private mappings of common memory cannot be had: {error}"
    return None


def _bytes(mapping: mmap.mmap, start: int, stop: int) -> torch.Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8, count=stop - start, offset=start)


def _view(mapping: mmap.mmap, kind: Kind, offset: int) -> torch.Tensor:
    if not kind.bytes:
        return torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype)
    # Each its own storage: a saved tensor must not take the whole segment along. And no view of another tensor, which
    # would be one more in that storage: who else holds what is there is told by their number.
    storage = torch.frombuffer(mapping, dtype=torch.uint8, count=kind.bytes, offset=offset).untyped_storage()
    return torch.empty(0, dtype=kind.dtype).set_(storage, 0, kind.shape, kind.stride)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _is_without_gaps(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


_SCAN = 0xC0606610  # ioctl PAGEMAP_SCAN, Linux 6.7: the kernel picks the pages, which is twice as quick
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_RANGES_AT_ONCE = 128
_ENTRY_BYTES = 8  # of pagemap: bit 63 says present, 62 swapped, 61 of a file


class _Request(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "size", "flags", "start", "end", "walk_end", "ranges", "ranges_length", "most_pages",
            "inverted", "all_of", "any_of", "returned",
        )
    )  # fmt: skip


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("categories", ctypes.c_uint64))


class OwnPages:
    """The pages that this process has written to of the private file mapping at ``address``, by /proc/self/pagemap.

    Raises `OSError` where the kernel does not tell.

    What the kernel is asked with is made once, since every step asks. It belongs to this process: a fork of it would be
    told of its parent's pages.
    """

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        self._descriptor = os.open("/proc/self/pagemap", os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._found = (_Range * _RANGES_AT_ONCE)()
        self._request = _Request(
            size=ctypes.sizeof(_Request), end=address + size, ranges=ctypes.addressof(self._found),
            ranges_length=_RANGES_AT_ONCE, inverted=_IS_FILE, all_of=_IS_FILE, any_of=_IS_PRESENT | _IS_SWAPPED,
            returned=_IS_PRESENT,
        )  # fmt: skip

    def ranges(self) -> list[tuple[int, int]]:
        """Byte ranges ``[start, stop)`` that are this process's own by now: whole pages, in order."""
        with contextlib.suppress(OSError):
            return _joined(self._scanned())
        return _joined(self._read())

    def _scanned(self) -> Iterator[tuple[int, int]]:
        request, start = self._request, self._address
        while start < self._address + self._size:
            request.start = start
            count = fcntl.ioctl(self._descriptor, _SCAN, request)
            for one in self._found[:count] if count else ():
                yield one.start - self._address, one.end - self._address
            start = request.walk_end

    def _read(self) -> Iterator[tuple[int, int]]:
        pages = -(-self._size // PAGE_BYTES)
        raw = os.pread(self._descriptor, pages * _ENTRY_BYTES, self._address // PAGE_BYTES * _ENTRY_BYTES)
        if len(raw) != pages * _ENTRY_BYTES:
            raise OSError(0, "/proc/self/pagemap ends early")
        kinds = np.frombuffer(raw, dtype=np.uint64) >> np.uint64(61)
        for page in np.flatnonzero((kinds > 1) & (kinds & np.uint64(1) == 0)).tolist():
            yield page * PAGE_BYTES, (page + 1) * PAGE_BYTES


def _joined(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


@runtime_checkable
class SharesMemory(Protocol):
    """A `Communicator` whose processes can have memory in common."""

    def share_memory(self, kinds: Sequence[Kind], what: str) -> list[Place]:
        """A place for a tensor of each kind, the same ones for all ranks, which pass equal kinds. All elements are 0.

        Raises `NoSharedMemoryError`, on all of them, if there is no room on one.
        """
