"""`DistributedDataset` and `DistributedIterator`: what the loop over a distributed dataset sees.

And what processes tell each other about their input, where it does not follow from the split of a global batch:
pipelines that every process reads for itself (FILE, OFF, HINT, `distribute_datasets_from_function`) may differ in rows
and in length. One small exchange per step keeps all processes stepping together until the last one is done.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from torchstrat.core import context, nest, notebook_html
from torchstrat.core.engine import BatchPlacement, Communicator, InputLayout
from torchstrat.core.errors import (
    CommunicationError,
    ContextError,
    InvalidArgumentError,
    OutOfRangeError,
    WrongTypeError,
)
from torchstrat.core.randomness import RandomStreams
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.core.values import BatchInfo, DistributedValues, Mirrored, PerReplica
from torchstrat.data import rows
from torchstrat.data.marks import Along, Same, unmarked
from torchstrat.data.options import InputOptions, PathLike
from torchstrat.data.position import Progress, Saved, Standing, Terms, state_of
from torchstrat.data.prefetch import Ahead, Placement, Prefetcher
from torchstrat.data.streams import Step

if TYPE_CHECKING:
    from torchstrat.core.context import StrategyLike


class _Report(NamedTuple):
    rows: tuple[int | None, ...] | None  # of the local replicas, None for one's None; None: there is no data left here
    template: nest.Nest  # an empty batch, in the first step, for processes that never see data
    failure: str | None


class StepAgreement:
    """Steps of all processes, made of the steps of each. Collective: every process calls `next` for every step."""

    def __init__(self, communicator: Communicator, local_replicas: int) -> None:
        self._communicator = communicator
        self._local = local_replicas
        self._empty: nest.Nest = None

    def next(self, pull: Callable[[], Step | None]) -> Step | None:
        """The next step with the rows of every replica; empty batches where this process's data has ended.

        Args:
            pull: this process's next step, with the rows of its own replicas; None, again and again, after the last.

        Returns:
            None when all processes have reached their ends.

        Raises:
            CommunicationError: another process failed to read its next batch. A failure of ``pull`` itself is raised
                here as it is.
        """
        step, failure = None, None
        try:
            step = pull()
        except Exception as error:  # told to the others, who would wait for this process otherwise
            failure = error
        first = self._empty is None
        if step is not None and first:
            self._empty = rows.empty_like(step.components[0])
        report = _Report(
            None if step is None else tuple(map(_rows_of, step.components, step.rows)),
            self._empty if first else None,
            None if failure is None else f"{type(failure).__name__}: {failure}",
        )
        reports = self._communicator.all_gather_object(report, "the rows of the next step")
        if failure is not None:
            raise failure
        for rank, other in enumerate(reports):
            if other.failure is not None:
                raise CommunicationError(f"rank {rank} could not read its next batch: {other.failure}")
        if all(other.rows is None for other in reports):
            return None
        if self._empty is None:
            self._empty = next((other.template for other in reports if other.template is not None), None)
        sizes = [size for other in reports for size in other.rows or (None,) * self._local]
        own = (None,) * self._local if step is None else step.components
        empty = None if all(size is None for size in sizes) else self._empty
        return Step(tuple(empty if one is None else one for one in own), tuple(size or 0 for size in sizes))


def _rows_of(component: nest.Nest, rows: int) -> int | None:
    return None if component is None else rows


class PassEnd:
    """How a pass that needs no agreement about its steps ended for each process. Every process makes one per pass.

    One that fails says so, and does not wait; who left its loop early has nothing against the pass.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._rank = communicator.rank
        self._words = communicator.words("the end of a pass over a distributed dataset")

    def left(self) -> None:
        self._words.tell("")

    def failed(self, error: BaseException) -> None:
        self._words.tell(f"{type(error).__name__}: {error}"[:1000])

    def reached(self) -> None:
        """This process has come to its end. Raises `CommunicationError` where another one did not, or does not come."""
        self.left()
        words = self._words.of_all()
        for rank, word in sorted(words.items()):
            if word and rank != self._rank:
                raise CommunicationError(
                    f"rank {rank} could not read its rows of a batch: {word}. What this rank has read is less than the "
                    "pass: the rows of the other replicas in that batch and after it are missing."
                )


def require_equal_data(communicator: Communicator, first: Step | None, cardinality: int) -> None:
    """Every process reads the whole dataset and keeps its own rows: then all must read the same.

    Compares the first batches, and the numbers of batches where they are known.
    """
    checksum = None if first is None else first.checksum
    reports = communicator.all_gather_object((checksum, cardinality), "the checksum of the first batch")
    sums, counts = zip(*reports, strict=True)
    if len(set(counts)) > 1:
        raise InvalidArgumentError(
            f"the dataset has {list(counts)} batches on ranks 0 to {len(counts) - 1}, and under AutoShardPolicy.DATA "
            "every process reads the same dataset and keeps its own rows. If it is sharded already, pass "
            "InputOptions(auto_shard_policy=AutoShardPolicy.OFF) or use distribute_datasets_from_function."
        )
    if len(set(sums)) == 1:
        return
    odd = [rank for rank, other in enumerate(sums) if other != sums[0]]
    raise InvalidArgumentError(
        f"rank(s) {odd} read another first batch than rank 0. Under AutoShardPolicy.DATA every process reads the same "
        "dataset and keeps its own rows. If it is sharded already, pass "
        "InputOptions(auto_shard_policy=AutoShardPolicy.OFF) or use distribute_datasets_from_function; if it is "
        "shuffled, give every rank the same seed."
    )


def require_same_files(communicator: Communicator, files: Sequence[PathLike]) -> None:
    """File ``i`` belongs to process ``i mod num_workers``: then all must list the same ones, in the same order."""
    said = communicator.all_gather_object(_names_of(files), "the files of a dataset")
    odd = [rank for rank, names in enumerate(said) if names != said[0]]
    if odd:
        pairs = enumerate(itertools.zip_longest(said[0], said[odd[0]]))
        number, (first, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        raise InvalidArgumentError(
            f"rank(s) {odd} list other files than rank 0, or in another order: file {number} is {first or 'missing'} "
            f"on rank 0 and {other or 'missing'} on rank {odd[0]}. Under AutoShardPolicy.FILE process i reads the "
            f"files i, i + {len(said)}, …, so all need the same list. The order in which a folder is listed may be "
            "another one on each machine: sort it, sorted(folder.glob(…))."
        )


def _names_of(files: Sequence[PathLike]) -> list[str]:
    """Within the folder that has all of them, which may be another one on each machine; none of what is no path."""
    if not all(isinstance(file, str | os.PathLike) for file in files):
        return []
    paths = [Path(file).parts for file in files]
    common = sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
    return ["/".join(path[common:]) for path in paths]


StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Reading:
    """One pass over the data, just opened."""

    steps: Iterator[Step]
    prepare: Callable[[int], None]
    """To be called in the caller's thread before each step, with its number."""
    standing: Standing
    pipelines: int
    """Streams that are read by all processes in this pass."""
    agreed: bool
    """Whether the steps hold the rows of all replicas, and are as many, in every process without asking."""
    compared: bool = False
    """Whether the processes compare their first batches."""
    here: bool = False
    """Whether the steps have to be taken in the caller's thread; see `Stream.here`."""


@dataclass(frozen=True)
class Feed:
    """How to open a distributed dataset, and what is known about it before."""

    open: Callable[[Saved | None], Reading]
    """Starts over, or goes on with a pass that was under way."""
    element_spec: Callable[[], nest.Nest]
    cardinality: int
    has_workers: bool
    exclusive: bool
    terms: Callable[[], Terms]
    streams: Mapping[int, RandomStreams]
    """Of this process's pipelines; see `Source.streams`."""
    between: Callable[[], Mapping[int, Mapping[str, object]]]
    """Of this process's pipelines; see `Source.between`."""
    settle: Callable[[Saved], None]
    """Takes over what was saved between two passes."""
    on_demand: bool = False
    """Whether nothing may be read before it is asked for."""


@short_tracebacks
class DistributedDataset(context.OfStrategy):
    """A dataset whose elements are split over the replicas of a strategy. Made by the strategy.

    Iterating gives one global batch per step: bare with a single replica in a single process, else a nest of
    `PerReplica`, whose components are on their replicas' devices. Every ``iter()`` starts over; with several processes
    all of them iterate together, and all see the same number of steps.
    """

    def __init__(self, strategy: StrategyLike, layout: InputLayout, options: InputOptions, feed: Feed) -> None:
        self._strategy = strategy
        self._layout = layout
        self._options = options
        self._feed = feed
        self._latest: weakref.ref[DistributedIterator] | None = None
        self._progress: Progress | None = None
        self._loaded: tuple[Saved, Mapping[str, object]] | None = None

    def __iter__(self) -> DistributedIterator:
        _require_outside_replicas(self._strategy, "iter(distributed_dataset)")
        if self._feed.exclusive and self._latest is not None and (latest := self._latest()) is not None:
            latest.close()  # its persistent workers are about to start over
        saved = None if self._loaded is None else self._loaded[0]
        if saved is not None and not saved.under_way:
            self._feed.settle(saved)
        going_on = saved if saved is not None and saved.under_way else None
        reading = self._feed.open(going_on)
        progress = Progress(reading.standing, reading.pipelines)
        iterator = DistributedIterator(self._strategy, self._layout, self._options, self._feed, reading, progress)
        self._loaded = None
        self._latest, self._progress = weakref.ref(iterator), progress
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """How far the data has been handed out, to go on from there in another run; see `load_state_dict`.

        Batches that were read ahead do not count. The pass is that of the latest ``iter()``, also when its loop was
        left early; when it has ended, or before the first, the state is between two passes. It is plain data of a few
        thousand bytes, whatever the size of the dataset. With several processes all of them call it, after the same
        step, and all get the same.

        Raises:
            InvalidArgumentError: the processes are at different steps.
            UnsupportedError: data whose reading cannot be repeated: a function that is called for each element, or a
                `DataLoader` with ``in_order=False``.
        """
        _require_outside_replicas(self._strategy, "distributed_dataset.state_dict()")
        if self._loaded is not None:
            saved, state = self._loaded
            return {**state, "streams": saved.streams_now(self._feed.streams, self._layout.peers)}
        return state_of(self._progress, self._feed.terms(), self._feed.between, self._layout.peers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on with the row after the last one that ``state`` counts; later ones start over.

        The number of replicas, of processes (under the policies DATA and FILE, or HINT with a hint) and the batch size
        may be others than they were. At equal settings the steps are those of a run that was not interrupted, and so
        is every pass after it, if the process's random streams are restored as well; this leaves them alone. For a
        map-style dataset behind a `DataLoader` the order of indices is drawn again, and no row is read that was handed
        out. What can only be read in sequence is read and dropped up to there, unless it has ``state_dict()`` and
        ``load_state_dict()`` of its own. Generators of one's own (``generator=g``, a data set's ``self.rng``), from
        which other datasets may draw as well, are put where they stood at once: load all of them before any is
        iterated. A loop that is under way goes on with its rows, and draws from there.

        Not part of a position: numbers that a map-style dataset draws within data-loading workers (those start with a
        new seed), and those that it draws here for a batch that was read one step ahead to be copied to an accelerator.
        An own sampler or an iterable that draws from the process's random streams has to be the only one to do so
        during a pass. Whether samplers draw the same again is checked, and whether iterables begin with the same.

        With several processes all of them call it, with the same state. Nothing is read before the next ``iter()``.

        Raises:
            WrongTypeError: not such a state.
            InvalidArgumentError: of another dataset, or of settings with which rows would be lost or repeated.
        """
        saved = self._feed.terms().check(state)
        saved.put_generators(self._feed.streams)
        self._loaded = (saved, state)

    @property
    def element_spec(self) -> nest.Nest:
        """A nest of `PerReplicaSpec`, or of `TensorSpec` where elements are bare; leaves have ``shape`` and ``dtype``.

        May read one example of the dataset; random streams are put back afterwards.

        Raises:
            InvalidArgumentError: the dataset is empty and does not say what its elements would be.
        """
        return self._feed.element_spec()

    @property
    def cardinality(self) -> int:
        """Global batches in one pass, where known; -1 for a dataset without end, -2 where it is not known."""
        return self._feed.cardinality

    def __len__(self) -> int:
        raise WrongTypeError(
            "a distributed dataset has no len(): use .cardinality, which is -2 where that is not known."
        )

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        steps = {-1: "without end", -2: "an unknown number of steps"}.get(self.cardinality, f"{self.cardinality} steps")
        return f"<DistributedDataset of {self._strategy!r}, {steps}>"

    def _repr_html_(self) -> str:
        return notebook_html.facts("DistributedDataset", self._facts())

    def _facts(self) -> Iterator[tuple[str, object]]:
        """From what is known without reading: the dataset may be slow, or give its rows once."""
        yield "strategy", self._strategy
        yield "global batches in a pass", {-1: "without end", -2: "unknown"}.get(self.cardinality, self.cardinality)
        progress = self._progress
        if self._loaded is not None:
            yield "position", "loaded; the next iter() goes on from there"
        elif progress is not None:
            yield "position", f"{progress.steps} steps into a pass" if not progress.ended else "between two passes"
        if self._layout.num_workers > 1:
            yield "input pipeline", f"number {self._layout.worker_index} of {self._layout.num_workers}"
        if self._layout.bare:
            yield "elements", "bare, as the dataset makes them: there is one replica"

    def reduce(self, initial_state: StateT, reduce_func: Callable[[StateT, Any], StateT]) -> StateT:
        """Fold over one pass: ``state = reduce_func(state, element)`` for every element; returns the last state."""
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state


class Optional(Generic[StateT]):
    """An element, or the end of the data. See `DistributedIterator.get_next_as_optional`."""

    def __init__(self, element: StateT | None, present: bool) -> None:
        self._element, self._present = element, present

    def has_value(self) -> bool:
        return self._present

    def get_value(self) -> StateT:
        """The element; `InvalidArgumentError` when there is none."""
        if not self._present:
            raise InvalidArgumentError("this Optional has no value: the data has ended; ask has_value() first.")
        return self._element  # type: ignore[return-value]


@short_tracebacks
class DistributedIterator(context.OfStrategy):
    """One pass over a `DistributedDataset`. Not for several threads at once.

    Reading ahead stops, and its thread ends, at the end of the data, on an error, on `close`, and when the iterator is
    garbage collected, so a loop may simply be left. After an error, such as of a row that cannot be read, every further
    call raises it again: the rows behind it are not at hand, and a loop that goes on shall not take that for the end.
    The other processes are told which rank failed, and why: in the call in which they wait for it, at the latest at
    their end of the pass, where all have a word for each other.
    """

    def __init__(
        self,
        strategy: StrategyLike,
        layout: InputLayout,
        options: InputOptions,
        feed: Feed,
        reading: Reading,
        progress: Progress,
    ) -> None:
        self._strategy = strategy
        self._layout = layout
        self._run_empty = options.empty_replicas == "run"
        self._feed = feed
        self._position = 0
        self._ended = False
        self._error: Exception | None = None
        self._reading, self._progress = reading, progress
        self._agreement: StepAgreement | None = None
        self._end: PassEnd | None = None
        if layout.peers is not None and not self._reading.agreed:
            self._agreement = StepAgreement(layout.peers, len(layout.local_replicas))
        elif layout.peers is not None:
            self._end = PassEnd(layout.peers)
            weakref.finalize(self, self._end.left).atexit = False
        self._placement = placement_of(layout, options)
        self._fetches = options.fetch_to_device
        place = self._placement.place if self._fetches else _leave
        behind = not self._reading.here and steps_read_ahead(layout, options, feed.has_workers) > 0
        ahead = _ahead(feed, options, self._placement.copies, behind=behind)
        if ahead is not Ahead.NOTHING:
            place = partial(_place_apart, place)
        self._progress.reads_ahead = ahead is not Ahead.NOTHING
        steps = self._progress.following(self._reading.steps, self._reading.standing)
        self._prefetcher = Prefetcher(steps, place, options.per_replica_buffer_size, ahead)

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        step = self._take("next(distributed_iterator)")
        if step is None:
            raise StopIteration
        return self._hand_out(step)

    def get_next(self) -> Any:
        """The next element; `OutOfRangeError` after the last one, however often it is called."""
        step = self._take("get_next")
        if step is None:
            raise OutOfRangeError(
                f"get_next was called after the last of {self._position} element(s). Catch OutOfRangeError, use "
                "get_next_as_optional, or a for loop, which ends by itself."
            )
        return self._hand_out(step)

    def get_next_as_optional(self) -> Optional[Any]:
        """The next element, or an `Optional` without a value after the last one."""
        step = self._take("get_next_as_optional")
        return Optional(None, False) if step is None else Optional(self._hand_out(step), True)

    @property
    def element_spec(self) -> nest.Nest:
        """As `DistributedDataset.element_spec`."""
        return self._feed.element_spec()

    def state_dict(self) -> dict[str, Any]:
        """As `DistributedDataset.state_dict`, of this pass. It is loaded by the dataset."""
        _require_outside_replicas(self._strategy, "distributed_iterator.state_dict()")
        return state_of(self._progress, self._feed.terms(), self._feed.between, self._layout.peers)

    def close(self) -> None:
        """Stop reading ahead; the iterator is at its end then. Idempotent."""
        self._ended = True
        self._prefetcher.close()
        if self._end is not None:
            self._end.left()

    def _take(self, call: str) -> Step | None:
        _require_outside_replicas(self._strategy, call)
        if self._error is not None:  # not the end of the data: who caught it would believe that all has been seen
            raise self._error
        if self._ended:
            return None
        try:
            step = self._advance()
        except BaseException as error:
            self._fail(error, call)
            raise
        if step is None:
            self._progress.ended = True
            self.close()
        else:
            self._progress.hand_out()
            self._position += 1
        return step

    def _fail(self, error: BaseException, call: str) -> None:
        self._error = error if isinstance(error, Exception) else _interrupted(error, call)
        if self._end is not None:
            self._end.failed(error)
        self.close()
        if self._layout.peers is not None and not isinstance(error, CommunicationError):  # of that the others know
            self._layout.peers.report_failure(
                f"its input failed in {call}: {type(error).__name__}: {error}", leaves=True
            )

    def _advance(self) -> Step | None:
        self._reading.prepare(self._position)
        if self._agreement is not None:
            return self._agreement.next(self._pull)
        step = self._pull()
        if self._position == 0 and self._reading.compared and self._layout.peers is not None:
            require_equal_data(self._layout.peers, step, self._feed.cardinality)
        if step is None and self._end is not None:
            self._end.reached()
        return step

    def _pull(self) -> Step | None:
        placed = self._prefetcher.next()
        if placed is None:
            return self._progress.pull(None)
        step: Step = self._placement.receive(placed) if self._fetches else placed[0]
        return self._progress.pull(step)

    def _hand_out(self, step: Step) -> Any:
        if self._layout.bare:
            return unmarked(step.components[0])
        info = BatchInfo(step.rows, self._run_empty)
        ids = self._layout.local_replicas
        join = self._layout.join if self._fetches else None

        def wrap(values: tuple[object, ...]) -> DistributedValues[object]:
            first = values[0]
            if isinstance(first, torch.Tensor) and join is None:
                return PerReplica(values, replica_ids=ids, batch_info=info)
            plain = tuple(unmarked(value) for value in values)
            if isinstance(first, Same):
                return Mirrored(plain, replica_ids=ids, batch_info=info)
            if isinstance(first, Along):
                return PerReplica(plain, replica_ids=ids, batch_info=replace(info, dim=first.dim))
            if join is not None:
                return join(plain, ids, info)
            return PerReplica(plain, replica_ids=ids, batch_info=info)

        return _zip(wrap, step.components)


def _interrupted(error: BaseException, call: str) -> ContextError:
    """What every further call raises after Ctrl-C, for one."""
    return ContextError(
        f"{type(error).__name__} interrupted {call}, and the batch that it was reading is lost to this iterator. Take "
        "another one, iter(distributed_dataset), which starts over; or which goes on with that batch, after "
        "distributed_dataset.load_state_dict(this_iterator.state_dict())."
    )


def placement_of(layout: InputLayout, options: InputOptions) -> BatchPlacement:
    """What moves batches to the replicas' devices; to none, where they are to stay on the host."""
    if options.fetch_to_device and layout.placement is not None:
        return layout.placement
    return Placement(layout.devices if options.fetch_to_device else ())


def steps_read_ahead(layout: InputLayout, options: InputOptions, has_workers: bool) -> int:
    """How many steps another thread may read beyond the one that is asked for. Where nothing is copied the thread that
    asks reads, as in a PyTorch loop, so that a pass that is left early has drawn what it draws there."""
    depth = options.per_replica_buffer_size
    return depth if depth > 1 or (has_workers and placement_of(layout, options).copies) else 0


def _ahead(feed: Feed, options: InputOptions, copies: bool, *, behind: bool) -> Ahead:
    if feed.on_demand:
        return Ahead.NOTHING
    if behind:
        return Ahead.READ_AND_COPY
    return Ahead.COPY if copies or options.per_replica_buffer_size > 1 else Ahead.NOTHING


_Placed = tuple[Step, tuple[object, ...]]


def _leave(step: Step) -> _Placed:
    return step, ()


def _place_apart(place: Callable[[Step], _Placed], step: Step) -> _Placed:
    """What is not copied to a device is copied on the host; see `rows.in_own_memory`."""
    placed, events = place(step)
    components = tuple(rows.map_leaves(rows.in_own_memory, component) for component in placed.components)
    return Step(components, placed.rows, placed.checksum), events


def _zip(wrap: Callable[[tuple[object, ...]], object], components: tuple[nest.Nest, ...]) -> nest.Nest:
    """The structure of one replica's batch, with ``wrap(the replicas' values)`` for every leaf.

    What the replicas do not have alike, such as lists of their own examples, is a leaf.
    """
    if all(component is None for component in components):
        return None
    if any(not nest.is_nested(component) or not component or rows.is_row_list(component) for component in components):
        return wrap(components)
    if not all(_is_alike(components[0], component) for component in components[1:]):
        return wrap(components)
    found = [nest.values_beside(components[0], component) for component in components]
    return nest.rebuild(components[0], [_zip(wrap, column) for column in zip(*found, strict=True)])


def _is_alike(first: nest.Nest, other: nest.Nest) -> bool:
    return len(first) == len(other) and (not isinstance(first, Mapping) or first.keys() == other.keys())


def _require_outside_replicas(strategy: StrategyLike, call: str) -> None:
    if not context.has_strategy():
        return
    context.require_not_mixed(strategy, call)
    if not context.in_cross_replica_context():
        raise InvalidArgumentError(
            f"{call} was called inside a replica of a run. Take the batch outside, and pass it: "
            "strategy.run(step, args=(next(iterator),))."
        )
