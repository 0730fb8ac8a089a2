"""What engines share: how much each replica of a run counts in the mean gradient, one value of what replicas returned,
what is added to an exception that a replica's own code raised, and warnings of what a step changes in objects of the
program's own.

Replicas of one process share these objects, so what each does to them is done once for each; a rank without rows does
not run the step, and does nothing. A sum over rows comes out as on one device that way, a count of steps
(``trainer.steps += 1``) or an average does not. Nobody can tell which was meant, so the numbers stay what the code
makes of them, and a warning names what has changed like that: a whole number that went up by exactly one for each
replica, a tensor that several have changed in place.
"""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from torchstrat.core import nest
from torchstrat.core._torch_private import POSITION_IN_LOADER, loader_iterator, version_of
from torchstrat.core.context import StrategyLike
from torchstrat.core.errors import InvalidArgumentError, StrategyMixingError, StructureMismatchError
from torchstrat.core.reachable import in_cell, is_library, slots_of
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.values import BatchInfo, PerReplica, Weights, select_replica


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

    def in_buffers(self, replicas: Sequence[int], weights: Sequence[float]) -> list[float]:
        """What ``replicas``, of these ``weights``, count in means of buffers: their rows, as statistics are over rows.
        One of weight 0 has no say: a batch without rows makes nan of a running mean."""
        counted = [float(weight > 0 or not any(weights)) for weight in weights]
        if self.batch is None or self._other is not None:
            return counted
        rows = [one * self.batch.rows[replica] for one, replica in zip(counted, replicas, strict=True)]
        return rows if any(rows) else counted


def _has_equal_shares(one: BatchInfo, other: BatchInfo) -> bool:
    """Whether every replica has the same part of both."""
    ours, theirs = sum(one.rows), sum(other.rows)
    return all(mine * theirs == its * ours for mine, its in zip(one.rows, other.rows, strict=True))


def inputs_of(
    replica: int, args: Sequence[object], kwargs: dict[str, object]
) -> tuple[list[object], dict[str, object]]:
    """Of a run's arguments what that replica is called with."""
    return [select_replica(replica, value) for value in args], select_replica(replica, kwargs) if kwargs else {}


def regroup(results: dict[int, object], weights: Weights | None = None, *, is_all: bool = True) -> Any:
    """What the replicas returned, as one value: the object itself where all returned the very same one, else leaves of
    `PerReplica` in the structure of the first replica's result, which the others' must match.

    ``is_all``: whether these are all replicas. Of a single one among several, which had all the rows of a step, nobody
    knows what the others would have returned: its tensors and numbers are its own.
    """
    ids = tuple(results)
    return _regroup(ids, [results[one] for one in ids], weights, is_one_of_several=len(ids) == 1 and not is_all)


_COPIED = (list, dict)  # what replicas share is not wrapped, but these are: one replica may have changed its own


def _regroup(ids: tuple[int, ...], values: list[Any], weights: Weights | None, *, is_one_of_several: bool) -> object:
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


def _is_own(value: object) -> bool:
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


def adoption_warning(adopted: list[str], strategy: StrategyLike) -> str:
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


_MOST = 64  # members of a list or a dictionary: longer ones hold data
_ITERATORS = frozenset({type(iter(range(0))), type(iter([])), type(iter(()))})
_POSITION = "the position of a DataLoader's iterator"


_OF_COUNTS = (
    "If it counts steps, count outside of Strategy.run, or keep it as an attribute or a buffer of a module, or as a "
    "ts.Variable."
)
_REMEDIES = {
    _POSITION: "Take the batch outside of Strategy.run, and give the step each replica's rows of it: for one, other in "
    "zip(strategy.distribute_dataset(loader), strategy.distribute_dataset(other_loader)): strategy.run(step, "
    "args=(one, other))."
}


def _itself(value: object) -> object:
    return value


@functools.lru_cache(maxsize=1024)
def _set_globals(code: types.CodeType) -> tuple[str, ...]:
    """Names that it assigns to with ``global``, and the functions defined in it."""
    own = [one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL"]
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _set_globals(one)]
    return (*own, *inner)


def _numbers_in(holder: Any) -> dict[str, int]:
    """What a program may count with, by names for a message."""
    kind, found = type(holder), dict[str, Any]()
    if isinstance(holder, loader_iterator):
        found = {_POSITION: vars(holder).get(POSITION_IN_LOADER)}
    elif kind in (list, collections.deque):
        found = {f"element {i} of a {kind.__name__}": one for i, one in enumerate(itertools.islice(holder, _MOST))}
    elif kind in (dict, collections.Counter, collections.defaultdict, collections.OrderedDict):
        found = {f"{key!r} of a {kind.__name__}": one for key, one in itertools.islice(holder.items(), _MOST)}
    elif kind is types.GeneratorType:
        frame = holder.gi_frame
        found = {f"{key} in {holder.__name__}()": one for key, one in (frame.f_locals if frame else {}).items()}
    elif kind in _ITERATORS:
        found = {f"the position of a {kind.__name__}": -operator.length_hint(holder)}
    elif kind is itertools.count:
        text = repr(holder).removeprefix("count(").removesuffix(")")
        found = {"itertools.count()": int(text) if text.isdecimal() else None}
    elif isinstance(holder, type | types.FunctionType):
        found = {f"{holder.__name__}.{key}": one for key, one in vars(holder).items()}
        if isinstance(holder, types.FunctionType):
            found |= {f"the global {key}": holder.__globals__.get(key) for key in _set_globals(holder.__code__)}
            cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
            found |= {f"{key} of the function around {holder.__name__}()": in_cell(cell) for key, cell in cells}
    elif isinstance(holder, types.SimpleNamespace) or not (
        isinstance(holder, nn.Module) or is_library(kind.__module__)
    ):
        found = {f"{kind.__name__}.{key}": one for key, one in getattr(holder, "__dict__", {}).items()}
        found |= {f"{kind.__name__}.{key}": getattr(holder, key, None) for key in slots_of(kind)}
    return {key: value for key, value in found.items() if type(value) is int}


class StepCounts:
    """Whole numbers that a step reaches, in one run of a strategy after the other: in objects of the program's own, and
    in a step's first run in lists, globals and the like; and how far iterators of loaders are, from which a step takes
    batches."""

    def __init__(self) -> None:
        self._before: list[tuple[Callable[[], object], dict[str, int]]] = []
        self._told: set[str] = set()

    def begin(self, objects: Sequence[weakref.ref[object]], reached: Sequence[object] = ()) -> None:
        """A run begins, whose step reaches these objects. ``reached``: all that a new step reaches."""
        places: list[Callable[[], object]] = [*objects]
        if reached:
            known = {id(reference()) for reference in objects}
            places += [functools.partial(_itself, one) for one in reached if id(one) not in known]
        self._before = [(place, numbers) for place in places if (numbers := _numbers_in(place()))]

    def grown_by(self, number: int) -> list[str]:
        """The run has ended: what has grown by exactly ``number``, as ``Class.attribute``."""
        before, self._before = self._before, []
        found = []
        for place, numbers in before:
            now = _numbers_in(place())
            found += [name for name, value in numbers.items() if now.get(name) == value + number]
        return found

    def warn_of_shared(self, replicas: int) -> None:
        """The run has ended, of so many replicas in this process."""
        self._warn(
            self.grown_by(replicas),
            f"has grown by {replicas} in one run: the {replicas} replicas of this process share it, and each has "
            "added 1, where a step on one device adds 1.",
        )

    def warn_of_missed(self, names: Iterable[str]) -> None:
        """The run has ended, and the step, which this process did not run, has added 1 to these elsewhere."""
        self._warn(
            names,
            "has grown by 1 in a run in which this process had no rows: it did not run the step, and what it "
            "has is as it was.",
        )

    def _warn(self, names: Iterable[str], what: str) -> None:
        for name in names:
            if name not in self._told:
                self._told.add(name)
                warnings.warn(f"{name} {what} {_REMEDIES.get(name, _OF_COUNTS)}", stacklevel=6)


class PlainTensors:
    """Tensors in closures, lists, objects of the program's own, in one run of a strategy after the other."""

    def __init__(self) -> None:
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._changed_by: dict[int, set[int]] = {}
        self._is_told = False

    def begin(self, tensors: Iterable[torch.Tensor], others: Container[int]) -> None:
        """A run begins. ``others``: the ``id`` of tensors that change hands."""
        self._changed_by = {}
        if self._is_told:
            return
        known = [one for one in tensors if id(one) not in others and not one.is_inference()]
        self._versions = [(one, version_of(one)) for one in known]

    def park(self, replica: int) -> None:
        """The turn of ``replica`` ends."""
        for place, (tensor, version) in enumerate(self._versions):
            if version_of(tensor) != version:
                self._versions[place] = tensor, version_of(tensor)
                self._changed_by.setdefault(place, set()).add(replica)

    def end(self) -> None:
        versions, self._versions = self._versions, []
        found = [versions[place][0] for place, replicas in self._changed_by.items() if len(replicas) > 1]
        if not found:
            return
        self._is_told = True
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.warn(
            f"the step changes a tensor of shape {tuple(found[0].shape)}{more} in place, which is in no module: in a "
            "closure, a list or an object of the program's own. The replicas of this process share it, and each has "
            "changed it, one after the other: what adds up has added up over all of them, but an average has moved "
            "once for each. State that all replicas change alike, to be changed once, belongs into a module as a "
            "buffer or a frozen parameter (torch.nn.Parameter(tensor, requires_grad=False)), or is changed outside of "
            "Strategy.run; return from the step what counts rows. Under torchrun each process has such a tensor for "
            "itself.",
            stacklevel=2,
        )
