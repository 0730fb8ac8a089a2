"""Buffers with one replica per process: brought together when a run ends, where a step has changed them differently."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchstrat.collectives.communicator import Communicator
from torchstrat.errors import ReplicaDivergenceError
from torchstrat.replicas.agreement import fingerprint
from torchstrat.replicas.transfer import broadcast_tensors
from torchstrat.variables import BufferSlot, VariableRegistry


class ProcessBuffers:
    """The buffers of modules that are in training mode when a run starts or when it ends. Made when it starts, with
    the ``modules`` that there are.

    Afterwards floating ones that differ between ranks are averaged and integral ones are the first rank's. Buffers on
    which all agree are left alone: averaging equal numbers would change them by rounding.
    """

    def __init__(self, registry: VariableRegistry, modules: Iterable[nn.Module]) -> None:
        self._registry = registry
        self._training_before = {id(module) for module in modules if module.training}

    def _takes(self, slot: BufferSlot) -> bool:
        return slot.module.training or id(slot.module) in self._training_before

    def summary(self, slots: Iterable[BufferSlot]) -> tuple[float, float]:
        """Numbers that are equal on ranks whose buffers are. ``slots``: of all buffers that there are by now."""
        return fingerprint(slot.tensor for slot in slots if slot.tensor is not None and self._takes(slot))

    def merge(self, communicator: Communicator, weights: list[float], call: str) -> None:
        """All ranks call it, when summaries differ. ``weights``: of the ranks; where any has one, those without are
        left out of means."""
        slots = self._registry.named_buffer_slots().items()
        found = {name: slot.tensor for name, slot in slots if slot.tensor is not None and self._takes(slot)}
        own = {name: (_kind(tensor), fingerprint([tensor])) for name, tensor in found.items()}
        everyone = communicator.all_gather_object(own, call)
        differing = []
        for name, tensor in found.items():
            each = [other.get(name) for other in everyone]
            if None in each or all(one == each[0] for one in each):
                continue  # a rank without it has dropped the module; the others will
            _require_equal_kinds(communicator, name, [one[0] for one in each], call)
            differing.append(tensor)
        counted = [weight > 0 or not any(weights) for weight in weights]
        floating = [tensor for tensor in differing if tensor.is_floating_point() or tensor.is_complex()]
        with torch.no_grad():
            for tensor in floating:
                counts = counted[communicator.rank]
                total = (tensor.detach().clone() if counts else torch.zeros_like(tensor)).contiguous()
                communicator.all_reduce(total, call).wait()
                tensor.copy_(total / sum(counted))
        rest = [tensor.detach() for tensor in differing if not (tensor.is_floating_point() or tensor.is_complex())]
        broadcast_tensors(communicator, rest, 0, call)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype)


def _require_equal_kinds(communicator: Communicator, name: str, kinds: list[Any], call: str) -> None:
    if any(kind != kinds[0] for kind in kinds):
        each = ", ".join(
            f"{kind[0]} {kind[1]} on replica {rank}" for rank, kind in zip(communicator.ranks, kinds, strict=True)
        )
        raise ReplicaDivergenceError(
            f"buffer {name} cannot be brought together in {call}: it is {each}. A buffer that a step replaces has to "
            "keep the same shape and dtype on every replica; keep what differs outside of the module's buffers."
        )
