"""`ClusterCoordinator` over a cluster of threads: what it takes and gives back, errors, per-worker values, losses."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchstrat as ts
from tests.support.gates import await_arrivals, close_gate, pass_gate
from torchstrat.errors import (
    ClosureInputError,
    CommunicationTimeoutError,
    ContextError,
    FunctionError,
    InvalidArgumentError,
    NotSendableError,
    OutOfRangeError,
    UnsupportedError,
    WrongTypeError,
)
from torchstrat.testing.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(workers=2, ps=2) as cluster:
        yield cluster


@pytest.fixture
def coordinator(cluster: FakeCluster) -> ts.ClusterCoordinator:
    return ts.ClusterCoordinator(cluster.strategy())


@pytest.fixture
def of_one() -> Iterator[ts.ClusterCoordinator]:
    """Of one worker."""
    with FakeCluster(workers=1, ps=1) as cluster:
        yield ts.ClusterCoordinator(cluster.strategy())


def counter_of(coordinator: ts.ClusterCoordinator) -> tuple[ts.Variable, Callable[[], None]]:
    with coordinator.strategy.scope():
        counter = ts.Variable(0.0, name="counter")

    def increment() -> None:
        counter.assign_add(1.0)

    return counter, increment


def bad() -> None:
    raise KeyError("bad")


def returning(value: Any) -> Callable[[], Any]:
    return lambda: value


def add(a: Any, b: Any = 10) -> torch.Tensor:
    return torch.as_tensor(a) + b


def batches() -> DataLoader[Any]:
    return DataLoader(torch.arange(6), batch_size=2)  # type: ignore[arg-type]


# -- what it refuses at once; more of it is in tests/mistakes ----------------------------------------------------------

DATASET = "create_per_worker_dataset"
OTHERS = (ts.OneDeviceStrategy("cpu:0"), None, 3, ts.ParameterServerStrategy)
OUTSIDE, MODEL = ts.Variable(1.0, name="counter"), nn.Linear(2, 2)
NO_FUNCTIONS = (None, 3, "fn", torch.tensor(1))
FOR_ARGS, FOR_DATA = (1, "ab", {"a": 1}, torch.ones(1), None), (None, 3, "text", [1, 2], {"a": 1})
BAD_CALLS: list[tuple[Callable[[ts.ClusterCoordinator], Any], type[Exception], str]] = [
    *((lambda one, fn=fn: one.schedule(fn), WrongTypeError, "schedule needs a function") for fn in NO_FUNCTIONS),
    *((lambda one, args=args: one.schedule(add, args), TypeError, "must be a list or a tuple") for args in FOR_ARGS),
    (lambda one: one.schedule(add, (1,), [2]), WrongTypeError, "kwargs must be a dict"),
    (lambda one: one.schedule(add, ([{"x": one.schedule(int)}],)), InvalidArgumentError, "RemoteValue"),
    (lambda one: one.schedule(add, (), {"a": one.schedule(int)}), InvalidArgumentError, "RemoteValue"),
    (lambda one: one.schedule(returning(one.schedule(int))), NotSendableError, r"value.*fetch it"),
    (lambda one: one.schedule(add, (threading.Lock(),)), NotSendableError, r"args\[0\]"),
    (lambda one: one.schedule(lambda: MODEL(torch.ones(1, 2))), InvalidArgumentError, "Linear"),
    (lambda one: one.schedule(lambda: OUTSIDE.assign_add(1.0)), NotSendableError, "OUTSIDE"),
    *((lambda one, data=data: one.create_per_worker_dataset(data), InvalidArgumentError, DATASET) for data in FOR_DATA),
    (lambda one: one.create_per_worker_resource(lambda *, size: size), WrongTypeError, "create_per_worker_resource"),
    (lambda one: one.create_per_worker_dataset(lambda context: batches()), WrongTypeError, DATASET),
    (lambda one: one.create_per_worker_resource(3), WrongTypeError, "create_per_worker_resource"),
    (lambda one: one.experimental_get_current_worker_index(), ContextError, "scheduled"),
    (lambda one: copy.copy(one.strategy), ContextError, "."),
    *((lambda _, other=other: ts.ClusterCoordinator(other), WrongTypeError, "ParameterServerSt") for other in OTHERS),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS)
def test_what_is_refused_at_once(coordinator: ts.ClusterCoordinator, call: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        call(coordinator)
    coordinator.join()  # it is not queued


def test_a_closed_coordinator_says_so(coordinator: ts.ClusterCoordinator) -> None:
    coordinator.strategy.close()
    for call in (coordinator.join, coordinator.done, lambda: coordinator.schedule(add, (1,))):
        with pytest.raises(ContextError, match="closed"):
            call()


def test_who_waits_is_told_when_the_strategy_is_closed(of_one: ts.ClusterCoordinator) -> None:
    gate = close_gate("closed")
    running, queued = [of_one.schedule(pass_gate, ("closed",)) for _ in range(2)]
    await_arrivals("closed", 1)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(wait) for wait in (of_one.join, running.get, queued.get)]
        of_one.strategy.close()
        for one in waiting:
            with pytest.raises(ContextError, match="closed"):
                one.result(timeout=60)
    gate.set()


# -- what it takes and gives back --------------------------------------------------------------------------------------


def test_fetch_gives_arrays_and_get_gives_tensors(coordinator: ts.ClusterCoordinator) -> None:
    value = coordinator.schedule(lambda: {"a": torch.ones(2), "b": (torch.tensor(3), b"s", "s", 5, None, [None])})
    fetched, got = value.fetch(), value.get()
    assert isinstance(fetched["a"], np.ndarray)
    assert fetched["a"].dtype == np.float32
    assert isinstance(fetched["b"], tuple)
    assert fetched["b"][1:] == got["b"][1:] == (b"s", "s", 5, None, [None])
    assert torch.equal(got["a"], torch.ones(2))
    tensor = torch.tensor(2)
    of_nest = coordinator.fetch([value, {"k": (value, 5)}, "x", None, tensor])
    assert isinstance(of_nest[1]["k"][0]["a"], np.ndarray)
    assert of_nest[0]["b"] == of_nest[1]["k"][0]["b"] == fetched["b"]
    assert of_nest[1]["k"][1:] == (5,)
    assert of_nest[2:4] == ["x", None]
    assert of_nest[4] is tensor
    assert coordinator.fetch(3) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64])
def test_dtypes_of_results(coordinator: ts.ClusterCoordinator, dtype: torch.dtype) -> None:
    value = coordinator.schedule(lambda: torch.ones(2, dtype=dtype))
    assert value.get().dtype == dtype
    assert value.fetch().tolist() == [1, 1]


def test_waiting_has_limits_that_name_what_is_awaited(coordinator: ts.ClusterCoordinator) -> None:
    coordinator.join(timeout=0)  # without work
    assert coordinator.done()
    gate = close_gate("limits")
    value = coordinator.schedule(pass_gate, ("limits",))
    await_arrivals("limits", 1)
    with pytest.raises(CommunicationTimeoutError, match=r"pass_gate.*runs on worker"):
        value.get(timeout=0.01)
    with pytest.raises(CommunicationTimeoutError, match="function 0 on worker"):
        coordinator.join(timeout=0.01)
    assert not coordinator.done()
    assert "pending" in repr(value)
    gate.set()
    coordinator.join()
    assert value.get(timeout=0.01) == "through"
    assert "'through'" in repr(value)


# -- where functions run ----------------------------------------------------------------------------------------------


def test_the_context_of_a_function(coordinator: ts.ClusterCoordinator) -> None:
    strategy = coordinator.strategy

    def facts() -> tuple[Any, ...]:
        rows = torch.tensor([1.0, 3.0])
        return (
            ts.has_strategy(),
            ts.get_strategy() is strategy,
            ts.in_cross_replica_context(),
            ts.get_replica_context() is None,
            strategy.num_replicas_in_sync,
            float(strategy.reduce("mean", rows, axis=0)),
            strategy.gather(rows, axis=0).tolist(),
            strategy.local_results(5),
        )

    assert coordinator.schedule(facts).get() == (True, True, True, True, 1, 2.0, [1.0, 3.0], (5,))


def test_one_function_at_a_time_per_worker_in_the_order_of_the_queue(of_one: ts.ClusterCoordinator) -> None:
    with of_one.strategy.scope():
        last = ts.Variable(-1)

    def follow(number: int) -> bool:
        before = int(last)
        last.assign(number)
        return before == number - 1

    assert all(of_one.fetch([of_one.schedule(follow, (number,)) for number in range(30)]))


# -- errors -----------------------------------------------------------------------------------------------------------


class UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_unpicklable() -> None:
    raise UnpicklableError(1, 2)


ERRORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = {
    "its own": (bad, (), KeyError, "bad"),
    "Python's": (lambda: 1 / 0, (), ZeroDivisionError, "division"),
    "torch's": (lambda: torch.tensor(1) // torch.tensor(0), (), RuntimeError, "ZeroDivisionError"),
    "of a class that pickle cannot make": (raise_unpicklable, (), UnpicklableError, "1 and 2"),
    "an exit": (lambda: exec("raise SystemExit(3)"), (), FunctionError, "SystemExit: 3"),
    "the end of an iterator": (lambda: next(iter(())), (), OutOfRangeError, "no more batches"),
    "a result that cannot travel": (lambda: (number for number in ()), (), NotSendableError, "result"),
    "no argument": (add, (), TypeError, r"add\(\)"),
    "an argument too many": (add, (1, 2, 3), TypeError, r"add\(\)"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_join_raises_a_functions_error_once(coordinator: ts.ClusterCoordinator, error: str) -> None:
    fn, args, kind, message = ERRORS[error]
    value = coordinator.schedule(fn, args)
    with pytest.raises(kind, match=message):
        value.fetch()  # which does not take it from `join`
    with pytest.raises(kind, match=message):
        coordinator.join()
    coordinator.join()
    assert coordinator.done()
    for call in (value.get, value.fetch, lambda: coordinator.fetch({"k": value})):
        with pytest.raises(kind, match=message):
            call()
    assert "failed" in repr(value)
    assert coordinator.schedule(add, (1,)).fetch() == 11


def test_schedule_reports_an_error_and_does_not_queue_its_function(coordinator: ts.ClusterCoordinator) -> None:
    counter, increment = counter_of(coordinator)
    value = coordinator.schedule(bad)
    with pytest.raises(KeyError):
        value.get()
    with pytest.raises(KeyError) as caught:
        coordinator.schedule(increment)
    if hasattr(caught.value, "add_note"):
        assert any("not queued" in note for note in caught.value.__notes__)
    coordinator.join()
    assert counter.read_value() == 0.0
    coordinator.schedule(increment)
    coordinator.join()
    assert counter.read_value() == 1.0


def test_what_only_the_coordinator_can_do(coordinator: ts.ClusterCoordinator) -> None:
    strategy = coordinator.strategy

    def opens_scope() -> None:
        with strategy.scope():
            pass

    for fn, kind in (
        (lambda: coordinator.schedule(add), ContextError),
        (lambda: coordinator.join(), ContextError),
        (opens_scope, ContextError),
        (lambda: ts.Variable(1.0), InvalidArgumentError),
    ):
        value = coordinator.schedule(fn)
        with pytest.raises(kind):
            value.get()
        with pytest.raises(kind):
            coordinator.join()


# -- per-worker values ------------------------------------------------------------------------------------------------


class Tens(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(10 * index)


class Counting(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(3))


def generator() -> Iterator[torch.Tensor]:
    yield torch.tensor([0, 1])


def first_of(coordinator: ts.ClusterCoordinator, dataset: Any) -> Any:
    return coordinator.schedule(next, (iter(coordinator.create_per_worker_dataset(dataset)),)).fetch()


@pytest.mark.parametrize(
    ("dataset", "first"),
    [
        (batches, [0, 1]),
        (batches(), [0, 1]),
        (functools.partial(DataLoader, torch.arange(6), batch_size=2), [0, 1]),
        (generator, [0, 1]),
        (lambda size=2: DataLoader(torch.arange(6), batch_size=size), [0, 1]),
        (lambda *_: iter([torch.tensor([0, 1])]), [0, 1]),
        *((dataset, 0) for dataset in (Tens, Tens(), Counting, Counting())),
    ],
)
def test_what_may_be_a_per_worker_dataset(coordinator: ts.ClusterCoordinator, dataset: Any, first: Any) -> None:
    """Classes of datasets are called, and their objects are not."""
    assert first_of(coordinator, dataset).tolist() == first


@pytest.mark.parametrize("returned", [None, 3, [1, 2], (torch.ones(1),), {"a": 1}])
def test_a_function_that_returns_no_dataset(coordinator: ts.ClusterCoordinator, returned: Any) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(lambda: returned))
    value = coordinator.schedule(next, (iterator,))
    with pytest.raises(ClosureInputError, match=f"returned a {type(returned).__name__}"):
        coordinator.join()
    with pytest.raises(ClosureInputError):
        value.fetch()


def test_a_dataset_function_may_use_variables_and_make_none(coordinator: ts.ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        start = ts.Variable(40)

    def dataset_fn() -> Iterator[torch.Tensor]:
        yield torch.tensor(int(start) + coordinator.get_current_worker_index())

    assert int(first_of(coordinator, dataset_fn)) in (40, 41)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter([ts.Variable(1.0)])))
    coordinator.schedule(next, (iterator,))
    with pytest.raises(ClosureInputError, match="Variable was created") as caught:
        coordinator.join()
    assert isinstance(caught.value, ValueError)


def test_each_worker_can_read_a_part() -> None:
    with FakeCluster(workers=3, ps=1) as cluster:
        program = ts.ClusterCoordinator(cluster.strategy())
        assert program.num_workers() == 3

        def dataset_fn() -> Any:
            workers, index = program.num_workers(), program.get_current_worker_index()
            rows = ts.data.ArrayDataset(torch.arange(9)).shard(workers, index % workers)
            return rows.map(lambda row: torch.stack([torch.tensor(workers), torch.tensor(index), row])).batch(3)

        def read(count: int) -> dict[int, list[int]]:
            iterator = iter(program.create_per_worker_dataset(dataset_fn))
            gate = close_gate("every worker reads")

            def first() -> torch.Tensor:
                pass_gate("every worker reads")
                batch: torch.Tensor = next(iterator)
                return batch

            values = [program.schedule(first) for _ in range(count)]
            await_arrivals("every worker reads", count)
            gate.set()
            found = [value.get(timeout=60) for value in values]
            assert all(set(batch[:, 0].tolist()) == {3} for batch in found)
            return {int(batch[0, 1]): batch[:, 2].tolist() for batch in found}

        parts = {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5, 8]}
        assert read(3) == parts
        cluster.start_worker(4)  # it is in no description, and the number stays
        assert read(4) == {**parts, 4: parts[1]}
        assert program.num_workers() == 3


def test_distributed_datasets(coordinator: ts.ClusterCoordinator) -> None:
    strategy = coordinator.strategy

    def dataset_fn(context: ts.InputContext) -> list[torch.Tensor]:
        numbers = [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]
        return [torch.tensor([numbers])]

    for made in (strategy.distribute_datasets_from_function(dataset_fn), strategy.distribute_dataset(batches())):
        with pytest.raises(InvalidArgumentError, match="create_per_worker_dataset"):
            iter(made)
    of_function = strategy.distribute_datasets_from_function(dataset_fn)
    assert first_of(coordinator, of_function).tolist() == [[1, 0, 1]]
    assert first_of(coordinator, lambda: strategy.distribute_datasets_from_function(dataset_fn)).tolist() == [[1, 0, 1]]
    assert first_of(coordinator, strategy.distribute_dataset(batches())).tolist() == [0, 1]


def test_iterators_on_the_coordinator(coordinator: ts.ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(batches)
    iterator = iter(dataset)
    assert iter(iterator) is iterator
    for call in (lambda: next(iterator), iterator.get_next, lambda: list(dataset)):
        with pytest.raises(UnsupportedError, match="schedule"):
            call()
    assert dataset.element_spec.shape == iterator.element_spec.shape == (None,)
    with pytest.raises(WrongTypeError, match="cannot be pickled"):
        pickle.dumps(iterator)


def test_iterators_in_functions(of_one: ts.ClusterCoordinator) -> None:
    dataset = of_one.create_per_worker_dataset(batches)
    iterator = iter(dataset)
    reads = [
        of_one.schedule(lambda nested: next(nested["a"][0]), ({"a": [iterator]},)),
        of_one.schedule(lambda: next(iterator)),
        of_one.schedule(lambda given: given.get_next(), kwargs={"given": iterator}),
    ]
    assert [batch.tolist() for batch in of_one.fetch(reads)] == [[0, 1], [2, 3], [4, 5]]
    assert of_one.schedule(lambda: next(iterator, None)).fetch() is None
    for fn in (lambda: next(iterator), lambda: iterator.get_next()):
        of_one.schedule(fn)
        with pytest.raises(OutOfRangeError, match="no more batches"):
            of_one.join()
    for source in (iter(dataset), dataset):
        assert of_one.schedule(lambda given: [int(b.sum()) for b in given], (source,)).fetch() == [1, 5, 9]


# -- exceptions of functions on their way to the coordinator -----------------------------------------------------------


_SCRIPT = """
class BadShard(Exception):
    def __init__(self, shard, reason="no rows"):
        super().__init__(f"shard {shard}: {reason}")
        self.shard, self.reason = shard, reason

class SaysHow(Exception):
    def __init__(self, shard):
        super().__init__(f"shard {shard}")
        self.shard = shard

    def __reduce__(self):
        return SaysHow, (self.shard,)

class BadFile(OSError):
    def __init__(self, shard):
        super().__init__(2, "no such shard", f"shard-{shard}")
        self.shard = shard
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that only this process has."""
    module = types.ModuleType("only_here")
    exec(_SCRIPT, vars(module))
    for kind in (module.BadShard, module.SaysHow, module.BadFile):
        kind.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "only_here", module)
    return module


class Doubled(Exception):  # noqa: N818  # a name as scripts have them
    """Can be imported everywhere; made again by its arguments it says something else."""

    def __init__(self, name: str) -> None:
        super().__init__(f"bad {name}")


def come_home(make: Callable[[], BaseException]) -> Any:
    """What a function's error is on the coordinator."""

    def fails() -> None:
        raise make()

    with FakeCluster(workers=1, ps=1) as cluster:
        value = ts.ClusterCoordinator(cluster.strategy()).schedule(fails)
        try:
            return value.get(timeout=60)
        except Exception as error:
            return error


COME_HOME: dict[str, tuple[Callable[[Any], Exception], dict[str, Any]]] = {
    "a class of the script": (
        lambda script: script.BadShard(7),
        {"args": ("shard 7: no rows",), "shard": 7, "reason": "no rows"},
    ),
    "what a builtin keeps in C": (
        lambda script: script.BadFile(3),
        {"errno": 2, "filename": "shard-3", "shard": 3},
    ),
    "a class that is made by other arguments": (lambda script: Doubled("row"), {"args": ("bad row",)}),
    "a class that says itself how it is pickled": (
        lambda script: script.SaysHow(7),
        {"args": ("shard 7",), "shard": 7},
    ),
}


@pytest.mark.parametrize("name", COME_HOME)
def test_what_a_function_raises_comes_back_as_itself(script: Any, name: str) -> None:
    make, wanted = COME_HOME[name]
    sent, error = make(script), come_home(lambda: make(script))
    assert type(error) is type(sent)
    assert str(error) == str(sent)
    assert {key: getattr(error, key) for key in wanted} == wanted
    assert "on the worker" in error.__notes__[0]


def test_tensors_come_along(script: Any) -> None:
    error = come_home(lambda: script.BadShard(torch.arange(3)))
    assert isinstance(error, script.BadShard)
    assert error.shard.tolist() == [0, 1, 2]


def test_attributes_that_cannot_travel_stay_behind(script: Any) -> None:
    error = come_home(lambda: script.BadShard(sys.stdout))
    assert isinstance(error, script.BadShard)
    assert (error.reason, hasattr(error, "shard")) == ("no rows", False)
    assert error.__notes__[0].endswith("attributes that could not travel: shard")


@pytest.mark.parametrize(
    "make", [lambda: ValueError(sys.stdout), lambda: SystemExit(3)], ids=["ValueError: <", "SystemExit"]
)
def test_what_cannot_travel_or_would_end_the_coordinator_arrives_as_text(make: Any, request: Any) -> None:
    found = come_home(make)
    assert isinstance(found, FunctionError)
    assert request.node.callspec.id in str(found)
