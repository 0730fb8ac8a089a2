"""Shared memory without a name: it exists while a process holds its descriptor or maps it, and no longer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

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
