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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.core._torch_private import foreach_copy_, own_parameters, set_version_counters, version_of
from torchstrat.core.randomness import ReplicaStreams
from torchstrat.core.registration_order import reference_of_entry
from torchstrat.core.variables import Members, VariableRegistry
from torchstrat.replicas.engine import PlainTensors
from torchstrat.replicas.in_process.component_attributes import ComponentAttributes, ComponentHelpers
from torchstrat.replicas.in_process.component_buffers import ComponentBuffers, copy_to, same_layout
from torchstrat.replicas.state import (
    CommonStorages,
    OwnCopies,
    TensorSlot,
    is_variable,
    leave_graph,
    refuse_changes_of,
    sample,
    settle,
)
from torchstrat.replicas.table_memory import has_scaled_rows, may_be_table, renormed_weights, rows_scaled_by_others

CENTRAL = -1
"""The place of the central components where no replica computes on the device that holds them."""


class Components:
    """The state of one in-process strategy, kept from run to run because gradients may accumulate over several.

    The slots hold the components of all replicas but the *installed* one, which are in the user's objects; once
    *parked* they hold all. Methods are called on the thread whose turn it is, or while all replicas stand still.
    """

    _undoes = True
    """Whether edits in place are undone when a run fails."""

    def __init__(
        self,
        registry: VariableRegistry,
        devices: tuple[torch.device, ...],
        parameter_device: torch.device | None,
        helpers: ComponentHelpers | None = None,
    ) -> None:
        self._registry = registry
        self._devices = devices
        self._parameter_device = parameter_device
        self._slots: dict[int, TensorSlot] = {}
        self.buffers = ComponentBuffers(devices, registry.buffer_rules)
        self.helpers = ComponentHelpers(watches_leader=True) if helpers is None else helpers
        self._attributes = ComponentAttributes()
        self._plain = PlainTensors()
        self._common = CommonStorages()
        self.streams = ReplicaStreams(devices)
        self._lazy: list[torch.Tensor] = []
        self._copies: set[int] = set()  # ids of the parameters of modules that were deep-copied in this run
        self._changes = 0
        self._recorded = 0  # how many modules ever, when they were last looked through
        self._made: list[TensorSlot] = []  # of variables that a replica has made in this run
        self.generation = 0
        """Another number whenever variables have come up in a run, or turned out to be those of all replicas."""
        self.given: list[TensorSlot] = []  # whose gradients the program has made between runs
        self._replicas: list[int] = []
        self._leader = 0
        self._home = 0  # the key of the central components: the leader's, or CENTRAL
        self._installed = 0
        self._is_parked = False
        self._steps = 0  # of optimizers, nested, that the leader makes now
        self.has_edits = False
        """Whether any replica has edited a parameter in place in this run, other than by an optimizer's step."""

    # -- a run ------------------------------------------------------------------------------------------------------

    def begin(self, replicas: list[int], members: Members) -> None:
        """Give every replica of this run its components, equal to the central ones, which stay installed. ``members``:
        what the registry has now."""
        device = self._parameter_device
        self._replicas, self._leader = list(replicas), replicas[0]
        self._home = self._leader if device is None or device == self._devices[self._leader] else CENTRAL
        self._installed, self._is_parked, self._steps, self.has_edits = self._home, False, 0, False
        self._changes, self._recorded, self._made = members.changes, self._registry.counts[0], []
        copies = {replica: one for replica, one in enumerate(self._devices) if replica != self._home}
        self._common.begin(members.vectors, members.tensors, copies)
        self._take(members.tensors)
        self._level()
        vectors = {id(vector) for vector in members.vectors}
        slots = [slot for slot in members.buffer_slots if not vectors or id(slot.tensor) not in vectors]
        self.buffers.begin(slots, members.modules, self._replicas, members.views)
        made = OwnCopies(vectors | {id(state.original) for state in self.buffers.states} | set(map(id, members.views)))
        self.helpers.begin(members.helpers, self._replicas, made)
        self._attributes.begin(members.modules, self._replicas, made)
        self._plain.begin(self._registry.plain_tensors(), made.vectors)
        if self._home == self._leader:
            self._install_objects(self._leader)

    def _level(self) -> None:
        """A run begins: every replica has what the central components are."""
        self.refresh()

    def end(self, weights: list[float] | None, rows: Sequence[int | None] = ()) -> None:
        """Install the central components and the modules' own buffers; leave the leader's helpers in place.

        ``weights``: of the replicas in the buffers' means; ``rows``: those of their batches. None after a failure:
        buffers stay as they were, and so do variables since the last moment when all replicas agreed, which is an
        optimizer's step or the run's start.
        """
        self.park()
        failed = True  # a warning may be an error
        try:
            if weights is not None:
                self.merge_rows()
                self.buffers.merge(weights, rows)
                failed = False
        finally:
            if failed:
                self._restore_unedited()
            settle(self._made, self._replicas, self._home)
            if not failed and self._home == CENTRAL:
                self._carry_to_central()
            self._leave()
            self._let_go(failed=failed)

    def _leave(self) -> None:
        self._install(self._home)
        self.streams.end()

    def _let_go(self, *, failed: bool, is_round: bool = False) -> None:
        self.buffers.end(failed=failed)
        self.helpers.end(is_round=is_round)
        self._attributes.end(self._leader)
        for slot in list(self._slots.values()):  # a slot goes when nothing but it has held its tensor
            slot.release()
        self._lazy, self._copies, self._made = [], set(), []
        self._plain.end()  # it may warn

    # -- taking turns -----------------------------------------------------------------------------------------------

    def park(self) -> None:
        """Put what is installed back into its slots, so that these hold everything. Nothing else changes."""
        if self._is_parked:
            return
        key = self._installed
        if self._common:
            self._common.park(key)
        keeps_unedited = key == self._leader == self._home and len(self._replicas) > 1 and self._undoes
        leave_graph(slot.tensor for slot in self._slots.values() if not slot.trained)
        for slot in self._slots.values():
            tensor = slot.tensor
            slot.data[key] = tensor.data
            slot.grads[key] = tensor.grad
            version = slot.versions[key] = version_of(tensor)
            if slot.trains or tensor.requires_grad != slot.trained:
                slot.trains[key] = tensor.requires_grad
            if version != slot.version:
                self.has_edits = True
                if keeps_unedited and slot.unedited is None:
                    self._keep_unedited(slot)
        if key != CENTRAL:
            if self.buffers.states:
                self.buffers.park(key)
            if self.helpers.helpers:
                self.helpers.park(key)
            self._attributes.park(key)
            self._plain.park(key)
        self._is_parked = True

    def has_nothing_to_swap(self, replica: int | None) -> bool:
        """Whether it is the turn of ``replica`` already, but for the random numbers."""
        return (
            replica == self._installed
            and not self._is_parked
            and not self._steps
            and not self._lazy
            and self._registry.changes == self._changes
        )

    def activate(self, replica: int | None) -> None:
        """Install a replica's components in the user's objects. None: all replicas stand still, the slots hold all."""
        if self._registry.changes != self._changes or self._registry.counts[0] != self._recorded:
            self._register_unused()
        self.register_newborn()
        if replica is None:
            self.park()
        else:
            key = CENTRAL if self._steps and replica == self._leader and self._home == CENTRAL else replica
            if key != self._installed:
                self.park()
                self._install(key)
            self._is_parked = False

    def install_central(self) -> None:
        """While all replicas stand still: let the user's objects be the central ones, for code that runs once."""
        self.park()
        self.merge_rows()
        if self._home == CENTRAL:
            self._carry_to_central()
        self._install(self._home)
        self._attributes.begin_common()

    def spread_central(self) -> None:
        """After `install_central` and such code: what it did to the variables is so for every replica."""
        self._attributes.end_common(self._leader)
        self._is_parked = False
        self.park()
        self.refresh()
        self.helpers.copy_again()

    def _install(self, key: int) -> None:
        if self._common:
            self._common.install(key)
        edited, versions = [], []
        for slot in self._slots.values():
            tensor = slot.tensor
            if tensor.grad is not None:
                tensor.grad = None
            tensor.data = slot.data[key]
            if (grad := slot.grads.get(key)) is not None:
                tensor.grad = grad
            if slot.trains:
                tensor.requires_grad_(slot.trains.get(key, slot.trained))
            version = slot.versions[key]
            if version_of(tensor) != version:
                edited.append(tensor)
                versions.append(version)
        if edited:
            # What one replica edits in place must not look to another's backward as if its own had been edited.
            set_version_counters(edited, versions)
        self._install_objects(self._leader if key == CENTRAL else key)
        torch.clear_autocast_cache()  # it is one per process and keyed by tensor, whose data just changed
        self._installed, self._is_parked = key, False

    def _install_objects(self, replica: int) -> None:
        if self.buffers.states:
            self.buffers.install(replica)
        if self.helpers.helpers:
            self.helpers.install(replica)
        self._attributes.install(replica)

    def _carry_to_central(self) -> None:
        """What the leader did to its components, and its gradients, as the central ones; for parked slots.

        All of them are copied, because an edit through ``.data`` leaves no trace by which to choose.
        """
        for slot in self._slots.values():
            own, central = slot.data[self._leader], slot.data[CENTRAL]
            if same_layout(own, central):
                central.copy_(own)
            else:
                slot.data[CENTRAL] = copy_to(own, self.device_of(CENTRAL))
            slot.versions[CENTRAL] = slot.versions[self._leader]
            grad = slot.grads.get(self._leader)
            slot.grads[CENTRAL] = None if grad is None else grad.to(self.device_of(CENTRAL))

    def enter_step(self, optimizer: Optimizer) -> None:
        """For the leader, in its turn: an optimizer is about to step; install the central components."""
        self._steps += 1
        self.helpers.enter_step(optimizer)
        if self._home == CENTRAL and self._installed != CENTRAL:
            self.park()
            self._carry_to_central()
            self._install(CENTRAL)

    def leave_step(self, optimizer: Optimizer, tensors: Iterable[torch.Tensor]) -> None:
        """The optimizer has stepped them: every replica gets the new values."""
        self._steps -= 1
        self.helpers.leave_step(optimizer)
        for slot in self._slots.values():
            slot.unedited = None
        if self._home != CENTRAL:
            self.refresh(tensors)
            return
        self.park()
        self.refresh(tensors)
        if not self._steps:
            self._install(self._leader)
        self._is_parked = False

    def undo_edits(self, optimizer: Optimizer, tensors: Iterable[torch.Tensor]) -> None:
        """For another replica, in its turn, after a step: what hooks on the optimizer edited in place has been done on
        the central variables already, when the leader stepped."""
        self.helpers.forget_state(optimizer)
        for tensor in tensors:
            slot = self._slots.get(id(tensor))
            if slot is not None and version_of(tensor) != slot.version:
                tensor.data.copy_(slot.data[self._home] if slot.unedited is None else slot.unedited)
                set_version_counters([tensor], [slot.version])

    @contextmanager
    def gradients_of(self, replica: int) -> Iterator[None]:
        """In this block, while all replicas stand still, every ``.grad`` is that replica's, and what it is at its end
        stays so. The replica may be one that has no part in the run."""
        was_parked = self._is_parked
        self.park()
        device = self.device_of(replica)
        for slot in self._slots.values():
            slot.tensor.grad = None
            if slot.tensor.device != device:  # a gradient has to be where its tensor is
                slot.tensor.data = torch.empty_like(slot.tensor, device=device)
            slot.tensor.grad = slot.grad_of(replica)
        try:
            yield
        finally:
            for slot in self._slots.values():
                slot.grads[replica], slot.tensor.grad = slot.tensor.grad, None
                slot.tensor.data = slot.data[self._installed]
                slot.tensor.grad = slot.grads.get(self._installed)
            self._is_parked = was_parked

    # -- tensors ----------------------------------------------------------------------------------------------------

    def slots(self) -> Iterable[TensorSlot]:
        return self._slots.values()

    def unmerged(self, slots: Iterable[TensorSlot]) -> list[TensorSlot]:
        """Those of which one component counts when replicas have edited them; not tables that `merge_rows` merges."""
        known = renormed_weights(self._registry.modules())
        return [slot for slot in slots if id(slot.tensor) not in known and not has_scaled_rows(slot, self._replicas)]

    @property
    def home(self) -> int:
        return self._home

    def hidden_from(self, replica: int) -> set[int]:
        """``id`` of what another replica has made in this run and this one not used, and of deep copies."""
        return {
            key
            for key, slot in self._slots.items()
            if slot.is_copy or (slot.made_by not in (None, replica) and not slot.is_shared)
        }

    def slot_of(self, tensor: torch.Tensor) -> TensorSlot | None:
        return self._slots.get(id(tensor))

    def new_slot_of(self, tensor: torch.Tensor) -> TensorSlot | None:
        """The same for a variable that may have come up since the last turn began."""
        self.register_newborn()
        return self._slots.get(id(tensor))

    def device_of(self, key: int) -> torch.device:
        return self._parameter_device if key == CENTRAL and self._parameter_device is not None else self._devices[key]

    def _new_slot(self, tensor: torch.Tensor) -> TensorSlot:
        self._slots[id(tensor)] = slot = TensorSlot(tensor, reference_of_entry(tensor, self._slots))
        return slot

    @property
    def has_lazy(self) -> bool:
        """Whether there are parameters whose shapes are not known yet."""
        return bool(self._lazy)

    def _take(self, tensors: list[torch.Tensor]) -> None:
        self._lazy, self.given = [], []
        slots, alive = self._slots, set()
        for tensor in tensors:
            if is_lazy(tensor):
                self._lazy.append(tensor)
            if not is_variable(tensor):
                continue
            key = id(tensor)
            alive.add(key)
            slot = slots.get(key)
            if slot is None or slot.reference() is not tensor:
                slot = self._new_slot(tensor)
            slot.take(tensor)
            self._begin_grads(slot)
            slot.keep_data_of(self._replicas)
        if len(alive) < len(slots):
            for key in [key for key in slots if key not in alive]:
                del slots[key]

    def _begin_grads(self, slot: TensorSlot) -> None:
        """Keep the replicas' own gradients if `.grad` is as the last run left it; else everyone starts from `.grad`."""
        grad = slot.tensor.grad
        if slot.is_grad_untouched(grad):
            kept = slot.grads
            if grad is not None and grad.dtype != slot.grad_dtype:  # the model was cast: so are all replicas' gradients
                slot.cast_grads(grad.dtype)
            if self._common and grad is not None:
                for replica in [replica for replica in kept if replica != self._home]:
                    kept[replica] = self._in_common(grad, kept[replica], replica)
            if self._home not in kept:
                kept[self._home] = grad
            elif kept[self._home] is not grad:  # another replica led the last run
                slot.tensor.grad = kept[self._home]
            return
        self.given.append(slot)
        slot.grads = {self._home: grad}
        for replica, device in enumerate(self._devices):  # also of those that sit this run out
            if replica != self._home:
                own = None if grad is None else grad.detach().clone().to(device)
                slot.grads[replica] = own if grad is None else self._in_common(grad, own, replica)

    def _in_common(self, central: torch.Tensor, own: torch.Tensor | None, replica: int) -> torch.Tensor | None:
        """A replica's ``own`` of something: where the ``central`` one shares its memory, in its copy of that."""
        storage = self._common.of(central)
        if storage is None or own is None or own.shape != central.shape or storage.holds(own, replica):
            return own
        view = storage.view_like(central, replica)
        view.copy_(own)
        return view

    def register_newborn(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Variables that appeared during the run: lazy parameters now materialised, modules first built in a step; and
        ``tensors``, if they are new.

        The replica whose turn it is, or was, made their value; it becomes everyone's.
        """
        if self._registry.changes == self._changes and not self._lazy and not tensors:
            return
        found = list(tensors)
        if self._registry.changes != self._changes:
            self._changes = self._registry.changes
            found += self._registry.tensors()
            self.helpers.add(self._registry.helpers(), self._holder)
        found += [tensor for tensor in self._lazy if not is_lazy(tensor)]
        self._lazy = [tensor for tensor in self._lazy if is_lazy(tensor)]
        for tensor in found:
            if id(tensor) not in self._slots:
                if is_lazy(tensor):
                    self._lazy.append(tensor)
                elif is_variable(tensor):
                    self._add_newborn(tensor)

    @property
    def _holder(self) -> int:
        return self._leader if self._installed == CENTRAL else self._installed

    def _add_newborn(self, tensor: torch.Tensor) -> None:
        slot = self._new_slot(tensor)
        slot.trained = tensor.requires_grad
        slot.made_by, slot.is_shared, slot.is_copy = self._holder, False, id(tensor) in self._copies
        slot.version, slot.first = version_of(tensor), sample(tensor)
        for key in {*self._replicas, self._home}:
            same = key == self._installed
            slot.data[key] = tensor.data if same else copy_to(tensor.data, self.device_of(key))
            slot.grads[key] = tensor.grad if same else None
            slot.versions[key] = slot.version
        slot.agreed = slot.data[self._home]
        self.generation += 1
        self._made.append(slot)

    def refresh(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Overwrite the replicas' components of ``tensors`` (default: all) with the central ones, which are installed
        or parked."""
        slots = self._slots
        chosen = list(slots.values()) if tensors is None else [slots[id(t)] for t in tensors if id(t) in slots]
        if not chosen:
            return
        home, is_installed = self._home, self._installed == self._home
        others = [(replica, self._devices[replica]) for replica in self._replicas if replica != home]
        has_common = bool(self._common)
        into: dict[int, list[torch.Tensor]] = {replica: [] for replica, _ in others}
        source: dict[int, list[torch.Tensor]] = {replica: [] for replica, _ in others}
        for slot in chosen:
            if is_installed:
                slot.data[home] = slot.tensor.data
                slot.versions[home] = version_of(slot.tensor)
            central = slot.data[home]
            slot.version = version = slot.versions[home]
            slot.agreed, slot.unedited = central, None
            places = {central.data_ptr()} if central.layout == torch.strided else set()
            for replica, device in others:
                slot.versions[replica] = version
                own = slot.data.get(replica)
                if has_common and (storage := self._common.of(central)) is not None:
                    own = slot.data[replica] = storage.view_like(central, replica)
                if own is None or not same_layout(own, central) or own.device != device:
                    slot.data[replica] = copy_to(central, device)
                elif own.layout != torch.strided:
                    own.copy_(central)
                elif own.data_ptr() in places and own.numel():  # the user has set `.data` to one tensor everywhere
                    slot.data[replica] = copy_to(central, device)
                else:
                    into[replica].append(own)
                    source[replica].append(central)
                    if len(others) > 1:
                        places.add(own.data_ptr())
        for replica, _ in others:
            if into[replica]:
                foreach_copy_(into[replica], source[replica])

    # -- edits in place ---------------------------------------------------------------------------------------------

    def merge_rows(self) -> None:
        """While all replicas stand still: rows that a lookup with ``max_norm`` has scaled on any replica."""
        if not self.has_edits:
            return
        for slot in self._slots.values():
            version = slot.version
            if any(one != version for one in slot.versions.values()) and may_be_table(slot.tensor):
                self._merge_rows_of(slot)

    def merge_rows_in_turn(self) -> None:
        """The same in the leader's turn, when the others are not about to change anything."""
        self.park()
        self.merge_rows()
        self._is_parked = False

    def _merge_rows_of(self, slot: TensorSlot) -> None:
        mine = slot.data[self._leader]
        for rows, theirs in rows_scaled_by_others(slot, self._replicas, self._registry.modules):
            if self._home == CENTRAL:
                slot.unedited = copy_to(slot.data[CENTRAL], self._devices[self._leader])
            elif slot.unedited is None and not slot.is_edited(self._leader):
                slot.unedited = mine.clone()
            mine[rows] = theirs[rows]

    def _keep_unedited(self, slot: TensorSlot) -> None:
        """The leader edited a central tensor in place: keep the value from before, which another replica still has."""
        clean = [one for one in self._replicas if one != self._leader and not slot.is_edited(one)]
        if clean:
            slot.unedited = slot.data[clean[-1]].clone()

    def _restore_unedited(self) -> None:
        """After a failure: undo in-place edits since the last moment when all replicas agreed."""
        for slot in self._slots.values():
            if slot.agreed is not None:
                slot.data[self._home] = slot.agreed
            if slot.unedited is not None:
                slot.agreed.copy_(slot.unedited)  # type: ignore[union-attr]

    # -- modules that came up during the run ------------------------------------------------------------------------

    def made_members(self, module: nn.Module) -> None:
        """The replica whose turn it is registers parameters or buffers."""
        self._attributes.made_members(module)

    def expect_member(self, module: nn.Module, name: str, value: torch.Tensor | nn.Module) -> None:
        """The replica whose turn it is is about to register a parameter, a buffer or a child."""
        self._attributes.expect_member(module, name, value, self._holder)
        if isinstance(value, nn.Parameter | nn.Module):
            return
        if self.buffers.was_there(module):
            self.buffers.expect(module, name, value, self._holder)
        else:
            self.buffers.note_assignment(module, name, self._holder)

    def _register_unused(self) -> None:
        """The turn of a replica ends: what others may find of what it has made, and not called so far."""
        made = self._registry.modules_since(self._recorded)
        self._attributes.add(made, self._holder)
        for module in made:
            if not self.buffers.was_there(module) and not any(map(is_lazy, module.buffers(recurse=False))):
                self.buffers.add_module(module, self._holder)
        self._recorded = self._registry.counts[0]

    def refuse_changes_of_made(self, *, at_end: bool) -> None:
        """While all replicas stand still: where what one has made in this run was changed by others otherwise.
        ``at_end``: of the run; else it goes on."""
        self._attributes.refuse_other_numbers()
        self.buffers.refuse_changes_of_made(looks_at_values=at_end)
        self._attributes.refuse_replaced_by_some(at_end=at_end)
        refuse_changes_of(self._made, self._replicas, self._registry.describe)

    def register_module(self, module: nn.Module) -> None:
        """A new module's variables have their first values and are about to be used."""
        self.register_newborn([tensor for tensor in own_parameters(module).values() if tensor is not None])
        if not self.buffers.was_there(module):
            self.buffers.add_module(module, self._holder)

    def note_copy(self, module: nn.Module) -> None:
        """``module`` has been made by a deep copy."""
        self._copies.update(id(tensor) for tensor in own_parameters(module).values())

    def note_use_of(self, slot: TensorSlot, replica: int) -> None:
        if not slot.is_shared and slot.made_by != replica:
            self.share([slot])

    def share(self, slots: Iterable[TensorSlot]) -> None:
        """These are variables of all replicas, whoever has made them."""
        for slot in slots:
            if not slot.is_shared:
                slot.is_shared = True
                self.generation += 1

    def note_use(self, module: nn.Module) -> None:
        """The replica whose turn it is uses a module that was made in this run."""
        for tensor in own_parameters(module).values():
            slot = None if tensor is None else self._slots.get(id(tensor))
            if slot is not None:
                self.note_use_of(slot, self._holder)
        self.buffers.note_use(module, self._holder)
