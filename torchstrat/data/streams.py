"""From a stream of global batches to what each replica of this process gets in each step.

Everything here that makes steps is an iterator over iterators: nothing runs before it is asked for, and nothing
communicates.

A row is along dim 0 of every leaf, or the program says so with a mark. Whoever is about to cut a batch asks here first
what shapes alone do not tell: it is found out from the collate function, or told in an error or a warning.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import default_collate

from torchstrat.core import nest
from torchstrat.core._torch_private import version_of
from torchstrat.core.engine import InputLayout
from torchstrat.core.errors import InvalidArgumentError, StructureMismatchError
from torchstrat.data import rows, spec
from torchstrat.data.marks import (
    Along,
    Examples,
    Marked,
    Same,
    can_mark,
    children,
    children_beside,
    is_container,
    is_opaque,
    names,
    rebuild,
)
from torchstrat.data.rows import batch_sizes_for_worker, equal_chunks

MARKS = (
    "ts.data.axis(x, 1) where its rows are along dim 1, ts.data.same(x) where every replica gets all of it, "
    "ts.data.examples(list) for a list with an entry for each row"
)


Dims = dict[str, set[int]]
"""By where a leaf is: the dimensions that may be its rows'. Of a list with an entry for each row: none."""


class CollateReading:
    """Where the rows are in what a collate function makes of ``n`` examples.

    Equal numbers alone do not say so: a batch of time-first sequences may have as many steps as rows, and a list of
    images as many channels. Where rows are not plainly along dim 0, some of the examples are collated by themselves, to
    see what becomes fewer; once, for the answer is the function's. Random streams are put back.
    """

    def __init__(self, collate: Callable[[list[object]], nest.Nest]) -> None:
        self._collate = collate
        self._dims: Dims | None = None
        self.is_torchs = collate is default_collate
        """Rows are along dim 0 of whatever torch's own makes."""

    def marked(self, whole: nest.Nest, examples: list[object]) -> nest.Nest | None:
        """``whole``, which was made of the ``examples``, with marks where rows are elsewhere than along dim 0.

        None: it has not one row for each example, and is not to be cut.
        """
        count = len(examples)
        if self._dims is None and not self.is_torchs and count > 1:
            self._dims = {} if _is_plain(whole, count) else self._find(whole, examples)
        dims = self._dims
        if dims is None and not self.is_torchs and count > 1:
            return None
        try:
            found = _mark(whole, dims) if dims else whole
            return found if rows.common_rows(found) == count else None
        except (TypeError, ValueError):  # leaves without rows, or a class that takes no marks
            return None

    def _find(self, whole: nest.Nest, examples: list[object]) -> Dims | None:
        count = len(examples)
        dims = _candidates(whole, count)
        few = min(2, count - 1)
        for some in (examples[:few], examples[-few:], examples[1:], examples[:-1]):
            if dims is None:
                return None
            try:
                with spec.undisturbed_randomness():
                    part = rows.to_tensors(self._collate(copies(some, of_tensors=True)))
            except Exception:  # it takes whole batches only: nothing but the rule is left
                by_rule = all(0 in found for found in dims.values())
                return _chosen(dims, count) if by_rule else None
            dims = _narrowed(dims, whole, part, count, len(some))
            if dims is not None and all(len(found) < 2 for found in dims.values()):
                return dims
        return None if dims is None else _chosen(dims, count)


def copies(examples: list[object], *, of_tensors: bool) -> list[object]:
    """Examples to collate once more: some collate functions take entries out of them, or write to their tensors."""
    if type(next(iter(examples), None)) in (dict, list):
        examples = [_copy(example) for example in examples]
    return [rows.map_leaves(rows.in_own_memory, example) for example in examples] if of_tensors else examples


def stands(examples: list[object]) -> list[tuple[nest.Nest, int]]:
    """The tensors and arrays in them, each with a number that is another one after it has been written to."""
    held = [leaf for leaf in rows.all_leaves(examples) if isinstance(leaf, torch.Tensor | np.ndarray)]
    return [(leaf, stand_of(leaf)) for leaf in held]


def stand_of(leaf: nest.Nest) -> int:
    if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
        return version_of(leaf)
    return rows.checksum(leaf)


def _copy(example: object) -> object:
    if type(example) is dict:
        return {key: _copy(value) for key, value in example.items()}
    return [_copy(value) for value in example] if type(example) is list else example


def _is_plain(batch: nest.Nest, count: int) -> bool:
    """Whether ``count`` is the length of dim 0 of each leaf, and of nothing else that could have the rows."""
    try:
        if rows.common_rows(batch) != count:
            return False
    except (TypeError, ValueError):  # leaves without rows
        return False
    for _, value in _parts(batch):
        if isinstance(value, list | tuple) and _may_list_examples(value, count) and not _are_strings(value):
            return False
        if isinstance(value, torch.Tensor) and not value.is_nested and count in value.shape[1:]:
            return False
    return True


def _may_list_examples(value: Sized, count: int) -> bool:
    return len(value) == count and not hasattr(value, "_fields") and not is_opaque(value)


def _are_strings(value: nest.Nest) -> bool:
    return rows.is_row_list(value) and all(isinstance(row, str | bytes) for row in value)


def _candidates(batch: nest.Nest, count: int, path: str = "batch") -> Dims | None:
    """What may have the rows in each leaf; None: nothing can in one of them."""
    if batch is None or isinstance(batch, Marked):
        return {}
    if rows.is_array(batch):
        sizes = batch.shape[:1] if isinstance(batch, torch.Tensor) and not can_mark(batch) else batch.shape
        found = {dim for dim, size in enumerate(sizes) if size == count}
        return {path: found} if found else None
    if isinstance(batch, list | tuple) and _may_list_examples(batch, count):
        return {path: set()}
    if not is_container(batch) or is_opaque(batch) or rows.is_row_list(batch):
        return None
    dims: Dims = {}
    for below, child in _below(batch, path):
        found_below = _candidates(child, count, below)
        if found_below is None:
            return None
        dims |= found_below
    return dims


def _narrowed(dims: Dims, whole: nest.Nest, part: nest.Nest, count: int, fewer: int) -> Dims | None:
    """Those of the candidates that became ``fewer`` with the examples."""
    narrowed: Dims = {}

    def compare(whole: nest.Nest, part: nest.Nest, path: str) -> bool:
        if whole is None or isinstance(whole, Marked):
            return True
        if rows.is_array(whole):
            if not rows.is_array(part) or part.ndim != whole.ndim:
                return False
            before = dims.get(path)
            options = range(whole.ndim) if before is None else before
            narrowed[path] = {dim for dim in options if whole.shape[dim] == count and part.shape[dim] == fewer}
            return bool(narrowed[path])
        if not is_container(whole) and not rows.is_row_list(whole):
            return False
        if isinstance(whole, list | tuple) and path in dims:
            if not isinstance(part, list | tuple):
                return False
            if len(part) == fewer:
                narrowed[path] = set()
                return True
            if rows.is_row_list(whole):
                return False
        if type(whole) is not type(part):
            return False
        try:
            beside = children_beside(whole, part)
        except StructureMismatchError:
            return False
        return all(compare(one, other, below) for (below, one), other in zip(_below(whole, path), beside, strict=True))

    return narrowed if compare(whole, part, "batch") else None


def _chosen(dims: Dims, count: int) -> Dims:
    """The first of what is still possible, and a warning that says which."""
    for path, found in dims.items():
        if len(found) > 1:
            chosen = min(found)
            warnings.warn(
                f"a collate function made {path} of {count} examples, a tensor with that length along dims "
                f"{sorted(found)}, and of fewer of them it did not show which has the rows: it is cut along dim "
                f"{chosen}. Mark it: ts.data.axis(x, {chosen}) if that is right, {MARKS}.",
                stacklevel=2,
            )
    return {path: {min(found)} if found else found for path, found in dims.items()}


def _mark(batch: nest.Nest, dims: Dims, path: str = "batch") -> nest.Nest:
    if path in dims:
        (dim,) = dims[path] or (None,)
        if dim is None:
            return Examples(batch)
        return Along(batch, dim) if dim and rows.is_array(batch) else batch
    if not is_container(batch) or rows.is_row_list(batch):
        return batch
    old = children(batch)
    made = [_mark(child, dims, below) for below, child in _below(batch, path)]
    return batch if all(one is other for one, other in zip(made, old, strict=True)) else rebuild(batch, made)


def require_aligned(batch: nest.Nest) -> int:
    """The rows of a batch, of which all leaves have the same number.

    Raises:
        InvalidArgumentError: they do not.
    """
    count = rows.common_rows(batch)
    if count is None:
        rows.count_rows(batch)  # raises, where there are none
        raise InvalidArgumentError(
            f"the leaves of a batch have different numbers of rows: {differing(batch)}. Rows are along dim 0 of "
            f"every leaf, or the program says so: {MARKS}. A dataset of single examples is batched first: "
            "DataLoader(dataset, batch_size=<global batch>)."
        )
    return count


def differing(batch: nest.Nest) -> str:
    """The leaves of a batch that have different numbers of rows, in words: one for each number."""
    first: dict[int, str] = {}
    for path, value in _parts(batch):
        if isinstance(value, Along | Examples) or rows.is_array(value) or rows.is_row_list(value):
            first.setdefault(rows.length(value), path)
    return ", ".join(f"{path} has {number}" for number, path in first.items())


def tell_of_lists(batch: nest.Nest) -> None:
    """Warn of the first list that holds columns by the rule, and looks as if it may hold examples."""
    for path, value in _parts(batch):
        if not isinstance(value, list) or rows.is_row_list(value) or not _may_be_examples(value):
            continue
        count = rows.count_rows(value)
        warnings.warn(
            f"{path} is a list of {len(value)} tensors of {count} rows each, and is read as columns: each is cut along "
            "dim 0. If it has an entry for each row, mark it: ts.data.examples(list). If it has columns, hand out a "
            "tuple, or say so: ts.data.axis(list, 0).",
            stacklevel=3,
        )
        return


def _may_be_examples(columns: list[Any]) -> bool:
    """Pairs of columns are usual, and columns of several kinds; examples are alike, and images have three dims."""
    if len(columns) < 2 or not all(isinstance(one, torch.Tensor) and one.ndim > 1 for one in columns):
        return False
    if len({(one.dtype, one.ndim, one.size(0)) for one in columns}) > 1 or any(one.is_nested for one in columns):
        return False
    return columns[0].size(0) == len(columns) or (len(columns) > 2 and columns[0].ndim > 2)


def _parts(batch: nest.Nest, path: str = "batch") -> Iterator[tuple[str, nest.Nest]]:
    """Every container, column and leaf of a batch, with where it is."""
    yield path, batch
    if is_container(batch) and not rows.is_row_list(batch):
        for below, child in _below(batch, path):
            yield from _parts(child, below)


def _below(batch: nest.Nest, path: str) -> Iterator[tuple[str, nest.Nest]]:
    if nest.is_nested(batch):
        return ((f"{path}[{key!r}]", child) for key, child in nest.children(batch))
    return ((f"{path}.{name}", child) for name, child in zip(names(batch), children(batch), strict=True))


logger = logging.getLogger("torchstrat.data")

END: Final = object()
"""In place of a batch: there is no other. A batch itself may be None."""


@dataclass(frozen=True)
class Step:
    """One step's input in this process."""

    components: tuple[nest.Nest, ...]
    """A batch for each local replica, some perhaps of zero rows; all None where the data has None for each."""
    rows: tuple[int, ...]
    """Rows of every replica of the group, or of the local ones where the others' are not known yet."""
    checksum: int | None = None
    """Of the global batch; only with the first step, and only where processes have to compare it."""


def rows_or_one(element: nest.Nest) -> int:
    """Rows of an element that is not cut: of its first tensor; an unbatched scalar counts as one."""
    counts = _counts(element)
    return 1 if not counts or 0 in [dims for dims, _ in counts] else counts[0][1]


def _counts(element: nest.Nest) -> list[tuple[int, int]]:
    """Rank and rows of each tensor, array or mark in an element."""
    if isinstance(element, Same):
        return []
    if isinstance(element, Marked):
        return [(1, rows.length(element))]
    if rows.is_array(element):
        return [(element.ndim, rows.length(element) if element.ndim else 1)]
    if is_opaque(element):
        return [(1, int(element.batch_sizes[0]) if len(element.batch_sizes) else 0)]
    if is_container(element) and not rows.is_row_list(element):
        return [count for child in children(element) for count in _counts(child)]
    return []


def _tell_of_counts(element: nest.Nest) -> None:
    counts = _counts(element)
    found = sorted({count for _, count in counts})
    if len(found) > 1 and all(dims for dims, _ in counts):
        warnings.warn(
            f"the tensors of a replica's batch have {found} rows, and its gradients are weighted by those of the "
            f"first, {counts[0][1]}. If that is not so, mark them: {MARKS}.",
            stacklevel=2,
        )


def bare_steps(elements: Iterator[nest.Nest]) -> Iterator[Step]:
    """One replica in one process: every element as it is, whatever it is."""
    return (Step((element,), (1,)) for element in elements)


def equal_chunk_steps(
    batches: Iterator[nest.Nest], layout: InputLayout, compare: bool = True, each_by_itself: bool = False
) -> Iterator[Step]:
    """One step per global batch, split by the equal-chunk rule over the whole group.

    Args:
        batches: global batches.
        layout: the replicas.
        compare: give the first step a checksum, where there are other processes that should have read the same.
        each_by_itself: leaves with different numbers of rows are split, as TensorFlow does, each by its own.

    Raises:
        InvalidArgumentError: leaves have different numbers of rows, or none.
    """
    for index, batch in enumerate(batches):
        checksum = rows.checksum_by_keys(batch) if compare and index == 0 and layout.num_workers > 1 else None
        if layout.num_replicas == 1:
            yield Step((batch,), (rows_or_one(batch),), checksum)
            continue
        if index == 0:
            tell_of_lists(batch)
        count = rows.common_rows(batch) if each_by_itself else require_aligned(batch)
        sizes = equal_chunks(rows.count_rows(batch) if count is None else count, layout.num_replicas)
        if count is None:
            parts = rows.split_equally(batch, layout.num_replicas)
        else:
            parts = rows.split_by_sizes(batch, sizes)
        if index == 0 and count is None:
            logger.warning(  # not of `warnings`: it is what TensorFlow does with such data, and what was asked for
                "the leaves of a batch have different numbers of rows: %s. Each is split by itself, and gradients are "
                "weighted by the first. If that is not so, mark them: %s.",
                differing(batch),
                MARKS,
            )
        yield Step(tuple(parts[replica] for replica in layout.local_replicas), sizes, checksum)


@dataclass
class InferredBatch:
    """The batch size that the fixed-size rule goes by where none is declared."""

    rows: int | None = None
    """None: the first batch will tell. 0: they differ."""


def fixed_size_steps(
    batches: Iterator[nest.Nest],
    declared: int | None,
    layout: InputLayout,
    steps_before: int = 0,
    inferred: InferredBatch | None = None,
    taken: int = 0,
) -> Iterator[Step]:
    """The fixed-size rule: this process cuts *all* of its rows for its own replicas, one step after the other.

    ``rows`` of the steps are those of the local replicas. ``steps_before``, ``inferred`` and ``taken``: where the rule
    stands, to go on within a pass; that many rows of the first batch were handed out, and are not in it any more.
    """
    if layout.num_replicas == 1:
        return (Step((batch,), (rows_or_one(batch),)) for batch in batches)
    local = len(layout.local_replicas)
    if declared:
        sizes = batch_sizes_for_worker(declared, layout.num_workers, local, layout.worker_index)
        used = steps_before * local % len(sizes)
        parts = cut_stream(batches, sizes[used:] + sizes[:used])
    else:
        used = steps_before * local % layout.num_replicas
        parts = _cut_undeclared(batches, layout, InferredBatch() if inferred is None else inferred, used, taken)
    return _grouped(parts, local)


def cut_stream(batches: Iterator[nest.Nest], sizes: Sequence[int], drop_remainder: bool = False) -> Iterator[nest.Nest]:
    """Rows of ``batches`` in new batches of ``sizes``, in turn and cyclically, across the borders of the old ones.

    Sizes are not negative, and one is positive; one of 0 gives a batch of zero rows. Ends when a batch of one row or
    more is due and no rows are left; a last batch with fewer rows than it should have is kept unless
    ``drop_remainder``.

    Raises:
        InvalidArgumentError: a batch whose leaves do not have the same number of rows.
    """
    batch, start, stop = next(batches, END), 0, 0
    if batch is END:
        return
    tell_of_lists(batch)
    empty, stop = rows.empty_like(batch), require_aligned(batch)
    for size in itertools.cycle(sizes):
        parts: list[nest.Nest] = []
        missing = size
        while missing:
            if start == stop:
                if (batch := next(batches, END)) is END:
                    break
                start, stop = 0, require_aligned(batch)
            taken = min(missing, stop - start)
            if taken:
                parts.append(rows.cut_batch(batch, start, start + taken))
            start, missing = start + taken, missing - taken
        if missing and (drop_remainder or not parts):
            return
        yield rows.join_batches(parts) if parts else empty
        if batch is END:
            batch, start, stop = empty, 0, 0  # the source has ended: only sizes of 0 can follow


def _cut_undeclared(
    batches: Iterator[nest.Nest], layout: InputLayout, inferred: InferredBatch, used: int, taken: int
) -> Iterator[nest.Nest]:
    """The fixed-size rule where no batch size is declared: the first batch's rows are taken for it.

    It stands as long as every batch but the last has that size; else equal chunks are used from there on, as
    TensorFlow does where it cannot derive a batch size. A batch makes a part for each replica of the group; ``used`` of
    the first one's have been handed out, with ``taken`` rows, which are not in it any more.
    """
    batch, following = next(batches, END), END
    if batch is not END:
        tell_of_lists(batch)
    if batch is not END and used and not taken and (not inferred.rows or any(_sizes_of(0, layout, inferred)[:used])):
        yield from [rows.empty_like(batch)] * (layout.num_replicas - used)  # all rows of the one before were taken
        used = 0
    while batch is not END:
        left = require_aligned(batch)
        count = left + taken
        if inferred.rows is None:
            inferred.rows = count
        if inferred.rows and count != inferred.rows:
            following = next(batches, END)
            if count > inferred.rows or following is not END:
                inferred.rows = 0
        sizes = _sizes_of(count, layout, inferred)
        first = used if sum(sizes[:used]) == taken else 0  # else an earlier torchstrat has cut it in another way
        stops = itertools.accumulate(sizes[first:])
        starts = itertools.accumulate(sizes[first:], initial=0)
        for start, stop in zip(starts, stops, strict=False):
            yield rows.cut_batch(batch, min(start, left), min(stop, left))
        batch, following = (next(batches, END) if following is END else following), END
        used = taken = 0


def _sizes_of(count: int, layout: InputLayout, inferred: InferredBatch) -> tuple[int, ...]:
    """The parts of a batch of ``count`` rows."""
    if not inferred.rows:
        return equal_chunks(count, layout.num_replicas)
    return batch_sizes_for_worker(inferred.rows, layout.num_workers, len(layout.local_replicas), layout.worker_index)


def _grouped(parts: Iterator[nest.Nest], local: int) -> Iterator[Step]:
    """``local`` parts per step; an unfinished last step is filled up with empty batches."""
    while components := list(itertools.islice(parts, local)):
        empty = rows.empty_like(components[0])
        components += [empty] * (local - len(components))
        yield Step(tuple(components), tuple(rows.count_rows(component) for component in components))


def element_steps(pipelines: Sequence[Iterator[nest.Nest]], layout: InputLayout) -> Iterator[Step]:
    """Steps of whole elements: from one pipeline a consecutive element for each local replica, or one pipeline each.

    Replicas for which no element is left, or None (as a collate function makes of rows that it drops), get empty ones.
    ``rows`` are those of the local replicas.
    """
    local = len(layout.local_replicas)
    sources = pipelines if len(pipelines) == local else list(pipelines) * local
    is_first = True
    while True:
        found = [next(source, END) for source in sources]
        if all(element is END for element in found):
            return
        elements = [None if element is END else element for element in found]
        present = next((element for element in elements if element is not None), None)
        if is_first and present is not None and layout.num_replicas > 1:
            _tell_of_counts(present)
        is_first &= present is None
        empty = rows.empty_like(present)
        yield Step(
            tuple(empty if element is None else element for element in elements),
            tuple(0 if element is None else rows_or_one(element) for element in elements),
        )
