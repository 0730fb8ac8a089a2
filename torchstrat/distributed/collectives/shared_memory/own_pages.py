"""Which pages of a private mapping this process has written to, as the kernel knows it: /proc/self/pagemap.

A private mapping of a file shows the file's pages, which all its mappings share, until this process writes to one: then
the kernel gives it a copy of its own. No counter of torch's sees writes through ``.data``; the page table sees all.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator

import numpy as np

PAGE_BYTES = mmap.PAGESIZE

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
    """Of the private file mapping at ``address``. Raises `OSError` where the kernel does not tell.

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
