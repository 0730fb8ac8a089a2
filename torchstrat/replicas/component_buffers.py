"""The replicas' components of modules' buffers, and the one value that they become when a run has ended."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torchstrat.variables import BufferSlot


class _BufferState:
    """One entry of a module's buffers: the tensor found there, per replica its data or what replaced it."""

    __slots__ = ("central", "data", "is_shared", "made_by", "original", "replaced", "slot")

    def __init__(self, slot: BufferSlot, original: torch.Tensor | None, made_by: int | None = None) -> None:
        self.slot = slot
        self.original = original
        self.central = None if original is None else original.data  # not written before the run has succeeded
        self.made_by = made_by  # during the run, with the whole module
        self.is_shared = made_by is None
        self.data: dict[int, torch.Tensor] = {}
        self.replaced: dict[int, torch.Tensor | None] = {}

    def give_each(self, replicas: Iterable[int], devices: dict[int, torch.device]) -> None:
        """A copy of the central value to every replica: a failed run must leave the module's buffer as it was."""
        if self.original is not None:
            for replica in replicas:
                self.data[replica] = copy_to(self.original.data, devices[replica])

    def park(self, replica: int) -> None:
        current = self.slot.tensor
        if current is not self.original:
            self.replaced[replica] = current
        else:
            self.replaced.pop(replica, None)
        if self.original is not None:
            self.data[replica] = self.original.data

    def install(self, replica: int) -> None:
        if self.original is not None:
            self.original.data = self.data[replica]
        self.put(self.replaced.get(replica, self.original))

    def put(self, value: torch.Tensor | None) -> None:
        if self.slot.tensor is not value:
            self.slot.module._buffers[self.slot.name] = value


class ComponentBuffers:
    """The buffers of one run after the other."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._devices = dict(enumerate(devices))
        self.states: list[_BufferState] = []
        self._replicas: list[int] = []
        self._modules: set[int] = set()

    def begin(self, slots: list[BufferSlot], modules: Iterable[nn.Module], replicas: list[int]) -> None:
        self._replicas = replicas
        self._modules = {id(module) for module in modules}
        self.states = [_BufferState(slot, slot.tensor) for slot in slots]
        for state in self.states:
            state.give_each(replicas, self._devices)

    def park(self, replica: int) -> None:
        for state in self.states:
            state.park(replica)

    def install(self, replica: int) -> None:
        for state in self.states:
            state.install(replica)

    def was_there(self, module: nn.Module) -> bool:
        """Whether ``module`` was known when the run began."""
        return id(module) in self._modules

    def expect(self, module: nn.Module, name: str, value: torch.Tensor, replica: int) -> None:
        """A module that was there before is about to get a new entry, in this replica's turn. It is made once, so the
        others find it there, with the value that it has now."""
        if name not in module._buffers and not self._knows(module, name):
            state = _BufferState(BufferSlot(module, name), value)
            state.give_each(self._replicas, self._devices)
            state.central = copy_to(value, value.device)
            state.install(replica)
            self.states.append(state)

    def add_module(self, module: nn.Module, made_by: int) -> None:
        """A module made in this run, whose buffers have their first values; ``made_by`` is the replica installed."""
        for name, value in module._buffers.items():
            if not self._knows(module, name):
                state = _BufferState(BufferSlot(module, name), value, made_by)
                state.give_each(self._replicas, self._devices)
                state.install(made_by)
                self.states.append(state)

    def _knows(self, module: nn.Module, name: str) -> bool:
        return any(state.slot.module is module and state.slot.name == name for state in self.states)

    def note_use(self, module: nn.Module, replica: int) -> None:
        for state in self.states:
            if state.slot.module is module and replica != state.made_by:
                state.is_shared = True

    def merge(self, weights: list[float]) -> None:
        """After the replicas' code has ended and all is parked: one value per buffer, from those of the replicas.

        In training mode, floating buffers that differ are averaged and integral ones are the leader's; where all
        replicas agree nothing is averaged, because that would change constants by rounding. Replicas of weight 0 have
        no say: a batch without rows makes nan of a running mean.
        """
        counted = [replica for replica, weight in zip(self._replicas, weights, strict=True) if weight] or self._replicas
        for state in self.states:
            replicas = counted if state.made_by is None or state.is_shared else [state.made_by]
            if state.replaced:
                self._merge_replaced(state, replicas)
            if state.central is None:
                continue
            merged = _merge([state.data[replica] for replica in replicas], training=state.slot.module.training)
            if merged.shape == state.central.shape and merged.dtype == state.central.dtype:
                state.central.copy_(merged)
            else:
                state.central = merged.clone()

    def _merge_replaced(self, state: _BufferState, replicas: list[int]) -> None:
        values = [state.replaced.get(replica, state.original) for replica in replicas]
        first, tensors = values[0], [value.detach() for value in values if value is not None]
        if first is not None and len(tensors) == len(values):
            merged = _merge(tensors, training=state.slot.module.training)
            if merged is not tensors[0]:
                first.data = merged
        state.replaced = dict.fromkeys(self._replicas, first)

    def end(self, *, failed: bool) -> None:
        """Install the modules' own buffers; they have changed where `merge` was called."""
        for state in self.states:
            if failed:
                state.put(state.original)
            if state.original is not None and state.central is not None:
                state.original.data = state.central
        self.states, self._replicas, self._modules = [], [], set()


def _merge(components: list[torch.Tensor], *, training: bool) -> torch.Tensor:
    first = components[0]
    if not training or all(
        other.shape == first.shape and torch.equal(other.to(first.device), first) for other in components[1:]
    ):
        return first
    if not (first.is_floating_point() or first.is_complex()) or any(other.shape != first.shape for other in components):
        return first
    total = first.clone()
    for other in components[1:]:
        total += other.to(first.device)
    return total / len(components)


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of its own, also where ``tensor`` is on ``device`` already."""
    copy = tensor.detach().clone(memory_format=torch.preserve_format)
    return copy if device == copy.device or device.type == "meta" else copy.to(device)
