"""What checkpoints keep of replicas that step variables of their own: each one's values, and where its round is."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchstrat.core.optimizers import stepped_by
from torchstrat.core.randomness import ROUND, ReplicaStreams
from torchstrat.core.variables import VariableRegistry
from torchstrat.replicas.local_rounds import LocalRounds
from torchstrat.replicas.roster import Roster

State = dict[Any, Any]
"""An optimizer's, by the tensor."""


class OwnValues(NamedTuple):
    """Of one replica, by names that are equal on all."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizers: list[State]


class ReplicaRounds:
    """The states of the replicas of this process, as `ReplicaEngine.replica_states`.

    ``rounds``: by replica, of the ``count`` that there are in all. ``read``: what one of them has; ``write``: give each
    what it is to have.
    """

    def __init__(
        self,
        streams: ReplicaStreams,
        rounds: Mapping[int, LocalRounds],
        count: int,
        optimizers: Callable[[], list[Optimizer]],
        read: Callable[[int], OwnValues],
        write: Callable[[dict[int, OwnValues]], None],
    ) -> None:
        self._streams = streams
        self._rounds = rounds
        self._count = count
        self._optimizers = optimizers
        self._read = read
        self._write = write

    def state_dict(self) -> dict[str, Any]:
        """As `ReplicaStreams`' with ``{"replica_0": {"round": {"steps": 3, "parameters": {...}, ...}}}``."""
        found = self._streams.state_dict()
        for replica, rounds in self._rounds.items():
            own = self._read(replica)
            found.setdefault(f"replica_{replica}", {})[ROUND] = {
                "steps": rounds.steps,
                "state": _copied(rounds.state),
                "parameters": _copied(own.parameters),
                "buffers": _copied(own.buffers),
                "optimizers": {
                    str(number): _by_place(optimizer, state)
                    for number, (optimizer, state) in enumerate(zip(self._optimizers(), own.optimizers, strict=True))
                },
            }
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; where there were more or fewer replicas, from the mean of their parameters, with a new
        round and the first one's optimizer state."""
        self._streams.load_state_dict(state)
        stored = _rounds_in(state)
        is_same = len(stored) == self._count
        mean = {} if is_same else mean_of(state)
        own = {}
        for replica, rounds in self._rounds.items():
            kept: Mapping[str, Any] = stored[replica] if is_same else {"parameters": mean}
            rounds.steps, rounds.state = kept.get("steps", 0), dict(kept.get("state", {}))
            optimizers = kept.get("optimizers", {})
            states = [_by_tensor(one, optimizers.get(str(n), {})) for n, one in enumerate(self._optimizers())]
            own[replica] = OwnValues(kept.get("parameters", {}), kept.get("buffers", {}), states if is_same else [])
        self._write(own)


def _rounds_in(state: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {int(name.removeprefix("replica_")): one[ROUND] for name, one in state.items() if ROUND in one}


def mean_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The mean of the parameters of all replicas that stepped their own, by name; empty if ``state`` is of others. The
    first one's where they are no floating numbers."""
    stored = _rounds_in(state)
    each = [stored[replica].get("parameters", {}) for replica in sorted(stored)]
    means = {}
    for name, first in each[0].items() if each else ():
        values = [one[name] for one in each if name in one]
        means[name] = torch.stack(values).mean(dim=0) if first.is_floating_point() or first.is_complex() else first
    return means


def put_values(registry: VariableRegistry, roster: Roster, own: OwnValues) -> None:
    """In the user's objects: parameters and buffers that still have these shapes, and the state of optimizers."""
    slots, parameters = registry.named_buffer_slots(), dict(roster.items())
    pairs = [(parameters.get(name), value) for name, value in own.parameters.items()]
    pairs += [(slots[name].tensor, value) for name, value in own.buffers.items() if name in slots]
    with torch.no_grad():
        for tensor, value in pairs:
            if tensor is not None and tensor.shape == value.shape:
                tensor.copy_(value)
    for optimizer, state in zip(registry.optimizers(), own.optimizers, strict=False):
        optimizer.state.clear()
        optimizer.state.update(state)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return {key: _copied(one) for key, one in value.items()} if isinstance(value, dict) else value


def _by_place(optimizer: Optimizer, state: State) -> dict[str, Any]:
    """Names of a checkpoint's are texts: a tensor's is its place in the optimizer."""
    tensors = stepped_by(optimizer)
    return {str(place): _copied(state[tensor]) for place, tensor in enumerate(tensors) if state.get(tensor)}


def _by_tensor(optimizer: Optimizer, kept: Mapping[str, Any]) -> State:
    state: State = collections.defaultdict(dict)
    for place, tensor in enumerate(stepped_by(optimizer)):
        for name, value in kept.get(str(place), {}).items():
            is_of_tensor = isinstance(value, torch.Tensor) and value.dim()
            state[tensor][name] = value.to(tensor.device) if is_of_tensor else value
    return state
