"""Layers and parameters that the step of a replica puts in the place of others."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from torchstrat.core._torch_private import own_children, own_parameters
from torchstrat.core.errors import ReplicaDivergenceError


class _Place(NamedTuple):
    """Of a child or a parameter."""

    module: nn.Module
    name: str
    before: object
    """What was there when the run began."""
    own: dict[int, object]
    """What replicas have put there."""

    @property
    def table(self) -> dict[str, Any]:
        return own_parameters(self.module) if isinstance(self.before, torch.Tensor) else own_children(self.module)


class ReplacedMembers:
    """Children and parameters in whose place replicas put others in a run (a new head). The dictionaries are common to
    all: each replica finds there what was there before, and from then on its own; what is left is the leader's."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], _Place] = {}

    def begin(self) -> None:
        self._places = {}

    def note(self, module: nn.Module, name: str, member: object) -> bool:
        """The replica whose turn it is is about to set that. Whether it takes another one's place."""
        if (id(module), name) in self._places:
            return True
        members = own_parameters(module) if isinstance(member, torch.Tensor) else own_children(module)
        before = dict(members.items()).get(name)
        if before is None or before is member or isinstance(module, torch.jit.ScriptModule):
            return False
        self._places[id(module), name] = _Place(module, name, before, {})
        return True

    def park(self, replica: int) -> None:
        for place in self._places.values():
            now = place.table.get(place.name)
            if now is not place.before:
                place.own[replica] = now
                place.table[place.name] = place.before

    def install(self, replica: int) -> None:
        for place in self._places.values():
            if replica in place.own:
                place.table[place.name] = place.own[replica]

    def refuse_of_some(self, replicas: list[int]) -> None:
        for place in self._places.values():
            missing = [one for one in replicas if one not in place.own]
            if missing and len(missing) < len(replicas):
                raise ReplicaDivergenceError(
                    f"{', '.join(f'replica {one}' for one in place.own)} put another {type(place.before).__name__} in "
                    f"the place of {type(place.module).__name__}.{place.name}, and "
                    f"{', '.join(f'replica {one}' for one in missing)} did not. Every replica's code has to do so, or "
                    "none: decide by what is the same for all, such as an argument of the step or an attribute of a "
                    "module, or do it between runs."
                )

    def end(self) -> None:
        self._places = {}
