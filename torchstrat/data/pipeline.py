"""Datasets that are read in one pass, and the few transformations that turn them into global batches.

They are `torch.utils.data.IterableDataset`, so a `DataLoader` takes them too. Every transformation returns a new
dataset and reads nothing. The roots, which read something, are in `torchstrat.data.datasets`. A pipeline whose root
reads files has ``files`` and ``open(files)``, which is what the FILE policy asks of any dataset.
"""

from __future__ import annotations

import itertools
import operator
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchstrat import nest
from torchstrat.data import rows, spec
from torchstrat.data.streams import cut_stream
from torchstrat.errors import InvalidArgumentError

SHARD_HINT: Final = -1
"""``dataset.shard(SHARD_HINT, SHARD_HINT)`` marks where the HINT policy shards: by process, once that is known."""

UNKNOWN_CARDINALITY: Final = -2
INFINITE_CARDINALITY: Final = -1

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class View:
    """What one process reads of a pipeline: its files (None: all) and its share at a hinted shard (None: all)."""

    files: tuple[PathLike, ...] | None = None
    hint: tuple[int, int] | None = None


class Pipeline(IterableDataset[Any]):
    """Base of the datasets in this file. Iterating it reads everything, in order."""

    batch_size: int | None = None
    """Rows of a full batch, where `batch` declared it."""
    drop_remainder: bool = False

    @abstractmethod
    def read(self, view: View) -> Iterator[nest.Nest]:
        """The elements that ``view`` leaves, in order."""

    @property
    @abstractmethod
    def element_spec(self) -> nest.Nest:
        """A nest of `TensorSpec`."""

    @property
    @abstractmethod
    def cardinality(self) -> int:
        """Number of elements, `UNKNOWN_CARDINALITY` or `INFINITE_CARDINALITY`."""

    @property
    def hinted(self) -> bool:
        """Whether ``shard(SHARD_HINT, SHARD_HINT)`` is part of the pipeline."""
        return False

    def __iter__(self) -> Iterator[nest.Nest]:
        worker = get_worker_info()
        if worker is None:
            return self.read(View())
        # In a DataLoader's worker process: every worker reads all and keeps its turn, so that `take` and `repeat`
        # mean the same for any number of workers.
        return itertools.islice(self.read(View()), worker.id, None, worker.num_workers)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Pipeline:
        """Stack ``batch_size`` consecutive elements; the last batch may be shorter unless ``drop_remainder``."""
        return _Batch(self, _positive(batch_size, "batch_size"), drop_remainder)

    def unbatch(self) -> Pipeline:
        """The rows of every element, one by one."""
        return _Unbatch(self)

    def map(self, fn: Callable[[Any], Any]) -> Pipeline:
        """``fn(element)`` for every element."""
        return _Map(self, fn)

    def take(self, count: int) -> Pipeline:
        """The first ``count`` elements."""
        return _Take(self, count)

    def repeat(self, count: int | None = None) -> Pipeline:
        """Everything ``count`` times over; None: without end."""
        return _Repeat(self, count)

    def shard(self, num_shards: int, index: int) -> Pipeline:
        """Every ``num_shards``-th element from ``index`` on. ``shard(SHARD_HINT, SHARD_HINT)``: see `SHARD_HINT`."""
        if (num_shards, index) != (SHARD_HINT, SHARD_HINT) and not 0 <= index < _positive(num_shards, "num_shards"):
            raise InvalidArgumentError(f"shard index={index} must be from 0 to {num_shards - 1}.")
        return _Shard(self, num_shards, index)

    def rebatch(self, batch_sizes: int | Sequence[int], drop_remainder: bool = False) -> Pipeline:
        """The same rows in batches of ``batch_sizes``, in turn and cyclically."""
        sizes = [batch_sizes] if isinstance(batch_sizes, int) else list(batch_sizes)
        return _Rebatch(self, sizes, drop_remainder)


@dataclass(eq=False)
class _Transformed(Pipeline):
    """A pipeline made from another one. What it does not change is its source's."""

    source: Pipeline

    def __post_init__(self) -> None:
        self.batch_size = self.source.batch_size
        self.drop_remainder = self.source.drop_remainder

    def __getattr__(self, name: str) -> Any:
        # Only a pipeline over files has these two names; having them is what makes it a file source.
        if name == "files" and "source" in vars(self):
            return self.source.files  # type: ignore[attr-defined]
        if name == "open" and "source" in vars(self) and hasattr(self.source, "open"):
            return lambda files: self.read(View(files=tuple(files)))
        raise AttributeError(f"{type(self).__name__.lstrip('_')} dataset has no attribute {name!r}")

    @property
    def hinted(self) -> bool:
        return self.source.hinted

    @property
    def element_spec(self) -> nest.Nest:
        return self.source.element_spec

    @property
    def cardinality(self) -> int:
        return self.source.cardinality


@dataclass(eq=False)
class _Batch(_Transformed):
    rows_per_batch: int
    drops: bool = False

    def __post_init__(self) -> None:
        self.batch_size, self.drop_remainder = self.rows_per_batch, self.drops

    def read(self, view: View) -> Iterator[nest.Nest]:
        elements = self.source.read(view)
        while batch := list(itertools.islice(elements, self.rows_per_batch)):
            if len(batch) == self.rows_per_batch or not self.drops:
                yield nest.map_structure(lambda *column: _stack(column), *batch)

    @property
    def element_spec(self) -> nest.Nest:
        return spec.batched(self.source.element_spec, self.rows_per_batch if self.drops else None)

    @property
    def cardinality(self) -> int:
        count = self.source.cardinality
        if count < 0:
            return count
        return count // self.rows_per_batch if self.drops else -(-count // self.rows_per_batch)


def _stack(column: Sequence[Any]) -> Any:
    if isinstance(column[0], str | bytes):
        return np.array(column, dtype=object)
    if isinstance(column[0], np.ndarray):
        return np.stack(column)
    return torch.stack([torch.as_tensor(value) for value in column])


@dataclass(eq=False)
class _Unbatch(_Transformed):
    def __post_init__(self) -> None:
        self.batch_size, self.drop_remainder = None, False

    def read(self, view: View) -> Iterator[nest.Nest]:
        for batch in map(rows.to_tensors, self.source.read(view)):
            for index in range(rows.count_rows(batch)):
                yield rows.map_rows(operator.itemgetter(index), batch)

    @property
    def element_spec(self) -> nest.Nest:
        return nest.map_structure(lambda leaf: spec.TensorSpec(leaf.shape[1:], leaf.dtype), self.source.element_spec)

    @property
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY


@dataclass(eq=False)
class _Map(_Transformed):
    fn: Callable[[Any], Any]

    def read(self, view: View) -> Iterator[nest.Nest]:
        return map(self.fn, self.source.read(view))

    @property
    def element_spec(self) -> nest.Nest:
        with spec.undisturbed_randomness():
            first = next(iter(self.read(View())), None)
        if first is None:
            raise InvalidArgumentError("element_spec of a mapped dataset without elements is not known.")
        fixed = all(leaf.shape[:1] != (None,) for leaf in nest.leaves(self.source.element_spec))
        return spec.spec_of(rows.to_tensors(first), rows_fixed=fixed)


@dataclass(eq=False)
class _Take(_Transformed):
    count: int

    def read(self, view: View) -> Iterator[nest.Nest]:
        return itertools.islice(self.source.read(view), self.count)

    @property
    def cardinality(self) -> int:
        count = self.source.cardinality
        return count if count == UNKNOWN_CARDINALITY else self.count if count < 0 else min(count, self.count)


@dataclass(eq=False)
class _Repeat(_Transformed):
    count: int | None = None

    def read(self, view: View) -> Iterator[nest.Nest]:
        rounds = itertools.count() if self.count is None else range(self.count)
        for _ in rounds:
            anything = False
            for element in self.source.read(view):
                anything = True
                yield element
            if not anything:
                return  # nothing, without end, is nothing

    @property
    def cardinality(self) -> int:
        count = self.source.cardinality
        if self.count is None:
            return INFINITE_CARDINALITY if count != 0 else 0
        return count if count < 0 else count * self.count


@dataclass(eq=False)
class _Shard(_Transformed):
    num_shards: int
    index: int

    def read(self, view: View) -> Iterator[nest.Nest]:
        shards, index = (view.hint or (1, 0)) if self.num_shards == SHARD_HINT else (self.num_shards, self.index)
        return itertools.islice(self.source.read(view), index, None, shards)

    @property
    def hinted(self) -> bool:
        return self.num_shards == SHARD_HINT or self.source.hinted

    @property
    def cardinality(self) -> int:
        count = self.source.cardinality
        if self.num_shards == SHARD_HINT or count < 0:
            return count
        return max(0, -(-(count - self.index) // self.num_shards))


@dataclass(eq=False)
class _Rebatch(_Transformed):
    sizes: list[int] = field(default_factory=list)
    drops: bool = False

    def __post_init__(self) -> None:
        self.batch_size, self.drop_remainder = None, self.drops

    def read(self, view: View) -> Iterator[nest.Nest]:
        return cut_stream(map(rows.to_tensors, self.source.read(view)), self.sizes, self.drops)

    @property
    def element_spec(self) -> nest.Nest:
        free = None if len(set(self.sizes)) > 1 or not self.drops else self.sizes[0]
        return nest.map_structure(
            lambda leaf: spec.TensorSpec((free, *leaf.shape[1:]), leaf.dtype), self.source.element_spec
        )

    @property
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY


def _positive(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name}={value!r} must be an int of at least 1.")
    return value
