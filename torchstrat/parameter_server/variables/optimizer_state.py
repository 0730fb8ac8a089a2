"""State of optimizers that parameter servers step: ``optimizer.state`` on the coordinator and workers asks for it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from torchstrat.checkpoint.pieces import goes_by_rows
from torchstrat.parameter_server.messages import ShardKey, StateOfShard, VariableSpec
from torchstrat.parameter_server.variables.placement import pieces
from torchstrat.parameter_server.variables.server_group import ServerGroup
from torchstrat.parameter_server.variables.variable_access import shard_keys

_Result = TypeVar("_Result")


class StateKeeper(Protocol):
    """Where the state is."""

    def is_current(self) -> bool:
        """Whether what was read last may be used still."""

    def read(self) -> Mapping[torch.Tensor, StateOfShard]: ...

    def change(self, state: RemoteOptimizerState, make: Callable[[], _Result]) -> _Result:
        """``make()``, which changes entries of ``state``; or an error, where that is not done here."""


class RemoteOptimizerState(collections.defaultdict[torch.Tensor, dict[str, Any]]):
    """``optimizer.state``: parameter → its state, as the servers have it. What it holds beside that is what was read
    last; ``dict.items(state)`` gives that without asking."""

    def __init__(self, keeper: StateKeeper, held: Mapping[torch.Tensor, StateOfShard]) -> None:
        super().__init__(dict, held)
        self._keeper = keeper
        self._noted = _marks(self)

    def refresh(self) -> None:
        """Read it, whether it is current or not."""
        read = self._keeper.read()
        own = {key: value for key, value in dict.items(self) if not isinstance(key, torch.Tensor)}  # no parameter's
        dict.clear(self)
        dict.update(self, {**own, **read})
        self.note()

    def note(self) -> None:
        """The servers have what it holds."""
        self._noted = _marks(self)

    def is_changed(self) -> bool:
        """Whether entries, or their tensors in place, have changed since."""
        return bool(self._noted or dict.__len__(self)) and _marks(self) != self._noted

    def holds(self, other: Mapping[torch.Tensor, StateOfShard]) -> bool:
        """Whether ``other`` has the values that were read: a ``load_state_dict`` of what ``state_dict`` gave."""
        there = {tensor: entry for tensor, entry in other.items() if entry}
        here = {tensor: entry for tensor, entry in dict.items(self) if entry}
        return there.keys() == here.keys() and all(_are_equal(entry, here[tensor]) for tensor, entry in there.items())

    def _fill(self) -> None:
        if not self._keeper.is_current():
            self.refresh()

    def __getitem__(self, tensor: torch.Tensor) -> dict[str, Any]:
        """An empty entry for a parameter without state, as everywhere; that changes nothing."""
        self._fill()
        if not dict.__contains__(self, tensor):
            dict.__setitem__(self, tensor, {})
        return dict.__getitem__(self, tensor)

    def __repr__(self) -> str:
        """Never waits for a server: debuggers and loggers call it."""
        return repr(dict(dict.items(self))) if self._keeper.is_current() else "<optimizer state on parameter servers>"

    def __reduce__(self) -> Any:
        self._fill()
        return collections.defaultdict, (dict, dict(dict.items(self)))

    def __copy__(self) -> Any:
        return self.copy()

    def copy(self) -> Any:
        self._fill()
        return collections.defaultdict(dict, dict(dict.items(self)))


def _reading(name: str) -> Callable[..., Any]:
    method = getattr(collections.defaultdict, name)

    def read(self: RemoteOptimizerState, *args: Any, **kwargs: Any) -> Any:
        self._fill()
        return method(self, *args, **kwargs)

    return read


def _changing(name: str) -> Callable[..., Any]:
    method = getattr(collections.defaultdict, name)

    def change(self: RemoteOptimizerState, *args: Any, **kwargs: Any) -> Any:
        return self._keeper.change(self, lambda: method(self, *args, **kwargs))

    return change


for _name in ("__iter__", "__len__", "__contains__", "__eq__", "get", "keys", "values", "items"):
    setattr(RemoteOptimizerState, _name, _reading(_name))
for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(RemoteOptimizerState, _name, _changing(_name))


def _marks(state: RemoteOptimizerState) -> list[Any]:
    """What is another when an entry is replaced, or a tensor in it changed in place. An empty entry, which comes into
    being when somebody asks for it, is like none."""
    marks: list[Any] = []
    for tensor, entry in dict.items(state):
        if entry:
            marks.append(id(tensor))
            marks += [
                (name, id(value), value._version) if isinstance(value, torch.Tensor) else (name, value)
                for name, value in entry.items()
            ]
    return marks


def _are_equal(one: StateOfShard, other: StateOfShard) -> bool:
    return one.keys() == other.keys() and all(
        bool(torch.equal(value, other[name])) if isinstance(value, torch.Tensor) else bool(value == other[name])
        for name, value in one.items()
    )


def read_state(
    servers: ServerGroup, optimizer: int, specs: Mapping[torch.Tensor, VariableSpec]
) -> dict[torch.Tensor, StateOfShard]:
    """The state of an optimizer, by its number; of parameters that have any."""
    wanted = shard_keys(specs.values())
    answers = servers.ask("ps.optimizer_state", {server: (optimizer, keys) for server, keys in wanted.items()})
    states: dict[ShardKey, StateOfShard] = {
        key: state for of_server in answers.values() for key, state in of_server.items()
    }
    found = {}
    for tensor, spec in specs.items():
        parts = [states.get((spec.number, shard)) for shard in range(len(spec.shards))]
        if parts[0]:
            found[tensor] = join_state(spec, parts)
    return found


def split_state(spec: VariableSpec, state: StateOfShard) -> list[StateOfShard]:
    """An optimizer's state of a whole variable, for each of its shards: what goes by rows is cut, the rest copied."""
    parts: list[StateOfShard] = [{} for _ in spec.shards]
    for name, value in state.items():
        cut = bool(spec.shape) and goes_by_rows(value, spec.shape[0], spec.shape)
        values = [part.contiguous() for part in pieces(spec, value)] if cut else [value] * len(parts)
        for part, own in zip(parts, values, strict=True):
            part[name] = own
    return parts


def join_state(spec: VariableSpec, parts: Sequence[StateOfShard | None]) -> StateOfShard:
    """The reverse of `split_state`."""
    first, shape = parts[0] or {}, spec.shard_shape(0)
    joined: StateOfShard = {}
    for name, value in first.items():
        is_cut = len(parts) > 1 and goes_by_rows(value, shape[0], shape)
        joined[name] = torch.cat([(part or first)[name] for part in parts]) if is_cut else value
    return joined
