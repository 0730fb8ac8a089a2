"""Second names and TensorFlow 1 calls, on every strategy of one process, and the programs of their documentation."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import torchstrat as ts
from tests.support.input_ranks import layout_in_process
from torchstrat.data.v1_iterators import make_input_fn_iterator
from torchstrat.errors import ContextError, InvalidArgumentError, StrategyMixingError, WrongTypeError

STRATEGIES: dict[str, Callable[[], ts.Strategy]] = {
    "default": ts.get_strategy,
    "one_device": lambda: ts.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "central with one device": ts.CentralStorageStrategy,
    "central with three devices": lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1", "cpu:2"]),
}
FIRST_NAMES = (
    *("distribute_dataset", "distribute_datasets_from_function", "distribute_values_from_function", "local_results"),
    *("split_to_logical_devices", "replicate_to_logical_devices", "assign_to_logical_device"),
)
SECOND_NAMES = {"experimental_run_v2": "run", **{f"experimental_{name}": name for name in FIRST_NAMES}}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Iterator[ts.Strategy]:
    made = STRATEGIES[request.param]()
    yield made
    made.close()


@pytest.fixture
def central() -> Iterator[ts.Strategy]:
    made = STRATEGIES["central"]()
    yield made
    made.close()


def numbers(count: int) -> ts.data.ArrayDataset:
    return ts.data.ArrayDataset(torch.arange(count))


def components(strategy: ts.Strategy, value: Any) -> list[Any]:
    """One entry per replica, as lists and numbers."""
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in strategy.local_results(value)]


def rows(strategy: ts.Strategy, iterator: Any) -> list[int]:
    """Every row that is left in ``iterator``, in order."""
    found = []
    while (step := iterator.get_next_as_optional()).has_value():
        found += [row for component in components(strategy, step.get_value()) for row in component]
    return found


def replica_id() -> torch.Tensor:
    context = ts.get_replica_context()
    assert context is not None
    return torch.tensor(context.replica_id_in_sync_group)


def test_every_experimental_name_is_known_here() -> None:
    others = {"experimental_run", "experimental_make_numpy_dataset"}
    assert {name for name in dir(ts.Strategy) if name.startswith("experimental_")} == SECOND_NAMES.keys() | others


@pytest.mark.parametrize("name", SECOND_NAMES)
def test_a_second_name_calls_the_same_function(
    strategy: ts.Strategy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = getattr(strategy, SECOND_NAMES[name])
    parameters, expected = inspect.signature(getattr(strategy, name)).parameters, inspect.signature(first).parameters
    described = [[(one.name, one.kind, one.default) for one in each.values()] for each in (parameters, expected)]
    assert described[0] == described[1]
    received: dict[str, Any] = {}
    result = object()

    def record(*args: Any, **kwargs: Any) -> object:
        received.update(inspect.signature(first).bind(*args, **kwargs).arguments)
        return result

    monkeypatch.setattr(strategy, SECOND_NAMES[name], record)
    given = {parameter: object() for parameter in expected}
    assert getattr(strategy, name)(**given) is result
    assert received == given


def test_the_names_of_tensorflow_1(strategy: ts.Strategy) -> None:
    results = strategy.run(replica_id)
    assert strategy.unwrap(results) == strategy.local_results(results)
    several = strategy.num_replicas_in_sync > 1
    assert strategy.group(results) is (None if several else results)
    with strategy.scope():
        variable = ts.Variable(1.0)
        with strategy.colocate_vars_with(variable):
            near = ts.Variable(2.0)
    assert strategy.extended.device_of(near) == strategy.extended.device_of(variable)


def test_a_dataset_iterator_splits_as_distribute_dataset(strategy: ts.Strategy) -> None:
    dataset = numbers(7).batch(3)
    iterator = strategy.make_dataset_iterator(dataset)
    expected = [components(strategy, batch) for batch in strategy.distribute_dataset(dataset)]
    assert [components(strategy, batch) for batch in iterator] == expected
    for _ in range(2):
        with pytest.raises(ts.OutOfRangeError):
            iterator.get_next()
    assert iterator.initialize() == []
    assert components(strategy, iterator.get_next()) == expected[0]
    iterator.initialize()
    assert rows(strategy, iterator) == list(range(7))
    assert not iterator.get_next_as_optional().has_value()


def test_initialize_before_the_first_batch_reads_nothing(strategy: ts.Strategy) -> None:
    iterator = strategy.make_dataset_iterator(batch for batch in torch.arange(5).split(2))
    iterator.initialize()
    iterator.initialize()
    assert rows(strategy, iterator) == list(range(5))
    iterator.initialize()
    with pytest.raises(InvalidArgumentError, match="can be read once"):
        iterator.get_next()


def test_an_input_fn_makes_a_dataset_of_replica_batches(strategy: ts.Strategy) -> None:
    contexts: list[ts.InputContext] = []
    iterator = strategy.make_input_fn_iterator(lambda context: contexts.append(context) or numbers(7).batch(2))
    replicas = strategy.num_replicas_in_sync
    assert components(strategy, iterator.get_next()) == [[0, 1], [2, 3], [4, 5], [6]][:replicas]
    iterator.initialize()
    assert rows(strategy, iterator) == list(range(7))  # also those of an incomplete last step
    assert contexts == [ts.InputContext(1, 0, replicas)]


def test_an_input_fn_makes_a_callable(strategy: ts.Strategy) -> None:
    calls: list[int] = []
    source = iter(torch.arange(8).split(1))
    iterator = strategy.make_input_fn_iterator(lambda _: lambda: calls.append(0) or next(source), "PER_WORKER")
    replicas = strategy.num_replicas_in_sync
    assert calls == []
    assert components(strategy, iterator.get_next()) == [[index] for index in range(replicas)]
    assert len(calls) == replicas  # once per replica and step, and not before
    iterator.initialize()
    assert rows(strategy, iterator) == list(range(replicas, 8))  # goes on where it was; no row is lost


def test_a_callable_is_not_called_before_its_step() -> None:
    calls: list[int] = []
    elsewhere = layout_in_process(1, devices=(torch.device("meta"),))  # where batches are copied, and read ahead for it
    iterator = make_input_fn_iterator(
        None,  # type: ignore[arg-type]
        elsewhere,
        lambda _: lambda: calls.append(0) or torch.ones(2),
        "PER_WORKER",
    )
    for step in range(3):
        assert iterator.get_next().device.type == "meta"
        assert len(calls) == step + 1


def test_a_callable_may_end_with_get_next(central: ts.Strategy) -> None:
    one = STRATEGIES["one_device"]()
    inner = one.make_dataset_iterator(numbers(3).batch(1))
    assert rows(central, central.make_input_fn_iterator(lambda _: inner.get_next)) == [0, 1, 2]
    one.close()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            (lambda s, returned=returned: s.make_input_fn_iterator(lambda _: returned), ValueError, "input_fn|dataset")
            for returned in (3, None, [1, 2], "lines")
        ),
        *(
            (lambda s, m=mode: s.make_input_fn_iterator(lambda _: numbers(2).batch(1), m), ValueError, "PER_REPLICA")
            for mode in (ts.InputReplicationMode.PER_REPLICA, "PER_REPLICA", "per job")
        ),
        (lambda s: s.make_input_fn_iterator(numbers(2)), TypeError, "make_input_fn_iterator"),
        (lambda s: s.make_input_fn_iterator(lambda _: lambda: None).get_next(), ValueError, "returned None instead"),
        (lambda s: s.make_input_fn_iterator(lambda _: lambda: 1 // 0).get_next(), ZeroDivisionError, "division"),
        (lambda s: s.make_dataset_iterator(3), TypeError, "int"),
        (lambda s: s.update_config_proto(3), WrongTypeError, "mapping"),
        (lambda s: s.configure(types.MappingProxyType({})), WrongTypeError, "mutable"),
        (lambda s: s.configure(cluster_spec={"worker": ["localhost:1"]}), NotImplementedError, "TF_CONFIG"),
    ],
)
def test_what_is_refused(
    call: Callable[[Any], object], error: type[Exception], message: str, strategy: ts.Strategy
) -> None:
    with pytest.raises(error, match=message):
        call(strategy)


def test_run_on_an_iterator(strategy: ts.Strategy) -> None:
    iterator = strategy.make_dataset_iterator(numbers(5).batch(2))
    iterator.initialize()
    seen: list[int] = []
    for _ in range(3):
        strategy.experimental_run(lambda batch: seen.extend(batch.tolist()), iterator)
    assert seen == list(range(5))
    with pytest.raises(ts.OutOfRangeError):
        strategy.experimental_run(seen.extend, iterator)


def test_run_on_a_distributed_iterator_and_on_nothing(strategy: ts.Strategy) -> None:
    replicas = strategy.num_replicas_in_sync
    if ts.get_strategy() is not strategy:
        iterator = iter(strategy.distribute_dataset(numbers(replicas).batch(replicas)))
        doubled = strategy.experimental_run(lambda batch: 2 * batch, iterator)
        assert components(strategy, doubled) == [[2 * index] for index in range(replicas)]
    assert components(strategy, strategy.experimental_run(replica_id)) == list(range(replicas))


def test_a_refused_run_uses_no_batch_up(central: ts.Strategy) -> None:
    iterator = central.make_dataset_iterator(numbers(2).batch(2))
    other = STRATEGIES["mirrored"]()
    for call, error, message in (
        (lambda: central.experimental_run(None, iterator), WrongTypeError, "experimental_run"),
        (lambda: central.run(lambda: central.experimental_run(torch.sum, iterator)), ContextError, "inside replica 0"),
        (lambda: central.experimental_run(torch.sum, numbers(2)), WrongTypeError, "make_dataset_iterator"),
        (lambda: other.experimental_run(torch.sum, iterator), StrategyMixingError, "strateg"),
    ):
        with pytest.raises(error, match=message):
            call()
    other.close()
    assert rows(central, iterator) == [0, 1]


def test_arrays_as_a_dataset(strategy: ts.Strategy) -> None:
    dataset = strategy.experimental_make_numpy_dataset({"x": np.arange(6.0), "y": (np.arange(12).reshape(6, 2),)}, None)
    first = next(iter(dataset))
    assert first["x"].dtype == torch.float64
    assert (first["x"].tolist(), first["y"][0].tolist()) == (0.0, [0, 1])
    prepared = dataset.map(lambda row: row["x"].long()).shard(2, 1).repeat(2).batch(2).prefetch(ts.data.AUTOTUNE)
    assert rows(strategy, strategy.make_dataset_iterator(prepared)) == [1, 3, 5] * 2
    shuffled = dataset.map(lambda row: row["x"].long()).shuffle(6).batch(2)
    assert sorted(rows(strategy, strategy.make_dataset_iterator(shuffled))) == list(range(6))


def test_lists_are_stacked(central: ts.Strategy) -> None:
    make = central.experimental_make_numpy_dataset
    assert [row.tolist() for row in make([np.arange(2), np.arange(2) + 5])] == [[0, 1], [5, 6]]
    assert [row.tolist() for row in make([[1.0, 2.0], [3.0, 4.0]])] == [[1.0, 2.0], [3.0, 4.0]]
    pairs = [(x.tolist(), y.item()) for x, y in make(([np.ones(2), np.zeros(2)], np.arange(2)))]
    assert pairs == [([1, 1], 0), ([0, 0], 1)]
    assert list(make(["a", "b"])) == ["a", "b"]
    for mismatched in ([np.arange(2), np.arange(3)], (np.arange(2), np.arange(3)), [[1], [2, 3]], [], np.float64(3)):
        with pytest.raises((ValueError, TypeError)):
            make(mismatched)


CONFIG = {"allow_soft_placement": True, "nested": {"threads": 2}}


def test_a_config_is_changed_in_a_copy_or_itself(strategy: ts.Strategy) -> None:
    given = {**CONFIG, "isolate_session_state": False}
    changed = strategy.update_config_proto(given)
    assert changed == {**CONFIG, "isolate_session_state": True}
    assert changed["nested"] is not given["nested"]
    assert given["isolate_session_state"] is False
    assert strategy.update_config_proto(types.MappingProxyType(CONFIG)) == changed
    strategy.configure(given)
    assert given == changed
    strategy.configure()


def test_an_omegaconf_config_keeps_its_kind_and_flags(central: ts.Strategy) -> None:
    given = OmegaConf.create(CONFIG)
    OmegaConf.set_struct(given, True)
    OmegaConf.set_readonly(given, True)
    changed = central.update_config_proto(given)
    assert OmegaConf.is_config(changed)
    assert changed.isolate_session_state is True
    assert "isolate_session_state" not in given
    assert OmegaConf.is_struct(changed)
    assert OmegaConf.is_readonly(changed)


def test_example_programs(strategy: ts.Strategy) -> None:
    """On each strategy: values go in and results come out. More of them run on one in `test_seed_examples`."""
    replicas, results, global_batch_size = strategy.num_replicas_in_sync, [], 12
    with strategy.scope():
        for x in strategy.experimental_distribute_dataset(numbers(5).batch(2)):
            results.append(strategy.run(lambda val: val + 1, args=(x,)))
    assert [row for one in results for part in components(strategy, one) for row in part or []] == [1, 2, 3, 4, 5]

    dataset = strategy.experimental_make_numpy_dataset(np.ones([10], dtype=np.float32))
    assert dataset.element_spec == ts.data.TensorSpec((), torch.float32)
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(5))
    totals = [strategy.reduce("sum", batch, axis=0) for batch in dist_dataset]
    assert [(total.dtype, total.item()) for total in totals] == [(torch.float32, 5.0)] * 2

    def input_fn(input_context: ts.InputContext) -> ts.data.Pipeline:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = ts.data.ArrayDataset(torch.tensor([[[1.0]]])).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn)
        replica_results = strategy.experimental_run(torch.sum, iterator)
    assert components(strategy, replica_results) == [global_batch_size / replicas] * replicas

    iterator = strategy.make_input_fn_iterator(lambda _: numbers(6).batch(1))
    result = strategy.extended.call_for_each_replica(lambda x: x + 1, args=(iterator.get_next(),))
    assert components(strategy, result) == [[index + 1] for index in range(replicas)]
    assert strategy.reduce("SUM", strategy.run(replica_id), axis=None).item() == sum(range(replicas))
