"""Copies between a device's memory and the host's: what ranks on GPUs need to use memory that they share.

A rank computes on its device, and meets the others in host memory. What it brings is copied there, complete before it
meets anybody; what it takes is copied back without waiting. Host memory is pinned, so that the device copies by itself.

`CudaRuntime` is all that knows CUDA. Tests put other host memory in the device's place. It has not been tried on a GPU
yet: that copies are ordered as its methods say, and that memory is registered, rests on CUDA's documentation.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from torchstrat.distributed.collectives.shared_memory.common_memory import PAGE_BYTES, CommonMemory, Segment

_ALIGNMENT_BYTES = 64
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process
_KEPT_LAYOUTS = 32


class DeviceRuntime(Protocol):
    """One device, as `DeviceCopies` sees it."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on the device, and not in host memory."""

    def register(self, address: int, size: int) -> str | None:
        """Pin host memory. Returns why that cannot be; None if it is done."""

    def unregister(self, address: int) -> None:
        """Take `register` back."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start a copy between the device and host memory, in either direction."""

    def mark(self) -> Callable[[], None]:
        """A function that waits until every copy that was started so far is complete."""


class CudaRuntime:
    """A GPU. Copies are told to the current stream of whoever asks for them, like any other work on the tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def register(self, address: int, size: int) -> str | None:
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
            if not code:
                return None
            # CUDA remembers the refusal, and the next kernel to start would be taken for what failed.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
        return f"cudaHostRegister says {code}"

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


class DeviceCopies:
    """The copies of one rank.

    Host memory that `to_device` reads, or that `to_host` has filled, may be written to again after `wait`; `to_host`
    and `read` wait by themselves.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._under_way: list[Callable[[], None]] = []  # one each, because a program may change streams in between
        self._scratch: Segment | None = None
        self._views: dict[tuple[tuple[torch.Size, torch.dtype], ...], list[torch.Tensor]] = {}
        self._pins: list[weakref.finalize[[int], CommonMemory | Segment]] = []
        self._has_warned = False

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on the device."""
        return self._runtime.has(tensor)

    @torch.no_grad()
    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of its own, for single numbers and what is rare; the tensor itself if it is in host memory."""
        return tensor.cpu()

    # -- copies -----------------------------------------------------------------------------------------------------

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies of these tensors, of any layout and dtype; complete, and valid until the next call.

        Sparse ones get memory of their own. What is in host memory is returned as it is.
        """
        dense = [tensor for tensor in tensors if self.has(tensor) and tensor.layout == torch.strided]
        views = iter(self._room_for(dense))
        found = [
            tensor if not self.has(tensor) else next(views) if tensor.layout == torch.strided else self.on_host(tensor)
            for tensor in tensors
        ]
        self.read(dense, [one for one, tensor in zip(found, tensors, strict=True) if _is_other(one, tensor)])
        return found

    def read(self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy dense ``tensors`` of the device to host memory, ``targets``; complete when it returns."""
        self.wait()
        self._copy(tensors, targets)
        self.wait()

    def to_device(self, sources: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Start copying host memory to the device; whatever is told to it next finds the new values."""
        self._copy(sources, tensors)

    @torch.no_grad()
    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._runtime.copy(source, target)
        if sources:
            self._under_way.append(self._runtime.mark())

    def wait(self) -> None:
        """Until every copy that was started is complete."""
        while self._under_way:
            self._under_way.pop()()

    def _room_for(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in self._views:
            if len(self._views) >= _KEPT_LAYOUTS:
                self._views.clear()
            self._views[key] = self._make_room(key)
        return self._views[key]

    def _make_room(self, layout: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in layout]
        rooms = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
        scratch = self._scratch_of(sum(rooms))
        pieces = scratch.tensor(torch.uint8, 0, scratch.size)[: sum(rooms)].split(rooms)
        return [
            piece[:size].view(dtype).view(shape)
            for piece, size, (shape, dtype) in zip(pieces, sizes, layout, strict=True)
        ]

    def _scratch_of(self, size: int) -> Segment:
        """At least as many bytes. Raises `NoRoomError`. Not torch's pinned memory, which doubles to a power of two."""
        if self._scratch is None or self._scratch.size < size:
            self.wait()
            self._views.clear()
            self._scratch = None
            self._scratch = Segment.allocate(max(-(-size // PAGE_BYTES), 1) * PAGE_BYTES)
            self._scratch.close()
            self.pin(self._scratch)
        return self._scratch

    # -- pinning ----------------------------------------------------------------------------------------------------

    def pin(self, memory: CommonMemory | Segment) -> None:
        """Until `close`, or until nobody refers to it. Where that is refused copies take longer, and nothing else."""
        reason = self._runtime.register(memory.address, memory.size)
        if reason is not None:
            if not self._has_warned:
                warnings.warn(
                    f"{memory.size:,} bytes of host memory could not be pinned ({reason}): copies between it and the "
                    "device take longer. A limit on locked memory (ulimit -l) may be what is in the way.",
                    stacklevel=2,
                )
            self._has_warned = True
            return
        end = weakref.finalize(memory, self._unpin, memory.address)
        end.atexit = False  # the driver may be gone by then, and does it by itself
        self._pins = [one for one in self._pins if one.alive] + [end]

    def _unpin(self, address: int) -> None:
        self.wait()
        self._runtime.unregister(address)

    def close(self) -> None:
        """Unpin everything. Copies that are asked for later are still right."""
        self.wait()
        for end in self._pins:
            end()
        self._pins = []


def device_copies(device: str) -> DeviceCopies | None:
    """For a rank on ``device``; None for one on the CPU, which sees the memory itself."""
    return DeviceCopies(CudaRuntime(torch.device(device))) if device.startswith("cuda") else None


def _is_other(one: torch.Tensor, tensor: torch.Tensor) -> bool:
    return one is not tensor and one.layout == torch.strided
