"""What becomes of a loader's global batch: collated once and cut, or fetched by index, each process its own rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from torchstrat.core import nest
from torchstrat.core.engine import InputLayout
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.data import rows, spec
from torchstrat.data.marks import with_same_of
from torchstrat.data.order import Index
from torchstrat.data.own_draws import COMMON, OwnDraws
from torchstrat.data.readings import MARKS, CollateReading, copies, require_aligned
from torchstrat.data.rows import equal_chunks
from torchstrat.data.streams import Step, equal_chunk_steps

Collate = Callable[[list[object]], nest.Nest]


class SplitBatch(NamedTuple):
    """One process's share of a global batch. A named tuple, because ``pin_memory`` opens those."""

    sizes: tuple[int, ...]
    parts: tuple[nest.Nest, ...]
    checksum: int | None


@dataclass
class CollateAndSplit:
    """Collates the examples of a global batch and splits them, in the process that loaded them.

    The whole batch is collated once and cut, as TensorFlow does. Where the result has not one row per example (packed
    ids with offsets, several crops per image, classes of one's own), cutting it would mix examples up: then each
    replica's examples are collated by themselves, which is also what happens with one replica per process. What is
    marked as the same is the whole batch's.
    """

    collate: Collate
    convert: Callable[[nest.Nest], nest.Nest]
    num_replicas: int
    local_replicas: tuple[int, ...]
    compare: bool
    """Add the checksum of the first batch that this copy of the object sees."""

    def __post_init__(self) -> None:
        self._reading = CollateReading(self.collate)

    def __call__(self, examples: list[object]) -> SplitBatch:
        if not isinstance(examples, list):
            return self._split_made(self.convert(self.collate(examples)))
        sizes = equal_chunks(len(examples), self.num_replicas)
        kept = examples if self._reading.is_torchs else copies(examples)
        whole = self.convert(self.collate(examples))
        checksum = rows.checksum(whole) if self.compare else None
        self.compare = False
        marked = self._reading.marked(whole, kept)
        parts = None if marked is None else self._cut(marked, sizes)
        if parts is None:
            parts = self._collate_shares(whole, sizes, kept)
        return SplitBatch(sizes, tuple(parts[replica] for replica in self.local_replicas), checksum)

    def _split_made(self, whole: nest.Nest) -> SplitBatch:
        """Of a data set whose ``__getitems__`` makes a batch, instead of a list of examples: by its rows alone."""
        sizes = equal_chunks(require_aligned(whole), self.num_replicas)
        parts = rows.split_by_sizes(whole, sizes)
        checksum = rows.checksum(whole) if self.compare else None
        self.compare = False
        return SplitBatch(sizes, tuple(parts[replica] for replica in self.local_replicas), checksum)

    def _cut(self, whole: nest.Nest, sizes: tuple[int, ...]) -> list[nest.Nest] | None:
        try:
            return rows.split_by_sizes(whole, sizes)
        except WrongTypeError:  # of a class that takes no other rows
            return None

    def _collate_shares(self, whole: nest.Nest, sizes: tuple[int, ...], examples: list[object]) -> list[nest.Nest]:
        stops = list(itertools.accumulate(sizes))
        shares = [examples[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
        with spec.undisturbed_randomness():  # the draws of a batch have been made
            return [
                with_same_of(whole, self.convert(self.collate(share))) if share else rows.empty_like(whole)
                for share in shares
            ]


class CollateToCut:
    """Collates the examples of a global batch whose rows are cut later, to sizes that do not follow from the batch.

    Raises:
        InvalidArgumentError: there is not one row for each example.
    """

    def __init__(self, collate: Collate) -> None:
        self._collate = collate
        self._reading = CollateReading(collate)

    def __call__(self, examples: list[object]) -> nest.Nest:
        if not isinstance(examples, list):  # a batch already; see above
            return self._collate(examples)
        kept = copies(examples)
        marked = self._reading.marked(rows.to_tensors(self._collate(examples)), kept)
        if marked is None:
            raise InvalidArgumentError(
                f"the collate function made a batch of {len(examples)} examples that has not one row for each, and "
                f"this sharding policy cuts batches to fixed sizes. Mark what it makes ({MARKS}), or use InputOptions("
                "auto_shard_policy=AutoShardPolicy.DATA), which collates each replica's examples by themselves."
            )
        return marked


class Share(NamedTuple):
    """What this process does for one global batch."""

    sizes: tuple[int, ...] | None
    """Rows of every replica of the group; None: known when the batch is there, which is fetched in full."""
    requests: tuple[Index, ...]
    """What to fetch: one request per local replica that has rows. With none, one row of another replica, to learn
    what an empty batch looks like."""
    streams: tuple[int, ...]
    """What is drawn for each of them is drawn from: its replica's stream, or that of all processes."""

    def requested(self, number: int, draws: OwnDraws | None) -> Iterator[Index]:
        """The requests of batch ``number``, each to be fetched before the next is asked for."""
        for stream, request in zip(self.streams, self.requests, strict=True):
            if draws is not None:
                draws.enter(number, stream)
            yield request


def share_of(index: Index, layout: InputLayout, auto_collated: bool, by_rows: bool) -> Share:
    """This process's share of the global batch of rows ``index``; ``by_rows``: no row depends on the others."""
    if not by_rows or (not auto_collated and not _lists_rows(index)):
        return Share(None, (index,), (COMMON,))
    sizes = equal_chunks(len(index), layout.num_replicas)
    stops = list(itertools.accumulate(sizes))
    present = tuple(replica for replica in layout.local_replicas if sizes[replica])
    if not present:
        return Share(sizes, (index[:1],), layout.local_replicas[:1])
    own = tuple(index[stops[replica] - sizes[replica] : stops[replica]] for replica in present)
    return Share(sizes, own, present)


def _lists_rows(index: Index) -> bool:
    """Whether one index of a dataset that makes its own batches names their rows (a tuple may be any key)."""
    return isinstance(index, list) or (isinstance(index, np.ndarray | torch.Tensor) and index.ndim == 1)


def served(shares: Iterator[Share], batches: Iterator[nest.Nest], layout: InputLayout) -> Iterator[Step]:
    """The steps that the batches which were fetched for ``shares`` make."""
    for share in shares:
        if share.sizes is None:
            yield from equal_chunk_steps(itertools.islice(batches, 1), layout, compare=False)
            continue
        fetched = [next(batches) for _ in share.requests]
        empty = rows.empty_like(fetched[0])
        present = iter(fetched)
        sizes = [share.sizes[replica] for replica in layout.local_replicas]
        yield Step(tuple(next(present) if size else empty for size in sizes), share.sizes)
