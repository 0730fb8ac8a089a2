"""How the replicas of a strategy run: the one interface behind `Strategy`, with two implementations.

`in_process` runs several replicas in this process, `per_process` one replica in each process of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from torchstrat import nest
from torchstrat.collectives.communicator import Communicator
from torchstrat.data.layout import InputLayout
from torchstrat.errors import StructureMismatchError
from torchstrat.memory import Copies
from torchstrat.reduction import Axis, ReduceOp
from torchstrat.values import PerReplica, Weights
from torchstrat.variables import VariableRegistry


class ReplicaStates(Protocol):
    """What the replicas of this process have for themselves, by what checkpoints call them: ``replica_<id>``, or
    ``lanes`` for one stream of random numbers of all replicas."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What ``state`` does not have begins with the seed in force."""


class MakesRounds(Protocol):
    """An engine whose replicas step variables of their own."""

    def end_round(self) -> None:
        """Bring them together now, between runs. Every process calls it."""


class ReplicaEngine(Protocol):
    """Runs functions on replicas and lets replicas talk to each other."""

    registry: VariableRegistry
    gradient_op: ReduceOp

    @property
    def num_replicas(self) -> int:
        """Replicas in the whole job."""

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """Ids of the replicas in this process."""

    @property
    def is_chief(self) -> bool: ...

    @property
    def layout(self) -> InputLayout: ...

    @property
    def communication(self) -> str:
        """How the replicas talk to each other, and why so, in words."""

    @property
    def everyone(self) -> Communicator | None:
        """All processes of the job, for calls that each has to make; None where this is the only one, or closed."""

    @property
    def rounds(self) -> MakesRounds | None:
        """None where replicas are equal between runs."""

    def device_of_replica(self, replica: int) -> str: ...

    @property
    def replica_states(self) -> ReplicaStates:
        """For checkpoints, and not during a run: the replicas' streams of random numbers, and with local steps the
        variables and optimizer state of each."""

    def copies(self) -> list[Copies]:
        """Who keeps how many copies of what, over all processes: the basis of memory estimates."""

    # cross-replica context
    def scope_opened(self) -> None: ...
    def scope_closed(self, *, failed: bool = False) -> None:
        """``failed``: by an exception, which other processes may not have seen; then nothing is exchanged."""

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...
    def reduce(self, op: ReduceOp, value: Any, axis: Axis) -> Any: ...

    def weighted_mean(self, value: Any) -> Any:
        """The mean of the components by what their replicas counted in the run that returned them."""

    def gather(self, value: Any, axis: int) -> Any: ...
    def set_no_sync(self, active: bool) -> None: ...

    def check_replicas(self, when: str) -> None:
        """Raise `ReplicaDriftError` where replicas have other values of what has to be equal. Collective."""

    def close(self) -> None: ...

    # replica context
    def all_reduce(self, op: ReduceOp, value: Any) -> Any: ...
    def all_gather(self, value: Any, axis: int) -> Any: ...
    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def set_weight(self, weight: float) -> None: ...

    def relative_weight(self) -> float:
        """How much the running replica counts in the mean gradient; 1 for each where a batch was split evenly."""

    def sync_batch_norm(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """Batch normalisation of ``x`` in training, over all replicas, where the engine has a way of its own; None: by
        `all_gather`."""


def regroup(results: dict[int, Any], weights: Weights | None = None, *, is_all: bool = True) -> Any:
    """What the replicas returned, as one value: the object itself where all returned the very same one, else leaves of
    `PerReplica` in the structure of the first replica's result, which the others' must match.

    ``is_all``: whether these are all replicas. Of a single one among several, which had all the rows of a step, nobody
    knows what the others would have returned: its tensors and numbers are its own.
    """
    ids = tuple(results)
    return _regroup(ids, [results[one] for one in ids], weights, is_one_of_several=len(ids) == 1 and not is_all)


_COPIED = (list, dict)  # what replicas share is not wrapped, but these are: one replica may have changed its own


def _regroup(ids: tuple[int, ...], values: list[Any], weights: Weights | None, *, is_one_of_several: bool) -> Any:
    first = values[0]
    if is_one_of_several and not nest.is_nested(first):
        return PerReplica(values, replica_ids=ids, weights=weights) if _is_own(first) else first
    is_one_object = all(value is first for value in values) and not is_one_of_several
    if is_one_object and not isinstance(first, _COPIED):
        return first
    if not nest.is_nested(first):
        return PerReplica(values, replica_ids=ids, weights=weights)
    for one, value in zip(ids, values, strict=True):
        _check_structure(ids[0], first, one, value)
    if isinstance(first, Mapping):
        columns = [[value[key] for value in values] for key in first]
    else:
        columns = [list(column) for column in zip(*values, strict=True)]
    return nest.rebuild(
        first, [_regroup(ids, column, weights, is_one_of_several=is_one_of_several) for column in columns]
    )


def _is_own(value: Any) -> bool:
    """Whether a replica's result is computed, and not some object that all replicas share."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter)
    return isinstance(value, int | float | complex | np.ndarray | np.generic) and not isinstance(value, bool)


def _check_structure(first_id: int, first: Any, one: int, value: Any) -> None:
    def shape(container: Any) -> str:
        if isinstance(container, Mapping):
            return f"a {type(container).__name__} with keys {list(container)}"
        if nest.is_nested(container):
            return f"a {type(container).__name__} of {len(container)}"
        return f"a {type(container).__name__}"

    same_kind = nest.is_nested(value) and (
        isinstance(value, Mapping) if isinstance(first, Mapping) else isinstance(value, type(first))
    )
    same_members = same_kind and (set(value) == set(first) if isinstance(first, Mapping) else len(value) == len(first))
    if not same_members:
        raise StructureMismatchError(
            f"replica {first_id} returned {shape(first)} and replica {one} {shape(value)}; every replica has to return "
            "the same structure of lists, tuples and dicts (leaves may differ)."
        )


def adoption_warning(adopted: list[str], strategy: Any) -> str:
    return (
        f"the step uses trainable variables that {type(strategy).__name__}.scope() has not seen: {', '.join(adopted)}."
        " They are treated as if made there; create modules, and the optimizer, within `with strategy.scope():`, and "
        "put a bare parameter into one of them."
    )
