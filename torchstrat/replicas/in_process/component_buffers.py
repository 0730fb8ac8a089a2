"""The replicas' components of modules' buffers, and the one value that they become when a run has ended."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from torchstrat.core._torch_private import own_buffers, set_version_counters, version_of
from torchstrat.core.buffer_rules import BufferRules, change_of, counts_rows
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.gradients import shares
from torchstrat.core.reachable import address_of, has_address
from torchstrat.core.reduction import ReduceOp, VariableAggregation
from torchstrat.core.tensor_bytes import extent
from torchstrat.core.variables import BufferSlot
from torchstrat.distributed.collectives.agreement import fingerprint
from torchstrat.replicas.state import made_by_another, sample
from torchstrat.replicas.update_policies import OwnValues


class _BufferState:
    """One entry of a module's buffers: the tensor found there, per replica its data or what replaced it."""

    __slots__ = (
        "assigned",
        "begun",
        "central",
        "count",
        "data",
        "first",
        "found",
        "has_other_views",
        "is_shared",
        "made_by",
        "original",
        "replaced",
        "slot",
        "training",
        "versions",
        "views",
    )

    def __init__(self, slot: BufferSlot, original: torch.Tensor | None, made_by: int | None = None) -> None:
        self.slot = slot
        self.training = slot.module.training  # when the run began
        self.count: float | None = None
        self.original = original
        self.central = None if original is None else original.data  # not written before the run has succeeded
        self.begun = 0 if original is None else _version_of(original)
        self.made_by = made_by  # during the run, with the whole module
        self.is_shared = made_by is None
        self.data: dict[int, torch.Tensor] = {}
        self.replaced: dict[int, torch.Tensor | None] = {}
        self.versions: dict[int, int] = {}
        self.assigned: dict[int, int] = {}
        """Of one that was made in the run: how often each replica has put another tensor there since."""
        self.found, self.first = (0, 0), b""
        """What `changes_by` gave when the others came to it, and a `sample` of it."""
        self.views: list[tuple[torch.Tensor, int]] = []
        """Other tensors that show parts of it, and where these begin."""
        self.has_other_views = False

    def find_views(self, views: Iterable[torch.Tensor]) -> None:
        original = self.original
        if original is None or not has_address(original):
            return
        start, length = int(original.storage_offset()), original.numel()
        for view in views:
            place = int(view.storage_offset()) - start
            if address_of(view) != address_of(original) or place + extent(view) <= 0 or place >= length:
                continue
            is_part = place >= 0 and place + extent(view) <= length
            if is_part and view.dtype == original.dtype and original.is_contiguous():
                self.views.append((view, place))
            else:
                self.has_other_views = True

    def show(self, data: torch.Tensor) -> None:
        """Its values are those of ``data`` from now on, to whatever looks."""
        assert self.original is not None
        self.original.data = data
        for view, place in self.views:
            if data.dtype == view.dtype and data.numel() >= place + extent(view):
                view.data = data.as_strided(view.shape, view.stride(), data.storage_offset() + place)

    def give_each(self, replicas: Iterable[int], devices: dict[int, torch.device]) -> None:
        """A copy of the central value to every replica: a failed run must leave the module's buffer as it was."""
        if self.original is not None:
            for replica in replicas:
                self.data[replica] = copy_to(self.original.data, devices[replica])
                self.versions[replica] = _version_of(self.original)

    def park(self, replica: int) -> None:
        current = self.slot.tensor
        if current is not self.original:
            self.replaced[replica] = current
        else:
            self.replaced.pop(replica, None)
        if self.original is not None:
            self.data[replica] = self.original.data
            self.versions[replica] = _version_of(self.original)

    def install(self, replica: int) -> None:
        if self.original is not None:
            self.show(self.data[replica])
            self.count_as(self.versions[replica])
        self.put(self.replaced.get(replica, self.original))

    def changes_by(self, replica: int) -> tuple[int, int]:
        """How often a replica has changed what another has made, in place and by assignment. For parked ones."""
        return self.versions.get(replica, 0), self.assigned.get(replica, 0)

    def value_of(self, replica: int) -> torch.Tensor | None:
        """What that replica has there. For parked ones."""
        found = self.replaced.get(replica, self.original)
        return self.data[replica] if found is self.original and found is not None else found

    def is_as_found(self, replica: int) -> bool:
        """Of one that was made in the run, whether that replica has the values there that all began with. For parked
        ones."""
        value = self.value_of(replica)
        if value is None or self.central is None:
            return value is self.central
        found = sample(value)
        return found == self.first if found else _are_same(value, self.central)

    def level(self) -> None:
        """All edits are over: to whatever looks from now on the buffer was edited as often as by any replica."""
        if self.original is not None:
            self.versions = dict.fromkeys(self.versions, max(self.versions.values()))
            self.count_as(max(self.versions.values()))

    def count_as(self, version: int) -> None:
        # What one replica edits in place must not look to another's backward as if its own had been edited.
        if self.original is not None and _version_of(self.original) != version:
            set_version_counters([self.original], [version])

    def put(self, value: torch.Tensor | None) -> None:
        if self.slot.tensor is not value:
            own_buffers(self.slot.module)[self.slot.name] = value


class ComponentBuffers:
    """The buffers of one run after the other."""

    def __init__(self, devices: tuple[torch.device, ...], rules: BufferRules) -> None:
        self._devices = dict(enumerate(devices))
        self._rules = rules
        self._own = _OwnBuffers(rules)
        self.states: list[_BufferState] = []
        self._made: list[_BufferState] = []  # of modules that a replica has made in this run
        self._replicas: list[int] = []
        self._shares: dict[int, float] = {}  # of replicas in means
        self._has_views = False
        self._modules: set[int] = set()

    def begin(
        self,
        slots: list[BufferSlot],
        modules: Iterable[nn.Module],
        replicas: list[int],
        views: Sequence[torch.Tensor] = (),
    ) -> None:
        """``views``: tensors that share memory with buffers."""
        self._replicas, self._has_views = replicas, bool(views)
        self._modules = {id(module) for module in modules}
        self.states = [_BufferState(slot, slot.tensor) for slot in slots]
        for state in self.states if views else ():
            state.find_views(views)
        for state in self.states:
            state.give_each(replicas, self._devices)
            if state.original is not None and counts_rows(state.slot.module, state.slot.name, state.original):
                state.count = float(state.original)
        self._own.give(self.states, replicas)

    def own_of(self, replica: int, slots: Mapping[str, BufferSlot]) -> dict[str, torch.Tensor]:
        """Between runs, where replicas stay apart: what that one will find in the next."""
        found = {name: self._own.find(slot, replica) for name, slot in slots.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def put_own(self, own: Mapping[int, OwnValues], slots: Mapping[str, BufferSlot]) -> None:
        """Every replica finds these in the next run."""
        for name, slot in slots.items():
            values = {r: one.buffers[name] for r, one in own.items() if r and name in one.buffers}
            self._own.put(slot, {r: copy_to(value, self._devices[r]) for r, value in values.items()})

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
        if name not in own_buffers(module) and not self._knows(module, name):
            state = _BufferState(BufferSlot(module, name), value)
            state.give_each(self._replicas, self._devices)
            state.central = copy_to(value, value.device)
            state.install(replica)
            self.states.append(state)

    def add_module(self, module: nn.Module, made_by: int) -> None:
        """A module made in this run, whose buffers have their first values; ``made_by`` is the replica installed."""
        for name, value in own_buffers(module).items():
            if not self._knows(module, name):
                state = _BufferState(BufferSlot(module, name), value, made_by)
                state.give_each(self._replicas, self._devices)
                state.found, state.first = state.changes_by(made_by), b"" if value is None else sample(value)
                state.install(made_by)
                self.states.append(state)
                self._made.append(state)

    def _knows(self, module: nn.Module, name: str) -> bool:
        return any(state.slot.module is module and state.slot.name == name for state in self.states)

    def note_assignment(self, module: nn.Module, name: str, replica: int) -> None:
        """``replica`` is about to put another tensor where a module that was made in this run may have one already."""
        for state in self._made:
            if state.slot.module is module and state.slot.name == name:
                state.assigned[replica] = state.assigned.get(replica, 0) + 1

    def refuse_changes_of_made(self, *, looks_at_values: bool) -> None:
        """Of what was made in this run, all replicas that have changed it have to have done so equally often (see
        `refuse_changes_of`). What several have changed is everyone's. ``looks_at_values``: for what is changed through
        ``.data``."""
        for state in self._made:
            for replica in self._replicas:
                maker, changes = state.made_by, state.changes_by(replica)
                is_changed = changes != state.found or (looks_at_values and not state.is_as_found(replica))
                if maker in (None, replica) or not is_changed:
                    continue
                state.is_shared = True
                is_as_often = changes == state.changes_by(maker) != state.found
                if not is_as_often and not _are_same(state.value_of(replica), state.value_of(maker)):
                    name = f"{type(state.slot.module).__name__}.{state.slot.name}"
                    raise made_by_another(name, maker, replica)

    def note_use(self, module: nn.Module, replica: int) -> None:
        for state in self.states:
            if state.slot.module is module and replica != state.made_by:
                state.is_shared = True

    def refuse_edits_of_viewed(self) -> None:
        """Each replica has a copy of a buffer, which views of another kind than `find_views` knows do not follow."""
        for state in self.states if self._has_views else ():
            before = state.central
            if not state.has_other_views or before is None:
                continue
            if all(_are_equal(data, before) for data in state.data.values()):
                continue
            name, kind = state.slot.name, type(state.slot.module).__name__
            raise UnsupportedError(
                f"the step changes the buffer {name!r} of a {kind}, of which the program keeps a view of another dtype "
                "or of more than the buffer. Replicas in one process work on copies of buffers, and that view does not "
                f"follow. Make it where it is used (self.{name}.view(…)), or run one replica per process (torchrun)."
            )

    def merge(self, weights: list[float], rows: Sequence[int | None]) -> None:
        """After the replicas' code has ended and all is parked: one value per buffer, from those of the replicas.

        `BufferRules` says which; where all replicas agree nothing is averaged, because that would change constants by
        rounding. ``weights``: of the replicas in means (`StepWeights.in_buffers`). ``rows``: of the replicas.
        """
        for state in self.states:
            state.level()
        self._shares = dict(zip(self._replicas, shares(ReduceOp.MEAN, weights), strict=True))
        # All values, then all writes: a warning may be an error, and several modules have one tensor for a buffer.
        firsts = {id(state.original): state for state in reversed(self.states)}
        found = [self._merged(one, rows, is_first=firsts[id(one.original)] is one) for one in self.states]
        self._own.keep(self.states, self._replicas)
        done: dict[int, torch.Tensor] = {}
        for state, (central, first, replaced) in zip(self.states, found, strict=True):
            if first is not None and replaced is not None:
                first.data = replaced
            if state.replaced:
                state.replaced = dict.fromkeys(self._replicas, first)
            if id(state.original) in done:
                state.central = done[id(state.original)]
            if central is None or state.central is None:
                continue
            if _can_take(state.central, central):
                state.central.copy_(central)
            else:
                state.central = central.clone()
            done[id(state.original)] = state.central

    def keep_apart(self) -> None:
        """Instead of `merge`: each replica finds in the next run what it has left, and the modules have the first
        replica's until then."""
        for state in self.states:
            state.level()
        self._own.keep(self.states, self._replicas, is_all=True)
        for state in self.states:
            if state.original is not None:
                first = self._replicas[0] if state.made_by is None or state.is_shared else state.made_by
                state.central = state.data[first]

    def _merged(
        self, state: _BufferState, rows: Sequence[int | None], *, is_first: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The values of the tensor that stood there, where there was one and this is the first of its places; and where
        replicas have put others there, the one that lasts, and its values unless it has them."""
        counted = [replica for replica, share in self._shares.items() if share]
        replicas = counted if state.made_by is None or state.is_shared else [state.made_by]
        central = first = replaced = None
        if state.replaced:
            found = {replica: state.replaced.get(replica, state.original) for replica in self._replicas}
            first = found[replicas[0]]
            tensors = {replica: value.detach() for replica, value in found.items() if value is not None}
            if len(tensors) == len(found):
                merged = self._merge(state, tensors, replicas, is_mean_of_others=True)
                replaced = None if merged is tensors[replicas[0]] else merged
        if state.central is not None and is_first:
            central = self._merge(state, state.data, replicas, is_mean_of_others=state.made_by is None)
        left = central if not state.replaced else first if replaced is None else replaced
        if state.count is not None and rows and counts_rows(state.slot.module, state.slot.name, left):
            assert left is not None
            self._rules.look_at_count(state.slot.module, state.slot.name, state.count, float(left), rows[0])
        return central, first, replaced

    def _merge(
        self, state: _BufferState, data: dict[int, torch.Tensor], counted: list[int], *, is_mean_of_others: bool
    ) -> torch.Tensor:
        """The one value of the replicas' ``data``, of which ``counted`` have a say in a mean."""
        module, name = state.slot.module, state.slot.name
        first, before = data[counted[0]], state.central
        everyone = [data[replica] for replica in self._replicas] if is_mean_of_others else [data[r] for r in counted]
        values = [data[replica] for replica in counted]
        sums = bool(self._rules) and self._rules.needs_before(module, name)
        if not sums and all(_are_equal(other, first) for other in values[1:]):
            return first
        if self._rules and self._rules.keeps_own(module, name):
            return first
        are_alike = all(other.shape == first.shape and other.dtype == first.dtype for other in everyone)
        training = module.training or state.training
        how = self._rules.aggregation_of(module, name, first, are_alike=are_alike, training=training)
        if how is VariableAggregation.ONLY_FIRST_REPLICA:
            return first
        if how is VariableAggregation.SUM and before is not None and before.shape == first.shape:
            start = before.to(first.device)
            changes = [change_of(own.to(first.device), start) for own in everyone]
            return torch.stack(changes).sum(dim=0).to(first.dtype) + start
        total = torch.zeros_like(first)
        for replica in counted:
            own = data[replica].to(first.device)
            total += own * self._shares[replica] if how is VariableAggregation.MEAN else own
        return total

    def end(self, *, failed: bool) -> None:
        """Install the modules' own buffers; they have changed where `merge` was called."""
        for state in self.states:
            if failed:
                state.put(state.original)
                state.count_as(state.begun)
            if state.original is not None and state.central is not None:
                state.show(state.central)
        self.states, self._made, self._replicas, self._modules = [], [], [], set()


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.layout != other.layout:
        return False
    is_dense = one.layout == torch.strided
    return torch.equal(one.to(other.device), other) if is_dense else fingerprint([one]) == fingerprint([other])


def _are_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is other or one is None or other is None:
        return one is other
    if torch.strided in (one.layout, other.layout):
        one, other = one.nan_to_num(), other.nan_to_num()
    return _are_equal(one, other)


class _Left(NamedTuple):
    """What a run has left in one buffer."""

    tensor: weakref.ref[torch.Tensor]
    """The first replica's, which stands there."""
    version: int
    own: dict[int, torch.Tensor]
    """Of the other replicas."""
    start: torch.Tensor | None
    """The value from which all of them have set out, where they will become one."""


class _OwnBuffers:
    """What each replica keeps to itself from run to run: of buffers whose aggregation is NONE, and of all of them where
    replicas stay apart."""

    def __init__(self, rules: BufferRules) -> None:
        self._rules = rules
        self._kept: weakref.WeakKeyDictionary[nn.Module, dict[str, _Left]] = weakref.WeakKeyDictionary()

    def find(self, slot: BufferSlot, replica: int) -> torch.Tensor | None:
        left, tensor = self._kept.get(slot.module, {}).get(slot.name), slot.tensor
        if left is None or left.tensor() is not tensor or tensor is None or left.version != version_of(tensor):
            return tensor
        return left.own.get(replica, tensor)

    def put(self, slot: BufferSlot, own: dict[int, torch.Tensor]) -> None:
        if slot.tensor is not None and own:
            left = _Left(weakref.ref(slot.tensor), version_of(slot.tensor), own, slot.tensor.data.clone())
            self._kept.setdefault(slot.module, {})[slot.name] = left

    def give(self, states: list[_BufferState], replicas: list[int]) -> None:
        """As a run begins: unless the program has changed the buffer since, each replica finds what it has left."""
        for state in states if self._kept else ():
            left = self._kept.get(state.slot.module, {}).get(state.slot.name)
            if left is None or state.original is None or left.tensor() is not state.original:
                continue
            if left.version == version_of(state.original):
                own = {replica: left.own[replica] for replica in replicas if replica in left.own}
                if left.start is not None:
                    state.central = left.start
                else:  # what a run that fails has changed is not what it had left
                    own = {replica: copy_to(value, value.device) for replica, value in own.items()}
                state.data.update(own)

    def keep(self, states: list[_BufferState], replicas: list[int], *, is_all: bool = False) -> None:
        """As a run ends, before all become one: the tensor that will stand there is the first replica's. ``is_all``:
        none becomes one."""
        for state in states if is_all or self._rules or self._kept else ():
            module, name = state.slot.module, state.slot.name
            keeps_own = self._rules.keeps_own(module, name)
            if not is_all and not keeps_own:
                self._kept.get(module, {}).pop(name, None)
                continue
            values = {r: state.replaced.get(r, state.original) for r in replicas}
            first = values[replicas[0]]
            earlier = self._kept.get(module, {}).get(name)
            kept = {} if earlier is None else dict(earlier.own)
            for replica, value in values.items():
                if value is not None and replica != replicas[0]:
                    kept[replica] = state.data[replica] if value is state.original else value.data
            self._kept.setdefault(module, {})
            if first is None:
                self._kept[module].pop(name, None)
            else:
                start = None if keeps_own else state.central
                self._kept[module][name] = _Left(weakref.ref(first), version_of(first), kept, start)


def _can_take(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether ``values`` can be written into its memory: not where it is expanded, or they are of another kind."""
    is_expanded = tensor.layout == torch.strided and 0 in tensor.stride()
    return tensor.shape == values.shape and tensor.dtype == values.dtype and not is_expanded


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of its own, also where ``tensor`` is on ``device`` already."""
    copy = tensor.detach().clone()
    return copy if device == copy.device or "meta" in (device.type, copy.device.type) else copy.to(device)


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the values of one can be copied into the other's memory as they lie."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and one.layout == other.layout
        and (one.layout != torch.strided or one.stride() == other.stride())
    )
