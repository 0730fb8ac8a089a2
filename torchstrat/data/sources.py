"""What a user gives as a dataset, seen as a stream of global batches.

`make_source` finds out what the object is. A `DataLoader` has a source of its own (`torchstrat.data.loader`), since
its rows can be shared over processes by index; every other source is read in full by each process that needs it.
"""

from __future__ import annotations

import functools
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchstrat.core import nest
from torchstrat.core._torch_private import iterates_as_torch_does
from torchstrat.core.engine import Communicator, InputLayout
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.core.randomness import RandomStreams
from torchstrat.data import rows, spec
from torchstrat.data.options import FileSource, PathLike, files_of_worker, reads_files
from torchstrat.data.own_draws import (
    Continuing,
    Seeds,
    Watched,
    draws_without_loader,
    generators_of_data,
    generators_of_stream,
    stream_seed,
)
from torchstrat.data.pipeline import (
    UNKNOWN_CARDINALITY,
    ArrayDataset,
    Pipeline,
    View,
    cardinality_of,
    draw_seed,
)
from torchstrat.data.position import Place, Resume, Stream, generators_now
from torchstrat.data.sequence import (
    Stateful,
    drawing_again,
    in_sequence,
    is_stateful,
    sequentially,
    skip,
    skip_extra,
    unmoved,
)
from torchstrat.data.streams import Step, equal_chunk_steps
from torchstrat.data.workers import ReadByItself, loaders_in

logger = logging.getLogger("torchstrat.data")


class Source(ABC):
    """A stream of global batches that can be opened again and again."""

    reads: str = "rows in sequence"
    """What its position counts; see `Terms`."""
    declared_batch: int | None = None
    """Rows of a full batch, where the dataset says so."""
    cardinality: int = UNKNOWN_CARDINALITY
    """Number of global batches, `UNKNOWN_CARDINALITY` or `INFINITE_CARDINALITY`."""
    rereads: bool = True
    """Whether reading it in every process costs reading it several times (arrays in memory cost nothing)."""
    has_workers: bool = False
    """Whether data-loading worker processes run the user's code, so that a thread of ours may wait for them."""
    exclusive: bool = False
    """Whether opening it again ends an earlier reading (a `DataLoader` with persistent workers)."""
    splits_each_by_itself: bool = False
    """Whether leaves with different numbers of rows are split nevertheless, as by TensorFlow, whose data these are."""
    on_demand: bool = False
    """Whether an element may not be read before it is asked for, because reading it has effects."""
    pipeline: int | None = None
    """The number of this one, where other processes read others. Decides what its data set draws; see `OwnDraws`."""
    rows_alone: bool = False
    """Whether the user said that no row of a batch depends on the others; see ``collate`` of `InputOptions`."""

    @property
    def draws(self) -> bool:
        """Whether reading it in this process may draw from the process's random streams."""
        return not self.has_workers

    @functools.cached_property
    def streams(self) -> RandomStreams:
        """What its order depends on, with the generators of the user's objects that reading it in this process may draw
        from."""
        return RandomStreams(())

    def agree(self, peers: Communicator | None) -> None:  # noqa: B027 - most sources choose nothing
        """Take over rank 0's random choices for the next `open`. Every process calls it right before that."""

    @abstractmethod
    def open(self, resume: Resume | None = None) -> Stream[nest.Nest]:
        """Start over, or go on where ``resume`` says. Workers are started here, in the calling thread; batches are
        read as they are asked for, but for those that have to be read and dropped to get there.

        Going on leaves the process's shared random streams where they were: they have been restored by whoever
        restored the position, or are not to be. So it leaves the generators of `streams`, which loading has put in
        place; of a position of version 1 they are put in place here.
        """

    def open_to_cut(self, resume: Resume | None = None) -> Stream[nest.Nest]:
        """`open`, for batches whose rows are cut to fixed sizes."""
        return self.open(resume)

    def settings(self) -> dict[str, object]:
        """What must not change within a pass for its position to mean the same rows."""
        return {}

    def between(self) -> dict[str, object]:
        """Between two passes: what the next one depends on besides the process's shared random streams."""
        return {}

    def settle(self, between: Mapping[str, object]) -> None:  # noqa: B027 - most sources have nothing of their own
        """Take over what `between` said in the run that was saved."""

    @abstractmethod
    def element_spec(self) -> nest.Nest:
        """The nest of `TensorSpec` of a global batch. May read one example, with random streams put back after."""

    def open_equal_chunks(
        self, layout: InputLayout, ahead: int, resume: Resume | None = None
    ) -> tuple[Stream[Step], Callable[[int], None]]:
        """`open` with every batch split by the equal-chunk rule.

        Args:
            layout: the replicas.
            ahead: how many steps beyond the current one may be asked for.
            resume: as for `open`.

        Returns:
            The steps of this process, and a function to call in the caller's thread before step ``i`` is asked for.
            Where there are several processes all call both, in the same order.
        """
        batches: Stream[nest.Nest] = self.open(resume)
        steps = equal_chunk_steps(batches.items, layout, each_by_itself=self.splits_each_by_itself)
        return replace(batches, items=steps), lambda step: None

    @property
    def files(self) -> Sequence[PathLike] | None:
        """Those that it reads; None: it reads none."""
        return None

    def for_files(self, worker: int, workers: int) -> Source:
        """The part of a source that reads files whose files belong to one process: file ``i mod workers``."""
        raise InvalidArgumentError(
            "auto_shard_policy=FILE over several processes needs a dataset that reads files: one with .files and "
            ".open(files), such as ts.data.TextLineDataset, that is no map-style Dataset. Use DATA to share the rows "
            "of any other dataset."
        )

    def for_hint(self, worker: int, workers: int) -> Source:
        """What the HINT policy leaves to one process; this source itself, when the dataset has no hint."""
        return self

    @property
    def compared(self) -> bool:
        """Whether processes that each read all of it should compare what they read first."""
        return True

    def check_splittable(self) -> None:  # noqa: B027 - most sources cannot know
        """Raise now, not in the first step, where it is known without reading that elements cannot be split."""


_MIXED = -1
"""For a global batch: it changed within the pass, so that only rows can be counted."""


class PipelineSource(Source):
    """`ArrayDataset`, `TextLineDataset` and what is made of them."""

    splits_each_by_itself = True

    def __init__(self, pipeline: Pipeline, view: View | None = None) -> None:
        self.data = pipeline
        self._view = view or View()
        self.declared_batch = pipeline.batch_size
        self.cardinality = pipeline.cardinality
        self.rereads = self.files is not None
        self.passes = 0
        self._agreed_seed: int | None = None

    @property
    def draws(self) -> bool:
        return bool(self.data.functions)

    @functools.cached_property
    def streams(self) -> RandomStreams:
        return RandomStreams((), generators_of_data(self.data, None) if self.data.functions else ())

    def agree(self, peers: Communicator | None) -> None:
        if peers is not None and self.data.needs_seed:
            self._agreed_seed = peers.broadcast_object(draw_seed(), 0, "the seed of a shuffled dataset")

    def open(self, resume: Resume | None = None) -> Stream[nest.Nest]:
        seed, self._agreed_seed = self._agreed_seed, None
        if resume is not None:
            self.passes, seed = resume.beginning["passes"], resume.beginning["seed"]
        elif seed is None:
            seed = self.data.pass_seed()
        read, seeds = self._reading(replace(self._view, seed=seed, passes=(self.passes,)), resume)
        beginning = {"passes": self.passes, "seed": seed, "global_batch": self.declared_batch or 0, "draws": seeds}
        self.passes += 1
        if resume is None:
            batches, place = read(0), Place()
        else:
            place = resume.place
            alike = place.rows is None or resume.beginning["global_batch"] == beginning["global_batch"]
            if not alike:
                beginning["global_batch"] = _MIXED
            with drawing_again(resume, self.streams):
                batches = self._read_on(read, place, by_batches=alike)
        counted = sequentially(batches, place)
        return Stream(
            counted, counted.stand, lambda: {**beginning, **generators_now(self.streams)}, here=seeds is not None
        )

    def _reading(self, view: View, resume: Resume | None) -> tuple[Callable[[int], Iterator[nest.Nest]], Seeds | None]:
        """What reads the batches from one on; with the seeds of what is drawn for this pipeline, if that is so."""
        pipeline = self.pipeline
        if pipeline is None or not self.data.functions:
            return lambda start: map(rows.to_tensors, self.data.read_from(view, start)), None
        own, seeds = draws_without_loader(self.data, None if resume is None else resume.beginning)

        def read(start: int) -> Iterator[nest.Nest]:
            batches = map(rows.to_tensors, self.data.read(replace(view, here=True)))
            # What is dropped has to be read: it draws from the same streams.
            return skip(Continuing(batches, own, view.passes[0], pipeline), Place(start, None))

        return read, seeds

    def _read_on(
        self, read: Callable[[int], Iterator[nest.Nest]], place: Place, by_batches: bool
    ) -> Iterator[nest.Nest]:
        if place.ended:
            return iter(())
        batches = read(place.batches if by_batches else 0)
        return skip_extra(batches if by_batches else skip(batches, place), place)

    def settings(self) -> dict[str, object]:
        root: object = self.data
        while hasattr(root, "source"):
            root = root.source
        return {"dataset": type(root).__name__} | ({"its rows": len(root)} if hasattr(root, "__len__") else {})

    def between(self) -> dict[str, object]:
        return {"passes": self.passes, **generators_now(self.streams)}

    def settle(self, between: Mapping[str, Any]) -> None:
        self.passes = between.get("passes", 0)

    def element_spec(self) -> nest.Nest:
        return self.data.element_spec

    @property
    def files(self) -> Sequence[PathLike] | None:
        return self.data.files if reads_files(self.data) else None

    def for_files(self, worker: int, workers: int) -> Source:
        if self.files is None:
            return super().for_files(worker, workers)
        files = files_of_worker(self.files, worker, workers)
        return PipelineSource(self.data, View(files, self._view.hint))

    def for_hint(self, worker: int, workers: int) -> Source:
        if not self.data.hinted:
            return self
        return PipelineSource(self.data, View(self._view.files, (workers, worker)))

    def check_splittable(self) -> None:
        if any(not leaf.shape for leaf in nest.leaves(self.element_spec())):
            raise InvalidArgumentError(
                "the elements of the dataset are scalars, which cannot be split over replicas: batch it first, with "
                "dataset.batch(<global batch>) or DataLoader(dataset, batch_size=<global batch>)."
            )


class ListSource(Source):
    """A list (or other sequence) of global batches in memory."""

    rereads = False
    draws = False

    def __init__(self, batches: Sequence[nest.Nest]) -> None:
        self._batches = batches
        self.cardinality = len(batches)
        if batches and not rows.holds_arrays(batches[0]):
            raise WrongTypeError(
                f"a {type(batches).__name__} of {type(batches[0]).__name__} is no dataset: give a sequence of batches, "
                "each a tensor, an array, or a list, tuple or dict of them."
            )

    def open(self, resume: Resume | None = None) -> Stream[nest.Nest]:
        return in_sequence(lambda: map(rows.to_tensors, self._batches), resume)

    def element_spec(self) -> nest.Nest:
        if not self._batches:
            raise InvalidArgumentError("element_spec of an empty sequence of batches is not known.")
        specs = [spec.spec_of(rows.to_tensors(batch), rows_fixed=False) for batch in self._batches]
        return nest.map_structure(spec.widest, *specs)

    def check_splittable(self) -> None:
        if self._batches:
            rows.count_rows(rows.to_tensors(self._batches[0]))


class IterableSource(Source):
    """An `IterableDataset`, or any other iterable of global batches, a generator included.

    An iterator can be read once: opening it a second time is an error, not an empty epoch.
    """

    sharded = False
    """Whether it was opened for this process's part. One that shards itself may do that by what all draw alike."""

    def __init__(self, iterable: Iterable[nest.Nest]) -> None:
        self._iterable = iterable
        self._once = iter(iterable) if isinstance(iterable, Iterator) else None
        self._used = False
        self._spec: nest.Nest = None
        """Of what can be read once, as soon as some of it has been."""
        self.declared_batch = _whole(getattr(iterable, "batch_size", None))
        self.cardinality = cardinality_of(iterable)
        self._stateful: Stateful | None = iterable if is_stateful(iterable) else None
        self._passes = 0

    @functools.cached_property
    def streams(self) -> RandomStreams:
        return RandomStreams(own=generators_of_stream(self._iterable))

    def open(self, resume: Resume | None = None) -> Stream[nest.Nest]:
        if self.pipeline is None or not self.sharded:
            return in_sequence(self._watched, resume, self.streams, self._stateful, type(self._data).__qualname__)
        beginning = {} if resume is None else resume.beginning
        pipeline, passes = self.pipeline, beginning.get("passes", self._passes)
        own, seeds = draws_without_loader(self._data, beginning)
        self._passes = passes + 1

        def read() -> Iterator[nest.Nest]:
            return Continuing(self._read(), own, passes, pipeline)

        found = in_sequence(read, resume, self.streams, self._stateful, type(self._data).__qualname__)
        seeded = {"draws": seeds, "passes": passes}
        return replace(found, beginning=lambda: {**found.beginning(), **seeded}, here=True)

    @property
    def _data(self) -> object:
        return self._iterable

    def _watched(self) -> Iterator[nest.Nest]:
        if self.pipeline is None:
            return self._read()
        loaders = loaders_in(self._data)
        items = ReadByItself(self._read, loaders, self.pipeline) if loaders else self._read()
        return items if self.pipeline else Watched(items, type(self._data).__qualname__)

    def settings(self) -> dict[str, object]:
        return {"dataset": type(self._iterable).__name__}

    def between(self) -> dict[str, object]:
        own = {} if self._stateful is None else {"own": self._stateful.state_dict()}
        return {"passes": self._passes, **own, **generators_now(self.streams)}

    def settle(self, between: Mapping[str, Any]) -> None:
        self._passes = between.get("passes", 0)
        if self._stateful is not None and "own" in between:
            self._stateful.load_state_dict(between["own"])
        else:
            self.streams.put(between.get("streams", {}))  # of a position of version 1

    def _read(self) -> Iterator[nest.Nest]:
        if self._once is None:
            return map(rows.to_tensors, iter(self._iterable))
        if self._used:
            raise InvalidArgumentError(
                f"the dataset is an iterator ({type(self._iterable).__name__}), which can be read once, and it has "
                "been. For several epochs give a list, an object whose __iter__ starts over, or a DataLoader."
            )
        self._used = True
        return map(self._noted, self._once)

    def _noted(self, batch: nest.Nest) -> nest.Nest:
        tensors = rows.to_tensors(batch)
        if self._spec is None:
            self._spec = spec.spec_of(tensors, rows_fixed=False)
        return tensors

    def element_spec(self) -> nest.Nest:
        if self._spec is not None:
            return self._spec
        if self._used:  # by who reads it now, who would miss what is taken here
            raise InvalidArgumentError(
                f"element_spec of an iterator ({type(self._iterable).__name__}) that is being read is known from its "
                "first batch on: ask for it before iter(), or after that."
            )
        with spec.undisturbed_randomness():
            if self._once is None:
                with unmoved(self._stateful):
                    first = next(iter(self._iterable), None)
            elif (first := next(self._once, None)) is not None:
                self._once = itertools.chain([first], self._once)
        if first is None:
            raise InvalidArgumentError("element_spec of a dataset without elements is not known.")
        return spec.spec_of(rows.to_tensors(first), rows_fixed=False)

    def for_hint(self, worker: int, workers: int) -> Source:
        shard = getattr(self._iterable, "shard", None)
        return make_source(shard(workers, worker)) if callable(shard) else self


class MapSource(Source):
    """A map-style `Dataset` whose items are the global batches, in the order of its indices."""

    reads = "batches by index"

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.cardinality = len(dataset)
        self._split = False
        self._passes = 0

    def check_splittable(self) -> None:
        self._split = True
        _warn_of_items(type(self._dataset).__qualname__)

    @functools.cached_property
    def streams(self) -> RandomStreams:
        return RandomStreams((), generators_of_data(self._dataset, None))

    def open(self, resume: Resume | None = None) -> Stream[nest.Nest]:
        place = Place() if resume is None else resume.place
        beginning = {} if resume is None else resume.beginning
        passes = beginning.get("passes", self._passes)
        read, seeds = self._reading(passes, beginning)
        self._passes = passes + 1
        batches = map(read, range(place.batches, len(self._dataset)))
        counted = sequentially(skip_extra(batches, place), place)
        seeded = {"draws": seeds, "passes": passes}
        return Stream(
            counted, counted.stand, lambda: {**seeded, **generators_now(self.streams)}, here=seeds is not None
        )

    def _reading(self, passes: int, beginning: Mapping[str, object]) -> tuple[Callable[[int], nest.Nest], Seeds | None]:
        """What reads a batch; with the seeds of what is drawn for this pipeline, if that is so."""
        pipeline = self.pipeline
        if pipeline is None:
            return self._batch, None
        own, seeds = draws_without_loader(self._dataset, beginning)

        def read(index: int) -> nest.Nest:
            try:
                own.enter(index, stream_seed(pipeline, passes))
                return self._batch(index)
            finally:
                own.leave()

        return read, seeds

    def between(self) -> dict[str, object]:
        return {"passes": self._passes, **generators_now(self.streams)}

    def settle(self, between: Mapping[str, Any]) -> None:
        self._passes = between.get("passes", 0)

    def _batch(self, index: int) -> nest.Nest:
        batch = rows.to_tensors(self._dataset[index])
        if self._split and not rows.is_batch(batch):
            raise WrongTypeError(
                f"item {index} of {type(self._dataset).__qualname__} is no batch of tensors with equally many rows, "
                "and each item of a map-style data set is taken for a global batch, to be split over the replicas. "
                "A dataset of single examples needs a DataLoader(dataset, batch_size=<global batch>)."
            )
        return batch

    def settings(self) -> dict[str, object]:
        return {"number of batches": len(self._dataset)}

    def element_spec(self) -> nest.Nest:
        if not len(self._dataset):
            raise InvalidArgumentError("element_spec of an empty dataset is not known.")
        with spec.undisturbed_randomness():
            return spec.spec_of(rows.to_tensors(self._dataset[0]), rows_fixed=False)

    def for_hint(self, worker: int, workers: int) -> Source:
        shard = getattr(self._dataset, "shard", None)
        return make_source(shard(workers, worker)) if callable(shard) else self


@functools.cache
def _warn_of_items(name: str) -> None:
    logger.warning(
        "each item of %s is taken for a global batch, whose rows (dim 0) are split over the replicas. If items are "
        "single examples, give a DataLoader(dataset, batch_size=<global batch>).",
        name,
    )


class ForeignFileSource(IterableSource):
    """A user's own dataset with ``files`` and ``open(files)``; its elements are global batches."""

    def __init__(self, dataset: FileSource, files: Sequence[PathLike] | None = None) -> None:
        super().__init__(_Files(dataset, tuple(dataset.files) if files is None else tuple(files)))
        self.declared_batch = _whole(getattr(dataset, "batch_size", None))
        self._dataset, self.sharded = dataset, files is not None

    @property
    def _data(self) -> object:
        return self._dataset

    @property
    def files(self) -> Sequence[PathLike] | None:
        return self._dataset.files

    def for_files(self, worker: int, workers: int) -> Source:
        return ForeignFileSource(self._dataset, files_of_worker(self._dataset.files, worker, workers))


class _Files:
    def __init__(self, dataset: FileSource, files: tuple[PathLike, ...]) -> None:
        self._dataset, self._files = dataset, files

    def __iter__(self) -> Iterator[nest.Nest]:
        return iter(self._dataset.open(self._files))


_of_loader: Callable[[DataLoader[object]], Source]


def set_loader_source(kind: Callable[[DataLoader[object]], Source]) -> None:
    """What `make_source` makes of a `DataLoader`, whose own batches need sources of what it reads."""
    global _of_loader
    _of_loader = kind


def make_source(dataset: object) -> Source:
    """The source of whatever may be given as a dataset.

    Raises:
        InvalidArgumentError: None.
        WrongTypeError: an object that is no dataset.
    """
    if dataset is None:
        raise InvalidArgumentError(
            "the dataset is None; give a DataLoader, a Dataset, arrays or an iterable of batches."
        )
    if isinstance(dataset, DataLoader) and iterates_as_torch_does(dataset):
        return _of_loader(dataset)
    if isinstance(dataset, Pipeline):
        return PipelineSource(dataset)
    if reads_files(dataset):
        return ForeignFileSource(dataset)
    if isinstance(dataset, IterableDataset):
        return IterableSource(dataset)
    if rows.is_array(dataset) or (isinstance(dataset, Mapping | tuple) and rows.only_arrays(dataset)):
        return PipelineSource(ArrayDataset(dataset))
    if isinstance(dataset, list | tuple):
        return ListSource(dataset)
    if isinstance(dataset, Iterable) and not isinstance(dataset, str | bytes | Mapping | range):
        return IterableSource(dataset)
    if isinstance(dataset, Dataset):
        if not hasattr(dataset, "__len__"):
            raise WrongTypeError(f"a map-style dataset needs __len__; {type(dataset).__name__} has none.")
        return MapSource(dataset)
    advice = " A function that makes one goes to distribute_datasets_from_function." if callable(dataset) else ""
    raise WrongTypeError(
        f"{type(dataset).__name__} is no dataset: give a DataLoader, a map-style or iterable Dataset, arrays or "
        f"tensors, or an iterable of batches.{advice}"
    )


def refuse_distributed(dataset: object) -> None:
    """A dataset that is distributed already cannot be distributed again."""
    from torchstrat.data.distributed import DistributedDataset, DistributedIterator

    if isinstance(dataset, DistributedDataset | DistributedIterator):
        raise UnsupportedError(
            f"the dataset is distributed already: distribute_dataset needs the one it was made from, and got a "
            f"{type(dataset).__name__}. Distribute once, and iterate over that as it is."
        )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
