"""Stands in for parameter servers where only the coordinator's program is tested: functions run here, when scheduled.

What is scheduled makes the journey that it would make to a worker, by pickle, with the strategy's own objects sent as
references: a function that drags an open file along, or a copy of the model, fails here too.
"""

import io
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle

import torchstrat as ts


class FakeStrategy:
    """A `OneDeviceStrategy` with the one method of ``extended`` that only parameter servers have."""

    def __init__(self) -> None:
        self._inner = ts.OneDeviceStrategy("cpu:0")
        self.extended = SimpleNamespace(pull=lambda module: self.on_pull(module))
        self.on_pull: Callable[[Any], None] = lambda module: None

    def scope(self) -> Any:
        return self._inner.scope()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return self._inner.run(fn, args=args)

    def close(self) -> None:
        self._inner.close()


class FakeResult:
    def __init__(self, coordinator: "FakeCoordinator", compute: Callable[[], Any]) -> None:
        self._coordinator = coordinator
        self._compute = compute

    def get(self, timeout: Any = None) -> Any:
        self._coordinator.in_flight.remove(self)
        return self._compute()


class FakeCoordinator:
    """Workers take turns. ``kinds`` are classes whose instances travel as references."""

    def __init__(self, strategy: FakeStrategy, workers: int, kinds: tuple[type, ...]) -> None:
        self._kinds = (FakeStrategy, FakeCoordinator, FakeIterator, *kinds)
        self._turns = itertools.cycle(range(workers))
        self._index: int | None = None
        self.in_flight: list[FakeResult] = []
        self.most_in_flight = 0
        self.joins = 0
        self.scheduled: list[int] = []
        """The worker of each function."""

    def schedule(self, fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> FakeResult:
        fn, args = self.travel((fn, args))
        worker = next(self._turns)
        self.scheduled.append(worker)
        outcome = self.on_worker(worker, lambda: fn(*args))
        result = FakeResult(self, lambda: outcome)
        self.in_flight.append(result)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return result

    def on_worker(self, worker: int, call: Callable[[], Any]) -> Any:
        before, self._index = self._index, worker
        try:
            return call()
        finally:
            self._index = before

    def join(self, timeout: Any = None) -> None:
        assert not self.in_flight
        self.joins += 1

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> "FakeDataset":
        return FakeDataset(self, self.travel(dataset_fn))

    def get_current_worker_index(self) -> int:
        assert self._index is not None, "asked outside of a worker"
        return self._index

    def travel(self, value: Any) -> Any:
        references: dict[str, Any] = {}
        kinds = self._kinds

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
            def persistent_id(self, found: Any) -> str | None:
                if not isinstance(found, kinds):
                    return None
                references[str(id(found))] = found
                return str(id(found))

        class Unpickler(cloudpickle.pickle.Unpickler):  # type: ignore[misc]
            def persistent_load(self, name: str) -> Any:
                return references[name]

        stream = io.BytesIO()
        Pickler(stream).dump(value)
        stream.seek(0)
        return Unpickler(stream).load()


class FakeDataset:
    def __init__(self, coordinator: FakeCoordinator, make: Callable[[], Any]) -> None:
        self.coordinator = coordinator
        self._make = make
        self._built: dict[int, Any] = {}
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return FakeIterator(self)

    def of(self, worker: int) -> Any:
        if worker not in self._built:
            self._built[worker] = self._make()
        return self._built[worker]


class FakeIterator:
    """The iterator of whichever worker asks."""

    def __init__(self, dataset: FakeDataset) -> None:
        self._dataset = dataset
        self._iterators: dict[int, Iterator[Any]] = {}

    def __iter__(self) -> "FakeIterator":
        return self

    def __next__(self) -> Any:
        worker = self._dataset.coordinator.get_current_worker_index()
        if worker not in self._iterators:
            self._iterators[worker] = iter(self._dataset.of(worker))
        return next(self._iterators[worker])
