"""What `ClusterCoordinator.schedule` returns: the place where a function's result will be. And per-worker values:
handles that mean, in a scheduled function, the executing worker's own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeGuard, TypeVar, overload

import torch
from numpy.typing import NDArray

from torchstrat.core import nest
from torchstrat.core.errors import CommunicationTimeoutError, InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.core.values import misfit, require_callable
from torchstrat.core.variable.tensor_like import array_of
from torchstrat.data import spec
from torchstrat.parameter_server.dispatch import ResourceSpec
from torchstrat.parameter_server.messages import Token

_making_event = threading.Lock()

T_co = TypeVar("T_co", covariant=True)
PlainT = TypeVar("PlainT", bool, int, float, complex, str, bytes, None)
"""What `RemoteValue.fetch` hands out as it is."""


@short_tracebacks
class RemoteValue(Generic[T_co]):
    """The result of a scheduled function. Made by `ClusterCoordinator.schedule` only.

    `get` and `fetch` wait until the function has run, on whichever worker, and raise what it raised.
    """

    __slots__ = ("__weakref__", "_error", "_event", "_function", "_has_ended", "_result", "_who", "name")

    def __init__(self, function: int, name: str, who: Callable[[int], str]) -> None:
        self._function = function
        self.name = name
        """Of the function."""
        self._who = who
        self._has_ended = False
        self._event: threading.Event | None = None  # made for the first who waits: most are never waited for
        self._result: Any = None
        self._error: BaseException | None = None

    def get(self, timeout: timedelta | float | None = None) -> T_co:
        """The result, with tensors on the CPU of the coordinator. ``timeout`` in seconds; None waits.

        Raises the function's own error, `CancelledError` if it was cancelled, `CommunicationTimeoutError`. An error
        that is raised here is not taken by that: `join`, `done` or the next `schedule` raises it once more.
        """
        if not self._has_ended and not self._wait(_seconds(timeout)):
            raise CommunicationTimeoutError(
                f"{self._describe()} is not there after {timeout} s: {self._who(self._function)}."
            )
        if self._error is not None:
            raise self._error
        result: T_co = self._result
        return result

    @overload
    def fetch(self: RemoteValue[torch.Tensor], timeout: timedelta | float | None = None) -> NDArray[Any]: ...
    @overload
    def fetch(self: RemoteValue[PlainT], timeout: timedelta | float | None = None) -> PlainT: ...
    @overload
    def fetch(self, timeout: timedelta | float | None = None) -> Any: ...
    def fetch(self, timeout: timedelta | float | None = None) -> Any:
        """The result with every tensor as a NumPy array, but for sparse and nested ones. Otherwise as `get`."""
        return nest.map_structure(_to_numpy, self.get(timeout))

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            f"{self._describe()} is awaited on the coordinator and cannot be pickled; fetch it, and pass what it gives."
        )

    def _refuse(self, *_: object) -> NoReturn:
        raise WrongTypeError(
            f"{self._describe()} was used as a number, and is only the place where that will be; write value.fetch() "
            "for it (or coordinator.fetch for many)."
        )

    __float__ = __int__ = __round__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def set_result(self, result: object) -> None:
        """For the coordinator: the function has returned."""
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """For the coordinator: the function has raised, or will not run."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._has_ended = True  # first: who makes an event that is not seen below looks at this afterwards
        if self._event is not None:
            self._event.set()

    def _wait(self, seconds: float | None) -> bool:
        with _making_event:
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return self._has_ended or event.wait(seconds)

    def _describe(self) -> str:
        return f"the result of function {self._function} ({self.name})"

    def __repr__(self) -> str:
        if not self._has_ended:
            state = f"pending: {self._who(self._function)}"
        elif self._error is not None:
            state = f"failed: {self._error!r:.200}"
        else:
            state = f"{self._result!r:.200}"
        return f"<RemoteValue of function {self._function} ({self.name}), {state}>"


def _to_numpy(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return leaf
    return array_of(leaf)


def _seconds(timeout: timedelta | float | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


class PerWorkerValues:
    """Something that every worker builds for itself, when a function that uses it first runs there; again after a
    worker was lost and started anew. Pass it to `ClusterCoordinator.schedule`, or let the function close over it."""

    def __init__(self, table: ResourceTable, resource: ResourceSpec) -> None:
        self._table = table
        self._resource = resource
        table.add(self, resource)

    def built_from(self) -> Iterable[object]:
        """What workers cannot build it without."""
        return getattr(self._resource.builder, "alive", ())

    def __reduce__(self) -> NoReturn:
        raise WrongTypeError(f"{self._resource.what} belongs to the coordinator that made it and cannot be pickled.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._resource.what}, one on each worker>"


class PerWorkerDataset(PerWorkerValues):
    """A dataset of which every worker reads its own full copy. `iter` starts a new pass on all workers."""

    def __init__(self, table: ResourceTable, resource: ResourceSpec, make: Callable[[], Any]) -> None:
        super().__init__(table, resource)
        self._make = make

    def __iter__(self) -> PerWorkerIterator:
        number = self._table.next_number()
        what = f"an iterator over {self._resource.what}"
        return PerWorkerIterator(self._table, ResourceSpec(number, what, source=self._resource.number), self)

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of a batch, None where sizes differ. Builds the dataset here once, to look at it."""
        with spec.undisturbed_randomness():
            dataset = self._make()
            known = getattr(dataset, "element_spec", None)
            return known if known is not None else spec.spec_of(next(iter(dataset)), rows_fixed=False)


class PerWorkerIterator(PerWorkerValues):
    """One pass over a `PerWorkerDataset` on every worker. Call ``next`` on it inside a scheduled function."""

    def __init__(self, table: ResourceTable, resource: ResourceSpec, dataset: PerWorkerDataset) -> None:
        self._dataset = dataset  # first: the table tells others of it
        super().__init__(table, resource)

    def built_from(self) -> Iterable[object]:
        return (self._dataset,)

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise UnsupportedError(
            "a per-worker iterator has its batches on the workers; pass it to coordinator.schedule(fn, "
            "args=(iterator,)) and call next(iterator) in fn."
        )

    get_next = __next__


class ResourceTable:
    """All per-worker values of a coordinator, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._specs: dict[int, ResourceSpec] = {}
        self.on_new: Callable[[PerWorkerValues, tuple[str, int]], None] = lambda made, token: None

    def next_number(self) -> int:
        return next(self._numbers)

    def add(self, made: PerWorkerValues, resource: ResourceSpec) -> None:
        self._specs[resource.number] = resource
        self.on_new(made, ("per_worker", resource.number))

    def forget(self, numbers: Iterable[int]) -> None:
        """The program has dropped these, and no function names them."""
        for number in numbers:
            self._specs.pop(number, None)

    def needed_for(self, numbers: set[int]) -> list[ResourceSpec]:
        """The descriptions of these and of what they are built from, sources first."""
        found: dict[int, ResourceSpec] = {}
        for number in sorted(numbers):
            chain = []
            current: int | None = number
            while current is not None:
                chain.append(self._specs[current])
                current = self._specs[current].source
            found.update((one.number, one) for one in reversed(chain))
        return list(found.values())


def numbers_of(tokens: Iterable[Token]) -> list[int]:
    """Of the per-worker values among these."""
    return [token[1] for token in tokens if token[0] == "per_worker"]


def require_builder(fn: Callable[..., object], call: str) -> None:
    """That ``fn``, which ``call`` got, can be called without arguments."""
    require_callable(fn, call, may_yield=True)
    if misfit(fn) is not None:
        raise WrongTypeError(
            f"{call} has every worker call the function without arguments; {fn!r:.80} needs some. "
            "Bind them with functools.partial, or read them from its closure."
        )


def refuse_remote_values(value: object, remote_type: type, call: str) -> None:
    for leaf in nest.leaves(value):
        if isinstance(leaf, remote_type):
            raise InvalidArgumentError(
                f"{call} got a RemoteValue; functions cannot take each other's results. Fetch it first: "
                "coordinator.fetch(value)."
            )


class DatasetForWorkers:
    """What ``distribute_dataset`` of the strategy gives on the coordinator. ``make`` makes what it gives on workers."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return "<dataset for the workers of a ParameterServerStrategy, for coordinator.create_per_worker_dataset>"

    def __iter__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a dataset distributed by ParameterServerStrategy is read on the workers: pass it to "
            "coordinator.create_per_worker_dataset, and call next() on its iterator in a scheduled function."
        )


class Constant:
    """A dataset function for a dataset that is there already."""

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset

    def __call__(self) -> object:
        return self._dataset


def is_function(dataset_fn: object) -> TypeGuard[Callable[[], object]]:
    """Whether to call it for a dataset: a class of datasets is called; one of its objects, even if callable, is not."""
    if isinstance(dataset_fn, type):
        return True
    return callable(dataset_fn) and not (hasattr(dataset_fn, "__getitem__") or hasattr(dataset_fn, "__iter__"))


def require_dataset(dataset: object) -> object:
    if isinstance(dataset, list | tuple | dict | str | bytes) or not (
        hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    ):
        raise InvalidArgumentError(
            "create_per_worker_dataset needs a function without arguments that returns a dataset, or a dataset; got "
            f"{type(dataset).__name__} {dataset!r:.80}. Make it a dataset of batches: DataLoader(list, batch_size=64), "
            "or batch_size=None where each entry is a batch."
        )
    return dataset
