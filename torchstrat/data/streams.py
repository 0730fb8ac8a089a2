"""From a stream of global batches to what each replica of this process gets in each step.

Everything here is an iterator over iterators: nothing runs before it is asked for, and nothing communicates.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchstrat.core import nest
from torchstrat.core.engine import InputLayout
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.data import rows
from torchstrat.data.marks import Marked, Same, children, is_container, is_opaque
from torchstrat.data.readings import MARKS, differing, require_aligned, tell_of_lists
from torchstrat.data.rows import batch_sizes_for_worker, equal_chunks

logger = logging.getLogger("torchstrat.data")


@dataclass(frozen=True)
class Step:
    """One step's input in this process."""

    components: tuple[nest.Nest, ...]
    """A batch for each local replica, some perhaps of zero rows."""
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
        checksum = rows.checksum(batch) if compare and index == 0 and layout.num_workers > 1 else None
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
) -> Iterator[Step]:
    """The fixed-size rule: this process cuts *all* of its rows for its own replicas, one step after the other.

    ``rows`` of the steps are those of the local replicas. ``steps_before`` and ``inferred``: where the rule stands, to
    go on within a pass.
    """
    if layout.num_replicas == 1:
        return (Step((batch,), (rows_or_one(batch),)) for batch in batches)
    local = len(layout.local_replicas)
    if declared:
        sizes = batch_sizes_for_worker(declared, layout.num_workers, local, layout.worker_index)
        used = steps_before * local % len(sizes)
        parts = cut_stream(batches, sizes[used:] + sizes[:used])
    else:
        parts = _cut_undeclared(batches, layout, InferredBatch() if inferred is None else inferred)
    return _grouped(parts, local)


def cut_stream(batches: Iterator[nest.Nest], sizes: Sequence[int], drop_remainder: bool = False) -> Iterator[nest.Nest]:
    """Rows of ``batches`` in new batches of ``sizes``, in turn and cyclically, across the borders of the old ones.

    A size of 0 gives a batch of zero rows. Ends when a batch of one row or more is due and no rows are left; a last
    batch with fewer rows than it should have is kept unless ``drop_remainder``.

    Raises:
        InvalidArgumentError: no positive size, or a batch whose leaves do not have the same number of rows.
    """
    if min(sizes, default=0) < 0 or sum(sizes) < 1:
        raise InvalidArgumentError(f"sizes={list(sizes)} must not be negative, and one of them must be positive.")
    return _cut_stream(batches, sizes, drop_remainder)


def _cut_stream(batches: Iterator[nest.Nest], sizes: Sequence[int], drop_remainder: bool) -> Iterator[nest.Nest]:
    batch, start, stop = next(batches, None), 0, 0
    if batch is None:
        return
    tell_of_lists(batch)
    empty, stop = rows.empty_like(batch), require_aligned(batch)
    for size in itertools.cycle(sizes):
        parts: list[nest.Nest] = []
        missing = size
        while missing:
            if start == stop:
                if (batch := next(batches, None)) is None:
                    break
                start, stop = 0, require_aligned(batch)
            taken = min(missing, stop - start)
            if taken:
                parts.append(rows.cut_batch(batch, start, start + taken))
            start, missing = start + taken, missing - taken
        if missing and (drop_remainder or not parts):
            return
        yield rows.join_batches(parts) if parts else empty
        if batch is None:
            batch, start, stop = empty, 0, 0  # the source has ended: only sizes of 0 can follow


def _cut_undeclared(batches: Iterator[nest.Nest], layout: InputLayout, inferred: InferredBatch) -> Iterator[nest.Nest]:
    """The fixed-size rule where no batch size is declared: the first batch's rows are taken for it.

    It stands as long as every batch but the last has that size; else equal chunks are used from there on, as
    TensorFlow does where it cannot derive a batch size.
    """
    batch, following = next(batches, None), None
    while batch is not None:
        count = require_aligned(batch)
        if inferred.rows is None:
            inferred.rows = count
        if inferred.rows and count != inferred.rows:
            following = next(batches, None)
            if count > inferred.rows or following is not None:
                inferred.rows = 0
        if inferred.rows:
            local = len(layout.local_replicas)
            sizes = batch_sizes_for_worker(inferred.rows, layout.num_workers, local, layout.worker_index)
            parts = list(itertools.islice(_cut_stream(iter([batch]), sizes, False), len(sizes)))
            parts += [rows.empty_like(batch)] * (len(sizes) - len(parts))
        else:
            parts = rows.split_equally(batch, layout.num_replicas)
        yield from parts
        batch, following = (following if following is not None else next(batches, None)), None


def _grouped(parts: Iterator[nest.Nest], local: int) -> Iterator[Step]:
    """``local`` parts per step; an unfinished last step is filled up with empty batches."""
    while components := list(itertools.islice(parts, local)):
        empty = rows.empty_like(components[0])
        components += [empty] * (local - len(components))
        yield Step(tuple(components), tuple(rows.count_rows(component) for component in components))


def element_steps(pipelines: Sequence[Iterator[nest.Nest]], layout: InputLayout) -> Iterator[Step]:
    """Steps of whole elements: from one pipeline a consecutive element for each local replica, or one pipeline each.

    Replicas for which no element is left get empty ones. ``rows`` are those of the local replicas.
    """
    local = len(layout.local_replicas)
    sources = pipelines if len(pipelines) == local else list(pipelines) * local
    is_first = True
    while True:
        elements = [next(source, None) for source in sources]
        present = next((element for element in elements if element is not None), None)
        if present is None:
            return
        if is_first and layout.num_replicas > 1:
            _tell_of_counts(present)
        is_first = False
        empty = rows.empty_like(present)
        yield Step(
            tuple(empty if element is None else element for element in elements),
            tuple(0 if element is None else rows_or_one(element) for element in elements),
        )
