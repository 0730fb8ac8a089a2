"""Buffers with one replica per process: brought together when a run ends, where a step has changed them differently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import is_lazy

from torchstrat.collectives.agreement import fingerprint
from torchstrat.collectives.communicator import Communicator
from torchstrat.reduction import VariableAggregation
from torchstrat.replicas.buffer_rules import BufferRules, counts_rows
from torchstrat.replicas.transfer import broadcast_tensors
from torchstrat.variables import BufferSlot, Members, VariableRegistry

_Kind = tuple[tuple[int, ...], torch.dtype]


class ProcessBuffers:
    """The buffers of one run. Made when it starts, with the ``members`` that there are; `BufferRules` says what becomes
    of those that differ. Buffers on which all ranks agree are left alone: averaging equal numbers rounds them.
    """

    def __init__(self, registry: VariableRegistry, rules: BufferRules, members: Members, device: torch.device) -> None:
        self._registry = registry
        self._device = device
        self._rules = rules
        self._training_before = {id(module) for module in members.modules if module.training}
        self._noted: dict[tuple[int, str], tuple[torch.Tensor | None, int]] = {}
        self._counts: dict[tuple[int, str], float] = {}
        self._before: dict[tuple[int, str], torch.Tensor] = {}
        self._kept: list[tuple[BufferSlot, torch.Tensor, torch.Tensor]] = []
        for slot in members.buffer_slots:
            self._note(slot)

    def _note(self, slot: BufferSlot) -> None:
        module, name, tensor = slot.module, slot.name, slot.tensor
        if module.training and tensor is not None and not _is_nothing(tensor):
            self._kept.append((slot, tensor, tensor.detach().clone()))
        if not module.training:
            self._noted[id(module), name] = (tensor, 0 if tensor is None else tensor._version)
        if counts_rows(module, name, tensor):
            self._counts[id(module), name] = float(tensor)  # type: ignore[arg-type]
        if self._rules and tensor is not None and self._rules.needs_before(module, name):
            self._before[id(module), name] = tensor.detach().clone()

    def restore(self) -> None:
        """After a failure: those of modules that trained when the run began are what they were."""
        with torch.no_grad():
            for slot, tensor, copy in self._kept:
                slot.module._buffers[slot.name] = tensor
                tensor.data.copy_(copy)

    def _is_training(self, slot: BufferSlot) -> bool:
        return slot.module.training or id(slot.module) in self._training_before

    def _may_differ(self, slot: BufferSlot) -> bool:
        """Buffers of modules in evaluation mode hardly ever change, so they are not read unless something shows it."""
        tensor = slot.tensor
        if self._is_training(slot):
            return tensor is not None
        noted, version = self._noted.get((id(slot.module), slot.name), (None, 0))
        return tensor is not noted or (tensor is not None and tensor._version != version)

    def _is_compared(self, slot: BufferSlot) -> bool:
        return not (self._rules and self._rules.keeps_own(slot.module, slot.name)) and not _is_nothing(slot.tensor)

    def summary(self, slots: Sequence[BufferSlot]) -> tuple[float, float]:
        """Numbers that are equal on ranks whose buffers are. ``slots``: of all buffers that there are by now."""
        if not slots:
            return fingerprint(())
        chosen = [slot for slot in slots if self._may_differ(slot) and self._is_compared(slot)]
        return fingerprint(slot.tensor for slot in chosen if slot.tensor is not None)

    def look_at_counts(self, slots: Iterable[BufferSlot], rows: int | None) -> None:
        """``rows``: of this replica in the run that has ended."""
        for slot in slots if self._counts and rows is not None else ():
            before, tensor = self._counts.get((id(slot.module), slot.name)), slot.tensor
            if before is not None and counts_rows(slot.module, slot.name, tensor):
                self._rules.look_at_count(slot.module, slot.name, before, float(tensor), rows)  # type: ignore[arg-type]

    def merge(self, communicator: Communicator, weights: list[float], call: str) -> None:
        """All ranks call it, when summaries differ or any has buffers whose changes are to be summed. ``weights``: of
        the ranks; where any has one, those without are left out of means."""
        named = self._registry.named_buffer_slots()
        found = {name: slot for name, slot in named.items() if self._is_compared(slot)}
        own = {name: (_kind(slot.tensor), _print_of(slot.tensor)) for name, slot in found.items()}
        everyone = communicator.all_gather_object(own, call)
        counted = [weight > 0 or not any(weights) for weight in weights]
        source = counted.index(True)
        level: list[torch.Tensor] = []
        done: set[int] = set()  # a tensor may be several modules' buffer
        with torch.no_grad():
            for name, slot in found.items():
                each = [other.get(name) for other in everyone]
                # A rank without it has dropped the module; the others will.
                if None in each or (all(one == each[0] for one in each) and not self._sums(slot)):
                    continue
                if slot.tensor is not None and id(slot.tensor) in done:
                    continue
                done.add(id(slot.tensor))
                self._merge_one(communicator, slot, [one[0] for one in each], counted, source, level, call)
        broadcast_tensors(communicator, level, source, call)

    def _sums(self, slot: BufferSlot) -> bool:
        return (id(slot.module), slot.name) in self._before

    @property
    def sums(self) -> bool:
        """Whether there are buffers whose changes are to be summed, also where these are equal. So on all ranks."""
        return bool(self._before)

    def _merge_one(
        self,
        communicator: Communicator,
        slot: BufferSlot,
        kinds: list[_Kind | None],
        counted: list[bool],
        source: int,
        level: list[torch.Tensor],
        call: str,
    ) -> None:
        """``level`` collects those that become the first rank's."""
        tensor, key = slot.tensor, (id(slot.module), slot.name)
        are_alike = all(kind == kinds[0] for kind in kinds) and tensor is not None
        training = self._is_training(slot)
        how = self._rules.aggregation_of(slot.module, slot.name, tensor, are_alike=are_alike, training=training)
        if how is VariableAggregation.ONLY_FIRST_REPLICA:
            kind = kinds[source]
            if kind != _kind(tensor):
                tensor = None if kind is None else torch.empty(kind[0], dtype=kind[1], device=self._device)
                slot.module._buffers[slot.name] = tensor
            if tensor is not None:
                level.append(tensor)
            return
        assert tensor is not None
        is_mean = how is VariableAggregation.MEAN
        before = None if is_mean else self._before[key]
        own = tensor.detach().clone() if before is None else tensor.detach() - before
        total = (own if counted[communicator.rank] or not is_mean else torch.zeros_like(own)).contiguous()
        communicator.all_reduce(total, call).wait()
        tensor.copy_(total / sum(counted) if before is None else before + total)


def _is_nothing(tensor: torch.Tensor | None) -> bool:
    """Whether it is a tensor without values."""
    return tensor is not None and (is_lazy(tensor) or tensor.is_meta)


def _kind(tensor: torch.Tensor | None) -> _Kind | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def _print_of(tensor: torch.Tensor | None) -> tuple[float, float]:
    return fingerprint([] if tensor is None else [tensor])
