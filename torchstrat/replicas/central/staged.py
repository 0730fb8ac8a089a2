"""Parameters that ranks compute with on devices: each has a copy there, and a step is made in memory that all share.

Between two steps what counts is the first rank's device copy: a program may have changed it in any way, through
``.data`` too, which nothing would tell. So a step begins with that rank's copies being read, and ends with every rank's
being overwritten.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from torchstrat.distributed.collectives.shared_memory.common_memory import Kind, Place
from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies
from torchstrat.replicas.entries import reference_of_entry


class _Home(NamedTuple):
    reference: weakref.ref[torch.Tensor]
    place: Place
    kind: Kind


class StagedParameters:
    """Which parameters of the device have a place in common memory. Only ``written`` of a place is used."""

    def __init__(self, copies: DeviceCopies) -> None:
        self.copies = copies
        self._homes: dict[int, _Home] = {}

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        home = self._homes.get(id(tensor))
        return None if home is None or home.reference() is not tensor else home.place

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.place_of(tensor) is not None

    def move_in(self, tensor: torch.Tensor, place: Place, kind: Kind, *, is_first: bool) -> None:
        """``tensor`` has this place from now on, with the first rank's values, which stand there."""
        if not is_first:
            tensor.data.copy_(place.written)
        self._homes[id(tensor)] = _Home(reference_of_entry(tensor, self._homes), place, kind)

    def take_left(self) -> list[torch.Tensor]:
        """Those that have got another shape, dtype or device. They have no place any more."""
        left = []
        for key, (reference, _, kind) in list(self._homes.items()):
            tensor = reference()
            if tensor is None:
                continue
            if tensor.dtype != kind.dtype or tensor.shape != kind.shape or not self.copies.has(tensor):
                del self._homes[key]
                left.append(tensor)
        return left

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy this rank's device copies into common memory; the first rank calls it, while no other reads there."""
        pairs = self._pairs(tensors)
        self.copies.read([tensor for tensor, _ in pairs], [written for _, written in pairs])

    def bring_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start overwriting this rank's device copies. Nobody may write to common memory until it has waited."""
        pairs = self._pairs(tensors)
        self.copies.to_device([written for _, written in pairs], [tensor for tensor, _ in pairs])

    def _pairs(self, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        places = ((tensor, self.place_of(tensor)) for tensor in tensors)
        return [(tensor.data, place.written) for tensor, place in places if place is not None]


def staged_kind_of(tensor: torch.Tensor) -> Kind | None:
    """Of its place in host memory: contiguous, whatever the device's copy is, so that copies need no memory between.

    None for tensors that have no place for every element, or whose elements are not numbers in memory.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return None
    return Kind(tuple(tensor.shape), tuple(torch.empty(tensor.shape, device="meta").stride()), tensor.dtype)
