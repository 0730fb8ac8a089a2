"""Stands in for parameter servers where only the coordinator's program is tested: functions run here, when scheduled.

What is scheduled makes the journey that it would make to a worker, by pickle, with the strategy's own objects sent as
references: a function that drags an open file along, or a copy of the model, fails here too.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle

import torchstrat as ts
from torchstrat import LeasedDataset
from torchstrat.parameter_server.leases.lease import claim_all, leases_among_arguments
from torchstrat.parameter_server.leases.reader import Reader


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
    def __init__(self, coordinator: FakeCoordinator, compute: Callable[[], Any]) -> None:
        self._coordinator = coordinator
        self._compute = compute

    def get(self, timeout: Any = None) -> Any:
        self._coordinator.in_flight.remove(self)
        return self._compute()


class FakeCoordinator:
    """Workers take turns. ``kinds`` are classes whose instances travel as references."""

    def __init__(self, strategy: FakeStrategy, workers: int, kinds: tuple[type, ...]) -> None:
        self._kinds = (FakeStrategy, FakeCoordinator, FakeReader, *kinds)
        self._turns = itertools.cycle(range(workers))
        self._index: int | None = None
        self.in_flight: list[FakeResult] = []
        self.most_in_flight = 0
        self.joins = 0
        self.scheduled: list[int] = []
        """The worker of each function."""

    def schedule(self, fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> FakeResult:
        worker = next(self._turns)
        with leases_among_arguments() as leases:
            outcome = self.on_worker(worker, lambda: self.call(*self.travel((fn, args))))
        claim_all(leases, len(self.scheduled))
        for lease in leases:
            lease._ended(returned=True)
        self.scheduled.append(worker)
        result = FakeResult(self, lambda: outcome)
        self.in_flight.append(result)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return result

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return fn(*args)

    def on_worker(self, worker: int, call: Callable[[], Any]) -> Any:
        before, self._index = self._index, worker
        try:
            return call()
        finally:
            self._index = before

    def join(self, timeout: Any = None) -> None:
        assert not self.in_flight
        self.joins += 1

    def _is_idle(self) -> bool:
        return not self.in_flight

    def create_leased_dataset(self, dataset: Any, batch_size: int, *, shuffle: Any, collate_fn: Any) -> LeasedDataset:
        reader = FakeReader(self, lambda: dataset, collate_fn)
        options: dict[str, Any] = {"shuffle": shuffle, "seed": 0, "drop_last": False, "name": "the training rows"}
        return LeasedDataset(self, reader, len(dataset), batch_size, **options)

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


class FakeReader:
    """The rows of whichever worker asks."""

    def __init__(self, coordinator: FakeCoordinator, make: Callable[[], Any], collate: Callable[[Any], Any]) -> None:
        self._coordinator = coordinator
        self._make = make
        self._collate = collate
        self._readers: dict[int, Reader] = {}

    def read(self, rows: Any) -> Any:
        worker = self._coordinator.get_current_worker_index()
        if worker not in self._readers:
            self._readers[worker] = Reader(self._coordinator.travel(self._make)(), self._collate)
        return self._readers[worker].read(rows)
