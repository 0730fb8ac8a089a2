"""Replicas without a row in a step, with one replica per process.

Their step is not called, and plain code is all that could tell them what it does. So the others run the step among
themselves, and afterwards the first of them hands over everything that the step changed.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.optim import Optimizer

from torchstrat.core import nest
from torchstrat.core._functional_private import noted_by, put_noted
from torchstrat.core._torch_private import own_buffers
from torchstrat.core.engine import Communicator
from torchstrat.core.errors import ReplicaDivergenceError
from torchstrat.core.optimizers import (
    hyperparameters,
    is_listed,
    is_seen_to_step,
    load_in_place,
    state_dict_of,
    state_of_removed,
)
from torchstrat.core.randomness import RandomStreams
from torchstrat.core.reachable import address_of, has_address
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.values import PerReplica, Weights
from torchstrat.core.variables import VariableRegistry
from torchstrat.data.own_draws import generators_reached, number_of
from torchstrat.replicas import optimizer_state
from torchstrat.replicas.central.storage import CentralStorage
from torchstrat.replicas.engine import StepCounts
from torchstrat.replicas.exchange import broadcast_gradients, broadcast_tensors
from torchstrat.replicas.gradient_records import GradientStatus
from torchstrat.replicas.gradient_synchronizer import GradientSynchronizer
from torchstrat.replicas.per_process.edits import level_plain
from torchstrat.replicas.per_process.step_policies import OWNER
from torchstrat.replicas.roster import MembersOfStep, MembersTold, Rosters, refuse_members

BEFORE = "the start of a run (some replicas have no rows)"
SETTLE = "the end of a run (gradients that are new in sums)"
AFTER = "the end of a run (handing its results to replicas without rows)"


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


class _Manifest(NamedTuple):
    """What the first active rank has to hand over."""

    structure: object
    """Of the step's result, with None for leaves."""
    counts: tuple[int, int, int]
    members: MembersTold | str
    """As `MembersOfStep.changes` has them."""
    parameters: dict[str, _Kind]
    central: set[str]
    """Those of the parameters that need no handing over: all ranks see them."""
    left: set[str]
    """Those that the step has taken out of common memory."""
    buffers: dict[str, _Kind]
    gradients: dict[str, GradientStatus]
    """What has become of those that all ranks are to have."""
    pending: bool
    attributes: dict[tuple[int, str], _Told]
    """Of modules, which the step has changed."""
    counted: list[str]
    """Of the program's objects, attributes to which the step has added 1."""
    helpers: dict[int, Any]
    """What optimizers, schedulers and scalers keep, by number."""
    drawn: dict[str, tuple[int, object]]
    """Of Python's, NumPy's and the program's own generators from which the step has drawn: where they stood, as a
    `number_of` that, and where they stand."""
    settings: dict[int, Sequence[Mapping[str, object]]]
    """What steps of optimizers of classes of one's own have set in their attributes."""


class IdleReplicas:
    """What happens around a run in which not all ranks take part. All ranks know from the batch who does.

    ``keeping_state``: opens a block in which optimizers of ranks that own none keep a state that they load.
    ``is_of_owner``: whether the owner alone has an optimizer's state. ``storage``: where parameters and the state of
    other optimizers are common to all ranks; only edits of them have to be handed over.
    """

    def __init__(
        self,
        world: Communicator,
        active: list[int],
        registry: VariableRegistry,
        rosters: Rosters,
        gradients: GradientSynchronizer,
        keeping_state: Callable[[], AbstractContextManager[None]],
        device: torch.device,
        is_of_owner: Callable[[Optimizer], bool],
        storage: CentralStorage | None,
        counts: StepCounts,
    ) -> None:
        self._world = world
        self._device = device
        self._first = active[0]
        self._idle = [rank for rank in range(world.size) if rank not in active]
        self._is_idle = world.rank not in active
        self._registry = registry
        self._rosters = rosters
        self._gradients = gradients
        self._records = gradients.records
        self._keeping_state = keeping_state
        self._is_of_owner = is_of_owner
        self._storage = storage
        self._counts = counts

    # -- before -----------------------------------------------------------------------------------------------------

    def before_run(self, fn: Callable[..., object], args: object, kwargs: object) -> None:
        self._streams = RandomStreams(("python", "numpy"), generators_reached(fn, nest.leaves((args, kwargs))))
        self._stand = {name: number_of(state) for name, state in self._streams.states().items()}
        if self._storage is not None:
            self._storage.level(self._registry.optimizers(), OWNER, BEFORE)
        if self._first != OWNER:
            self._lend_state()
        is_first = self._world.rank == self._first
        self._counts.begin(self._registry.objects)
        self._known = range(self._registry.counts[2])
        self._members = MembersOfStep(self._registry)
        self._attributes = _attributes_of(self._registry, self._known) if is_first else {}
        optimizers = self._optimizers() if is_first else {}
        self._settings = {number: _settings_of(one) for number, one in optimizers.items()}
        self._tensors = {id(one): optimizer_state.tensors_in(one) for one in optimizers.values()}

    def _optimizers(self) -> dict[int, Optimizer]:
        return {number: one for number, one in self._registry.named_helpers().items() if isinstance(one, Optimizer)}

    def _lend_state(self) -> None:
        """The owner of the optimizers' state is idle: the first rank that runs steps in its place."""
        optimizers = {number: one for number, one in self._optimizers().items() if self._is_of_owner(one)}
        if not optimizers:
            return
        own = {number: _state_dict(one) for number, one in optimizers.items()} if self._world.rank == OWNER else None
        states = self._world.broadcast_object(own, OWNER, BEFORE)
        if self._world.rank == self._first:
            with self._keeping_state():
                for number, optimizer in optimizers.items():
                    if states.get(number) is not None:
                        load_in_place(optimizer, states[number])

    # -- after ------------------------------------------------------------------------------------------------------

    def settle_gradients(self, group: Communicator) -> None:
        """Before the others are told. All ranks that ran call it."""
        if self._records.op is not ReduceOp.SUM:
            return
        roster = self._rosters.now()
        new = self._records.new_in_sum(roster)
        self._records.settle(roster, group.all_gather_object(new, SETTLE) if group.size > 1 else [new])

    def after_run(self, result: object, weights: Weights) -> Any:
        """Hand over. Returns the result of the run on this rank: without components, where it was idle."""
        mine = self._make_manifest(result) if self._world.rank == self._first else None
        manifest: _Manifest = self._world.broadcast_object(mine, self._first, AFTER)
        if isinstance(manifest.members, str):
            raise refuse_members(manifest.members, self._idle)
        if not self._is_idle:
            self._registry.forget_held_since(len(self._known))
        if self._is_idle:
            self._registry.catch_up_with(manifest.counts)
            self._members.put(manifest.members, self._device)
            self._gradients.pending = manifest.pending
            self._materialise(manifest)
            self._load_helpers(manifest.helpers)
            for number, optimizer in self._optimizers().items():
                optimizer_state.put(vars(optimizer), manifest.settings.get(number, ()))
            _put_attributes(self._registry, manifest.attributes)
            self._counts.warn_of_missed(manifest.counted)
            # One that stood elsewhere, the program has seeded otherwise here.
            self._streams.put({n: now for n, (was, now) in manifest.drawn.items() if self._stand.get(n) == was})
        level_plain(self._world, self._registry, self._first, AFTER)
        self._hand_over_values(manifest)
        self._hand_over_gradients(manifest)
        if self._storage is not None:
            self._storage.level(self._registry.optimizers(), self._first, AFTER)
        if self._world.rank != OWNER:
            for optimizer in self._registry.optimizers():
                if self._is_of_owner(optimizer):
                    optimizer.state.clear()
        if not self._is_idle:
            return result
        return nest.map_structure(lambda leaf: PerReplica((), replica_ids=(), weights=weights), manifest.structure)

    def _make_manifest(self, result: object) -> _Manifest:
        roster = self._rosters.now()
        buffers = _buffers(self._registry)
        left = set() if self._storage is None else self._storage.left(roster.items())
        return _Manifest(
            _structure(result),
            self._registry.counts,
            self._members.changes(),
            {name: _kind(tensor) for name, tensor in roster.items()},
            {
                name
                for name, tensor in roster.items()
                if self._storage is not None and self._storage.parameters.are_seen(tensor)
            },
            left,
            {name: _kind(tensor) for name, tensor in buffers.items() if tensor is not None and not is_lazy(tensor)},
            self._records.for_idle(roster),
            self._gradients.pending,
            _changed_attributes(self._registry, self._attributes, self._known),
            self._counts.grown_by(1),
            {number: self._state_of(helper) for number, helper in self._registry.named_helpers().items()},
            {n: (was, now) for n, now in self._streams.states().items() if number_of(now) != (was := self._stand[n])},
            {
                number: optimizer_state.changes(optimizer, self._settings[number])
                for number, optimizer in self._optimizers().items()
                if number in self._settings
            },
        )

    def _state_of(self, helper: object) -> Any:
        state = _state_dict(helper)
        if state is not None and isinstance(helper, Optimizer):
            if self._is_in_place(helper):
                state = {**state, "state": {}}
            state["has stepped"] = vars(helper).get("_opt_called", False)
            state["variables"] = self._variables_of(helper)
            before, now = self._tensors.get(id(helper), {}), optimizer_state.tensors_in(helper)
            # What the run has edited in place, and put no other in the place of: it is edited on the others, too.
            state["kept"] = [place for place, tensor in now.items() if before.get(place) is tensor]
            removed = state_of_removed(helper).items()
            names = self._names() if removed else {}
            state["removed"] = {names[id(one)]: entry for one, entry in removed if id(one) in names}
        elif isinstance(helper, torch.amp.GradScaler):
            state = {**state, "noted": noted_by(helper, self._optimizers())}
        return state

    def _variables_of(self, optimizer: Optimizer) -> list[list[str | None]]:
        """By group. None: a tensor that has no name on all ranks."""
        names = self._names()
        return [[names.get(id(tensor)) for tensor in group["params"]] for group in optimizer.param_groups]

    def _names(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self._registry.named_tensors().items()}

    def _regroup(self, optimizer: Optimizer, told: list[list[str | None]]) -> None:
        """The step has added groups, or moved parameters between them."""
        if self._variables_of(optimizer) == told:
            return
        named, groups = self._registry.named_tensors(), optimizer.param_groups
        missing = [name for group in told for name in group if name not in named]
        if missing:
            raise ReplicaDivergenceError(
                f"a step has given {type(optimizer).__name__} parameters that replicas without rows in it do not "
                "have. Add them, and their group, outside of Strategy.run, where every process does it."
            )
        del groups[len(told) :]
        groups += [{"params": []} for _ in told[len(groups) :]]
        for group, names in zip(groups, told, strict=True):
            group["params"] = [named[name] for name in names if name is not None]

    def _load_helpers(self, states: dict[int, Any]) -> None:
        for number, helper in self._registry.named_helpers().items():
            if (state := states.get(number)) is None:
                continue
            if isinstance(helper, Optimizer):
                self._regroup(helper, state.pop("variables"))
                own = optimizer_state.tensors_in(helper)
                own = {place: own[place] for place in state.pop("kept") if place in own}
                removed = state.pop("removed")
                if state.pop("has stepped"):
                    vars(helper)["_opt_called"] = True  # or schedulers warn that there was no step before theirs
            if isinstance(helper, Optimizer) and self._storage is not None and self._storage.shares(helper):
                for group, told in zip(helper.param_groups, state["param_groups"], strict=True):
                    group.update(hyperparameters(told))
            elif isinstance(helper, Optimizer):
                load_in_place(helper, state)
            if isinstance(helper, Optimizer):
                optimizer_state.keep_tensors(helper, own)
                if removed:
                    named = self._registry.named_tensors()
                    helper.state.update((named[name], entry) for name, entry in removed.items() if name in named)
            elif hasattr(helper, "load_state_dict"):
                if isinstance(helper, torch.amp.GradScaler):
                    put_noted(helper, state.pop("noted"), self._optimizers(), self._device)
                helper.load_state_dict(state)

    def _is_in_place(self, optimizer: Optimizer) -> bool:
        """Whether its state is where it belongs without being handed over."""
        if self._is_of_owner(optimizer):
            return self._first == OWNER
        return self._storage is not None and self._storage.shares(optimizer)

    def _materialise(self, manifest: _Manifest) -> None:
        """Lazy parameters and buffers whose shapes the others now know, and what a step has replaced."""
        named = self._registry.named_tensors()
        if self._storage is not None:
            self._storage.parameters.let_go(named[name] for name in manifest.left if name in named)
        for name, kind in manifest.parameters.items():
            tensor = named.get(name)
            if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
                tensor.materialize(kind.shape, dtype=kind.dtype)
            elif tensor is not None and _kind(tensor) != kind:  # ``p.data = torch.cat((p, rows))``, or a cast
                tensor.grad, tensor.data = None, self._room_for(kind)
        slots = self._registry.named_buffer_slots()
        for name, kind in manifest.buffers.items():
            slot = slots.get(name)
            if slot is None:
                continue
            tensor = slot.tensor
            if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
                tensor.materialize(kind.shape, dtype=kind.dtype)
            elif tensor is None or _kind(tensor) != kind:
                own_buffers(slot.module)[slot.name] = self._room_for(kind)

    def _room_for(self, kind: _Kind) -> torch.Tensor:
        device = self._device if kind.device_type == self._device.type else torch.device(kind.device_type)
        return torch.empty(kind.shape, dtype=kind.dtype, device=device)

    def _takes(self, tensor: torch.Tensor | None, kind: _Kind) -> bool:
        """Whether this rank's own tensor is to be sent or overwritten. The other ranks that ran have equal ones, and
        some may be known to the first rank alone: what comes for those is dropped."""
        is_end = self._is_idle or self._world.rank == self._first
        return is_end and tensor is not None and not is_lazy(tensor) and _kind(tensor) == kind

    def _hand_over_values(self, manifest: _Manifest) -> None:
        parameters, buffers = self._registry.named_tensors(), _buffers(self._registry)
        elsewhere = {name: kind for name, kind in manifest.parameters.items() if name not in manifest.central}
        if self._is_idle and self._storage is not None:  # others have written to the memory
            self._storage.parameters.stepped(parameters[name] for name in manifest.central if name in parameters)
        for kinds, own in ((elsewhere, parameters), (manifest.buffers, buffers)):
            values = []
            for name, kind in kinds.items():
                tensor = own.get(name)
                mine = tensor if tensor is not None and self._takes(tensor, kind) else None
                values.append(self._room_for(kind) if mine is None else mine)
            broadcast_tensors(self._world, values, self._first, AFTER)

    def _hand_over_gradients(self, manifest: _Manifest) -> None:
        """Of which nothing is accumulated and not combined."""
        own = self._registry.named_tensors()
        targets, gradients, like = [], [], []
        for name in manifest.gradients:
            kind, tensor = manifest.parameters[name], own.get(name)
            target = tensor if tensor is not None and self._takes(tensor, kind) else None
            targets.append(target)
            gradients.append(None if target is None or target.grad is None else target.grad.detach())
            like.append(self._room_for(kind) if target is None else target)
        received = broadcast_gradients(self._world, gradients, like, self._first, AFTER)
        if self._is_idle:
            for target, gradient, status in zip(targets, received, manifest.gradients.values(), strict=True):
                if target is not None:
                    self._records.take_over(target, gradient, status)


def _settings_of(optimizer: Optimizer) -> list[dict[str, object]]:
    """Its attributes, where steps may set some: its groups are in its state."""
    return [] if is_listed(type(optimizer)) else optimizer_state.settings(optimizer)[:1]


def _state_dict(helper: object) -> Any:
    """None: it has none of its own, and what it wraps are helpers, too."""
    if not isinstance(helper, Optimizer):
        return helper.state_dict() if hasattr(helper, "state_dict") else None
    if not isinstance(helper.state, dict):
        return None
    if _asks_tables_of_hooks(helper):
        return _state_without_tables(helper)
    state = state_dict_of(helper)
    is_odd = not (isinstance(state, dict) and "param_groups" in state)
    return None if is_odd else state  # a list of those of several that it wraps, say


def _asks_tables_of_hooks(optimizer: Optimizer) -> bool:
    """Whether to save or to load its state asks for tables that it has not."""
    lacks = not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks")
    return lacks and Optimizer in (_owner_of(optimizer, "state_dict"), _owner_of(optimizer, "load_state_dict"))


def _state_without_tables(optimizer: Optimizer) -> dict[str, Any] | None:
    """As ``state_dict`` has it, of a wrapper that has no tables of hooks, which that asks for. Its groups are those of
    what it wraps."""
    if is_seen_to_step(optimizer):
        return None
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    entries = {place: optimizer.state[tensor] for place, tensor in enumerate(tensors) if tensor in optimizer.state}
    return {"state": entries, "param_groups": []}


def _owner_of(value: object, name: str) -> type | None:
    """The class that has the method."""
    return next((kind for kind in type(value).__mro__ if name in vars(kind)), None)


def _buffers(registry: VariableRegistry) -> dict[str, torch.Tensor | None]:
    slots = registry.named_buffer_slots().items()
    return {name: tensor for name, slot in slots if (tensor := slot.tensor) is None or not tensor.is_meta}


def _kind(tensor: torch.Tensor) -> _Kind:
    return _Kind(tuple(tensor.shape), tensor.dtype, tensor.device.type)


def _structure(result: object) -> object:
    """The nest of a result without its leaves, of plain containers where its own do not travel."""
    skeleton = nest.map_structure(lambda leaf: None, result)
    try:
        pickle.dumps(skeleton)
    except Exception:
        return _plain(skeleton)
    return skeleton


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value] if isinstance(value, list) else tuple(_plain(c) for c in value)
    return None


# -- attributes of modules --------------------------------------------------------------------------------------------

_OF_MODULES = frozenset(vars(nn.Module()))


class _Attribute(NamedTuple):
    value: object
    content: bytes


class _Told(NamedTuple):
    """An attribute that the step has changed."""

    content: bytes
    is_same: bool
    """Whether it is the object that it was."""


Attributes = dict[tuple[int, str], _Attribute]
"""By the number of a module and the name of its attribute."""


def _attributes_of(registry: VariableRegistry, helpers: Container[int]) -> Attributes:
    """Those that can be handed over: no objects that hold modules or what is trained, nor what is a part of a variable
    or a buffer and changes with it."""
    belongings = _belongings(registry, helpers)
    names = {id(value): name for name, value in belongings.items()}
    tensors = [value for value in belongings.values() if isinstance(value, torch.Tensor)]
    addresses = {address_of(one) for one in tensors if has_address(one)}
    found = {}
    for module in registry.modules():
        for name, value in vars(module).items():
            if name not in _OF_MODULES and (content := _pickled(value, names, addresses)) is not None:
                found[registry.number_of(module), name] = _Attribute(value, content)
    return found


def _changed_attributes(
    registry: VariableRegistry, before: Attributes, helpers: Container[int]
) -> dict[tuple[int, str], _Told]:
    found = {}
    for key, (value, content) in _attributes_of(registry, helpers).items():
        old = before.get(key)
        if old is None or old.content != content:
            found[key] = _Told(content, old is not None and old.value is value)
    return found


def _put_attributes(registry: VariableRegistry, told: dict[tuple[int, str], _Told]) -> None:
    """Containers stay the objects that they are, and tensors where the step has left them so: the program may have
    others' references to them, and a tensor may be a view of a buffer."""
    modules = {registry.number_of(module): module for module in registry.modules()}
    belongings = _belongings(registry, registry.named_helpers()) if told else {}
    for (number, name), (content, is_same) in told.items():
        if number not in modules:
            continue
        try:
            value = _Unpickler(io.BytesIO(content), belongings).load()  # of a rank of this job
        except KeyError:  # it has what was made in the step, which is not here
            continue
        attributes = vars(modules[number])
        own = attributes.get(name)
        if not (is_same and _copy(own, value)) and not _fill(own, value):
            attributes[name] = value


def _belongings(registry: VariableRegistry, helpers: Container[int]) -> dict[str, object]:
    """What each rank has for itself, by names that are the same on all: an attribute may refer to it."""
    found: dict[str, object] = {f"module {registry.number_of(module)}": module for module in registry.modules()}
    found.update(registry.named_tensors())
    found.update((f"helper {number}", one) for number, one in registry.named_helpers().items() if number in helpers)
    found.update((f"buffer {name}", tensor) for name, tensor in _buffers(registry).items() if tensor is not None)
    return found


def _copy(own: object, value: object) -> bool:
    if not isinstance(own, torch.Tensor) or not isinstance(value, torch.Tensor) or own.requires_grad:
        return False
    if own.is_inference() or own.layout != torch.strided or _kind(own) != _kind(value):
        return False
    own.copy_(value)
    return True


def _fill(own: Any, value: Any) -> bool:
    """Whether ``own`` has become what ``value`` is. Only what is one module's own may: an enumeration's member, a
    function or a frozen data class is there once, and others have it too."""
    if type(own) is not type(value):
        return False
    if isinstance(own, list):
        own[:] = value
    elif isinstance(own, dict):
        own.clear()
        own.update(value)
    elif not _is_own_data(own):
        return False
    if hasattr(own, "__dict__"):
        vars(own).clear()
        vars(own).update(vars(value))
    return True


def _is_own_data(value: object) -> bool:
    if not dataclasses.is_dataclass(value) or isinstance(value, type | enum.Enum) or not hasattr(value, "__dict__"):
        return False
    return not value.__dataclass_params__.frozen  # type: ignore[attr-defined]


class _Pickler(pickle.Pickler):
    """``addresses``: of memory of what has a name. ``at_leaves``: ids of what a nest of containers holds itself. There
    everything with a name goes by it; inside of other objects, of which each rank has to keep its own, only what is
    not trained."""

    def __init__(self, file: io.BytesIO, names: dict[int, str], addresses: set[int], at_leaves: set[int]) -> None:
        super().__init__(file)
        self._names, self._addresses, self._at_leaves = names, addresses, at_leaves

    def persistent_id(self, value: Any) -> str | None:
        name = self._names.get(id(value))
        is_trained = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
        is_tied = isinstance(value, nn.Module) or is_trained
        is_part = name is None and isinstance(value, torch.Tensor) and has_address(value)
        if is_tied and (name is None or id(value) not in self._at_leaves):
            raise pickle.PicklingError("is not plain")
        if is_part and address_of(value) in self._addresses:
            raise pickle.PicklingError("shares memory")
        return name

    def reducer_override(self, value: Any) -> Any:
        """What a forward pass has left, such as the weight that pruning makes, goes without its graph."""
        is_of_graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
        return value.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL) if is_of_graph else NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, belongings: dict[str, object]) -> None:
        super().__init__(file)
        self._belongings = belongings

    def persistent_load(self, name: str) -> object:
        return self._belongings[name]


def _pickled(value: object, names: dict[int, str], addresses: set[int]) -> bytes | None:
    file = io.BytesIO()
    try:
        _Pickler(file, names, addresses, {id(leaf) for leaf in nest.leaves(value)}).dump(value)
    except Exception:
        return None
    return file.getvalue()
