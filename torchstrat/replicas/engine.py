"""The engine of a strategy, which runs its replicas: one interface with two implementations.

`in_process` runs several replicas in this process, `per_process` one replica in each process of a job. Here is also how
much each replica of a run counts in the mean gradient, and what is added to an exception that its own code raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError, StrategyMixingError, StructureMismatchError
from torchstrat.core.memory import Copies
from torchstrat.core.reduction import Axis, ReduceOp
from torchstrat.core.values import BatchInfo, PerReplica, Weights
from torchstrat.core.variables import VariableRegistry
from torchstrat.data.layout import InputLayout
from torchstrat.distributed.collectives.communicator import Communicator


class StepWeights:
    """The weights of one run: rows where an input pipeline made the batch, else 1; `set_weight` overrides.

    ``batches``: in the order of the run's arguments. Of several the first one's rows count, if replicas have the same
    share of all; else nothing says how much a replica counts, and what needs it raises.
    """

    def __init__(self, replicas: Iterable[int], batches: Sequence[BatchInfo] = ()) -> None:
        everyone = list(replicas)
        self.batches = tuple(batches)
        self.batch = batches[0] if batches else None
        self._said: dict[int, float | None] = {}
        self._other: BatchInfo | None = None
        self._spans_replicas = False
        if self.batch is None:
            self._rows = dict.fromkeys(everyone, 1.0)
            self.active = everyone
        else:
            first = self.batch
            if everyone and max(everyone) >= min(len(one.rows) for one in batches):
                raise StrategyMixingError(
                    f"run was given a batch that another strategy has split over {len(first.rows)} replicas; replica "
                    f"{max(everyone)} of this one has no part of it. Distribute the dataset by the strategy that runs "
                    "the step."
                )
            self._other = next((one for one in batches[1:] if not _has_equal_shares(first, one)), None)
            counted = batches if self._other is not None else [first]
            self._rows = {replica: float(sum(one.rows[replica] for one in counted)) for replica in everyone}
            runs_empty = any(one.run_empty for one in batches)
            self.active = [replica for replica in everyone if self._rows[replica] > 0 or runs_empty]
        self._weights = dict(self._rows)

    def override(self, replica: int, weight: float) -> None:
        self._weights[replica] = self._said[replica] = weight

    def hide(self, replica: int) -> None:
        """The step has given it a weight that cannot be looked at here."""
        self._said[replica] = None

    def span_replicas(self) -> None:
        """The step has taken a loss over all replicas together, whose gradient no weight changes."""
        self._spans_replicas = True

    @property
    def are_said(self) -> bool:
        """Whether the step has called `set_weight`."""
        return bool(self._said)

    def known(self, replica: int) -> float | None:
        """As `of`, but None where neither a batch's rows nor the step said it."""
        rows = None if self.batch is None or self._other is not None else float(self.batch.rows[replica])
        return self._said.get(replica, rows)

    def of(self, replica: int) -> float:
        return self._weights[replica]

    def of_gradients(self, op: ReduceOp, replica: int) -> float:
        """`of`, for gradients. Raises `InvalidArgumentError` for their mean where batches do not agree about it."""
        if op is ReduceOp.MEAN and self._other is not None and not self._said and not self._spans_replicas:
            assert self.batch is not None
            raise InvalidArgumentError(
                f"the run has batches of which replicas have different shares: {list(self.batch.rows)} rows of one and "
                f"{list(self._other.rows)} of another, so that no one weight of a replica gives both their gradients "
                "of one device. Leave the smaller last batches out (drop_last=True), take each loss over the global "
                "batch by ts.global_mean(sum of a replica's losses, its rows), or say what counts: "
                "ts.get_replica_context().set_weight(len(x)) before backward."
            )
        return self._weights[replica]

    def relative(self, replica: int) -> float:
        """The weight of a replica where those of a batch that was split evenly are 1, so that nothing is rounded."""
        rows = [] if self.batch is None else [self._rows[one] for one in self.active]
        mean = sum(rows) / len(rows) if any(rows) else 1.0
        return self._weights[replica] / mean

    def values(self) -> list[float]:
        """Of the replicas that take part, in their order. When none has any weight they count alike."""
        weights = [self._weights[replica] for replica in self.active]
        return weights if any(weights) else [1.0] * len(weights)

    def rows_of(self, replica: int) -> int | None:
        return None if self.batch is None else self.batch.rows[replica]


def _has_equal_shares(one: BatchInfo, other: BatchInfo) -> bool:
    """Whether every replica has the same part of both."""
    ours, theirs = sum(one.rows), sum(other.rows)
    return all(mine * theirs == its * ours for mine, its in zip(one.rows, other.rows, strict=True))


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

    def span_replicas(self) -> None:
        """What the running replica differentiates may come over from others, by their weights."""

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


def add_replica_note(error: Exception, replica: int, num_replicas: int, weights: StepWeights) -> None:
    """Name the replica, and its rows where these may be the reason. The exception stays the user's own object."""
    note = f"Raised on replica {replica} of {num_replicas}."
    rows = weights.rows_of(replica)
    if rows is not None and weights.batch is not None:
        total = sum(weights.batch.rows)
        note += f" It had {rows} of the {total} rows of this batch."
        if rows <= 1 or rows < max(weights.batch.rows):
            note += " If the step cannot work on so few, set drop_last=True on the loader or use a larger batch."
    if num_replicas > 1 and "through the graph a second time" in str(error):
        note += (
            " If replicas run in one process, they share Python objects: a graph that one has left in a list or object "
            "of the program's is used up by another. Keep it in an attribute of a module, or return it from the step."
        )
    add_note(error, note)


def add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10 has no notes
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
