"""A `DataLoader` as a source: its own dataset, collate function and workers, with rows shared over replicas.

In one process the loader's own sampler is used, and each global batch is collated once and cut. Over several processes
a map-style dataset is shared by index: a process fetches and collates the rows of its own replicas only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, default_collate

from torchstrat import nest
from torchstrat.data import rows, spec
from torchstrat.data.layout import InputLayout
from torchstrat.data.order import Index, IndexOrder, index_sampler
from torchstrat.data.pipeline import UNKNOWN_CARDINALITY, PathLike, Pipeline
from torchstrat.data.rebatch import equal_chunks
from torchstrat.data.sources import FileSource, Source, files_of_worker, make_source, reads_files
from torchstrat.data.streams import Step, equal_chunk_steps

Collate = Callable[[list[Any]], nest.Nest]


class SplitBatch(NamedTuple):
    """One process's share of a global batch. A named tuple, because ``pin_memory`` opens those."""

    sizes: tuple[int, ...]
    parts: tuple[nest.Nest, ...]
    checksum: int | None


@dataclass
class _CollateAndSplit:
    """Collates the examples of a global batch and splits them, in the process that loaded them.

    The whole batch is collated once and cut, as TensorFlow does. Where the result has not one row per example (packed
    ids with offsets, several crops per image, classes of one's own), cutting it would mix examples up: then each
    replica's examples are collated by themselves, which is also what happens with one replica per process.
    """

    collate: Collate
    convert: Callable[[nest.Nest], nest.Nest]
    num_replicas: int
    local_replicas: tuple[int, ...]
    compare: bool
    """Add the checksum of the first batch that this copy of the object sees."""

    def __call__(self, examples: list[Any]) -> SplitBatch:
        sizes = equal_chunks(len(examples), self.num_replicas)
        whole = self.convert(self.collate(examples))
        checksum = rows.checksum(whole) if self.compare else None
        self.compare = False
        if _row_per_example(whole, len(examples)):
            parts = rows.split_by_sizes(whole, sizes)
        else:
            stops = list(itertools.accumulate(sizes))
            shares = [examples[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
            parts = [self.convert(self.collate(share)) if share else rows.empty_like(whole) for share in shares]
        return SplitBatch(sizes, tuple(parts[replica] for replica in self.local_replicas), checksum)


def _row_per_example(batch: nest.Nest, examples: int) -> bool:
    try:
        return rows.common_rows(batch) == examples
    except (TypeError, ValueError):  # leaves without rows
        return False


class LoaderSource(Source):
    """A `DataLoader` whose iteration is torch's own. Settings are read off it; it is not changed.

    Columns of strings are what the loader makes of them, lists; those of our own datasets, such as `TextLineDataset`,
    are object arrays, as their ``batch`` makes them.
    """

    def __init__(self, loader: DataLoader[Any], strings_as_arrays: bool | None = None) -> None:
        self.loader = loader
        as_arrays = isinstance(loader.dataset, Pipeline) if strings_as_arrays is None else strings_as_arrays
        self._convert = rows.strings_to_arrays if as_arrays else rows.to_tensors
        sampler = index_sampler(loader)
        self._iterable = isinstance(loader.dataset, IterableDataset)
        self._auto_collated = loader.batch_sampler is not None
        declared = getattr(sampler, "batch_size", None) if loader.batch_size is None else loader.batch_size
        self.declared_batch = declared if isinstance(declared, int) else None
        self._drops = bool(loader.drop_last or getattr(sampler, "drop_last", False))
        self.cardinality = _length(loader)
        self.rereads = self._iterable
        self.has_workers = loader.num_workers > 0
        self.exclusive = loader.persistent_workers
        self._inner: DataLoader[Any] | None = None

    def open(self) -> Iterator[nest.Nest]:
        return map(self._convert, iter(self.loader))

    @property
    def compared(self) -> bool:
        return self._iterable  # else rank 0's indices make every rank read the same

    def open_equal_chunks(self, layout: InputLayout, ahead: int) -> tuple[Iterator[Step], Callable[[int], None]]:
        if layout.num_replicas == 1:
            return equal_chunk_steps(self.open(), layout), _nothing
        if layout.peers is not None and not self._iterable:
            return self._open_by_index(layout, ahead)
        if not self._auto_collated:
            return equal_chunk_steps(self.open(), layout), _nothing
        return self._open_and_split(layout), _nothing

    def _open_and_split(self, layout: InputLayout) -> Iterator[Step]:
        """Every batch in full, collated and split where it is loaded."""
        loader = self.loader
        collate = _CollateAndSplit(
            loader.collate_fn, self._convert, layout.num_replicas, layout.local_replicas, layout.num_workers > 1
        )
        if self._iterable:
            batching: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        else:
            batching = {"batch_sampler": loader.batch_sampler}
        if self._inner is None or not self.exclusive:
            self._inner = _like(loader, generator=loader.generator, collate_fn=collate, **batching)
        batches = iter(self._inner)
        return (Step(batch.parts, batch.sizes, batch.checksum) for batch in batches)

    def _open_by_index(self, layout: InputLayout, ahead: int) -> tuple[Iterator[Step], Callable[[int], None]]:
        """Rank 0's order; of each batch only the rows of this process's replicas are fetched and collated."""
        assert layout.peers is not None
        loader = self.loader
        order = IndexOrder(loader, layout.peers, ahead + loader.num_workers * (loader.prefetch_factor or 1))
        to_request, to_serve = itertools.tee(_share(index, layout, self._auto_collated) for index in order)
        requests = (request for share in to_request for request in share.requests)
        if self._inner is None or not self.exclusive:
            given = _Requests()
            name = "batch_sampler" if self._auto_collated else "sampler"
            batching = {name: given} if self._auto_collated else {name: given, "batch_size": None}
            generator = loader.generator if layout.worker_index == 0 else torch.Generator()
            self._inner = _like(loader, generator=generator, collate_fn=loader.collate_fn, **batching)
            self._given = given
        self._given.current = requests
        _seed_workers(loader, self._inner, layout.worker_index)
        batches = map(self._convert, iter(self._inner))
        return _serve(to_serve, batches, layout), order.prepare

    def element_spec(self) -> nest.Nest:
        with spec.undisturbed_randomness():
            example = self._example()
        if not self._auto_collated:
            return spec.spec_of(self._convert(example), rows_fixed=False)
        batch = self._convert(self.loader.collate_fn([example]))
        # Only torch's own collate function says that examples have one shape; any other may pad.
        found = spec.spec_of(batch, rows_fixed=False, trailing_fixed=self.loader.collate_fn is default_collate)
        count = self.declared_batch if self._drops else None
        return nest.map_structure(
            lambda leaf: spec.TensorSpec((count, *leaf.shape[1:]), leaf.dtype) if leaf.shape else leaf, found
        )

    def _example(self) -> Any:
        dataset = self.loader.dataset
        if isinstance(dataset, range):
            return 0
        if isinstance(dataset, TensorDataset):
            return tuple(tensor.new_zeros(tensor.shape[1:]) for tensor in dataset.tensors)
        if self._iterable:
            return next(iter(dataset))
        lists = not self._auto_collated and isinstance(self.loader.sampler, BatchSampler)
        return dataset[[0] if lists else 0]

    @property
    def reads_files(self) -> bool:
        return reads_files(self.loader.dataset)

    def for_files(self, worker: int, workers: int) -> Source:
        dataset: Any = self.loader.dataset
        if not reads_files(dataset):
            return super().for_files(worker, workers)
        files = files_of_worker(dataset.files, worker, workers)
        return self._with_dataset(_OwnFiles(dataset, files))

    def for_hint(self, worker: int, workers: int) -> Source:
        dataset = self.loader.dataset
        shard = getattr(dataset, "shard", None)
        if not callable(shard) or not self._iterable:
            return self
        return self._with_dataset(_Opened(make_source(dataset).for_hint(worker, workers)))

    def _with_dataset(self, dataset: IterableDataset[Any]) -> LoaderSource:
        loader = self.loader
        batching = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        other = _like(loader, dataset, generator=loader.generator, collate_fn=loader.collate_fn, **batching)
        return LoaderSource(other, strings_as_arrays=self._convert is rows.strings_to_arrays)


class _Share(NamedTuple):
    """What this process does for one global batch."""

    sizes: tuple[int, ...] | None
    """Rows of every replica of the group; None: known when the batch is there, which is fetched in full."""
    requests: tuple[Index, ...]
    """What to fetch: one request per local replica that has rows. With none, one row of another replica, to learn
    what an empty batch looks like."""


def _share(index: Index, layout: InputLayout, auto_collated: bool) -> _Share:
    if not auto_collated and not _lists_rows(index):
        return _Share(None, (index,))
    sizes = equal_chunks(len(index), layout.num_replicas)
    stops = list(itertools.accumulate(sizes))
    own = tuple(index[stops[replica] - sizes[replica] : stops[replica]] for replica in layout.local_replicas)
    return _Share(sizes, tuple(request for request in own if len(request)) or (index[:1],))


def _lists_rows(index: Index) -> bool:
    """Whether one index of a dataset that makes its own batches names their rows (a tuple may be any key)."""
    return isinstance(index, list) or (isinstance(index, np.ndarray | torch.Tensor) and index.ndim == 1)


def _serve(shares: Iterator[_Share], batches: Iterator[nest.Nest], layout: InputLayout) -> Iterator[Step]:
    for share in shares:
        if share.sizes is None:
            yield from equal_chunk_steps(itertools.islice(batches, 1), layout, compare=False)
            continue
        fetched = [next(batches) for _ in share.requests]
        empty = rows.empty_like(fetched[0])
        present = iter(fetched)
        sizes = [share.sizes[replica] for replica in layout.local_replicas]
        yield Step(tuple(next(present) if size else empty for size in sizes), share.sizes)


class _Requests:
    """The (batch) sampler of the inner loader: hands on what is to be fetched in the current epoch."""

    def __init__(self) -> None:
        self.current: Iterator[Index] = iter(())

    def __iter__(self) -> Iterator[Index]:
        return self.current


class _OwnFiles(IterableDataset[Any]):
    """The files of one process. Data-loading workers of that process take turns in its files' elements."""

    def __init__(self, dataset: FileSource, files: Sequence[PathLike]) -> None:
        self._dataset, self._files = dataset, files

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        elements = iter(self._dataset.open(self._files))
        return elements if worker is None else itertools.islice(elements, worker.id, None, worker.num_workers)


class _Opened(IterableDataset[Any]):
    def __init__(self, source: Source) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        elements = self._source.open()
        return elements if worker is None else itertools.islice(elements, worker.id, None, worker.num_workers)


def _like(loader: DataLoader[Any], dataset: Any = None, **changes: Any) -> DataLoader[Any]:
    """A loader with the settings of ``loader``, but for the changes. Batches must come in the order of requests."""
    return DataLoader(
        loader.dataset if dataset is None else dataset,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        persistent_workers=loader.persistent_workers,
        **changes,
    )


def _seed_workers(loader: DataLoader[Any], inner: DataLoader[Any], worker_index: int) -> None:
    """Different random augmentation in every process, though all draw the same seed for their workers.

    Every rank draws as torch would, so that random streams stay equal; ranks other than 0 add their number to it.
    """
    if worker_index > 0:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        inner.generator.manual_seed((seed + worker_index) % 2**63)


def _length(loader: DataLoader[Any]) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return UNKNOWN_CARDINALITY


def _nothing(step: int) -> None:
    """Reading this source needs no preparation."""
