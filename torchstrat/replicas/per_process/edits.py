"""What a step has changed, with one replica per process: where ranks did so differently, the first one's counts.
As in one process, but nobody else would notice between processes.

**Parameters**, changed in place. Decay and clamping are the same on every rank and need nothing. Random noise is not:
each replica draws its own. Rows of tables that a lookup has scaled (`scaling_lookups`) count from every rank.

**State of optimizers.** To read the version of all that an optimizer keeps would cost every step more than it is worth,
so the step's code has a view of the state that notes what it looks at; most steps never look.

**Buffers** are brought together when a run ends, where a step has changed them differently.

**What is no tensor**: modes, ``requires_grad``, plain attributes of modules, and what schedulers and scalers keep.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.core._torch_private import own_buffers, version_of
from torchstrat.core.buffer_rules import batches_counted, change_of, counts_rows, is_statistic
from torchstrat.core.engine import Communicator
from torchstrat.core.gradients import shares
from torchstrat.core.optimizers import is_listed, is_seen_to_step, stepped_by, wrapped_by
from torchstrat.core.reduction import ReduceOp, VariableAggregation
from torchstrat.core.tensor_classes import memory_of, whole_value_of
from torchstrat.core.variables import BufferSlot, Members, VariableRegistry
from torchstrat.distributed.collectives.agreement import fingerprint
from torchstrat.replicas import table_memory
from torchstrat.replicas.engine import StepWeights
from torchstrat.replicas.exchange import broadcast_tensors
from torchstrat.replicas.optimizer_state import LeaderView, SharedState, is_plain, real_state
from torchstrat.replicas.roster import Roster
from torchstrat.replicas.state import is_memory, leave_graph, sample
from torchstrat.replicas.table_memory import renormed_weights

Prints = dict[int, float]
"""Of parameters' entries, by the parameter's place."""


class _Noted(NamedTuple):
    """A value as the step's code has found it."""

    value: Any
    version: int
    address: int
    sample: bytes

    def is_still(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor):
            return value is self.value or (is_plain(value) and is_plain(self.value) and value == self.value)
        return value is self.value and _note(value)[1:] == self[1:]


def _note(value: object) -> _Noted:
    memory = memory_of(value)
    if not isinstance(memory, torch.Tensor):
        return _Noted(value, 0, 0, b"")
    is_at_an_address = is_memory(type(memory)) and memory.layout == torch.strided and not memory.is_meta
    address = memory.data_ptr() if is_at_an_address else 0
    return _Noted(value, 0 if memory.is_inference() else version_of(memory), address, sample(memory))


def _note_entry(entry: object) -> dict[Any, _Noted]:
    return {name: _note(value) for name, value in _values(entry).items()}


def _values(entry: object) -> dict[object, object]:
    """Of one parameter; most optimizers keep a dictionary."""
    return entry if isinstance(entry, dict) else {} if entry is None else {"": entry}


def _is_still(noted: object, entry: object) -> bool:
    before, now = noted if isinstance(noted, dict) else {}, _values(entry)
    return before.keys() == now.keys() and all(before[name].is_still(value) for name, value in now.items())


class _Watched(NamedTuple):
    optimizer: Optimizer
    shared: SharedState
    view: LeaderView

    @property
    def is_replaced(self) -> bool:
        """Whether there is another state by now, from ``load_state_dict``, say."""
        state = vars(self.optimizer).get("state")
        return state is not self.view and state is not self.shared.real


class StateEdits:
    """Of the optimizers of one run on this rank. It holds them until `forget`, and what they keep while they live."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._views: weakref.WeakKeyDictionary[Optimizer, LeaderView] = weakref.WeakKeyDictionary()

    def begin(self, helpers: Iterable[object]) -> None:
        """A run begins; what the program did in between it did on all ranks."""
        self._watched = {}
        for helper in helpers:
            if isinstance(helper, Optimizer):
                self._watch(helper)

    def _watch(self, optimizer: Optimizer) -> None:
        own = vars(optimizer)
        state = own.get("state")
        if isinstance(state, dict):
            real, view = real_state(state), self._views.get(optimizer)
            if view is None or view.shared.real is not real:
                self._views[optimizer] = view = LeaderView(SharedState(real, _note_entry))
            view.shared.before.clear()
            own["state"] = view
            self._watched[id(optimizer)] = _Watched(optimizer, view.shared, view)

    def pause(self, optimizer: Optimizer) -> None:
        """It is about to step, on the state itself."""
        for one in (optimizer, *wrapped_by(optimizer)):
            own, found = vars(one), self._watched.get(id(one))
            if found is not None and own.get("state") is found.view:
                own["state"] = found.shared.real

    def resume(self, optimizer: Optimizer) -> None:
        """It has stepped, and the state is what all ranks have."""
        for one in (optimizer, *wrapped_by(optimizer)):
            own, found = vars(one), self._watched.get(id(one))
            if found is None or own.get("state") is not found.shared.real:
                self._watch(one)
            else:
                found.shared.before.clear()
                own["state"] = found.view

    def end(self) -> None:
        """The step's code has come to its end."""
        for optimizer, shared, view in self._watched.values():
            own = vars(optimizer)
            if own.get("state") is view:
                own["state"] = shared.real

    def forget(self) -> None:
        """All ranks have what it has changed."""
        self._watched = {}

    def is_looked_at(self, optimizer: Optimizer) -> bool:
        """Whether the step's code has looked at what it keeps, or one that it wraps, since it has stepped last."""
        watched = (self._watched.get(id(one)) for one in (optimizer, *wrapped_by(optimizer)))
        return any(found is not None and found.shared.before for found in watched)

    def digest(self, optimizer: Optimizer) -> float:
        """A number that is equal on ranks that have made the same edits: 0 where there are none."""
        found = self._watched.get(id(optimizer))
        if found is None or not (found.shared.before or found.is_replaced):
            return 0.0
        changed = self._changed(optimizer)
        return float(zlib.crc32(repr(changed).encode())) if changed else 0.0

    def _changed(self, optimizer: Optimizer) -> Prints:
        found = self._watched.get(id(optimizer))
        if found is None:
            return {}
        state, before = real_state(vars(optimizer).get("state")), found.shared.before
        changed = {}
        for place, tensor in enumerate(stepped_by(optimizer)):
            if found.is_replaced or (tensor in before and not _is_still(before[tensor], state.get(tensor))):
                changed[place] = _print(state.get(tensor))
        return changed

    def differing(self, communicator: Communicator, optimizer: Optimizer, call: str) -> list[int]:
        """The places of parameters whose state ranks have changed, each in another way. All ranks call it, when
        digests differ."""
        everyone = communicator.all_gather_object(self._changed(optimizer), call)
        places = sorted({place for one in everyone for place in one})
        return [place for place in places if any(one.get(place) != everyone[0].get(place) for one in everyone)]

    def level(self, communicator: Communicator, optimizer: Optimizer, places: list[int], call: str) -> None:
        """There the first rank's state becomes everyone's. All ranks call it."""
        tensors, state = stepped_by(optimizer), real_state(vars(optimizer).get("state"))
        own = {place: state.get(tensors[place]) for place in places}
        told: dict[int, Any] = {place: (_copied(entry), _of_pieces(entry)) for place, entry in own.items()}
        told = communicator.broadcast_object(told, 0, call)
        for place, (entry, of_pieces) in told.items() if communicator.rank else ():
            tensor = tensors[place]
            if of_pieces and (variable := whole_value_of(tensor)) is not None:
                entry.update({name: variable.entry(entry[name]) for name in of_pieces})
            if entry is None:
                state.pop(tensor, None)
            elif not isinstance(entry, dict) or not isinstance(state.get(tensor), dict):
                state[tensor] = entry
            else:
                _put(state[tensor], entry, tensor.device)


def _print(entry: object) -> float:
    values = _values(entry)
    plain = repr([(name, value) for name, value in values.items() if is_plain(value)])
    tensors = [memory_of(value) for value in values.values() if isinstance(value, torch.Tensor)]
    return float(zlib.crc32(plain.encode())) + sum(fingerprint(tensors))


def _copied(entry: object) -> object:
    """Without the memory around what are views."""
    if isinstance(entry, dict):
        return {name: _copied(value) for name, value in entry.items()}
    return memory_of(entry).detach().clone() if isinstance(entry, torch.Tensor) else entry


def _of_pieces(entry: object) -> list[object]:
    """The names of its values that stand for wholes, of which each process has its piece."""
    return [name for name, value in _values(entry).items() if memory_of(value) is not value]


def _put(here: dict[object, object], told: dict[object, object], device: torch.device) -> None:
    for name in [name for name in here if name not in told]:
        del here[name]
    for name, value in told.items():
        own, memory = memory_of(here.get(name)), memory_of(value)
        if isinstance(own, torch.Tensor) and isinstance(memory, torch.Tensor):
            if own.shape == memory.shape and own.dtype == memory.dtype:
                with torch.no_grad():
                    own.copy_(memory)
                continue
            value = value if memory is not value else value.to(own.device)
        elif isinstance(value, torch.Tensor) and value.device.type != "cpu":
            value = value.to(device)
        here[name] = value


class ParameterEdits:
    """Notices edits by version counters and, because ``.data`` goes around those, by a sample of bytes.

    ``modules()``: all that there are. ``uses``: of tables, in the run.
    """

    def __init__(
        self, modules: Callable[[], Iterable[nn.Module]] = tuple, uses: table_memory.UsesOfTables | None = None
    ) -> None:
        self._modules, self._uses = modules, uses
        self.state = StateEdits()
        """Of what optimizers keep."""
        self._edited: set[int] = set()  # ids of those that the program has edited in some step
        self._copies: dict[int, torch.Tensor] = {}
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are now equal on all ranks."""
        for tensor in tensors:
            self._noted[id(tensor)] = weakref.ref(tensor), version_of(tensor)
            if self._edited and id(tensor) in self._edited:
                self._copies[id(tensor)] = tensor.detach().clone()

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """A run over ``tensors`` begins. What the program did to them in between it did on all ranks."""
        self._noted, self._copies = {}, {}
        self._edited -= renormed_weights(self._modules()) if self._edited else set()
        self.note(tensors)

    def since_noted(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that the program has edited."""
        found, noted = [], self._noted
        for tensor in tensors:
            known = noted.get(id(tensor))
            if known is not None and version_of(tensor) != known[1] and known[0]() is tensor:
                found.append(tensor)
        if found:
            self._edited.update(map(id, found))
        return found

    def moved_by(self, optimizer: Optimizer) -> float:
        """How often the program has changed in place what an optimizer of a class of its own steps, since that was
        noted: it may do so by what the optimizer keeps. Classes of torch's have no methods that would."""
        if is_listed(type(optimizer)) or not is_seen_to_step(optimizer):
            return 0.0
        noted = ((tensor, self._noted.get(id(tensor))) for tensor in stepped_by(optimizer))
        return float(sum(version_of(tensor) - known[1] for tensor, known in noted if known is not None))

    def undo(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """After a failure: make them what they were when they were noted. Returns those of which there is no copy, as
        the program has edited them for the first time: copies of all would cost every run."""
        self.state.end()
        self.state.forget()
        edited = self.since_noted(tensors)
        for tensor in edited:
            if id(tensor) in self._copies:
                _put_back(tensor, self._copies[id(tensor)])
        lost = [tensor for tensor in edited if id(tensor) not in self._copies]
        self.note(edited)
        return lost

    def summary(self, roster: Roster) -> tuple[float, float, float]:
        """Numbers that are equal on ranks whose parameters are. The run ends."""
        edited = self.since_noted(roster.tensors)
        leave_graph(edited)
        return (*fingerprint(edited), _probe(roster.tensors))

    def make_equal(self, communicator: Communicator, roster: Roster, call: str) -> list[torch.Tensor]:
        """Overwrite what differs with the first rank's; the tensors of which that lost something. All ranks call it,
        when summaries differ."""
        roster = roster.in_common(communicator, call)
        prints = [fingerprint([tensor]) for tensor in roster.tensors]
        everyone = communicator.all_gather_object(prints, call)
        differing = [
            tensor
            for tensor, each in zip(roster.tensors, zip(*everyone, strict=True), strict=True)
            if any(one != each[0] for one in each)
        ]
        scaled = self.level(communicator, differing, call)
        self.note(roster.tensors)
        of_all = {id(tensor) for tensor in scaled}
        return [tensor for tensor in differing if id(tensor) not in of_all]

    def level(self, communicator: Communicator, tensors: list[torch.Tensor], call: str) -> list[torch.Tensor]:
        """Overwrite these with the first rank's, but for rows that a lookup has scaled elsewhere; the tensors that have
        such rows. All ranks call it."""
        known = renormed_weights(self._modules())
        numbers = {number for number, tensor in enumerate(tensors) if id(tensor) in known}
        keys, memory = dict(enumerate(map(id, tensors))), [tensor.data for tensor in tensors]
        own_uses = table_memory.uses_of(self._uses, keys)
        scaled, uses = table_memory.level(communicator, memory, numbers, call, own_uses)
        table_memory.require_lookups_alone(self._uses, keys, uses)
        return [tensors[number] for number in sorted(scaled)]


def _probe(tensors: Iterable[torch.Tensor]) -> float:
    """A checksum of a few bytes of each tensor in host memory. Reading them on a GPU would make the host wait."""
    return float(zlib.crc32(b"".join(map(sample, tensors))))


_Kind = tuple[tuple[int, ...], torch.dtype]


class ProcessBuffers:
    """The buffers of one run. Made when it starts, with the ``members`` that there are; `BufferRules` says what becomes
    of those that differ. Buffers on which all ranks agree are left alone: averaging equal numbers rounds them.
    ``weights``: of the run.
    """

    def __init__(
        self, registry: VariableRegistry, members: Members, device: torch.device, weights: StepWeights
    ) -> None:
        self._registry = registry
        self._device = device
        self._rules = registry.buffer_rules
        self._weights = weights
        self._training_before = {id(module) for module in members.modules if module.training}
        self._noted: dict[tuple[int, str], tuple[torch.Tensor | None, tuple[int, bytes]]] = {}
        self._counts: dict[tuple[int, str], float] = {}
        self._before: dict[tuple[int, str], torch.Tensor] = {}
        self.sums = False
        """Whether there are buffers whose changes are to be summed, also where these are equal. So on all ranks."""
        self._kept: list[tuple[BufferSlot, torch.Tensor, torch.Tensor]] = []
        for slot in members.buffer_slots:
            self._note(slot)

    def _note(self, slot: BufferSlot) -> None:
        module, name, tensor = slot.module, slot.name, slot.tensor
        is_kept = module.training or self._rules.was_edited(module, name)
        if is_kept and tensor is not None and not _is_nothing(tensor):
            self._kept.append((slot, tensor, tensor.detach().clone()))
        if not module.training:
            self._noted[id(module), name] = (tensor, _changes_of(slot))
        if counts_rows(module, name, tensor):
            self._counts[id(module), name] = float(tensor)  # type: ignore[arg-type]
        if self._rules and self._rules.needs_before(module, name):
            self.sums = True
            if tensor is not None:
                self._before[id(module), name] = tensor.detach().clone()

    def restore(self) -> None:
        """After a failure: those of modules that trained when the run began are what they were, and others that an
        earlier run has changed. Copies of all would cost every evaluation."""
        with torch.no_grad():
            for slot, tensor, copy in self._kept:
                own_buffers(slot.module)[slot.name] = tensor
                _put_back(tensor, copy)

    def _is_training(self, slot: BufferSlot) -> bool:
        return slot.module.training or id(slot.module) in self._training_before

    def _may_differ(self, slot: BufferSlot) -> bool:
        """Buffers of modules in evaluation mode hardly ever change, so they are not read unless something shows it."""
        tensor = slot.tensor
        if self._is_training(slot):
            return tensor is not None
        noted, changes = self._noted.get((id(slot.module), slot.name), (None, (0, b"")))
        is_edited = tensor is not noted or _changes_of(slot) != changes
        if is_edited:
            self._rules.note_edited(slot.module, slot.name)
        return is_edited

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
        the ranks."""
        named = self._registry.named_buffer_slots()
        found = {name: slot for name, slot in named.items() if self._is_compared(slot)}
        own = {name: (_kind(slot.tensor), _print_of(slot.tensor)) for name, slot in found.items()}
        everyone = communicator.all_gather_object(own, call)
        counted = shares(ReduceOp.MEAN, self._weights.in_buffers(range(len(weights)), weights))
        source = next(rank for rank, share in enumerate(counted) if share)
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
        return self.sums and slot.tensor is not None and self._rules.needs_before(slot.module, slot.name)

    def _merge_one(
        self,
        communicator: Communicator,
        slot: BufferSlot,
        kinds: list[_Kind | None],
        counted: list[float],
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
                own_buffers(slot.module)[slot.name] = tensor
            if tensor is not None:
                level.append(tensor)
            return
        assert tensor is not None
        is_mean = how is VariableAggregation.MEAN
        before = None if is_mean else self._before.get(key)
        if before is not None and before.shape != tensor.shape:
            before = None  # nothing to add changes to: the replicas' values are added up, as where there was none
        total = (tensor.detach().clone() if before is None else change_of(tensor.detach(), before)).contiguous()
        if is_mean:  # a share makes floating numbers of whole ones
            share = counted[communicator.rank]
            total = total * share if share else torch.zeros_like(total)  # which may be nan where there is none
        communicator.all_reduce(total, call).wait()
        tensor.copy_(total if before is None else before + total)


def _changes_of(slot: BufferSlot) -> tuple[int, bytes]:
    """Something else where a buffer has been changed in place. Normalizing leaves no trace in versions, and where the
    function that writes running statistics is called by hand, no count of batches tells either."""
    tensor = slot.tensor
    if tensor is None:
        return 0, b""
    if not is_statistic(slot.module, slot.name):
        return version_of(tensor), b""
    return version_of(tensor) + batches_counted(slot.module), sample(tensor)


def _is_nothing(tensor: torch.Tensor | None) -> bool:
    """Whether it is a tensor without values."""
    return tensor is not None and (is_lazy(tensor) or tensor.is_meta)


def _kind(tensor: torch.Tensor | None) -> _Kind | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def _put_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Also where the step has put other elements there, of which there may be more (``queue.data = torch.cat(…)``)."""
    if _kind(tensor) == _kind(copy):
        tensor.data.copy_(copy)
    else:
        tensor.data = copy


def _print_of(tensor: torch.Tensor | None) -> tuple[float, float]:
    return fingerprint([] if tensor is None else [tensor])


def _plain_of(helper: object) -> dict[str, object]:
    return {name: value for name, value in vars(helper).items() if is_plain(value)}


def plain_digest(members: Members) -> float:
    """Equal on ranks that have it alike, but for attributes of modules, which each replica has for itself."""
    flags = [module.training for module in members.modules]
    flags += [tensor.requires_grad for tensor in members.tensors]
    found = zlib.crc32(bytes(flags))
    for helper in members.helpers:
        if not isinstance(helper, Optimizer):
            found = zlib.crc32(repr(_plain_of(helper)).encode(), found)
    return float(found)


def level_plain(communicator: Communicator, registry: VariableRegistry, source: int, call: str) -> list[str]:
    """That of rank ``source`` becomes everyone's. All ranks call it. Names of those whose ``requires_grad`` it was."""
    members, tensors = registry.members(), registry.named_tensors()
    own = (
        {registry.number_of(module): module.training for module in members.modules},
        {name: tensor.requires_grad for name, tensor in tensors.items()},
        {n: _plain_of(one) for n, one in registry.named_helpers().items() if not isinstance(one, Optimizer)},
    )
    modes, flags, kept = communicator.broadcast_object(own, source, call)
    for module in members.modules:
        module.training = modes.get(registry.number_of(module), module.training)
    changed = []
    for name, tensor in tensors.items():
        flag = flags.get(name, tensor.requires_grad)
        if flag != tensor.requires_grad and tensor.is_leaf and not is_lazy(tensor):
            tensor.requires_grad_(flag)
            changed.append(name)
    for number, helper in registry.named_helpers().items():
        told = kept.get(number, {})
        vars(helper).update({name: value for name, value in told.items() if vars(helper).get(name) != value})
    return changed
