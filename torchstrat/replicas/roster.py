"""The variables that take part in a run, under names that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch.nn.parameter import is_lazy

from torchstrat.collectives.communicator import Communicator
from torchstrat.errors import ReplicaDivergenceError
from torchstrat.replicas.agreement import code
from torchstrat.variables import VariableRegistry

Signature = tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]


class Roster:
    """Tensors in one order on all ranks: what an index into them means is what ranks tell each other about.

    Ranks may hold different ones for a while: a model that the program dropped lives on where Python has not yet
    collected it. ``digest`` tells whether they do, and `in_common` leaves what all of them hold.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self.names = tuple(named)
        self.tensors = list(named.values())
        self.signature: Signature = tuple((name, t.shape, t.dtype, t.device) for name, t in named.items())

    @property
    def digest(self) -> float:
        """Equal on all ranks that hold the same variables."""
        return _digest(self.signature)

    def only(self, names: Container[str]) -> Roster:
        return Roster({name: tensor for name, tensor in self.items() if name in names})

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


_latest: tuple[Signature, float] = ((), 0.0)


def _digest(signature: Signature) -> float:
    global _latest
    if signature != _latest[0]:
        text = repr([(name, tuple(shape), str(dtype)) for name, shape, dtype, _ in signature])
        _latest = signature, code(text)
    return _latest[1]


def roster_of(registry: VariableRegistry) -> Roster:
    """All variables that have values by now."""
    return Roster({name: tensor for name, tensor in registry.named_tensors().items() if not is_lazy(tensor)})
