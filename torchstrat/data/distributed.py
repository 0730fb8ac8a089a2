"""`DistributedDataset` and `DistributedIterator`: what the loop over a distributed dataset sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torchstrat import nest
from torchstrat.data import rows
from torchstrat.data.agreement import StepAgreement, require_equal_data
from torchstrat.data.layout import BatchPlacement, InputLayout
from torchstrat.data.options import InputOptions
from torchstrat.data.prefetch import Ahead, Placement, Prefetcher
from torchstrat.data.streams import Step
from torchstrat.errors import InvalidArgumentError, OutOfRangeError, WrongTypeError
from torchstrat.values import BatchInfo, PerReplica

if TYPE_CHECKING:
    from torchstrat.strategy import Strategy

StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Reading:
    """One pass over the data, just opened."""

    steps: Iterator[Step]
    prepare: Callable[[int], None]
    """To be called in the caller's thread before each step, with its number."""
    agreed: bool
    """Whether the steps hold the rows of all replicas, and are as many, in every process without asking."""
    compared: bool = False
    """Whether the processes compare their first batches."""


@dataclass(frozen=True)
class Feed:
    """How to open a distributed dataset, and what is known about it before."""

    open: Callable[[], Reading]
    element_spec: Callable[[], nest.Nest]
    cardinality: int
    has_workers: bool
    exclusive: bool
    on_demand: bool = False
    """Whether nothing may be read before it is asked for."""


class DistributedDataset:
    """A dataset whose elements are split over the replicas of a strategy. Made by the strategy.

    Iterating gives one global batch per step: bare with a single replica in a single process, else a nest of
    `PerReplica`, whose components are on their replicas' devices. Every ``iter()`` starts over; with several processes
    all of them iterate together, and all see the same number of steps.
    """

    def __init__(self, strategy: Strategy, layout: InputLayout, options: InputOptions, feed: Feed) -> None:
        self._strategy = strategy
        self._layout = layout
        self._options = options
        self._feed = feed
        self._latest: weakref.ref[DistributedIterator] | None = None

    def __iter__(self) -> DistributedIterator:
        _require_outside_replicas(self._strategy, "iter(distributed_dataset)")
        if self._feed.exclusive and self._latest is not None and (latest := self._latest()) is not None:
            latest.close()  # its persistent workers are about to start over
        iterator = DistributedIterator(self._strategy, self._layout, self._options, self._feed)
        self._latest = weakref.ref(iterator)
        return iterator

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


class DistributedIterator:
    """One pass over a `DistributedDataset`. Not for several threads at once.

    Reading ahead stops, and its thread ends, at the end of the data, on an error, on `close`, and when the iterator is
    garbage collected, so a loop may simply be left.
    """

    def __init__(self, strategy: Strategy, layout: InputLayout, options: InputOptions, feed: Feed) -> None:
        self._strategy = strategy
        self._layout = layout
        self._run_empty = options.empty_replicas == "run"
        self._feed = feed
        self._position = 0
        self._ended = False
        self._reading = feed.open()
        self._agreement: StepAgreement | None = None
        if layout.peers is not None and not self._reading.agreed:
            self._agreement = StepAgreement(layout.peers, len(layout.local_replicas))
        fetch = options.fetch_to_device
        self._placement: BatchPlacement = Placement(layout.devices if fetch else ())
        if fetch and layout.placement is not None:
            self._placement = layout.placement
        self._fetches = fetch
        place = self._placement.place if fetch else _leave
        ahead = _ahead(feed, options, fetch and self._placement.copies)
        self._prefetcher = Prefetcher(self._reading.steps, place, options.per_replica_buffer_size, ahead)

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

    def close(self) -> None:
        """Stop reading ahead; the iterator is at its end then. Idempotent."""
        self._ended = True
        self._prefetcher.close()

    def _take(self, call: str) -> Step | None:
        _require_outside_replicas(self._strategy, call)
        if self._ended:
            return None
        try:
            step = self._advance()
        except BaseException as error:
            self.close()
            if self._layout.peers is not None:
                self._layout.peers.report_failure(f"its input failed in {call}: {type(error).__name__}: {error}")
            raise
        if step is None:
            self.close()
        else:
            self._position += 1
        return step

    def _advance(self) -> Step | None:
        self._reading.prepare(self._position)
        if self._agreement is not None:
            return self._agreement.next(self._pull)
        if self._position > 0 or not self._reading.compared or self._layout.peers is None:
            return self._pull()
        step = self._pull()
        require_equal_data(self._layout.peers, step, self._feed.cardinality)
        return step

    def _pull(self) -> Step | None:
        placed = self._prefetcher.next()
        if placed is None:
            return None
        step: Step = self._placement.receive(placed) if self._fetches else placed[0]
        return step

    def _hand_out(self, step: Step) -> Any:
        if self._layout.bare:
            return step.components[0]
        info = BatchInfo(step.rows, self._run_empty)
        ids = self._layout.local_replicas
        join = self._layout.join if self._fetches else None
        if join is not None:
            return _zip(lambda values: join(values, ids, info), step.components)
        return _zip(lambda values: PerReplica(values, replica_ids=ids, batch_info=info), step.components)


def _ahead(feed: Feed, options: InputOptions, copies: bool) -> Ahead:
    if feed.on_demand:
        return Ahead.NOTHING
    if feed.has_workers or options.per_replica_buffer_size > 1:
        return Ahead.READ_AND_COPY
    return Ahead.COPY if copies else Ahead.NOTHING


def _leave(step: Step) -> tuple[Step, tuple[Any, ...]]:
    return step, ()


def _zip(wrap: Callable[[tuple[Any, ...]], Any], components: tuple[nest.Nest, ...]) -> nest.Nest:
    """The structure of one replica's batch, with ``wrap(the replicas' values)`` for every leaf."""
    if all(component is None for component in components):
        return None
    if any(not nest.is_nested(component) or not component or rows.is_row_list(component) for component in components):
        return wrap(components)
    columns = zip(*([child for _, child in nest.children(component)] for component in components), strict=True)
    return nest.rebuild(components[0], [_zip(wrap, column) for column in columns])


def _require_outside_replicas(strategy: Strategy, call: str) -> None:
    from torchstrat import context  # above this package; it needs a strategy, which needs input

    if not context.has_strategy():
        return
    context.require_not_mixed(strategy, call)
    if not context.in_cross_replica_context():
        raise InvalidArgumentError(
            f"{call} was called inside a replica of a run. Take the batch outside, and pass it: "
            "strategy.run(step, args=(next(iterator),))."
        )
