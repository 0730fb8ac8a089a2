"""Datasets that are read in one pass: roots that read arrays or lines of text, and the few transformations that turn
them into global batches.

They are `torch.utils.data.IterableDataset`, so a `DataLoader` takes them too. Every transformation returns a new
dataset and reads nothing. A pipeline whose root reads files has ``files`` and ``open(files)``, which is what the FILE
policy asks of any dataset.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, SupportsIndex

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.data import rows, spec
from torchstrat.data.marks import Marked
from torchstrat.data.options import PathLike
from torchstrat.data.prefetch import Ahead, Prefetcher
from torchstrat.data.streams import cut_stream, require_aligned

SHARD_HINT: Final = -1
"""``dataset.shard(SHARD_HINT, SHARD_HINT)`` marks where the HINT policy shards: by process, once that is known."""

UNKNOWN_CARDINALITY: Final = -2
INFINITE_CARDINALITY: Final = -1


def len_of(data: Any) -> int | None:
    """None where it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def cardinality_of(data: object) -> int:
    """How many batches it says that it has."""
    return UNKNOWN_CARDINALITY if (count := len_of(data)) is None else count


AUTOTUNE: Final = -1
"""``dataset.prefetch(AUTOTUNE)``: as many elements as this package finds right."""
_PREFETCHED_ELEMENTS: Final = 2


@dataclass(frozen=True)
class View:
    """What one process reads of a pipeline in one pass."""

    files: tuple[PathLike, ...] | None = None
    """Its files; None: all."""
    hint: tuple[int, int] | None = None
    """Number and index of its share at a hinted shard; None: all."""
    seed: int = 0
    """Of this pass, for shuffles that have no seed of their own."""
    passes: tuple[int, ...] = ()
    """The number of the pass, and of the rounds of each `repeat` in it: every one is shuffled anew."""
    here: bool = False
    """Whether everything is read in the thread that asks."""


def draw_seed() -> int:
    """A number from PyTorch's default generator, as a `DataLoader` draws one for its sampler."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


class Pipeline(IterableDataset[object]):
    """Base of the datasets in this file. Iterating it reads everything, in order."""

    batch_size: int | None = None
    """Rows of a full batch, where `batch` declared it."""
    drop_remainder: bool = False

    @abstractmethod
    def read(self, view: View) -> Iterator[nest.Nest]:
        """The elements that ``view`` leaves, in order."""

    def read_from(self, view: View, start: int) -> Iterator[nest.Nest]:
        """`read` without its first ``start`` elements: read and dropped, where they cannot be passed over."""
        elements = self.read(view)
        next(itertools.islice(elements, start, start), None)
        return elements

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

    @property
    def needs_seed(self) -> bool:
        """Whether a `shuffle` without a seed of its own is part of the pipeline."""
        return False

    passes = 0
    """How often it was iterated: every pass is shuffled anew."""

    seed_in_workers: int | None = None
    """What data-loading workers shuffle by; None: by the seed that they have from their `DataLoader`."""

    def pass_seed(self) -> int:
        """The seed of a pass that begins now: the same in all workers of a `DataLoader`. Draws only if needed."""
        worker = get_worker_info()
        if worker is None:
            return draw_seed() if self.needs_seed else 0
        return worker.seed - worker.id if self.seed_in_workers is None else self.seed_in_workers

    def read_pass(self, files: tuple[PathLike, ...] | None = None) -> Iterator[nest.Nest]:
        """Another pass, over all files or these."""
        elements = self.read(View(files, seed=self.pass_seed(), passes=(self.passes,)))
        self.passes += 1
        return elements

    def __iter__(self) -> Iterator[nest.Nest]:
        elements = self.read_pass()
        worker = get_worker_info()
        if worker is None:
            return elements
        # In a DataLoader's worker process: every worker reads all and keeps its turn, so that `take` and `repeat`
        # mean the same for any number of workers.
        return itertools.islice(elements, worker.id, None, worker.num_workers)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Pipeline:
        """Stack ``batch_size`` consecutive elements; the last batch may be shorter unless ``drop_remainder``."""
        return _Batch(self, _positive(batch_size, "batch_size"), drop_remainder)

    def unbatch(self) -> Pipeline:
        """The rows of every element, one by one."""
        return _Unbatch(self)

    def map(self, fn: Callable[[Any], object]) -> Pipeline:
        """``fn(element)`` for every element."""
        return _Map(self, fn)

    def take(self, count: int) -> Pipeline:
        """The first ``count`` elements; -1: all."""
        return self if count == -1 else _Take(self, _at_least(0, count, "count"))

    def repeat(self, count: int | None = None) -> Pipeline:
        """Everything ``count`` times over; None or -1: without end."""
        return _Repeat(self, None if count in (None, -1) else _at_least(0, count, "count"))

    def shuffle(self, buffer_size: int, seed: int | None = None) -> Pipeline:
        """Elements in random order, another one in every pass: each is drawn from the next ``buffer_size`` elements.

        ``seed`` repeats the same orders in every run. None: from PyTorch's default generator; over several processes
        `Strategy.distribute_dataset` takes rank 0's. A function that shards by itself needs a seed before its `shard`,
        or the processes shard different orders.
        """
        return _Shuffle(self, _positive(buffer_size, "buffer_size"), seed)

    def prefetch(self, buffer_size: int) -> Pipeline:
        """Read up to ``buffer_size`` elements (`AUTOTUNE`: two) ahead, in a background thread.

        Random numbers that earlier `map` functions draw then come at times of their own among those of the training
        step; without prefetch they are drawn in the thread that asks, which makes runs repeatable.
        """
        depth = _PREFETCHED_ELEMENTS if buffer_size == AUTOTUNE else _positive(buffer_size, "buffer_size")
        return _Prefetch(self, depth)

    @property
    def functions(self) -> list[Callable[[Any], object]]:
        """Those of `map`, all that may draw random numbers."""
        return []

    def shard(self, num_shards: int, index: int) -> Pipeline:
        """Every ``num_shards``-th element from ``index`` on. ``shard(SHARD_HINT, SHARD_HINT)``: see `SHARD_HINT`."""
        if (num_shards, index) != (SHARD_HINT, SHARD_HINT) and not 0 <= index < _positive(num_shards, "num_shards"):
            raise InvalidArgumentError(f"shard index={index} must be from 0 to {num_shards - 1}.")
        return _Shard(self, num_shards, index)

    def rebatch(self, batch_sizes: int | Sequence[int], drop_remainder: bool = False) -> Pipeline:
        """The same rows in batches of ``batch_sizes``, in turn and cyclically."""
        given = list(batch_sizes) if isinstance(batch_sizes, Iterable) else [batch_sizes]
        sizes = [_at_least(0, size, "each of batch_sizes") for size in given]
        if not any(sizes):
            raise InvalidArgumentError(f"batch_sizes={sizes}: one of them must be positive.")
        return _Rebatch(self, sizes, drop_remainder)


@dataclass(eq=False)
class _Transformed(Pipeline):
    """A pipeline made from another one. What it does not change is its source's."""

    source: Pipeline

    def __post_init__(self) -> None:
        self.batch_size = self.source.batch_size
        self.drop_remainder = self.source.drop_remainder

    def __getattr__(self, name: str) -> object:
        # Only a pipeline over files has these two names; having them is what makes it a file source.
        if name == "files" and "source" in vars(self):
            return self.source.files  # type: ignore[attr-defined]
        if name == "open" and "source" in vars(self) and hasattr(self.source, "open"):
            return lambda files: self.read_pass(tuple(files))
        raise AttributeError(f"{type(self).__name__.lstrip('_')} dataset has no attribute {name!r}")

    @property
    def hinted(self) -> bool:
        return self.source.hinted

    @property
    def needs_seed(self) -> bool:
        return self.source.needs_seed

    @property
    def functions(self) -> list[Callable[[Any], object]]:
        return self.source.functions

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
        return self._grouped(self.source.read(view))

    def read_from(self, view: View, start: int) -> Iterator[nest.Nest]:
        return self._grouped(self.source.read_from(view, start * self.rows_per_batch))

    def _grouped(self, elements: Iterator[nest.Nest]) -> Iterator[nest.Nest]:
        while batch := list(itertools.islice(elements, self.rows_per_batch)):
            if len(batch) == self.rows_per_batch or not self.drops:
                yield nest.map_structure(lambda *column: stack(column), *batch)

    @property
    def element_spec(self) -> nest.Nest:
        return spec.batched(self.source.element_spec, self.rows_per_batch if self.drops else None)

    @property
    def cardinality(self) -> int:
        count = self.source.cardinality
        if count < 0:
            return count
        return count // self.rows_per_batch if self.drops else -(-count // self.rows_per_batch)


def stack(column: Sequence[Any]) -> Any:
    """Values of one shape along a new dim 0: a tensor, or an object array of strings."""
    if isinstance(column[0], Marked):
        raise WrongTypeError(
            f"batch() got elements with a mark, {type(column[0]).__name__}, which says something about a batch: mark "
            "its batches, dataset.batch(…).map(…)."
        )
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
            for index in range(require_aligned(batch)):
                yield rows.map_rows(functools.partial(rows.row, index=index), batch)

    @property
    def element_spec(self) -> nest.Nest:
        return nest.map_structure(spec.TensorSpec.of_row, self.source.element_spec)

    @property
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY


@dataclass(eq=False)
class _Map(_Transformed):
    fn: Callable[[Any], object]

    def read(self, view: View) -> Iterator[nest.Nest]:
        return map(self.fn, self.source.read(view))

    def read_from(self, view: View, start: int) -> Iterator[nest.Nest]:
        return map(self.fn, self.source.read_from(view, start))

    @property
    def functions(self) -> list[Callable[[Any], object]]:
        return [*self.source.functions, self.fn]

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

    def read_from(self, view: View, start: int) -> Iterator[nest.Nest]:
        taken = min(start, self.count)
        return itertools.islice(self.source.read_from(view, taken), self.count - taken)

    @property
    def cardinality(self) -> int:
        count = self.source.cardinality
        return count if count == UNKNOWN_CARDINALITY else self.count if count < 0 else min(count, self.count)


@dataclass(eq=False)
class _Repeat(_Transformed):
    count: int | None = None

    def read(self, view: View) -> Iterator[nest.Nest]:
        rounds = itertools.count() if self.count is None else range(self.count)
        for number in rounds:
            anything = False
            for element in self.source.read(replace(view, passes=(*view.passes, number))):
                anything = True
                yield element
            if not anything:
                return  # nothing, without end, is nothing

    @property
    def cardinality(self) -> int:
        count = self.source.cardinality
        if self.count is None:
            return INFINITE_CARDINALITY if count != 0 else 0
        return count if count < 0 < self.count else count * self.count


@dataclass(eq=False)
class _Shuffle(_Transformed):
    buffer_size: int
    seed: int | None

    def read(self, view: View) -> Iterator[nest.Nest]:
        seed = view.seed if self.seed is None else self.seed
        # A string is hashed the same way in every process, and nearby ones give unrelated streams.
        choices = random.Random(f"{seed} {view.passes}")
        elements = self.source.read(view)
        buffer = list(itertools.islice(elements, self.buffer_size))
        for element in elements:
            chosen = choices.randrange(len(buffer))
            yield buffer[chosen]
            buffer[chosen] = element
        choices.shuffle(buffer)
        yield from buffer

    @property
    def needs_seed(self) -> bool:
        return self.seed is None or self.source.needs_seed


@dataclass(eq=False)
class _Prefetch(_Transformed):
    buffer_size: int

    def read(self, view: View) -> Iterator[nest.Nest]:
        return self.source.read(view) if view.here else self._read_ahead(view)

    def _read_ahead(self, view: View) -> Iterator[nest.Nest]:
        boxed = zip(self.source.read(view))  # a 1-tuple is never the None that ends a prefetcher
        prefetcher: Prefetcher[tuple[nest.Nest]] = Prefetcher(boxed, _itself, self.buffer_size, Ahead.READ_AND_COPY)
        try:
            while (box := prefetcher.next()) is not None:
                yield box[0]
        finally:
            prefetcher.close()


def _itself(box: tuple[nest.Nest]) -> tuple[nest.Nest]:
    return box


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
        count = None if len(set(self.sizes)) > 1 or not self.drops else self.sizes[0]
        return nest.map_structure(lambda leaf: leaf.with_rows(count), self.source.element_spec)

    @property
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY


def _positive(value: int, name: str) -> int:
    return _at_least(1, value, name)


def _at_least(least: int, value: SupportsIndex | None, name: str) -> int:
    """NumPy's ints are ints, too."""
    number = operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else least - 1
    if number < least:
        raise InvalidArgumentError(f"{name}={value!r} must be an int of at least {least}.")
    return number


class ArrayDataset(Pipeline):
    """The rows of an array or tensor, or of a nest of them, along dim 0: one element per row, not batched.

    Args:
        arrays: arrays of equal length; elements have the structure of the nest.

    Raises:
        InvalidArgumentError: no array, a scalar, or arrays of different lengths.
    """

    def __init__(self, arrays: nest.Nest) -> None:
        self.arrays = rows.to_tensors(arrays)
        leaves = nest.flatten(self.arrays)
        if not leaves or not all(rows.is_array(leaf) for leaf in leaves):
            raise WrongTypeError(
                f"ArrayDataset takes an array, a tensor, or a nest of them; got {type(arrays).__name__}. "
                "For a sequence of batches give a list."
            )
        count = rows.common_rows(self.arrays)
        if count is None:
            raise InvalidArgumentError(
                f"arrays of one dataset need the same number of rows; got {[rows.length(leaf) for leaf in leaves]}. "
                "For a sequence of batches of different sizes give a list."
            )
        self._count = count

    def read(self, view: View) -> Iterator[nest.Nest]:
        return self.read_from(view, 0)

    def read_from(self, view: View, start: int) -> Iterator[nest.Nest]:
        for index in range(start, self._count):
            yield nest.map_structure(operator.itemgetter(index), self.arrays)

    @property
    def element_spec(self) -> nest.Nest:
        return nest.map_structure(lambda leaf: spec.TensorSpec(tuple(leaf.shape[1:]), leaf.dtype), self.arrays)

    @property
    def cardinality(self) -> int:
        return self._count

    def __len__(self) -> int:
        return self._count


class TextLineDataset(Pipeline):
    """The lines of text files, without their line ends, one file after the other: one ``str`` per element.

    Args:
        files: a path, or paths.
        encoding: of the files.
    """

    def __init__(self, files: PathLike | Sequence[PathLike], encoding: str = "utf-8") -> None:
        self.files = (files,) if isinstance(files, str | os.PathLike) else tuple(files)
        self._encoding = encoding

    def open(self, files: Sequence[PathLike]) -> Iterator[str]:
        for path in files:
            with Path(path).open(encoding=self._encoding) as lines:
                for line in lines:
                    yield line.rstrip("\n")

    def read(self, view: View) -> Iterator[nest.Nest]:
        return self.open(self.files if view.files is None else view.files)

    @property
    def element_spec(self) -> nest.Nest:
        return spec.TensorSpec((), np.dtype(object))

    @property
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY
