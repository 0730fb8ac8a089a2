"""`ClusterCoordinator` over a cluster of threads: what it takes and gives back, errors, per-worker values, losses."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchstrat as ts
from tests.unit.gates import DEADLINE_SECONDS, await_arrivals, close_gate, pass_gate
from torchstrat.errors import (
    CancelledError,
    ClosureInputError,
    CommunicationTimeoutError,
    ContextError,
    FunctionError,
    InvalidArgumentError,
    NotSendableError,
    OutOfRangeError,
    ParameterServerUnavailable,
    UnsupportedError,
    WrongTypeError,
)
from torchstrat.parameter_server import coordinator as coordinator_module
from torchstrat.testing.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(workers=2, ps=2) as cluster:
        yield cluster


@pytest.fixture
def coordinator(cluster: FakeCluster) -> ts.ClusterCoordinator:
    return ts.ClusterCoordinator(cluster.strategy())


def counter_of(coordinator: ts.ClusterCoordinator) -> tuple[ts.Variable, Callable[[], None]]:
    with coordinator.strategy.scope():
        counter = ts.Variable(0.0, name="counter")

    def increment() -> None:
        counter.assign_add(1.0)

    return counter, increment


def bad() -> None:
    raise KeyError("bad")


def error_of(value: Any) -> Exception | None:
    try:
        value.get()
    except Exception as error:
        return error
    return None


def add(a: Any, b: Any = 10) -> torch.Tensor:
    return torch.as_tensor(a) + b


# -- who it belongs to ------------------------------------------------------------------------------------------------


def test_one_per_strategy(cluster: FakeCluster) -> None:
    strategy = cluster.strategy()
    coordinator = ts.ClusterCoordinator(strategy)
    assert ts.ClusterCoordinator(strategy=strategy) is coordinator
    assert coordinator.strategy is strategy
    with strategy.scope():
        assert ts.ClusterCoordinator(strategy) is coordinator


@pytest.mark.parametrize("other", [ts.OneDeviceStrategy("cpu:0"), None, 3, ts.ParameterServerStrategy])
def test_other_strategies_are_refused(other: Any) -> None:
    with pytest.raises(WrongTypeError, match="ParameterServerStrategy"):
        ts.ClusterCoordinator(other)


# -- what schedule takes ----------------------------------------------------------------------------------------------


class Callable4:
    def __call__(self) -> int:
        return 4

    def times(self, number: int) -> int:
        return 4 * number


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "result"),
    [
        (add, (1,), None, 11),
        (add, [1], {}, 11),
        (add, (), {"a": 1, "b": 2}, 3),
        (add, (1,), {"b": np.float64(2.5)}, 3.5),
        (add, (np.array(1),), None, 11),
        (functools.partial(add, 1), (), None, 11),
        (Callable4(), (), None, 4),
        (Callable4().times, (3,), None, 12),
        (len, ([1, 2],), None, 2),
        (torch.add, (torch.tensor(1), 2), None, 3),
        (dict, (), {"a": 1}, {"a": 1}),
        (lambda text: text, ("abc",), None, "abc"),
        (lambda nothing: nothing is None, (None,), None, True),
    ],
)
def test_any_callable_and_any_arguments(
    coordinator: ts.ClusterCoordinator, fn: Any, args: Any, kwargs: Any, result: Any
) -> None:
    assert coordinator.schedule(fn, args=args, kwargs=kwargs).get() == result


@pytest.mark.parametrize("fn", [None, 3, "fn", torch.tensor(1)])
def test_no_function(coordinator: ts.ClusterCoordinator, fn: Any) -> None:
    with pytest.raises(WrongTypeError, match="schedule needs a function"):
        coordinator.schedule(fn)


@pytest.mark.parametrize("args", [1, "ab", {"a": 1}, torch.ones(1), None])
def test_arguments_in_no_list(coordinator: ts.ClusterCoordinator, args: Any) -> None:
    with pytest.raises(TypeError, match="args must be a list or a tuple"):
        coordinator.schedule(add, args)


def test_keyword_arguments_in_no_dict(coordinator: ts.ClusterCoordinator) -> None:
    with pytest.raises(WrongTypeError, match="kwargs must be a dict"):
        coordinator.schedule(add, (1,), [2])  # type: ignore[arg-type]


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"c": 1}), ((1,), {"a": 1})])
def test_arguments_that_do_not_fit_fail_when_the_function_is_called(
    coordinator: ts.ClusterCoordinator, args: Any, kwargs: Any
) -> None:
    value = coordinator.schedule(add, args, kwargs)
    with pytest.raises(TypeError, match=r"add\(\)"):
        coordinator.join()
    with pytest.raises(TypeError, match=r"add\(\)"):
        value.fetch()


@pytest.mark.parametrize("nest", [lambda v: ((v,), {}), lambda v: (([{"x": v}],), {}), lambda v: ((), {"a": v})])
def test_results_of_other_functions_are_no_arguments(coordinator: ts.ClusterCoordinator, nest: Any) -> None:
    value = coordinator.schedule(lambda: 1)
    args, kwargs = nest(value)
    with pytest.raises(InvalidArgumentError, match="RemoteValue"):
        coordinator.schedule(add, args, kwargs)
    with pytest.raises(NotSendableError, match=r"value.*fetch it"):
        coordinator.schedule(lambda: value)


def test_what_cannot_travel_is_named_and_not_queued(coordinator: ts.ClusterCoordinator) -> None:
    lock = threading.Lock()
    with pytest.raises(NotSendableError, match="closure variable 'lock'"):
        coordinator.schedule(lambda: lock)
    with pytest.raises(NotSendableError, match=r"args\[0\]"):
        coordinator.schedule(add, (threading.Lock(),))
    assert coordinator.done()


def test_trained_state_from_outside_of_the_scope(coordinator: ts.ClusterCoordinator) -> None:
    model, counter = nn.Linear(2, 2), ts.Variable(1.0)
    with pytest.raises(InvalidArgumentError, match="Linear"):
        coordinator.schedule(lambda: model(torch.ones(1, 2)))
    with pytest.raises(NotSendableError, match="counter"):
        coordinator.schedule(lambda: counter.assign_add(1.0))
    model.requires_grad_(False)
    sent = coordinator.schedule(lambda: model.bias).get()
    assert torch.equal(sent, model.bias)


def test_a_variable_as_an_argument_is_the_one_on_the_servers(coordinator: ts.ClusterCoordinator) -> None:
    counter, _ = counter_of(coordinator)

    def work(by_position: ts.Variable, nested: dict[str, ts.Variable]) -> torch.Tensor:
        by_position.assign_add(1.0)
        return nested["counter"].read_value()

    assert coordinator.schedule(work, (counter,), {"nested": {"counter": counter}}).fetch() == 1.0
    assert counter.read_value() == 1.0


# -- what comes back --------------------------------------------------------------------------------------------------


def test_fetch_gives_arrays_and_get_gives_tensors(coordinator: ts.ClusterCoordinator) -> None:
    value = coordinator.schedule(lambda: {"a": torch.ones(2), "b": (torch.tensor(3), b"s", "s", 5, None, [None])})
    fetched, got = value.fetch(), value.get()
    assert isinstance(fetched["a"], np.ndarray)
    assert fetched["a"].dtype == np.float32
    assert isinstance(fetched["b"], tuple)
    assert fetched["b"][1:] == got["b"][1:] == (b"s", "s", 5, None, [None])
    assert torch.equal(got["a"], torch.ones(2))


def test_fetch_of_a_nest_leaves_the_rest_alone(coordinator: ts.ClusterCoordinator) -> None:
    value, tensor = coordinator.schedule(lambda: torch.tensor(1.0)), torch.tensor(2)
    fetched = coordinator.fetch([value, {"k": (value, 5)}, "x", None, tensor])
    assert fetched[0] == fetched[1]["k"][0] == np.float32(1)
    assert isinstance(fetched[1]["k"][0], np.ndarray)
    assert fetched[1]["k"][1] == 5
    assert fetched[2:4] == ["x", None]
    assert fetched[4] is tensor
    assert coordinator.fetch(3) == 3
    assert coordinator.fetch(value) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64])
def test_dtypes_of_results(coordinator: ts.ClusterCoordinator, dtype: torch.dtype) -> None:
    value = coordinator.schedule(lambda: torch.ones(2, dtype=dtype))
    assert value.get().dtype == dtype
    assert value.fetch().tolist() == [1, 1]


def test_results_without_a_numpy_form_stay_tensors(coordinator: ts.ClusterCoordinator) -> None:
    fetched = coordinator.schedule(lambda: torch.eye(2).to_sparse()).fetch()
    assert fetched.layout is torch.sparse_coo
    assert torch.equal(fetched.to_dense(), torch.eye(2))


def test_results_are_values_without_history(coordinator: ts.ClusterCoordinator) -> None:
    counter, _ = counter_of(coordinator)
    assert not coordinator.schedule(lambda: torch.ones(2, requires_grad=True) * 2).get().requires_grad
    assigned = coordinator.schedule(lambda: counter.assign_add(5.0)).get()
    assert type(assigned) is torch.Tensor
    assert assigned == 5.0


def test_results_that_cannot_travel(coordinator: ts.ClusterCoordinator) -> None:
    value = coordinator.schedule(lambda: (number for number in range(3)))
    with pytest.raises(NotSendableError, match="result"):
        coordinator.join()
    with pytest.raises(NotSendableError, match="result"):
        value.fetch()


def test_waiting_has_limits_that_name_what_is_awaited(coordinator: ts.ClusterCoordinator) -> None:
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
        return (
            ts.has_strategy(),
            ts.get_strategy() is strategy,
            ts.in_cross_replica_context(),
            ts.get_replica_context() is None,
            strategy.num_replicas_in_sync,
        )

    assert coordinator.schedule(facts).get() == (True, True, True, True, 1)


def test_the_strategys_functions_in_a_function(coordinator: ts.ClusterCoordinator) -> None:
    strategy = coordinator.strategy

    def replica(x: torch.Tensor) -> Any:
        context = ts.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", x + context.replica_id_in_sync_group + context.num_replicas_in_sync)

    def work() -> Any:
        value = strategy.run(replica, args=(torch.tensor(5.0),))
        rows = torch.tensor([1.0, 3.0])
        return (
            value,
            strategy.reduce("sum", value, axis=None),
            strategy.reduce("mean", rows, axis=0),
            strategy.gather(rows, axis=0),
            strategy.local_results(value),
        )

    value, total, mean, gathered, local = coordinator.schedule(work).get()
    assert (value, total, mean, local) == (6.0, 6.0, 2.0, (6.0,))
    assert gathered.tolist() == [1.0, 3.0]


def test_the_workers_index(coordinator: ts.ClusterCoordinator) -> None:
    gate = close_gate("index")

    def index() -> int:
        pass_gate("index")
        return coordinator.get_current_worker_index()

    values = [coordinator.schedule(index) for _ in range(2)]
    await_arrivals("index", 2)  # one on each worker
    gate.set()
    assert sorted(coordinator.fetch(values)) == [0, 1]
    for call in (coordinator.get_current_worker_index, coordinator.experimental_get_current_worker_index):
        with pytest.raises(ContextError, match="scheduled"):
            call()


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


def test_one_function_at_a_time_per_worker_in_the_order_of_the_queue() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        coordinator = ts.ClusterCoordinator(cluster.strategy())
        with coordinator.strategy.scope():
            last = ts.Variable(-1)

        def follow(number: int) -> bool:
            before = int(last)
            last.assign(number)
            return before == number - 1

        values = [coordinator.schedule(follow, (number,)) for number in range(30)]
        assert all(coordinator.fetch(values))


def test_schedule_waits_while_the_queue_is_full(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "QUEUE_SIZE", 3)
    coordinator = ts.ClusterCoordinator(cluster.strategy())
    gate, scheduled = close_gate("full"), threading.Semaphore(0)

    def schedule() -> None:
        for _ in range(8):
            coordinator.schedule(pass_gate, ("full",))
            scheduled.release()

    thread = threading.Thread(target=schedule)
    thread.start()
    for _ in range(3):
        assert scheduled.acquire(timeout=DEADLINE_SECONDS)
    assert not scheduled.acquire(timeout=0.1)
    gate.set()
    thread.join(DEADLINE_SECONDS)
    coordinator.join()
    assert coordinator.done()


# -- errors -----------------------------------------------------------------------------------------------------------


class UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_unpicklable() -> None:
    raise UnpicklableError(1, 2)


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    [
        (bad, KeyError, "bad"),
        (lambda: 1 / 0, ZeroDivisionError, "division"),
        (lambda: torch.tensor(1) // torch.tensor(0), RuntimeError, "ZeroDivisionError"),
        (raise_unpicklable, UnpicklableError, "1 and 2"),
        (lambda: exec("raise SystemExit(3)"), FunctionError, "SystemExit: 3"),
        (lambda: next(iter(())), OutOfRangeError, "no more batches"),
    ],
)
def test_join_raises_the_functions_error_once(
    coordinator: ts.ClusterCoordinator, fn: Any, kind: type[Exception], message: str
) -> None:
    value = coordinator.schedule(fn)
    with pytest.raises(kind, match=message):
        coordinator.join()
    coordinator.join()
    assert coordinator.done()
    for call in (value.get, value.fetch, lambda: coordinator.fetch({"k": value})):
        with pytest.raises(kind, match=message):
            call()
    assert "failed" in repr(value)
    assert coordinator.schedule(add, (1,)).fetch() == 11


def test_fetch_does_not_take_the_error_from_join(coordinator: ts.ClusterCoordinator) -> None:
    value = coordinator.schedule(bad)
    with pytest.raises(KeyError):
        value.fetch()
    with pytest.raises(KeyError):
        coordinator.join()


def test_done_reports_an_error_once(coordinator: ts.ClusterCoordinator) -> None:
    assert coordinator.done()
    value = coordinator.schedule(bad)
    with pytest.raises(KeyError):
        value.get()
    with pytest.raises(KeyError):
        coordinator.done()
    assert coordinator.done()
    coordinator.join()


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


def test_what_is_queued_behind_an_error_is_cancelled_and_what_runs_finishes(coordinator: ts.ClusterCoordinator) -> None:
    counter, increment = counter_of(coordinator)
    gate = close_gate("behind")
    running = [coordinator.schedule(pass_gate, ("behind",)) for _ in range(2)]
    await_arrivals("behind", 2)
    failing = coordinator.schedule(bad)
    later = [coordinator.schedule(increment) for _ in range(20)]
    gate.set()
    with pytest.raises(KeyError):
        coordinator.join()
    assert coordinator.fetch(running) == ["through", "through"]
    with pytest.raises(KeyError):
        failing.get()
    errors = [error_of(value) for value in later]
    cancelled = sum(error is not None for error in errors)
    assert all(isinstance(error, CancelledError) and isinstance(error.__cause__, KeyError) for error in errors if error)
    assert counter.read_value() == len(later) - cancelled
    assert cancelled > 0
    assert coordinator.done()


def test_of_several_errors_only_the_first_is_reported(coordinator: ts.ClusterCoordinator) -> None:
    gate = close_gate("several")  # or the first error would be there before the last function is scheduled
    for _ in range(2):
        coordinator.schedule(pass_gate, ("several",))
    values = [coordinator.schedule(bad) for _ in range(6)]
    gate.set()
    with pytest.raises(KeyError):
        coordinator.join()
    coordinator.join()
    for value in values:
        with pytest.raises((KeyError, CancelledError)):
            value.get()


def test_join_without_work(coordinator: ts.ClusterCoordinator) -> None:
    coordinator.join()
    coordinator.join(timeout=0)
    assert coordinator.done()


# -- per-worker values ------------------------------------------------------------------------------------------------


class Tens(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(10 * index)


class Counting(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(3))


def batches() -> DataLoader[Any]:
    return DataLoader(torch.arange(6), batch_size=2)  # type: ignore[arg-type]


def generator() -> Iterator[torch.Tensor]:
    yield torch.tensor([0, 1])


def first_of(coordinator: ts.ClusterCoordinator, dataset: Any) -> Any:
    return coordinator.schedule(next, (iter(coordinator.create_per_worker_dataset(dataset)),)).fetch()


@pytest.mark.parametrize(
    "dataset",
    [
        batches,
        batches(),
        functools.partial(DataLoader, torch.arange(6), batch_size=2),
        generator,
        lambda size=2: DataLoader(torch.arange(6), batch_size=size),  # type: ignore[arg-type]
        lambda *_: iter([torch.tensor([0, 1])]),
    ],
)
def test_what_may_be_a_per_worker_dataset(coordinator: ts.ClusterCoordinator, dataset: Any) -> None:
    assert first_of(coordinator, dataset).tolist() == [0, 1]


@pytest.mark.parametrize("dataset", [Tens, Tens(), Counting, Counting()])
def test_classes_of_datasets_are_called_and_their_objects_are_not(
    coordinator: ts.ClusterCoordinator, dataset: Any
) -> None:
    assert first_of(coordinator, dataset) == 0


@pytest.mark.parametrize("dataset", [None, 3, "text", [1, 2], {"a": 1}])
def test_what_is_no_dataset(coordinator: ts.ClusterCoordinator, dataset: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="create_per_worker_dataset"):
        coordinator.create_per_worker_dataset(dataset)


def test_functions_that_need_arguments(coordinator: ts.ClusterCoordinator) -> None:
    with pytest.raises(WrongTypeError, match="create_per_worker_dataset"):
        coordinator.create_per_worker_dataset(lambda context: batches())
    with pytest.raises(WrongTypeError, match="create_per_worker_resource"):
        coordinator.create_per_worker_resource(lambda *, size: size)  # type: ignore[misc]
    with pytest.raises(WrongTypeError, match="create_per_worker_resource"):
        coordinator.create_per_worker_resource(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("returned", [None, 3, [1, 2], (torch.ones(1),), {"a": 1}])
def test_a_function_that_returns_no_dataset(coordinator: ts.ClusterCoordinator, returned: Any) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(lambda: returned))
    value = coordinator.schedule(next, (iterator,))
    with pytest.raises(ClosureInputError, match=f"returned a {type(returned).__name__}"):
        coordinator.join()
    with pytest.raises(ClosureInputError):
        value.fetch()


def test_a_builder_that_fails_is_tried_again_by_the_next_function(coordinator: ts.ClusterCoordinator) -> None:
    resource = coordinator.create_per_worker_resource(bad)
    for _ in range(2):
        coordinator.schedule(lambda value: value, (resource,))
        with pytest.raises(ClosureInputError, match=r"resource bad .*KeyError\('bad'\)"):
            coordinator.join()


def test_a_variable_made_by_a_dataset_function(coordinator: ts.ClusterCoordinator) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(lambda: DataLoader([ts.Variable(1.0)])))  # type: ignore[arg-type]
    coordinator.schedule(next, (iterator,))
    with pytest.raises(ClosureInputError, match="Variable was created") as caught:
        coordinator.join()
    assert isinstance(caught.value, ValueError)


def test_a_dataset_function_may_use_variables_and_the_index(coordinator: ts.ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        start = ts.Variable(40)

    def dataset_fn() -> Iterator[torch.Tensor]:
        yield torch.tensor(int(start) + coordinator.get_current_worker_index())

    assert int(first_of(coordinator, dataset_fn)) in (40, 41)


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


def test_iterators_in_functions() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        coordinator = ts.ClusterCoordinator(cluster.strategy())
        dataset = coordinator.create_per_worker_dataset(batches)
        iterator = iter(dataset)
        assert coordinator.schedule(lambda nested: next(nested["a"][0]), ({"a": [iterator]},)).fetch().tolist() == [
            0,
            1,
        ]
        assert coordinator.schedule(lambda: next(iterator)).fetch().tolist() == [2, 3]
        assert coordinator.schedule(lambda given: given.get_next(), kwargs={"given": iterator}).fetch().tolist() == [
            4,
            5,
        ]
        assert coordinator.schedule(lambda: next(iterator, None)).fetch() is None
        for fn in (lambda: next(iterator), lambda: iterator.get_next()):
            coordinator.schedule(fn)
            with pytest.raises(OutOfRangeError, match="no more batches"):
                coordinator.join()
        sums = [
            coordinator.schedule(lambda given: [int(b.sum()) for b in given], (source,))
            for source in (iter(dataset), dataset)
        ]
        assert coordinator.fetch(sums) == [[1, 5, 9], [1, 5, 9]]


def test_every_worker_has_a_copy_of_its_own(coordinator: ts.ClusterCoordinator) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    gate = close_gate("copies")

    def read(given: Iterator[torch.Tensor]) -> Any:
        pass_gate("copies")
        return next(given)

    values = [coordinator.schedule(read, (iterator,)) for _ in range(2)]
    await_arrivals("copies", 2)
    gate.set()
    assert [value.tolist() for value in coordinator.fetch(values)] == [[0, 1], [0, 1]]


def test_resources_keep_their_state_on_the_worker() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        coordinator = ts.ClusterCoordinator(cluster.strategy())
        resource = coordinator.create_per_worker_resource(dict)

        def count(store: dict[str, int]) -> int:
            store["n"] = store.get("n", 0) + 1
            return store["n"]

        assert coordinator.fetch([coordinator.schedule(count, (resource,)) for _ in range(3)]) == [1, 2, 3]
        cluster.kill_worker(0)
        cluster.start_worker(0)
        assert coordinator.schedule(count, (resource,)).fetch() == 1


# -- losses -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_lost_while_idle(cluster: FakeCluster, coordinator: ts.ClusterCoordinator) -> None:
    counter, increment = counter_of(coordinator)
    cluster.kill_worker(1)
    for _ in range(20):
        coordinator.schedule(increment)
    coordinator.join(timeout=DEADLINE_SECONDS)
    assert counter.read_value() == 20.0
    cluster.start_worker(1)
    coordinator.join()
    assert counter.read_value() == 20.0


def test_a_worker_that_is_lost_inside_a_function(cluster: FakeCluster, coordinator: ts.ClusterCoordinator) -> None:
    counter, _ = counter_of(coordinator)
    gate = close_gate("inside")

    def work() -> int:
        counter.assign_add(1.0)
        pass_gate("inside")
        return coordinator.get_current_worker_index()

    values = [coordinator.schedule(work) for _ in range(2)]
    await_arrivals("inside", 2)
    cluster.kill_worker(0)
    gate.set()
    coordinator.join(timeout=DEADLINE_SECONDS)
    assert coordinator.fetch(values) == [1, 1]
    assert counter.read_value() == 2.0  # the function that ran twice has counted once


def test_without_workers_functions_wait(cluster: FakeCluster, coordinator: ts.ClusterCoordinator) -> None:
    counter, increment = counter_of(coordinator)
    for index in range(2):
        cluster.kill_worker(index)
    value = coordinator.schedule(increment)
    assert "pending" in repr(value)
    with pytest.raises(CommunicationTimeoutError, match=r"1 functions are queued, workers \[\]"):
        coordinator.join(timeout=0.05)
    assert not coordinator.done()
    cluster.start_worker(1)
    coordinator.join(timeout=DEADLINE_SECONDS)
    assert counter.read_value() == 1.0


def test_workers_come_and_go(cluster: FakeCluster, coordinator: ts.ClusterCoordinator) -> None:
    cluster.start_worker(7)
    for index in range(2):
        coordinator.remove_worker(index, timeout=DEADLINE_SECONDS)
    assert {coordinator.schedule(coordinator.get_current_worker_index).get() for _ in range(4)} == {7}


def test_a_server_that_is_lost(cluster: FakeCluster, coordinator: ts.ClusterCoordinator) -> None:
    counter, increment = counter_of(coordinator)
    gate = close_gate("server")
    running = [coordinator.schedule(pass_gate, ("server",)) for _ in range(2)]
    await_arrivals("server", 2)
    pending = [coordinator.schedule(increment) for _ in range(3)]
    cluster.kill_server(0)
    with pytest.raises(ParameterServerUnavailable, match="server 0"):
        counter.read_value()
    gate.set()
    with pytest.raises(ParameterServerUnavailable, match="server 0"):
        coordinator.join(timeout=DEADLINE_SECONDS)
    assert coordinator.fetch(running) == ["through", "through"]
    for value in pending:
        with pytest.raises(ParameterServerUnavailable, match="server 0"):
            value.fetch()
    assert coordinator.done()
    with pytest.raises(ParameterServerUnavailable, match="server 0"):
        coordinator.schedule(increment)


def test_a_closed_coordinator_says_so(coordinator: ts.ClusterCoordinator) -> None:
    coordinator.strategy.close()
    for call in (coordinator.join, coordinator.done, lambda: coordinator.schedule(add, (1,))):
        with pytest.raises(ContextError, match="closed"):
            call()


def test_a_strategy_is_not_copied(coordinator: ts.ClusterCoordinator) -> None:
    with pytest.raises(ContextError):
        copy.copy(coordinator.strategy)
