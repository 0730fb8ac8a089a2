"""The replicas' components of every variable, and how they take each other's place in the user's own objects.

A parameter stays the ``nn.Parameter`` it is. When another replica's turn comes, its ``.data`` and ``.grad`` are swapped
for that replica's. So do the entries of a module's buffers, the ``__dict__`` of helpers (optimizers' hyperparameters,
schedulers, gradient scalers) and the random number generators.

The *leader* (the first replica that takes part in a run) works on the central tensors themselves where it computes on
the device that holds them, and on the user's own helper objects; the others work on copies that are made afresh when
a run starts and after every optimizer step. What the leader does to them is therefore what lasts: an in-place edit
that every replica makes takes effect once.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchstrat._torch_private import foreach_copy_
from torchstrat.replicas.randomness import ReplicaStreams
from torchstrat.variables import BufferSlot, VariableRegistry

CENTRAL = -1
"""The place of the central components where no replica computes on the device that holds them."""


class TensorSlot:
    """One parameter or leaf tensor: per replica its data and its gradient."""

    __slots__ = ("data", "grads", "parked_grad", "tensor", "unedited", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.data: dict[int, torch.Tensor] = {}
        self.grads: dict[int, torch.Tensor | None] = {}
        self.unedited: torch.Tensor | None = None  # the central value before the leader edited it in place in this run
        self.version = tensor._version  # at the last moment when all components were equal
        self.parked_grad: tuple[weakref.ref[torch.Tensor] | None, int] | None = None  # what the last run left in .grad


class _BufferState:
    """One entry of a module's buffers: the tensor found there, per replica its data or what replaced it."""

    __slots__ = ("central", "data", "original", "replaced", "slot")

    def __init__(self, slot: BufferSlot) -> None:
        self.slot = slot
        self.original = slot.tensor
        self.central = None if self.original is None else self.original.data  # not written before the run has succeeded
        self.data: dict[int, torch.Tensor] = {}
        self.replaced: dict[int, torch.Tensor | None] = {}


class Components:
    """The state of one in-process strategy, kept from run to run because gradients may accumulate over several."""

    def __init__(
        self, registry: VariableRegistry, devices: tuple[torch.device, ...], parameter_device: torch.device | None
    ) -> None:
        self._registry = registry
        self._devices = devices
        self._parameter_device = parameter_device
        self._slots: dict[int, TensorSlot] = {}
        self._buffers: list[_BufferState] = []
        self._helpers: list[tuple[Any, dict[int, dict[str, Any]]]] = []
        self._streams = ReplicaStreams(devices)
        self._replicas: list[int] = []
        self._leader = 0
        self._home = 0  # the key of the central components: the leader's, or CENTRAL
        self._installed = 0

    # -- a run ------------------------------------------------------------------------------------------------------

    def begin(self, replicas: list[int]) -> None:
        """Give every replica of this run its components, equal to the central ones. The central ones stay installed."""
        self._replicas = list(replicas)
        self._leader = replicas[0]
        device = self._parameter_device
        self._home = self._leader if device is None or device == self._devices[self._leader] else CENTRAL
        self._installed = self._home
        self._register_tensors()
        self.refresh()
        self._buffers = [self._begin_buffer(slot) for slot in self._registry.buffer_slots()]
        self._helpers = [(helper, self._begin_helper(helper)) for helper in self._registry.helpers()]
        if self._home == self._leader:
            self._install_objects(self._leader)
        self._streams.begin(self._replicas)

    def end(self) -> None:
        """Install the central components and the modules' own buffers; leave the leader's helpers in place."""
        self.activate(None)
        self._streams.end()
        for state in self._buffers:
            if state.original is not None and state.central is not None:
                state.original.data = state.central
        for slot in self._slots.values():
            grad = slot.tensor.grad
            slot.parked_grad = (None, 0) if grad is None else (weakref.ref(grad), grad._version)
        for helper, dicts in self._helpers:
            helper.__dict__ = dicts[self._leader]
        self._buffers, self._helpers = [], []

    # -- taking turns -----------------------------------------------------------------------------------------------

    def park(self) -> None:
        """Put what is installed back into its slots, so that the slots hold everything. Nothing else changes."""
        key = self._installed
        for slot in self._slots.values():
            slot.data[key] = slot.tensor.data
            slot.grads[key] = slot.tensor.grad
        if key in self._replicas:
            for state in self._buffers:
                current = state.slot.tensor
                if current is not state.original:
                    state.replaced[key] = current
                    state.slot.module._buffers[state.slot.name] = state.original
                if state.original is not None:
                    state.data[key] = state.original.data
            for helper, dicts in self._helpers:
                dicts[key] = helper.__dict__

    def activate(self, replica: int | None) -> None:
        """Install a replica's components in the user's objects; None: the central ones."""
        key = self._home if replica is None else replica
        if key == self._installed:
            self.register_newborn()
        else:
            self.park()
            self.register_newborn()
            self._install(key)
        self._streams.activate(replica)

    def _install(self, key: int) -> None:
        if key == CENTRAL:
            self._carry_to_central()
        for slot in self._slots.values():
            tensor = slot.tensor
            tensor.grad = None
            tensor.data = slot.data[key]
            tensor.grad = slot.grads.get(key)
        self._install_objects(key if key in self._replicas else self._leader)
        torch.clear_autocast_cache()  # it is one per process and keyed by tensor, whose data just changed
        self._installed = key

    def _carry_to_central(self) -> None:
        """What the leader did in place to its components, and its gradients, as the central ones."""
        with torch.no_grad():
            for slot in self._slots.values():
                if slot.tensor._version != slot.version:
                    slot.data[CENTRAL].copy_(slot.data[self._leader])
                    slot.version = slot.tensor._version
                grad = slot.grads.get(self._leader)
                slot.grads[CENTRAL] = None if grad is None else grad.to(slot.data[CENTRAL].device)

    def enter_central(self) -> None:
        """For the leader, in its turn: install the central components, where an optimizer is about to step."""
        if self._home == CENTRAL:
            self.park()
            self._install(CENTRAL)

    def leave_central(self) -> None:
        if self._home == CENTRAL:
            self.park()
            self._install(self._leader)

    def _install_objects(self, replica: int) -> None:
        for state in self._buffers:
            if state.original is not None:
                state.original.data = state.data[replica]
            if replica in state.replaced:
                state.slot.module._buffers[state.slot.name] = state.replaced[replica]
        for helper, dicts in self._helpers:
            helper.__dict__ = dicts[replica]

    def reinstall_gradients(self, slots: Iterable[TensorSlot]) -> None:
        """Make ``.grad`` what the slots hold, after they were written while all replicas stand still."""
        for slot in slots:
            if self._installed in slot.grads:
                slot.tensor.grad = slot.grads[self._installed]

    # -- tensors ----------------------------------------------------------------------------------------------------

    def slots(self) -> Iterable[TensorSlot]:
        return self._slots.values()

    def slot_of(self, tensor: torch.Tensor) -> TensorSlot | None:
        return self._slots.get(id(tensor))

    def device_of(self, key: int) -> torch.device:
        return self._parameter_device if key == CENTRAL and self._parameter_device is not None else self._devices[key]

    def _register_tensors(self) -> None:
        alive = {id(tensor): tensor for tensor in self._registry.tensors() if not is_lazy(tensor)}
        self._slots = {key: self._slots.get(key) or TensorSlot(tensor) for key, tensor in alive.items()}
        for slot in self._slots.values():
            self._begin_grads(slot)
            slot.data = {key: slot.data[key] for key in self._replicas if key in slot.data and key != self._home}
            slot.data[self._home] = slot.tensor.data

    def _begin_grads(self, slot: TensorSlot) -> None:
        """Keep the replicas' own gradients if `.grad` is as the last run left it; else everyone starts from `.grad`."""
        grad = slot.tensor.grad
        left, version = slot.parked_grad or (None, 0)
        untouched = slot.parked_grad is not None and (
            grad is None if left is None else grad is left() and grad is not None and grad._version == version
        )
        kept = slot.grads if untouched else {}
        slot.grads = {self._home: grad}
        for replica in range(len(self._devices)):  # also of those that sit this run out
            if replica == self._home:
                continue
            own = kept.get(replica, grad)
            slot.grads[replica] = (
                own.detach().clone().to(self._devices[replica]) if own is grad and own is not None else own
            )

    def register_newborn(self) -> None:
        """Variables that appeared during the run: lazy parameters now materialised, modules first built in a step.

        The replica that ran first made their value; it becomes everyone's.
        """
        for tensor in self._registry.tensors():
            if id(tensor) in self._slots or is_lazy(tensor):
                continue
            slot = TensorSlot(tensor)
            self._slots[id(tensor)] = slot
            for key in {*self._replicas, self._home}:
                same = key == self._installed
                slot.data[key] = tensor.data if same else _copy_to(tensor.data, self.device_of(key))
                slot.grads[key] = tensor.grad if same else None

    def refresh(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Overwrite the replicas' components of ``tensors`` (default: all) with the central ones."""
        slots = list(self._slots.values())
        if tensors is not None:
            slots = [self._slots[id(tensor)] for tensor in tensors if id(tensor) in self._slots]
        for replica in self._replicas:
            if replica == self._home:
                continue
            into, source = [], []
            for slot in slots:
                central = slot.tensor.data if self._installed == self._home else slot.data[self._home]
                own = slot.data.get(replica)
                if own is None or not _same_storage_layout(own, central) or own.device != self._devices[replica]:
                    slot.data[replica] = _copy_to(central, self._devices[replica])
                elif central.layout == torch.strided:
                    into.append(own)
                    source.append(central)
                else:
                    own.copy_(central)
            if into:
                with torch.no_grad():
                    foreach_copy_(into, source)
        for slot in slots:
            slot.version = slot.tensor._version

    def keep_unedited(self) -> None:
        """Before the leader's turn ends: where it edited a central tensor in place, keep the value from before.

        The last replica has not had its turn yet, so its component still has that value. See `restore_unedited`.
        """
        if self._home != self._leader or self._replicas[-1] == self._leader:
            return
        for slot in self._slots.values():
            if slot.tensor._version != slot.version and slot.unedited is None:
                slot.unedited = slot.data[self._replicas[-1]].clone()

    def forget_unedited(self) -> None:
        for slot in self._slots.values():
            slot.unedited = None

    def restore_unedited(self) -> None:
        """After a failure: undo in-place edits since the last moment when all replicas agreed."""
        with torch.no_grad():
            for slot in self._slots.values():
                if slot.unedited is not None:
                    slot.tensor.data.copy_(slot.unedited)
                    slot.unedited = None

    def central_data(self, slot: TensorSlot) -> torch.Tensor:
        return slot.tensor.data if self._installed == self._home else slot.data[self._home]

    # -- buffers and helpers ----------------------------------------------------------------------------------------

    def _begin_buffer(self, slot: BufferSlot) -> _BufferState:
        state = _BufferState(slot)
        if state.original is not None:
            for replica in self._replicas:
                # The leader too works on a copy: a failed run must leave the module's buffer as it was.
                state.data[replica] = _copy_to(state.original.data, self._devices[replica])
        return state

    def merge_buffers(self) -> None:
        """After the replicas' code has ended: one value per buffer, from those of the replicas that took part.

        In training mode, floating buffers that differ are averaged and integral ones are the leader's; where all
        replicas agree nothing is averaged, because that would change constants by rounding.
        """
        self.park()
        for state in self._buffers:
            if state.replaced:
                state.slot.module._buffers[state.slot.name] = self._merge_replaced(state)
            if state.original is None or state.central is None:
                continue
            components = [state.data[replica] for replica in self._replicas]
            merged = _merge_buffer(components, training=state.slot.module.training)
            if merged.shape == state.central.shape and merged.dtype == state.central.dtype:
                state.central.copy_(merged)
            else:
                state.central = merged.clone()

    def _merge_replaced(self, state: _BufferState) -> torch.Tensor | None:
        values = [state.replaced.get(replica, state.original) for replica in self._replicas]
        tensors = [value for value in values if value is not None]
        if len(tensors) != len(values):
            return values[0]
        merged = _merge_buffer([value.detach() for value in tensors], training=state.slot.module.training)
        assert values[0] is not None
        if merged is not values[0]:
            values[0].data = merged
        return values[0]

    def _begin_helper(self, helper: Any) -> dict[int, dict[str, Any]]:
        own = helper.__dict__
        return {replica: own if replica == self._leader else _private(own) for replica in self._replicas}


def _merge_buffer(components: list[torch.Tensor], *, training: bool) -> torch.Tensor:
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


def _copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = tensor.detach().clone(memory_format=torch.preserve_format)
    return copy if device == copy.device or device.type == "meta" else copy.to(device)


def _same_storage_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and one.layout == other.layout
        and (one.layout != torch.strided or one.stride() == other.stride())
    )


def _private(attributes: dict[str, Any]) -> dict[str, Any]:
    """A replica's own copy of a helper's attributes: containers and plain tensors copied, objects shared.

    An optimizer's state and its lists of parameters stay shared: they are central, and only the leader steps.
    """
    return {name: value if name == "state" else _private_value(value) for name, value in attributes.items()}


def _private_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else value.clone()
    if isinstance(value, collections.defaultdict):
        return collections.defaultdict(
            value.default_factory, {key: _private_value(member) for key, member in value.items()}
        )
    if type(value) in (dict, collections.OrderedDict):
        return type(value)(
            (key, member if key == "params" else _private_value(member)) for key, member in value.items()
        )
    if type(value) is list:
        if value and all(isinstance(member, nn.Parameter) for member in value):
            return value
        return [_private_value(member) for member in value]
    if type(value) is tuple:
        return tuple(_private_value(member) for member in value)
    if type(value) is set:
        return set(value)
    return value
