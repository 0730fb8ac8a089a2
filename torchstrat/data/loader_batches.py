"""A `DataLoader`'s global batches: collated once and cut, or fetched by index, each process its own rows.

Over an iterable dataset they are read from its beginning or from a place on (`IterableLoader`). Without data-loading
workers its elements are counted, and passed over one by one without being collated. Workers each read a stream of their
own, taking turns batch by batch: they are started with the seed that they had, and whole batches are read and dropped,
so their number and the batch size have to stay what they were.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, default_collate

from torchstrat.core import nest
from torchstrat.core.engine import InputLayout
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.randomness import RandomStreams
from torchstrat.data import rows, spec
from torchstrat.data.marks import with_same_of
from torchstrat.data.options import FileSource, PathLike
from torchstrat.data.order import Index
from torchstrat.data.own_draws import (
    COMMON,
    Continuing,
    OwnDraws,
    Seeds,
    Watched,
    apart,
    generators_of_data,
    generators_of_stream,
    leave_for_next_pass,
    next_of,
    seeds_of_pass,
)
from torchstrat.data.pipeline import Pipeline
from torchstrat.data.position import GENERATORS, Place, Resume, Stream, generators_now
from torchstrat.data.rows import equal_chunks
from torchstrat.data.sequence import (
    Counting,
    FirstItems,
    Stateful,
    drawing_again,
    is_stateful,
    own_state,
    rows_of,
    shown_batch,
    skip,
    skip_extra,
)
from torchstrat.data.streams import (
    END,
    MARKS,
    CollateReading,
    Step,
    copies,
    equal_chunk_steps,
    require_aligned,
    stand_of,
    stands,
)
from torchstrat.data.workers import Watch, WatchedInWorkers, draw_for_workers, generator_of_workers

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
        self._may_write = not self._reading.is_torchs  # to its examples' tensors; the first batch tells whether it does

    def __call__(self, examples: list[object]) -> SplitBatch:
        if not isinstance(examples, list):
            return self._split_made(self.convert(self.collate(examples)))
        sizes = equal_chunks(len(examples), self.num_replicas)
        kept = examples if self._reading.is_torchs else copies(examples, of_tensors=self._may_write)
        before = stands(examples) if self._may_write else []
        whole = self.convert(self.collate(examples))
        self._may_write = any(stand_of(leaf) != stand for leaf, stand in before)
        checksum = rows.checksum_by_keys(whole) if self.compare else None
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
        checksum = rows.checksum_by_keys(whole) if self.compare else None
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
        kept = copies(examples, of_tensors=False)
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


if TYPE_CHECKING:
    from torchstrat.data.sources import Source

MakeLoader = Callable[..., DataLoader[object]]
"""``make(dataset, collate, generator)``: a loader with the user's settings otherwise."""


class _From(IterableDataset[object]):
    """The elements of a dataset after the first ``skipped``, which are read and dropped: at once, by ``iter``, or when
    the first element is asked for."""

    def __init__(self, dataset: Iterable[object], skipped: int, first: FirstItems | None, at_once: bool = True) -> None:
        self._dataset, self._skipped, self._first, self._at_once = dataset, skipped, first, at_once
        self.ended = False

    def __iter__(self) -> Iterator[object]:
        elements = iter(self._dataset)
        if self._first is not None:
            elements = self._first.watched(elements, _shown_element)
        if self._at_once:
            self._skip(elements)
        return self._watched(elements)

    def _skip(self, elements: Iterator[object]) -> None:
        with contextlib.nullcontext() if self._first is None else self._first.again():
            next(itertools.islice(elements, self._skipped, self._skipped), None)

    def _watched(self, elements: Iterator[object]) -> Iterator[object]:
        if not self._at_once:
            self._skip(elements)
        yield from elements
        self.ended = True


def _shown_element(element: object) -> tuple[object, str]:
    return element, "element"


def _shown_batch(batch: object) -> tuple[object, str] | None:
    if not isinstance(batch, SplitBatch):
        return shown_batch(batch)
    if len(batch.parts) == len(batch.sizes):
        return batch.parts, f"batch of {batch.sizes}"
    return None if batch.checksum is None else (batch.checksum, f"checksum of {sum(batch.sizes)}")


class OwnFiles(IterableDataset[object]):
    """The files of one process. Data-loading workers of that process take turns in its files' elements."""

    def __init__(self, dataset: FileSource, files: Sequence[PathLike]) -> None:
        self.dataset, self._files = dataset, files

    def __iter__(self) -> Iterator[object]:
        worker = torch.utils.data.get_worker_info()
        elements = iter(self.dataset.open(self._files))
        return elements if worker is None else itertools.islice(elements, worker.id, None, worker.num_workers)


class Opened(IterableDataset[object]):
    """The batches of another source. They are the elements of this dataset."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __iter__(self) -> Iterator[object]:
        worker = torch.utils.data.get_worker_info()
        elements = self.source.open().items
        return elements if worker is None else itertools.islice(elements, worker.id, None, worker.num_workers)


def read_by(dataset: object) -> object:
    """The user's data set in ours."""
    if isinstance(dataset, OwnFiles):
        return dataset.dataset
    return getattr(dataset.source, "data", dataset) if isinstance(dataset, Opened) else dataset


@runtime_checkable
class _CountsPasses(Protocol):
    """What shuffles by the number of the pass."""

    passes: int


def _counting_passes(dataset: object) -> _CountsPasses | None:
    """None for a dataset that is not ours."""
    if isinstance(dataset, Opened):
        source: object = dataset.source
        return source if isinstance(source, _CountsPasses) else None
    found = read_by(dataset)
    return found if isinstance(found, Pipeline) else None


class IterableLoader:
    """Opens the loader of an iterable dataset.

    Args:
        loader: the user's.
        make: another one with its settings.
    """

    def __init__(self, loader: DataLoader[object], make: MakeLoader) -> None:
        self._loader, self._make = loader, make
        self._dataset: Any = loader.dataset
        workers, batched = loader.num_workers, loader.batch_size is not None
        self._ours = _counting_passes(self._dataset)
        piped = isinstance(self._dataset, IterDataPipe)  # torch looks for it in the loader: it cannot be wrapped
        self._by_element = workers == 0 and batched and not piped
        self._by_turns = workers > 0 or (piped and batched)
        self._stateful: Stateful | None = (
            self._dataset if is_stateful(self._dataset) and workers == 0 and not piped else None
        )
        self._kept: DataLoader[object] | None = None
        # Of persistent workers: the states from which their seed was drawn, and how often they have started over.
        self._started: dict[str, object] | None = None
        self._passes = 0
        self._again: Resume | None = None
        self._pipeline: int | None = None

    @functools.cached_property
    def streams(self) -> RandomStreams:
        """As `Source.streams`."""
        owners = (self._loader,) if self._loader.num_workers else (self._loader, read_by(self._dataset))
        return RandomStreams(own=generators_of_stream(*owners))

    def _first_items(self, resume: Resume | None) -> FirstItems | None:
        """None for what is ours, or goes on by itself."""
        data = read_by(self._dataset)
        if self._stateful is not None or isinstance(data, Pipeline):
            return None
        return FirstItems(type(data).__qualname__, resume, *(() if self._by_element else (1,)))

    def open(self, collate: Collate, resume: Resume | None, pipeline: int | None = None) -> Stream[nest.Nest]:
        """The batches as ``collate`` makes them. ``pipeline``: as of `Source`."""
        self._pipeline = pipeline
        resume, self._again = resume or self._again, None
        if resume is None:
            return self._open_new(collate)
        place = resume.place
        if place.ended:
            return self._ended(resume)
        if place.extra and self._by_turns and isinstance(collate, CollateAndSplit):
            raise InvalidArgumentError(
                "the data position lies within a batch, where it was saved under another auto_shard_policy: go on "
                "under that policy until the pass has ended."
            )
        own = self.streams if self._stateful is None else RandomStreams(())
        with drawing_again(resume, own, whole=self._loader.num_workers > 0):
            return self._open_again(collate, resume)

    def _open_new(self, collate: Collate) -> Stream[nest.Nest]:
        states, passes = self.streams.states(), self._passes_of_dataset()
        if self._persistent:
            if self._started is None:
                self._started, self._passes = states, passes
            else:
                self._passes += 1
            states, passes = self._started, self._passes
        first = Place(own=own_state(self._stateful))
        items = self._first_items(None)
        by_element = self._by_element and items is not None
        watched = _From(self._dataset, 0, items) if by_element or self._stateful is not None else None
        batches, seeds = self._opened(watched, collate)
        if items is not None and not by_element:
            batches = items.watched(batches, _shown_batch)
        return self._counted(batches, first, states, passes, watched, seeds, items)

    def _open_again(self, collate: Collate, resume: Resume) -> Stream[nest.Nest]:
        place, states, passes = resume.place, resume.beginning["streams"], resume.beginning["passes"]
        if self._stateful is not None and place.own is not None:
            self._stateful.load_state_dict(copy.deepcopy(place.own))
            self.streams.put_shared(states)
            skipped = place.extra
        else:
            self.streams.put(states)
            skipped = (place.rows or 0) + place.extra
        self._kept = None  # workers that have begun cannot go back
        if self._persistent:
            self._started, self._passes = states, passes
        items = self._first_items(resume)
        watched = _From(self._dataset, skipped, items, at_once=not self._apart) if self._by_element else None
        with self._at_pass(passes):
            batches, seeds = self._opened(watched, collate, resume.beginning.get("draws"))
        if items is not None and not self._by_element:
            batches = items.watched(batches, _shown_batch)
        with contextlib.nullcontext() if items is None else items.again():
            if self._by_turns:
                batches = skip_extra(skip(batches, Place(place.batches, None)), place)
            elif not self._by_element:
                batches = skip_extra(batches if place.own is not None else skip(batches, place), place)
        if self._loader.num_workers:
            self.streams.put(resume.beginning.get("own_now", {}))  # of a position of version 1
        return self._counted(batches, place, states, passes, watched, seeds, items)

    def _ended(self, resume: Resume) -> Stream[nest.Nest]:
        """Nothing is left of this pass; the next one begins as it would have."""
        beginning = resume.beginning
        between = {"passes": beginning["passes"] + 1, "own": resume.place.own} | _generators_then(beginning)
        self.settle(between | ({"started": beginning["streams"]} if self._persistent else {}))
        return _stream(iter(()), resume.place, lambda place, _: place, lambda: dict(beginning))

    @property
    def _apart(self) -> bool:
        """Whether the data set draws in streams of its pipeline.

        One that shards itself may do that by what all processes draw alike: it is left alone.
        """
        data = read_by(self._dataset)
        if self._pipeline is None:
            return False
        if isinstance(data, Pipeline):
            return bool(data.functions) or self._loader.collate_fn is not default_collate
        return isinstance(self._dataset, OwnFiles)

    def _opened(
        self, dataset: object, collate: Collate, seeds: Seeds | None = None
    ) -> tuple[Iterator[object], Seeds | None]:
        """``seeds``: of what is read in this process, if the pass has some already."""
        loader, pipeline = self._loader, self._pipeline
        if pipeline is None or not self._apart:
            return self._opened_alike(dataset, collate), None
        owned = generators_of_data(read_by(self._dataset), loader.collate_fn)
        if loader.num_workers:
            starts = not self._persistent or self._kept is None
            inner = self._loader_of(dataset, collate, generator_of_workers(loader, pipeline))
            with apart(owned, pipeline), self._shuffled_alike():
                batches = iter(inner)
            if starts and pipeline:
                draw_for_workers(loader)
            return batches, None
        seeds = seeds_of_pass(loader.generator, owned) if seeds is None else (seeds[0], seeds[1])
        leave_for_next_pass(owned)
        batches = iter(self._loader_of(dataset, collate, loader.generator))
        return Continuing(batches, OwnDraws(seeds, owned), 0, pipeline), seeds

    def _opened_alike(self, dataset: object, collate: Collate) -> Iterator[object]:
        """What draws from streams that are seeded as those of the other pipelines; the first one tells of it."""
        loader, name = self._loader, type(self._dataset).__qualname__
        if self._pipeline != 0 or isinstance(read_by(self._dataset), Pipeline):
            return iter(self._loader_of(dataset, collate, loader.generator))
        if not loader.num_workers:
            return Watched(iter(self._loader_of(dataset, collate, loader.generator)), name)
        watched = self._watch.settings(loader, collate)
        inner = self._loader_of(dataset, watched["collate_fn"], loader.generator)
        inner.worker_init_fn = watched["worker_init_fn"]
        return WatchedInWorkers(iter(inner), self._watch, name)

    @functools.cached_property
    def _watch(self) -> Watch:
        return Watch()

    @contextlib.contextmanager
    def _shuffled_alike(self) -> Iterator[None]:
        """While workers start, which are seeded apart: what is sharded after a shuffle needs one order in all
        pipelines. Files of its own a pipeline shuffles by seeds of its own."""
        data = read_by(self._dataset)
        if isinstance(self._dataset, OwnFiles):
            yield
            return
        assert isinstance(data, Pipeline)
        data.seed_in_workers = next_of(self._loader.generator)  # with which those of the first pipeline are seeded
        try:
            yield
        finally:
            data.seed_in_workers = None

    def _loader_of(self, dataset: object, collate: Collate, generator: torch.Generator | None) -> DataLoader[object]:
        plain = collate is self._loader.collate_fn and generator is self._loader.generator
        if plain and dataset is None and not self._persistent:
            return self._loader
        if self._kept is None or not self._persistent:
            self._kept = self._make(self._dataset if dataset is None else dataset, collate, generator)
            self._kept.in_order = self._loader.in_order or self._pipeline is None
        return self._kept

    def _counted(
        self,
        batches: Iterator[object],
        first: Place,
        states: dict[str, object],
        passes: int,
        watched: _From | None,
        seeds: Seeds | None,
        items: FirstItems | None,
    ) -> Stream[nest.Nest]:
        def after(place: Place, batch: object) -> Place:
            if batch is END:
                return place._replace(own=own_state(self._stateful), ended=True)
            ended = watched is not None and watched.ended
            return Place(place.batches + 1, self._rows_after(place, batch), own=own_state(self._stateful), ended=ended)

        def beginning() -> dict[str, object]:
            found = {"streams": states, "passes": passes, "draws": seeds, **generators_now(self.streams)}
            return found | ({} if items is None else items.state())

        return _stream(batches, first, after, beginning, here=seeds is not None)

    def _rows_after(self, place: Place, batch: object) -> int | None:
        if self._by_turns or place.rows is None:
            return None
        # Elements, for a loader that groups them: a last batch that is smaller counts too many of what does not exist.
        count = self._loader.batch_size if self._by_element else rows_of(batch)
        return None if count is None else place.rows + place.extra + count

    @property
    def _persistent(self) -> bool:
        return self._loader.persistent_workers

    def _passes_of_dataset(self) -> int:
        return 0 if self._ours is None else int(self._ours.passes)

    @contextlib.contextmanager
    def _at_pass(self, passes: int) -> Iterator[None]:
        """While a loader is opened: our own datasets shuffle by the number of the pass; workers get a copy of it."""
        if self._ours is None:
            yield
            return
        before, self._ours.passes = self._ours.passes, passes
        after = before
        try:
            yield
            if not self._loader.num_workers:
                after = self._ours.passes
        finally:
            self._ours.passes = after

    def settings(self) -> dict[str, object]:
        found = {"dataset": type(self._dataset).__name__, "num_workers": self._loader.num_workers}
        return found | ({"batch_size": self._loader.batch_size} if self._by_turns else {})

    def between(self) -> dict[str, object]:
        found: dict[str, object] = {"passes": self._passes_of_dataset(), **generators_now(self.streams)}
        if self._stateful is not None:
            found["own"] = own_state(self._stateful)
        if self._started is not None:
            found |= {"started": self._started, "passes": self._passes + 1}
        return found

    def settle(self, between: Mapping[str, Any]) -> None:
        if self._stateful is not None and "own" in between:
            self._stateful.load_state_dict(copy.deepcopy(between["own"]))
        else:
            self.streams.put(between.get("streams", {}))  # of a position of version 1
        if "started" in between and self._persistent:
            beginning = _generators_then(between) | {"streams": between["started"], "passes": between["passes"]}
            self._again = Resume(Place(), beginning)
        elif self._ours is not None:
            self._ours.passes = between.get("passes", 0)


def _generators_then(saved: Mapping[str, object]) -> dict[str, object]:
    """Where the generators stood: what is of a pass in what is between two, and the other way round."""
    if GENERATORS in saved:
        return {GENERATORS: saved[GENERATORS]}
    now = saved.get("own_now", saved["streams"])  # version 1 has them under the first name of a pass
    return {"streams": now, "own_now": now}


def _stream(
    batches: Iterator[object],
    first: Place,
    after: Callable[..., Place],
    beginning: Callable[[], dict[str, object]],
    here: bool = False,
) -> Stream[nest.Nest]:
    counting = Counting(batches, first, after)
    return Stream(counting, counting.stand, beginning, here)
