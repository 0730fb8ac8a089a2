"""Per-worker values on the coordinator: handles that mean, in a scheduled function, the executing worker's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from torchstrat import nest
from torchstrat.data import spec
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.parameter_server.dispatch import ResourceSpec
from torchstrat.values import misfit

if TYPE_CHECKING:
    from torchstrat.parameter_server.coordinator import ClusterCoordinator

Token = tuple[str, int]


class PerWorkerValues:
    """Something that every worker builds for itself, when a function that uses it first runs there; again after a
    worker was lost and started anew. Pass it to `ClusterCoordinator.schedule`, or let the function close over it."""

    def __init__(self, coordinator: ClusterCoordinator, resource: ResourceSpec) -> None:
        self._coordinator = coordinator
        self._resource = resource

    @property
    def _token(self) -> Token:
        return ("per_worker", self._resource.number)

    def __reduce__(self) -> NoReturn:
        raise WrongTypeError(f"{self._resource.what} belongs to the coordinator that made it and cannot be pickled.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._resource.what}, one on each worker>"


class PerWorkerDataset(PerWorkerValues):
    """A dataset of which every worker reads its own full copy. `iter` starts a new pass on all workers."""

    def __init__(self, coordinator: ClusterCoordinator, resource: ResourceSpec, make: Callable[[], Any]) -> None:
        super().__init__(coordinator, resource)
        self._make = make

    def __iter__(self) -> PerWorkerIterator:
        number = self._coordinator._resources.next_number()
        what = f"an iterator over {self._resource.what}"
        spec_of_iterator = ResourceSpec(number, what, source=self._resource.number)
        made: PerWorkerIterator = self._coordinator._resources.add(
            PerWorkerIterator(self._coordinator, spec_of_iterator, self)
        )
        return made

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of a batch, None where sizes differ. Builds the dataset here once, to look at it."""
        with spec.undisturbed_randomness():
            dataset = self._make()
            known = getattr(dataset, "element_spec", None)
            return known if known is not None else spec.spec_of(next(iter(dataset)), rows_fixed=False)


class PerWorkerIterator(PerWorkerValues):
    """One pass over a `PerWorkerDataset` on every worker. Call ``next`` on it inside a scheduled function."""

    def __init__(self, coordinator: ClusterCoordinator, resource: ResourceSpec, dataset: PerWorkerDataset) -> None:
        super().__init__(coordinator, resource)
        self._dataset = dataset

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
        self.on_new: Callable[[PerWorkerValues], None] = lambda made: None

    def next_number(self) -> int:
        return next(self._numbers)

    def add(self, made: Any) -> Any:
        self._specs[made._resource.number] = made._resource
        self.on_new(made)
        return made

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


def numbers_of(tokens: Iterable[tuple[Any, ...]]) -> list[int]:
    """Of the per-worker values among these."""
    return [token[1] for token in tokens if token[0] == "per_worker"]


def require_builder(fn: Any, call: str) -> None:
    """That ``fn``, which ``call`` got, can be called without arguments."""
    if misfit(fn) is not None:
        raise WrongTypeError(
            f"{call} has every worker call the function without arguments; {fn!r:.80} needs some. "
            "Bind them with functools.partial, or read them from its closure."
        )


def refuse_remote_values(value: Any, remote_type: type, call: str) -> None:
    for leaf in nest.leaves(value):
        if isinstance(leaf, remote_type):
            raise InvalidArgumentError(
                f"{call} got a RemoteValue; functions cannot take each other's results. Fetch it first: "
                "coordinator.fetch(value)."
            )
