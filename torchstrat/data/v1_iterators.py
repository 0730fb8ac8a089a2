"""Input as TensorFlow 1 spelled it: iterators that are started with `initialize` and read with `get_next`.

`InputIterator` is an iterator over a `DistributedDataset` that can start over; batches are split, placed and agreed on
between processes as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from torchstrat.core import nest
from torchstrat.core.engine import InputLayout
from torchstrat.core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError, WrongTypeError
from torchstrat.core.values import require_callable
from torchstrat.data import rows
from torchstrat.data.distribute import hand_out_elements, input_context
from torchstrat.data.distributed import DistributedDataset, DistributedIterator, Optional
from torchstrat.data.options import InputContext, InputOptions, InputReplicationMode
from torchstrat.data.pipeline import ArrayDataset, stack
from torchstrat.data.position import Place, Resume, Stream
from torchstrat.data.sources import Source, make_source, refuse_distributed

if TYPE_CHECKING:
    from torchstrat.core.context import StrategyLike


class InputIterator:
    """Reads a distributed dataset from its beginning, as often as it is initialized.

    Made by `make_dataset_iterator` and `make_input_fn_iterator` of a strategy. With several processes all of them make
    the same calls.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._reading: DistributedIterator | None = None

    def initialize(self) -> list[Any]:
        """Start over, at the first `get_next` after this; the first pass needs no call.

        A callable of an ``input_fn`` has no beginning: it is simply called again. Returns an empty list, where
        TensorFlow's graphs return the operations to run.
        """
        self.close()
        return []

    def get_next(self) -> Any:
        """The next global batch, split over the replicas; `OutOfRangeError` after the last one."""
        return self._open().get_next()

    def get_next_as_optional(self) -> Optional[Any]:
        """The next global batch, or an `Optional` without a value after the last one."""
        return self._open().get_next_as_optional()

    def __iter__(self) -> InputIterator:
        return self

    def __next__(self) -> Any:
        return next(self._open())

    def close(self) -> None:
        """Stop reading. Idempotent; the next `get_next` starts over."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None

    def _open(self) -> DistributedIterator:
        # Not before it is needed: a generator can be opened only once, and `initialize` comes first in most programs.
        if self._reading is None:
            self._reading = iter(self._dataset)
        return self._reading


class CallableSource(Source):
    """A function that returns the next element, for one replica, each time it is called.

    It ends the data by raising `StopIteration` or `OutOfRangeError`, as ``lambda: next(iterator)`` does.
    """

    on_demand = True
    rereads = False

    def __init__(self, fn: Callable[[], nest.Nest]) -> None:
        self._fn = fn

    def open(self, resume: Resume | None = None) -> Stream[nest.Nest]:
        return Stream(self._elements(), Place, self.between)

    def between(self) -> NoReturn:
        raise UnsupportedError(
            "the position of a function that is called for each element is its own affair: nobody else can go back to "
            "it. Save what it depends on, or return a dataset from the input_fn."
        )

    def _elements(self) -> Iterator[nest.Nest]:
        while True:
            try:
                element = self._fn()
            except (StopIteration, OutOfRangeError):
                return
            if element is None:
                raise InvalidArgumentError(
                    "the callable of an input_fn returned None instead of a replica's next element; raise "
                    "StopIteration at the end of the data."
                )
            yield rows.to_tensors(element)

    def element_spec(self) -> NoReturn:
        raise UnsupportedError("element_spec of a callable is not known without calling it, which uses an element up.")


def make_input_fn_iterator(
    strategy: StrategyLike,
    layout: InputLayout,
    input_fn: Callable[[InputContext], object],
    replication_mode: InputReplicationMode | str,
) -> InputIterator:
    """An iterator over whole elements, one per replica and step, of what ``input_fn`` makes in this process.

    Args:
        strategy: in whose scope, or outside of any, the iterator may be read.
        layout: its replicas. With several processes all of them make this call.
        input_fn: called once, with this process's `InputContext`. Returns a dataset of replica batches, or a function
            without arguments that is called once per local replica and step; see `CallableSource`.
        replication_mode: PER_WORKER.

    Raises:
        InvalidArgumentError: ``input_fn`` returned something else, or another ``replication_mode``.
    """
    require_callable(input_fn, "make_input_fn_iterator", may_yield=True)
    options = InputOptions(replication_mode=replication_mode)
    if options.replication_mode is not InputReplicationMode.PER_WORKER:
        raise InvalidArgumentError(
            f"make_input_fn_iterator was given {replication_mode}; it reads one dataset per process. Use "
            "distribute_datasets_from_function(input_fn, InputOptions(replication_mode=PER_REPLICA))."
        )
    source = _source_of(input_fn(input_context(layout)))
    return InputIterator(hand_out_elements(strategy, layout, [source], options))


def _source_of(made: object) -> Source:
    refuse_distributed(made)
    try:
        return make_source(made)
    except WrongTypeError as error:
        if callable(made):
            return CallableSource(made)
        raise InvalidArgumentError(
            f"input_fn returned a {type(made).__name__}; it must return a dataset or a function that returns the next "
            f"element. {error}"
        ) from None


def next_of(input_iterator: Any) -> Any:
    """``input_iterator.get_next()``; an error that says what to pass when it has none."""
    if not callable(getattr(input_iterator, "get_next", None)):
        raise WrongTypeError(
            f"experimental_run was given a {type(input_iterator).__name__} as input_iterator; it takes the result of "
            "make_dataset_iterator, make_input_fn_iterator or iter(distributed_dataset)."
        )
    return input_iterator.get_next()


def array_dataset(numpy_input: nest.Nest) -> ArrayDataset:
    """The rows of an array or a nest of arrays; lists, at any depth, are stacked to one array first.

    Raises:
        InvalidArgumentError: the arrays of a list differ in shape, or those of the nest in length.
    """
    return ArrayDataset(_stack_lists(numpy_input))


def _stack_lists(value: nest.Nest) -> nest.Nest:
    if isinstance(value, list):
        return _stacked(value)
    if nest.is_nested(value):
        return nest.rebuild(value, [_stack_lists(child) for _, child in nest.children(value)])
    return value


def _stacked(items: list[object] | tuple[object, ...]) -> nest.Nest:
    arrays = [_stacked(item) if isinstance(item, list | tuple) else item for item in items]
    shapes = [tuple(getattr(array, "shape", ())) for array in arrays]
    if len(set(shapes)) != 1:
        raise InvalidArgumentError(
            f"a list of arrays is stacked to one array, and needs arrays of one shape; got shapes {shapes}. Give a "
            "tuple for the columns of a dataset."
        )
    return stack(arrays)
