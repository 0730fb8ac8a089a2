"""Optimizer state in memory that all ranks see: once in all, and whole wherever ``optimizer.state`` is read.

A step makes it where it runs, in parts: a portion for each rank, of equally many bytes, which every rank computes the
same. Then the parts are put together in common memory, and every rank's optimizer is given views of that (`settle`).
What a program puts there itself (``load_state_dict``, state that is cleared, or made by a constructor) is noticed
because it is another object, and the first rank's becomes everyone's (`take`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchstrat.core.engine import Communicator
from torchstrat.core.errors import UnsupportedError
from torchstrat.distributed.collectives.shared_memory.common_memory import (
    CommonMemory,
    Kind,
    Place,
    SharesMemory,
    kind_of,
)
from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies
from torchstrat.distributed.collectives.shared_memory.neighbours import NoSharedMemoryError
from torchstrat.replicas.optimizer_state import are_alike

_CUT_ELEMENTS = 256
"""Parameters are cut at multiples of this. Kernels take elements in groups of vectors, at most 128 at a time, and what
is left over one by one, which may round another way: so the same elements are left over as in a step of the whole."""


class Work(NamedTuple):
    """One parameter of a step. ``may_be_cut``: its elements may be stepped by several ranks."""

    numel: int
    itemsize: int
    may_be_cut: bool

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_cut(self) -> bool:
        return self.may_be_cut and self.numel >= 2 * _CUT_ELEMENTS


class Part(NamedTuple):
    """Elements ``[start, stop)`` of parameter number ``number``."""

    number: int
    start: int
    stop: int


def portions(works: Sequence[Work], ranks: int) -> list[list[Part]]:
    """For each rank its parts, in the order of the parameters. Every element is in one."""
    shares: list[list[Part]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    whole = [(work.bytes, index) for index, work in enumerate(works) if not work.is_cut]
    for size, index in sorted(whole, key=lambda one: (-one[0], one[1])):
        rank = loads.index(min(loads))
        shares[rank].append(Part(index, 0, works[index].numel))
        loads[rank] += size
    each = -(-sum(work.bytes for work in works) // ranks)
    _cut(works, [each - load for load in loads], shares)
    return [sorted(share) for share in shares]


def _cut(works: Sequence[Work], room: list[int], shares: list[list[Part]]) -> None:
    """One rank after the other takes as much of the row of parameters as it has room for, the last one the rest."""
    rank = 0
    for index, work in enumerate(works):
        start = 0
        while work.is_cut and start < work.numel:
            rest = work.numel - start
            count = min(rest, max(0, round(room[rank] / work.itemsize / _CUT_ELEMENTS)) * _CUT_ELEMENTS)
            if rank == len(room) - 1:
                count = rest
            if count:
                shares[rank].append(Part(index, start, start + count))
                room[rank] -= count * work.itemsize
                start += count
            if count < rest:
                rank += 1


class Entry(NamedTuple):
    """An entry of one parameter's state. ``value``: what stands in ``optimizer.state``."""

    value: Any
    place: Place | None
    address: int = 0
    """Of the place, as this rank is shown it."""

    def is_kept(self, value: object) -> bool:
        """Whether ``value``, found in the state, is still this one where it was: neither replaced nor moved through
        ``.data``."""
        return value is self.value and (self.place is None or value.data_ptr() == self.address)


class Made(NamedTuple):
    """An entry that a step has made on this rank, of its part of a parameter."""

    part: Part
    name: str
    value: Any


class CentralState:
    """Where the state of each optimizer lies. ``generation`` changes with it, alike on all ranks.

    ``copies``: of ranks on devices. State that a program makes or loads there is moved to the host.
    """

    def __init__(self, copies: DeviceCopies | None = None) -> None:
        self._copies = copies
        self._kept: weakref.WeakKeyDictionary[Optimizer, dict[int, dict[str, Entry]]] = weakref.WeakKeyDictionary()
        self.generation = 0
        self._memories: tuple[int, list[weakref.ref[CommonMemory]]] = (-1, [])

    def entries(self, optimizer: Optimizer, tensor: torch.Tensor) -> dict[str, Entry]:
        return self._kept.get(optimizer, {}).get(id(tensor), {})

    def is_foreign(self, optimizer: Optimizer, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the program has put anything there, or taken it away."""
        kept = self._kept.get(optimizer, {})
        for tensor in tensors:
            state, entries = optimizer.state.get(tensor) or {}, kept.get(id(tensor)) or {}
            if len(state) != len(entries):
                return True
            for name, entry in entries.items():
                if not entry.is_kept(state.get(name)):
                    return True
        return False

    def memories(self) -> list[CommonMemory]:
        """Where state lies."""
        if self._memories[0] != self.generation:
            places = (entry.place for entry in self._all() if entry.place is not None)
            found = {id(place.memory): place.memory for place in places}
            self._memories = (self.generation, [weakref.ref(memory) for memory in found.values()])
        return [memory for reference in self._memories[1] if (memory := reference()) is not None]

    def _all(self) -> Iterable[Entry]:
        by_tensor = itertools.chain.from_iterable(kept.values() for kept in self._kept.values())
        return itertools.chain.from_iterable(entries.values() for entries in by_tensor)

    # -- what a program has put there -------------------------------------------------------------------------------

    def take(self, world: Communicator, optimizer: Optimizer, source: int, call: str) -> None:
        """Make the state that ``source`` has everyone's. All ranks call it. See `_allocate` for what it raises."""
        tensors = tensors_of(optimizer)
        layout = self._layout(optimizer, tensors) if world.rank == source else None
        layout = world.broadcast_object(layout, source, call)
        wanted = {
            (index, name): kind
            for index, entries in layout.items()
            for name, (kind, _) in entries.items()
            if isinstance(kind, Kind)
        }
        places = self._allocate(world, wanted, call)
        if world.rank == source:
            with torch.no_grad():
                for (index, name), place in places.items():
                    place.written.copy_(optimizer.state[tensors[index]][name])
        world.barrier(call)
        for index, tensor in enumerate(tensors):
            before, entries = self.entries(optimizer, tensor), {}
            for name, (kind, value) in layout.get(index, {}).items():
                if kind == _KEPT:
                    entries[name] = before[name]
                else:
                    own = (optimizer.state.get(tensor) or {}).get(name)
                    entries[name] = _entry(value, places.get((index, name)), own)
            self._bind(optimizer, tensor, entries)
        self.generation += 1

    def _layout(
        self, optimizer: Optimizer, tensors: Sequence[torch.Tensor]
    ) -> dict[int, dict[str, tuple[object, object]]]:
        """By parameter and entry: where it is, or of what kind it has to be, or the value itself."""
        layout: dict[int, dict[str, tuple[object, object]]] = {}
        for index, tensor in enumerate(tensors):
            entries = self.entries(optimizer, tensor)
            for name, value in (optimizer.state.get(tensor) or {}).items():
                if name in entries and entries[name].is_kept(value):
                    told: tuple[object, object] = (_KEPT, None)
                else:
                    if self._copies is not None and isinstance(value, torch.Tensor):
                        value = self._copies.on_host(value)
                    kind = _kind_like(value, tensor)
                    told = (kind, None if kind else value)
                layout.setdefault(index, {})[name] = told
        return layout

    # -- what a step has made ---------------------------------------------------------------------------------------

    def settle(self, world: Communicator, optimizer: Optimizer, made: Sequence[Made], call: str) -> None:
        """Put what ranks have made of their parts together. All ranks call it, also those that have made nothing."""
        tensors = tensors_of(optimizer)
        own: dict[tuple[int, str], tuple[object, object]] = {}
        for part, name, value in made:
            tensor = tensors[part.number]
            if _is_slice(part, value, tensor):
                own[part.number, name] = Kind(tuple(tensor.shape), tuple(tensor.stride()), value.dtype), None
            elif part.start == 0:
                kind = _kind_like(value, tensor)
                own[part.number, name] = kind, None if kind else value
        told: dict[tuple[int, str], tuple[Any, object]] = {}
        for one in world.all_gather_object(own, call):
            told = {**one, **told}
        told = {key: told[key] for key in sorted(told)}
        places = self._allocate(world, {key: kind for key, (kind, _) in told.items() if kind}, call)
        with torch.no_grad():
            for part, name, value in made:
                place = places.get((part.number, name))
                if place is not None and _is_slice(part, value, tensors[part.number]):
                    place.written.view(-1)[part.start : part.stop].copy_(value)
                elif place is not None and part.start == 0:
                    place.written.copy_(value)
        world.barrier(call)
        changed: dict[int, dict[str, Entry]] = {}
        for (index, name), (_, value) in told.items():
            entries = changed.setdefault(index, dict(self.entries(optimizer, tensors[index])))
            entries[name] = _entry(value, places.get((index, name)))
        for index, entries in changed.items():
            self._bind(optimizer, tensors[index], entries)
        self.generation += 1

    def _allocate(
        self, world: Communicator, wanted: dict[tuple[int, str], Kind], call: str
    ) -> dict[tuple[int, str], Place]:
        """Raises `UnsupportedError`, on all ranks, where there is no room."""
        if not wanted:
            return {}
        assert isinstance(world, SharesMemory)
        try:
            return dict(zip(wanted, world.share_memory(list(wanted.values()), call), strict=True))
        except NoSharedMemoryError as reason:
            raise UnsupportedError(
                f"the optimizer's state does not fit into memory that processes share (in {call}): {reason}. Free "
                "memory, use an optimizer that keeps less, or collectives='process_group', with which rank 0 keeps it."
            ) from reason

    def _bind(self, optimizer: Optimizer, tensor: torch.Tensor, entries: dict[str, Entry]) -> None:
        self._kept.setdefault(optimizer, {})[id(tensor)] = entries
        if not entries:
            optimizer.state.pop(tensor, None)
            return
        state = optimizer.state[tensor]
        state.clear()
        state.update({name: entry.value for name, entry in entries.items()})


_KEPT = "kept"


def _entry(value: object, place: Place | None, own: object = None) -> Entry:
    """``own``: what this rank's program has put there. It may hold it elsewhere too (`load_state_dict` copies nothing),
    where it is to see steps as on one device: so it stays, and lies in the place from now on."""
    if place is None:
        return Entry(value, None)
    shown = place.shown
    if type(own) is torch.Tensor and are_alike(own, shown):
        own.data = shown
        shown = own
    return Entry(shown, place, place.shown.data_ptr())


def tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _is_slice(part: Part, value: object, tensor: torch.Tensor) -> bool:
    """Whether ``value`` was made of a part of a parameter, element by element, and the part is not all of it."""
    is_cut = part.stop - part.start < tensor.numel()
    return is_cut and isinstance(value, torch.Tensor) and value.shape == (part.stop - part.start,)


def _kind_like(value: object, tensor: torch.Tensor) -> Kind | None:
    """What is to be kept for ``value``; None for what is no tensor in host memory."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return None
    if value.shape == tensor.shape:
        like = kind_of(tensor.detach())  # parts of both are taken in one order
        if like is not None:
            return like._replace(dtype=value.dtype)
    stride = torch.empty(value.shape, device="meta").stride()
    return Kind(tuple(value.shape), tuple(stride), value.dtype)
