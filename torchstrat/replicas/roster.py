"""The variables that take part in a run, under names that are equal on all ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from torchstrat.core.communicator import Communicator
from torchstrat.core.errors import ReplicaDivergenceError
from torchstrat.core.variables import Members, VariableRegistry
from torchstrat.distributed.collectives.agreement import code

Signature = tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]


class Layout:
    """What is known of the variables of a roster without holding them. It stays the same object while they stay the
    same, so what follows from them need not be found out in every run."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self.names = tuple(named)
        self.index = {id(tensor): place for place, tensor in enumerate(named.values())}
        self.signature: Signature = tuple((name, t.shape, t.dtype, t.device) for name, t in named.items())
        self._known = [(weakref.ref(tensor), tensor.shape, tensor.dtype, tensor.device) for tensor in named.values()]

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are its variables."""
        return [id(known[0]()) for known in self._known] == list(map(id, tensors))

    def describes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """The same, with the shapes and dtypes, and on the devices, that they had."""
        if len(tensors) != len(self._known):
            return False
        for tensor, (reference, shape, dtype, device) in zip(tensors, self._known, strict=True):
            if reference() is not tensor or tensor.dtype is not dtype:
                return False
            if tensor.shape != shape or tensor.device != device:
                return False
        return True

    @functools.cached_property
    def digest(self) -> float:
        return code(repr([(name, tuple(shape), str(dtype)) for name, shape, dtype, _ in self.signature]))


class Roster:
    """Tensors in one order on all ranks: what an index into them means is what ranks tell each other about.

    Ranks may hold different ones for a while: a model that the program dropped lives on where Python has not yet
    collected it. ``digest`` tells whether they do, and `in_common` leaves what all of them hold.
    """

    def __init__(self, tensors: list[torch.Tensor], layout: Layout) -> None:
        self.tensors, self.layout = tensors, layout

    @staticmethod
    def of(named: Mapping[str, torch.Tensor]) -> Roster:
        return Roster(list(named.values()), Layout(named))

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def signature(self) -> Signature:
        return self.layout.signature

    @property
    def digest(self) -> float:
        """Equal on all ranks that hold the same variables."""
        return self.layout.digest

    def only(self, names: Container[str]) -> Roster:
        return Roster.of({name: tensor for name, tensor in self.items() if name in names})

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self.names, self.tensors, strict=True))

    def in_common(self, communicator: Communicator, call: str) -> Roster:
        """Those that every rank has. All ranks call it, when digests differ."""
        own = {name: (tuple(shape), str(dtype)) for name, shape, dtype, _ in self.signature}
        everyone = communicator.all_gather_object(own, call)
        for name in own:
            kinds = [other.get(name) for other in everyone]
            if None not in kinds and any(kind != kinds[0] for kind in kinds):
                each = ", ".join(f"{kind} on replica {r}" for r, kind in zip(communicator.ranks, kinds, strict=True))
                raise ReplicaDivergenceError(
                    f"{name} is not the same variable on all replicas: {each} (noticed in {call}). Every replica has "
                    "to create the same modules in the same order, and give lazy ones inputs of the same size."
                )
        return self.only({name for name in own if all(name in other for other in everyone)})


class Rosters:
    """Calls the roll of a registry. ``is_only``: no other process has variables that could be of other kinds."""

    def __init__(self, registry: VariableRegistry, *, is_only: bool = False) -> None:
        self._registry = registry
        self.describe = registry.describe
        self._is_only = is_only
        self._latest = Layout({})
        self._counts = (0, 0, 0)
        self._places: list[int | str] = []

    def now(self, members: Members | None = None) -> Roster:
        """All variables that have values by now. ``members``: of the registry, if they have just been looked up."""
        members = self._registry.members() if members is None else members
        tensors = members.tensors
        # A tensor that an optimizer has brought may get another name once a step reaches it.
        is_known = self._latest.is_of if self._is_only else self._latest.describes
        # The same tensors in the same order may have other names: pruning makes of ``weight`` a ``weight_orig``.
        is_same = self._counts == self._registry.counts and self._places == members.places
        if not is_same or not is_known(tensors):
            self._counts, self._places = self._registry.counts, members.places
            named = {
                name: tensor
                for name, tensor in self._registry.named_tensors().items()
                if not is_lazy(tensor) and not tensor.is_meta
            }
            self._latest = Layout(named)
            tensors = list(named.values())
        return Roster(tensors, self._latest)
