"""Parameters in memory that all ranks see. Each rank is shown them through a mapping of its own.

The objects stay the user's; only where their elements lie changes (``.data``). What a program writes to a parameter in
place is its own rank's until the ranks meet for a step. Then the first rank's edits are everyone's, as they would be in
one process, and the others' are gone.

Parameters that ranks compute with on devices: each has a copy there, and a step is made in memory that all share.

Between two steps what counts is the first rank's device copy: a program may have changed it in any way, through
``.data`` too, which nothing would tell. So a step begins with that rank's copies being read, and ends with every rank's
being overwritten.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core._torch_private import tensors_in_storage
from torchstrat.core.engine import Communicator
from torchstrat.core.optimizers import keep_elements, kept_by
from torchstrat.core.registration_order import reference_of_entry
from torchstrat.distributed.collectives.shared_memory.common_memory import (
    CommonMemory,
    Kind,
    Place,
    SharesMemory,
    kind_of,
)
from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies


class _StagedHome(NamedTuple):
    reference: weakref.ref[torch.Tensor]
    place: Place
    kind: Kind


class StagedParameters:
    """Which parameters of the device have a place in common memory. Only ``written`` of a place is used."""

    def __init__(self, copies: DeviceCopies) -> None:
        self.copies = copies
        self._homes: dict[int, _StagedHome] = {}

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        home = self._homes.get(id(tensor))
        return None if home is None or home.reference() is not tensor else home.place

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.place_of(tensor) is not None

    def move_in(self, tensor: torch.Tensor, place: Place, kind: Kind, *, is_first: bool) -> None:
        """``tensor`` has this place from now on, with the first rank's values, which stand there."""
        if not is_first:
            tensor.data.copy_(place.written)
        self._homes[id(tensor)] = _StagedHome(reference_of_entry(tensor, self._homes), place, kind)

    def take_left(self) -> list[torch.Tensor]:
        """Those that have got another shape, dtype or device. They have no place any more."""
        left = []
        for key, (reference, _, kind) in list(self._homes.items()):
            tensor = reference()
            if tensor is None:
                continue
            if tensor.dtype != kind.dtype or tensor.shape != kind.shape or not self.copies.has(tensor):
                del self._homes[key]
                left.append(tensor)
        return left

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy this rank's device copies into common memory; the first rank calls it, while no other reads there."""
        pairs = self._pairs(tensors)
        self.copies.read([tensor for tensor, _ in pairs], [written for _, written in pairs])

    def bring_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start overwriting this rank's device copies. Nobody may write to common memory until it has waited."""
        pairs = self._pairs(tensors)
        self.copies.to_device([written for _, written in pairs], [tensor for tensor, _ in pairs])

    def _pairs(self, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        places = ((tensor, self.place_of(tensor)) for tensor in tensors)
        return [(tensor.data, place.written) for tensor, place in places if place is not None]


def staged_kind_of(tensor: torch.Tensor) -> Kind | None:
    """Of its place in host memory: contiguous, whatever the device's copy is, so that copies need no memory between.

    None for tensors that have no place for every element, or whose elements are not numbers in memory.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return None
    return Kind(tuple(tensor.shape), tuple(torch.empty(tensor.shape, device="meta").stride()), tensor.dtype)


class _Home(NamedTuple):
    reference: weakref.ref[torch.Tensor]
    place: Place
    kind: Kind
    address: int
    """Of the place, as this rank is shown it."""
    number: int
    """The same on all ranks. A model that was dropped may go on one of them before it does on others."""

    def fits(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == self.kind.dtype and tensor.shape == self.kind.shape and tensor.is_cpu

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether its elements lie in the place."""
        return self.fits(tensor) and tensor.data_ptr() == self.address and tensor.stride() == self.kind.stride

    def again(self) -> _Home:
        """Once the memory is shown elsewhere."""
        place = self.place.memory.again(self.place, self.kind)
        return self._replace(place=place, address=place.shown.data_ptr())


class CentralParameters:
    """Which parameters lie in common memory, and where.

    ``copies``: of a rank on a device. Those of its parameters that lie there stay, and are ``staged``.
    """

    def __init__(self, copies: DeviceCopies | None = None) -> None:
        self.staged = None if copies is None else StagedParameters(copies)
        self._homes: dict[int, _Home] = {}
        self._moved_in = 0  # ever
        self._left: dict[int, weakref.ref[torch.Tensor]] = {}

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        home = self._homes.get(id(tensor))
        if home is not None and home.reference() is tensor:
            return home.place
        return None if self.staged is None else self.staged.place_of(tensor)

    def are_seen(self, tensor: torch.Tensor) -> bool:
        """Whether what all ranks see is the tensor itself, and no copy of it."""
        return tensor in self and (self.staged is None or tensor not in self.staged)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.place_of(tensor) is not None

    def memories(self) -> list[CommonMemory]:
        return list({id(home.place.memory): home.place.memory for home in self._homes.values()}.values())

    def places(self) -> dict[int, tuple[int, Place]]:
        """Of those that are not staged, with their ``id``, by numbers that are the same on all ranks."""
        return {home.number: (key, home.place) for key, home in self._homes.items()}

    def tensors(self) -> Iterable[torch.Tensor]:
        """Those by which the memory of parameters is held here."""
        return itertools.chain.from_iterable((home.place.shown, home.place.written) for home in self._homes.values())

    def moved_in(self) -> list[torch.Tensor]:
        tensors = (home.reference() for home in self._homes.values())
        return [tensor for tensor in tensors if tensor is not None]

    # -- moving in --------------------------------------------------------------------------------------------------

    def candidates(self, named: Mapping[str, torch.Tensor], stepped: Iterable[torch.Tensor]) -> dict[str, Kind]:
        """Those that could be moved, and are not: parameters of modules, and whatever an optimizer steps."""
        known = {id(tensor) for tensor in stepped}
        storages: dict[int, int] = {}
        for tensor in named.values():
            if tensor.layout == torch.strided and (tensor.device.type == "cpu" or self._is_staged(tensor)):
                pointer = tensor.untyped_storage().data_ptr()
                storages[pointer] = storages.get(pointer, 0) + 1
        found = {}
        for name, tensor in named.items():
            if tensor in self or not (isinstance(tensor, nn.Parameter) or id(tensor) in known):
                continue
            is_staged = self._is_staged(tensor)
            kind = staged_kind_of(tensor) if is_staged else kind_of(tensor)
            if kind is None or not kind.bytes or (tensor.is_shared() and not is_staged):
                continue
            if not is_staged and tensors_in_storage(tensor) > 1:
                continue  # the program has it by another tensor or array too, which is to show what steps make of it
            storage = tensor.untyped_storage()
            # One that shares its storage with another, or is a part of something larger, would be torn from it.
            if storage.nbytes() == kind.bytes and storages[storage.data_ptr()] == 1:
                found[name] = kind
        return found

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return self.staged is not None and self.staged.copies.has(tensor)

    def move_in(self, world: Communicator, tensors: list[torch.Tensor], kinds: list[Kind], call: str) -> None:
        """All ranks call it, with the same variables. The first rank's values are everyone's from then on.

        Raises `NoSharedMemoryError`, on every rank, where there is no room; nothing is changed then.
        """
        assert isinstance(world, SharesMemory)
        places = world.share_memory(kinds, call)
        if self.staged is not None and any(map(self._is_staged, tensors)):
            self.staged.copies.pin(places[0].memory)
        with torch.no_grad():
            if world.rank == 0:
                for tensor, place in zip(tensors, places, strict=True):
                    place.written.copy_(tensor)
            world.barrier(call)
            for tensor, kind, place in zip(tensors, kinds, places, strict=True):
                self._moved_in += 1
                if self.staged is not None and self._is_staged(tensor):
                    self.staged.move_in(tensor, place, kind, is_first=world.rank == 0)
                    continue
                tensor.data = place.shown
                self._keep(tensor, place, kind)

    def _keep(self, tensor: torch.Tensor, place: Place, kind: Kind) -> None:
        reference = reference_of_entry(tensor, self._homes)
        self._homes[id(tensor)] = _Home(reference, place, kind, place.shown.data_ptr(), self._moved_in)

    # -- edits ------------------------------------------------------------------------------------------------------

    def call_back(self) -> bool:
        """A program may have put another tensor in the place of a parameter's elements (``p.data = p.data * 0.9``).

        What has the same shape is an edit like any other. What has not, or would be torn from a larger tensor or from
        another parameter with the same elements, lives elsewhere from now on; whether any does.
        """
        has_left = self.staged is not None and self._let_staged_go(self.staged)
        away = {
            key: tensor
            for key, home in self._homes.items()
            if (tensor := home.reference()) is not None and not home.has(tensor)
        }
        if not away:
            return has_left
        tied = self._find_tied(away)
        away |= tied
        self._leave_what_is_held(away)
        for key, tensor in away.items():
            home = self._homes[key]
            if key not in tied and home.fits(tensor) and tensor.untyped_storage().nbytes() == home.kind.bytes:
                with torch.no_grad():
                    home.place.shown.copy_(tensor)
                tensor.data = home.place.shown
            else:
                del self._homes[key]
                self._left[key] = weakref.ref(tensor)
                has_left = True
        return has_left

    def _find_tied(self, away: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those that have one memory with another (``p.data = q.data``), which a place of its own would tear apart."""
        shown = {home.address: key for key, home in self._homes.items() if key not in away}
        in_memory: dict[int, dict[int, torch.Tensor]] = {}
        for key, tensor in away.items():
            in_memory.setdefault(tensor.data_ptr(), {})[key] = tensor
        for address, tensors in in_memory.items():
            other = self._homes[shown[address]].reference() if address in shown else None
            if other is not None:
                tensors[shown[address]] = other
        return {key: one for tensors in in_memory.values() if len(tensors) > 1 for key, one in tensors.items()}

    def _leave_what_is_held(self, away: Container[int]) -> None:
        """What a program has taken out of a parameter and still holds, to put it back or into another one, is its own:
        what is written to the parameter's place from now on is not to show there."""
        held: dict[int, list[torch.Tensor]] = {}
        for key, home in self._homes.items():
            memory, _, shown = home.place
            if key in away and tensors_in_storage(shown) > 1:
                held.setdefault(id(memory), []).append(shown)
        for memory in self.memories():
            if id(memory) in held:
                memory.show_anew(held[id(memory)])
        for key, home in self._homes.items() if held else ():
            if id(home.place.memory) in held:
                moved = home.again()
                tensor = home.reference()
                if key not in away and tensor is not None:
                    tensor.data = moved.place.shown
                self._homes[key] = moved

    def _let_staged_go(self, staged: StagedParameters) -> bool:
        left = staged.take_left()
        self._left.update({id(tensor): weakref.ref(tensor) for tensor in left})
        return bool(left)

    def take_left(self, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The names of those that live elsewhere since this was called last."""
        names = self.left(named)
        self._left = {}
        return names

    def left(self, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """What `take_left` will say."""
        return {name for name, tensor in named if id(tensor) in self._left and self._left[id(tensor)]() is tensor}

    def let_go(self, tensors: Iterable[torch.Tensor]) -> None:
        """As if this rank's program, too, had put other elements in the place of these, which live elsewhere now."""
        for tensor in tensors:
            if self._homes.pop(id(tensor), None) is not None:
                self._left[id(tensor)] = weakref.ref(tensor)
                tensor.data = tensor.detach().clone()

    # -- a step of one rank alone -----------------------------------------------------------------------------------

    def lead(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let these mean what all ranks see, for a step by this rank alone."""
        for tensor, place in self._in_places(tensors):
            tensor.data = place.written

    def follow(self, optimizer: Optimizer) -> None:
        """All mean again what this rank is shown, after a step of ``optimizer`` by this rank alone."""
        places = [*self._in_places(self.moved_in())]
        led = [(tensor, place.written) for tensor, place in places if tensor.data_ptr() != place.shown.data_ptr()]
        keep_elements(led, partial(kept_by, optimizer), holders=2)  # the parameter, and the place's own
        for tensor, place in places:
            tensor.data = place.shown

    def _in_places(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Place]]:
        for tensor in tensors:
            home = self._homes.get(id(tensor))
            if home is not None and home.reference() is tensor:
                yield tensor, home.place

    def stepped(self, tensors: Iterable[torch.Tensor]) -> None:
        """Somebody has written to these. Backward has to notice where it needs what was there before."""
        torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor in self])
