"""Central storage of one job, as a step and a run use it. See the package for what it is made of.

A rank's own part of a step: an optimizer of the user's class over parts of the parameters, in common memory.

The user's own object is not stepped: its parameters and its state are what this rank is shown, and stay so. The twin
reads the hyperparameters anew at every step, because schedulers change them.
"""

from __future__ import annotations

import collections
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.core.engine import Communicator
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.gradients import Owned
from torchstrat.core.optimizers import State, Tier, stand_in_of, tier_of
from torchstrat.distributed.collectives.agreement import agree
from torchstrat.distributed.collectives.shared_memory.common_memory import (
    CommonMemory,
    Place,
    Ranges,
    SharesMemory,
    why_not,
)
from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies
from torchstrat.distributed.collectives.shared_memory.neighbours import NoSharedMemoryError
from torchstrat.replicas.central.parameters import CentralParameters
from torchstrat.replicas.central.state import CentralState, Made, Part, Work, portions, tensors_of
from torchstrat.replicas.table_memory import (
    Rows,
    UsesOfTables,
    may_be_table,
    put_rows,
    require_lookups_alone,
    scaled_rows,
    uses_of,
)

_MISSING = object()


class _Piece:
    """One part: the leaf that is stepped, and what its state was before."""

    __slots__ = ("known", "leaf", "part", "tensor")

    def __init__(self, part: Part, tensor: torch.Tensor, leaf: torch.Tensor, known: dict[str, object]) -> None:
        self.part, self.tensor, self.leaf, self.known = part, tensor, leaf, known

    @property
    def is_whole(self) -> bool:
        return self.part.stop - self.part.start == self.tensor.numel()

    def gradient(self) -> torch.Tensor | None:
        gradient = self.tensor.grad
        if gradient is not None and not self.is_whole:
            gradient = gradient.detach().reshape(-1)[self.part.start : self.part.stop]
        return gradient


class Twin:
    """Of one optimizer, for these parts of its ``tensors``.

    ``copies``: of a rank whose gradients, and some of whose parameters, lie on a device. The step is made on the host.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[Part],
        parameters: CentralParameters,
        state: CentralState,
        copies: DeviceCopies | None = None,
    ) -> None:
        self._copies = copies
        self._outside: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device without a place on the host
        self._state: State = collections.defaultdict(dict)
        self._pieces: dict[int, list[_Piece]] = {}
        for part in parts:
            tensor = tensors[part.number]
            leaf = _leaf(part, tensor, parameters)
            known = _state_of_part(part, tensor, optimizer, state)
            if copies is not None:
                known = _on_host(known, copies)
                if leaf is tensor and copies.has(tensor):
                    leaf = torch.empty(tensor.shape, dtype=tensor.dtype)
                    self._outside.append((tensor, leaf))
            if known:
                self._state[leaf] = dict(known)
            self._pieces.setdefault(id(tensor), []).append(_Piece(part, tensor, leaf, known))

    def make(self, optimizer: Optimizer) -> Optimizer:
        """What is stepped instead of ``optimizer``, with this step's gradients."""
        if self._copies is not None:
            return self._make_on_host(optimizer, self._copies)
        groups = []
        for group in optimizer.param_groups:
            pieces = [piece for tensor in group["params"] for piece in self._pieces.get(id(tensor), ())]
            for piece in pieces:
                piece.leaf.grad = piece.gradient()
            groups.append({**group, "params": [piece.leaf for piece in pieces]})
        return stand_in_of(type(optimizer), vars(optimizer), groups, self._state)

    def _make_on_host(self, optimizer: Optimizer, copies: DeviceCopies) -> Optimizer:
        """The same where gradients have to be copied first; and numbers that the optimizer keeps on the device, such as
        a gradient scaler's."""
        all_pieces = [
            [piece for tensor in group["params"] for piece in self._pieces.get(id(tensor), ())]
            for group in optimizer.param_groups
        ]
        copies.read([tensor.data for tensor, _ in self._outside], [leaf for _, leaf in self._outside])
        stepped = [
            (piece, gradient) for pieces in all_pieces for piece in pieces if (gradient := piece.gradient()) is not None
        ]
        for (piece, _), gradient in zip(stepped, copies.to_host([one for _, one in stepped]), strict=True):
            piece.leaf.grad = gradient
        groups = [
            {**_on_host(group, copies), "params": [piece.leaf for piece in pieces]}
            for group, pieces in zip(optimizer.param_groups, all_pieces, strict=True)
        ]
        return stand_in_of(type(optimizer), _on_host(vars(optimizer), copies), groups, self._state)

    def made(self) -> list[Made]:
        """After the step: the entries of state that are new; and sparse ones, which no other rank sees."""
        found = []
        for pieces in self._pieces.values():
            for piece in pieces:
                for name, value in self._state.get(piece.leaf, {}).items():
                    if piece.known.get(name, _MISSING) is not value or is_sparse(value):
                        found.append(Made(piece.part, name, value))
        return found

    def let_go(self) -> None:
        """The gradients are the program's again, which may want their memory back."""
        for pieces in self._pieces.values():
            for piece in pieces:
                if piece.leaf is not piece.tensor:
                    piece.leaf.grad = None
        if self._copies is not None:
            self._copies.to_device([leaf for _, leaf in self._outside], [tensor.data for tensor, _ in self._outside])

    def states(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """By parameter, where every part is a whole one."""
        all_pieces = (piece for pieces in self._pieces.values() for piece in pieces)
        return [(piece.tensor, self._state[piece.leaf]) for piece in all_pieces if piece.leaf in self._state]


def is_sparse(value: object) -> bool:
    """Whether it is a tensor that cannot lie in common memory: a rank that steps it in place has told nobody."""
    return isinstance(value, torch.Tensor) and value.layout != torch.strided


def _on_host(values: dict[str, object], copies: DeviceCopies) -> dict[str, object]:
    return {n: copies.on_host(value) if isinstance(value, torch.Tensor) else value for n, value in values.items()}


def _leaf(part: Part, tensor: torch.Tensor, parameters: CentralParameters) -> torch.Tensor:
    place = parameters.place_of(tensor)
    if place is None:
        return tensor
    written = place.written.detach()
    is_whole = part.stop - part.start == tensor.numel()
    return written if is_whole else written.view(-1)[part.start : part.stop]


def _state_of_part(part: Part, tensor: torch.Tensor, optimizer: Optimizer, state: CentralState) -> dict[str, object]:
    entries = state.entries(optimizer, tensor)
    if part.stop - part.start == tensor.numel():
        here = optimizer.state.get(tensor) or {}
        known = {name: value for name, value in here.items() if name not in entries or not entries[name].is_kept(value)}
        return known | {
            name: entry.value if entry.place is None else entry.place.written
            for name, entry in entries.items()
            if entry.is_kept(here.get(name))
        }
    values = {}
    for name, entry in entries.items():
        value = entry.value
        if entry.place is not None:
            value = entry.place.written
            if value.shape == tensor.shape:
                value = value.view(-1)[part.start : part.stop]
            elif part.start > 0:
                value = value.clone()  # a count of steps, say: the rank with the first element keeps everyone's
        values[name] = value
    return values


FIRST = 0
"""The rank of a group whose edits count, and which steps what cannot be shared out."""


@dataclasses.dataclass
class _Prepared:
    """The twin of an optimizer, and what it was made for."""

    key: Any
    twin: Twin


class CentralStorage:
    """Parameters and optimizer state of a job whose ranks share memory.

    ``world``: all ranks. What is stepped among some of them only (the others have no rows) is stepped by the first.
    ``copies``: of ranks on devices. A step then begins with the first rank's parameters being copied to common memory,
    and ends with everybody's being overwritten; in between it is the same, on the host.
    """

    def __init__(self, world: Communicator, copies: DeviceCopies | None = None) -> None:
        self._world = world
        self._copies = copies
        self.parameters = CentralParameters(copies)
        self.state = CentralState(copies)
        self._prepared: weakref.WeakKeyDictionary[Optimizer, _Prepared] = weakref.WeakKeyDictionary()
        self._edits: list[tuple[CommonMemory, Ranges]] = []
        self._rows: list[Rows] = []
        self._before: dict[int, torch.Tensor] = {}
        """Tables, by number, as the program has changed them between runs."""
        self.tables: Callable[[], Container[int]] = tuple
        """The ``id`` of the weights that are known to be tables whose rows a lookup scales."""
        self.uses: UsesOfTables | None = None
        self.wrapped: Callable[[], Container[int]] = tuple
        """The ``id`` of the optimizers that others wrap."""
        self._leading: Optimizer | None = None

    @staticmethod
    def of(world: Communicator, copies: DeviceCopies | None = None) -> CentralStorage | None:
        """None where the ranks have no memory in common. Every rank calls it and gets the same answer."""
        if not isinstance(world, SharesMemory):
            return None
        reasons = [told for told in world.all_gather_object(why_not(), "the start of central storage") if told]
        if reasons:
            warnings.warn(
                f"every process keeps parameters of its own, because of {reasons[0]}; rank 0 alone has the optimizer's "
                "state and steps.",
                stacklevel=7,
            )
            return None
        return CentralStorage(world, copies)

    def shares(self, optimizer: Optimizer) -> bool:
        """Whether its steps are shared out, and its state is common. Those of an optimizer that another one wraps are
        part of that one's, which the first rank makes alone."""
        if id(optimizer) in self.wrapped():
            return False
        if self._copies is not None:
            return self._shares_on_host(optimizer, self._copies)
        return tier_of(optimizer) is not Tier.ALL and all(t.device.type == "cpu" for t in tensors_of(optimizer))

    @staticmethod
    def _shares_on_host(optimizer: Optimizer, copies: DeviceCopies) -> bool:
        if any(group.get("capturable") for group in optimizer.param_groups):
            return False  # it is made for steps on a device, and raises elsewhere
        return tier_of(optimizer) is not Tier.ALL and all(
            t.device.type == "cpu" or copies.has(t) for t in tensors_of(optimizer)
        )

    # -- variables --------------------------------------------------------------------------------------------------

    def move_in(
        self, named: Mapping[str, torch.Tensor], among: Iterable[str], optimizers: Sequence[Optimizer], call: str
    ) -> set[str]:
        """Move those of the variables ``among`` that can be moved into common memory; their names.

        All ranks call it. The first rank's values are everyone's then. Where there is no room none is moved.
        """
        candidates = self.parameters.candidates(named, (t for one in optimizers for t in tensors_of(one)))
        own = {name: candidates[name] for name in among if name in candidates}
        everyone = self._world.all_gather_object(own, call)
        kinds = {name: kind for name, kind in own.items() if all(other.get(name) == kind for other in everyone)}
        if not kinds:
            return set()
        try:
            self.parameters.move_in(self._world, [named[name] for name in kinds], list(kinds.values()), call)
        except NoSharedMemoryError as reason:
            warnings.warn(f"every process keeps parameters of its own: {reason}", stacklevel=5)
            return set()
        self.state.generation += 1
        return set(kinds)

    def moved_out(self, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Variables that have been in common memory, and have got another shape or dtype since."""
        self._call_back()
        return self.parameters.take_left(named)

    def left(self, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """What `moved_out` will say."""
        self._call_back()
        return self.parameters.left(named)

    def _call_back(self) -> None:
        if self.parameters.call_back():
            self.state.generation += 1

    # -- edits ------------------------------------------------------------------------------------------------------

    def look_for_edits(self, *, rows: bool = False) -> int:
        """Whether this rank's program has changed parameters or state in place since the last step: 0 or 1, and with
        ``rows`` 2 where it has scaled rows of tables (see `scaling_lookups`), which count on every rank.

        It comes before a meeting after which some write to common memory: so no copy may still be reading there.
        """
        self._call_back()
        if self._copies is not None:
            self._copies.wait()
        found = ((memory, memory.edits()) for memory in (*self.parameters.memories(), *self.state.memories()))
        self._edits = [(memory, ranges) for memory, ranges in found if ranges]
        self._rows = self._find_rows() if rows and self._edits else []
        return 2 if self._rows else int(bool(self._edits))

    def begin_run(self) -> None:
        """What the program has changed since the last step it has changed on all ranks: it is from there that lookups
        in this run scale rows."""
        tables = set(map(id, self.uses.possible())) if self.uses is not None else set()
        known = self.parameters.places().items() if tables else ()  # nearly always there is none
        places = {number: place for number, (key, place) in known if key in tables}
        memories = {id(place.memory): place.memory for place in places.values()}
        ranges = {key: memory.edits() for key, memory in memories.items()}
        self._before = {number: place.shown.clone() for number, place in places.items() if _is_edited(place, ranges)}

    def _find_rows(self) -> list[Rows]:
        ranges = {id(memory): pages for memory, pages in self._edits}
        found, known = [], self.tables()
        for number, (key, place) in self.parameters.places().items():
            if may_be_table(place.written) and _is_edited(place, ranges):
                before = self._before.get(number, place.written)
                which = scaled_rows(before, place.shown, is_known=key in known)
                if len(which):
                    found.append((number, which, place.shown[which]))
        return found

    def publish_edits(self, communicator: Communicator, call: str, source: int = FIRST, *, rows: bool = False) -> None:
        """The edits of one rank become everyone's, the others' are undone. All ranks of ``communicator`` call it,
        right after `look_for_edits` and a meeting that told that any has edits. ``rows``: some have scaled rows."""
        if rows:
            places = self.parameters.places()
            keys = {number: key for number, (key, _) in places.items()}
            everyone = communicator.all_gather_object((self._rows, uses_of(self.uses, keys)), call)
            require_lookups_alone(self.uses, keys, [uses for _, uses in everyone])
            if communicator.rank == source:
                shown = {number: place.shown for number, (_, place) in places.items()}
                put_rows(shown, [told for told, _ in everyone])
                self.look_for_edits()
        if communicator.rank == source:
            for memory, ranges in self._edits:
                memory.publish(ranges)
        _meet(communicator, call)
        self.forget_edits()
        _meet(communicator, call)

    def drop_edits(self) -> None:
        """Undo this rank's edits; each rank for itself."""
        if self.look_for_edits():
            self._forget()

    def forget_edits(self) -> None:
        self._forget()
        self.state.generation += 1  # parts of steps keep counts of their own

    def _forget(self) -> None:
        for memory, ranges in self._edits:
            memory.forget(ranges)
        self._edits, self._before = [], {}

    # -- a step that is shared out ----------------------------------------------------------------------------------

    def is_foreign(self, optimizer: Optimizer) -> bool:
        return self.state.is_foreign(optimizer, tensors_of(optimizer))

    def take_state(self, communicator: Communicator, optimizer: Optimizer, call: str) -> None:
        """What the first rank's program has put into the optimizer's state is everyone's. All ranks call it."""
        if communicator.size == self._world.size:  # else there is no room to be had before the run is over
            self.state.take(communicator, optimizer, FIRST, call)

    def begin_step(
        self,
        communicator: Communicator,
        optimizer: Optimizer,
        owned: Callable[[torch.Tensor], Owned | None],
        call: str,
    ) -> Optimizer:
        """What this rank has to step: its own part. All ranks of ``communicator`` call it, after a meeting.

        ``owned``: who has which elements of a gradient, and therefore has to step them.
        """
        tensors = tensors_of(optimizer)
        if self.parameters.staged is not None:
            if communicator.rank == FIRST:
                self.parameters.staged.read(_with_gradients(tensors))
            _meet(communicator, call)
        facts = [None if (gradient := t.grad) is None else (gradient.layout, owned(t)) for t in tensors]
        key = (communicator.ranks, self.state.generation, facts, list(map(id, tensors)))
        prepared = self._prepared.get(optimizer)
        if prepared is None or prepared.key != key or communicator.size < self._world.size:
            parts = self._parts(communicator, optimizer, tensors, owned, call)
            self._prepared[optimizer] = prepared = _Prepared(
                key, Twin(optimizer, tensors, parts, self.parameters, self.state, self._copies)
            )
            _meet(communicator, call)  # some have read what others are about to step
        return prepared.twin.make(optimizer)

    def _parts(
        self,
        communicator: Communicator,
        optimizer: Optimizer,
        tensors: Sequence[torch.Tensor],
        owned: Callable[[torch.Tensor], Owned | None],
        call: str,
    ) -> list[Part]:
        """This rank's parts. What does not lie in common memory is the first one's, who hands it out afterwards."""
        stepped = {number: tensor for number, tensor in enumerate(tensors) if tensor.grad is not None}
        fixed = {number: owned(tensor) for number, tensor in stepped.items()}
        if communicator.size < self._world.size:
            if any(fixed.values()):
                raise InvalidArgumentError(
                    f"{call} steps with gradients of an earlier run, which with gradients='owner' some replicas have "
                    "that now have no rows. Step in the run that has made the gradients, or leave the argument out."
                )
            whole = [Part(number, 0, tensor.numel()) for number, tensor in stepped.items()]
            return whole if communicator.rank == FIRST else []
        elsewhere = [number for number, tensor in stepped.items() if tensor not in self.parameters]
        shared = {n: t for n, t in stepped.items() if fixed[n] is None and n not in elsewhere}
        own = self._portions(optimizer, shared)[communicator.rank]
        for number, ranges in fixed.items():
            own += [Part(number, start, stop) for rank, start, stop in ranges or () if rank == communicator.rank]
        if communicator.rank == FIRST:
            own += [Part(number, 0, tensors[number].numel()) for number in elsewhere]
        return sorted(own)

    def _portions(self, optimizer: Optimizer, tensors: Mapping[int, torch.Tensor]) -> list[list[Part]]:
        """For each rank its parts of these, which lie in common memory."""
        by_element = tier_of(optimizer) is Tier.ELEMENTS
        works = [
            Work(t.numel(), t.element_size(), by_element and t.is_contiguous() and not _is_sparse(t))
            for t in tensors.values()
        ]
        numbers = list(tensors)
        return [
            [part._replace(number=numbers[part.number]) for part in share]
            for share in portions(works, self._world.size)
        ]

    def owners(self, optimizers: Iterable[Optimizer]) -> dict[int, Owned]:
        """By ``id`` of a parameter: who is to step which of its elements, before there are gradients.

        Only of those in common memory that one optimizer steps; the gradients of others are needed by all ranks.
        """
        found: dict[int, list[tuple[int, int, int]]] = {}
        steppers = collections.Counter(id(tensor) for one in optimizers for tensor in tensors_of(one))
        for optimizer in optimizers:
            if not self.shares(optimizer):
                continue
            tensors = {n: t for n, t in enumerate(tensors_of(optimizer)) if t in self.parameters and not _is_sparse(t)}
            for rank, share in enumerate(self._portions(optimizer, tensors)):
                for part in share:
                    tensor = tensors[part.number]
                    if steppers[id(tensor)] == 1:
                        found.setdefault(id(tensor), []).append((rank, part.start, part.stop))
        return {key: tuple(owned) for key, owned in found.items()}

    def end_step(self, communicator: Communicator, optimizer: Optimizer, call: str) -> None:
        """After the step of what `begin_step` gave: once it returns, all parts are stepped on all ranks."""
        self._end_step(communicator, optimizer, call)
        if self.parameters.staged is not None:
            self.parameters.staged.bring_back(_with_gradients(tensors_of(optimizer)))

    def _end_step(self, communicator: Communicator, optimizer: Optimizer, call: str) -> None:
        twin = self._prepared[optimizer].twin
        twin.let_go()
        if communicator.size < self._world.size:
            if communicator.rank == FIRST:
                for tensor, state in twin.states():
                    self._keep_for_now(optimizer, tensor, state)
            _meet(communicator, call)
            return
        made = twin.made()
        if any(row[0] for row in agree(communicator, call, (float(len(made)),))):
            self.state.settle(communicator, optimizer, made, call)

    def _keep_for_now(self, optimizer: Optimizer, tensor: torch.Tensor, stepped: Mapping[str, Any]) -> None:
        """State that one rank alone has, until the run is over and `level` makes it everyone's: it knows it by its
        objects, so what was stepped in place has to be another one."""
        places = {
            id(entry.place.written): entry.value
            for entry in self.state.entries(optimizer, tensor).values()
            if entry.place is not None
        }
        optimizer.state[tensor] = {
            name: value.clone() if is_sparse(value) else places.get(id(value), value) for name, value in stepped.items()
        }

    def level_after(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of a step's variables that are equal on all ranks afterwards."""
        if self.parameters.staged is None:
            return tensors
        staged = self.parameters.staged
        return [tensor for tensor in tensors if tensor.grad is not None or tensor not in staged]

    # -- a step of the first rank alone -----------------------------------------------------------------------------

    def lead(self, optimizer: Optimizer) -> None:
        """For the rank that steps all at once: parameters mean what all ranks see, until `follow`. Also those of other
        optimizers, which hooks of the user's own may edit."""
        self._leading = optimizer
        self.parameters.lead(self.parameters.moved_in())

    def follow(self) -> None:
        """Raises `UnsupportedError` where a step has replaced elements that somebody still holds."""
        leading, self._leading = self._leading, None
        if leading is not None:
            self.parameters.follow(leading)

    # -- runs that some ranks sit out -------------------------------------------------------------------------------

    def level(self, optimizers: Sequence[Optimizer], source: int, call: str) -> None:
        """What ``source`` has put in its parameters and optimizers is everyone's. All ranks of the job call it."""
        shared = [optimizer for optimizer in optimizers if self.shares(optimizer)]
        for optimizer in shared:
            if any(row[0] for row in agree(self._world, call, (float(self.is_foreign(optimizer)),))):
                self.state.take(self._world, optimizer, source, call)
        self.state.generation += 1  # ranks without rows know nothing of the steps of the others
        edited = self.look_for_edits()
        if any(row[0] for row in agree(self._world, call, (float(edited),))):
            self.publish_edits(self._world, call, source)


def _is_edited(place: Place, ranges: Mapping[int, Ranges]) -> bool:
    """``ranges``: what this rank has written to, by the ``id`` of the memory."""
    start = place.written.data_ptr() - place.memory.address
    stop = start + place.written.nbytes
    return any(first < stop and start < last for first, last in ranges.get(id(place.memory), ()))


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.grad is not None and tensor.grad.layout != torch.strided


def _with_gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.grad is not None]


def _meet(communicator: Communicator, call: str) -> None:
    """A barrier that notices if somebody is in another call: on this side of it memory may be read, on that written."""
    agree(communicator, call)
