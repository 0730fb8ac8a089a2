"""Sums over ranks whose tensors lie on devices: made in host memory, by way of copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies
from torchstrat.distributed.collectives.shared_memory.in_place_sum import InPlaceSum, Piece


class StagedSum:
    """`InPlaceSum` for tensors on a device, in host memory, or some here and some there."""

    def __init__(self, on_host: InPlaceSum, copies: DeviceCopies, rank: int) -> None:
        self._on_host, self._copies, self._rank = on_host, copies, rank

    def __call__(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        staged = self._copies.to_host(tensors)
        self._on_host(staged, factor)
        self._bring_back([(one, tensor) for one, tensor in zip(staged, tensors, strict=True) if one is not tensor])

    def to_owners(self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]]) -> None:
        """Only what this rank owns goes back to the device."""
        staged = self._copies.to_host(tensors)
        self._on_host.to_owners(staged, factor, owned)
        self._bring_back(
            [
                (one.view(-1)[start:stop], tensors[number].detach().view(-1)[start:stop])
                for number, start, stop in owned[self._rank]
                if (one := staged[number]) is not tensors[number]
            ]
        )

    def _bring_back(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies.to_device([one for one, _ in pairs], [tensor for _, tensor in pairs])

    def publish_small(
        self, tensors: Sequence[torch.Tensor], turn: int, after_bytes: int
    ) -> Callable[[float], None] | None:
        """None for tensors on a device: they are not there before the meeting."""
        if any(self._copies.has(tensor) for tensor in tensors):
            return None
        return self._on_host.publish_small(tensors, turn, after_bytes)
