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
from tests.unit.data_ranks import layout_in_process
from torchstrat.compat import ExperimentalNames
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
SECOND_NAMES = {
    name: "run" if name == "experimental_run_v2" else name.removeprefix("experimental_")
    for name in vars(ExperimentalNames)
    if name.startswith("experimental_")
}


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


def replica_id() -> int:
    context = ts.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


# -- second names ---------------------------------------------------------------------------------------------------


def test_every_experimental_name_is_known_here() -> None:
    assert {name for name in dir(ts.Strategy) if name.startswith("experimental_")} == SECOND_NAMES.keys() | {
        "experimental_run",
        "experimental_make_numpy_dataset",
    }


@pytest.mark.parametrize("name", SECOND_NAMES)
def test_a_second_name_calls_the_same_function(
    strategy: ts.Strategy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = getattr(strategy, SECOND_NAMES[name])
    parameters = inspect.signature(getattr(strategy, name)).parameters
    expected = inspect.signature(first).parameters
    assert [(one.name, one.kind) for one in parameters.values()] == [(one.name, one.kind) for one in expected.values()]
    assert [one.default for one in parameters.values()] == [one.default for one in expected.values()]

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
    results = strategy.run(lambda: torch.tensor(replica_id()))
    assert strategy.unwrap(results) == strategy.local_results(results)
    several = strategy.num_replicas_in_sync > 1
    assert strategy.group(results) is (None if several else results)
    with strategy.scope():
        variable = ts.Variable(1.0)
        with strategy.colocate_vars_with(variable):
            near = ts.Variable(2.0)
    assert strategy.extended.device_of(near) == strategy.extended.device_of(variable)


# -- iterators ------------------------------------------------------------------------------------------------------


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

    def input_fn(context: ts.InputContext) -> Any:
        contexts.append(context)
        return numbers(7).batch(2)

    iterator = strategy.make_input_fn_iterator(input_fn)
    replicas = strategy.num_replicas_in_sync
    batches = [[0, 1], [2, 3], [4, 5], [6]]
    assert components(strategy, iterator.get_next()) == batches[:replicas]
    iterator.initialize()
    assert rows(strategy, iterator) == list(range(7))  # also those of an incomplete last step
    assert contexts == [ts.InputContext(1, 0, replicas)]


def test_an_input_fn_makes_a_callable(strategy: ts.Strategy) -> None:
    calls: list[int] = []

    def input_fn(_: ts.InputContext) -> Callable[[], torch.Tensor]:
        source = iter(torch.arange(8).split(1))

        def next_element() -> torch.Tensor:
            calls.append(len(calls))
            return next(source)

        return next_element

    iterator = strategy.make_input_fn_iterator(input_fn, "PER_WORKER")
    replicas = strategy.num_replicas_in_sync
    assert calls == []
    assert components(strategy, iterator.get_next()) == [[index] for index in range(replicas)]
    assert len(calls) == replicas  # once per replica and step, and not before
    iterator.initialize()
    assert rows(strategy, iterator) == list(range(replicas, 8))  # goes on where it was; no row is lost


def test_a_callable_is_not_called_before_its_step() -> None:
    calls: list[int] = []
    elsewhere = layout_in_process(1, devices=(torch.device("meta"),))  # where batches are copied, and read ahead for it

    def next_element() -> torch.Tensor:
        calls.append(len(calls))
        return torch.ones(2)

    iterator = make_input_fn_iterator(None, elsewhere, lambda _: next_element, "PER_WORKER")  # type: ignore[arg-type]
    for step in range(3):
        assert iterator.get_next().device.type == "meta"
        assert len(calls) == step + 1


def test_a_callable_may_end_with_get_next(central: ts.Strategy) -> None:
    source = central.make_input_fn_iterator(lambda _: numbers(3).batch(1))
    one = STRATEGIES["one_device"]()
    inner = one.make_dataset_iterator(numbers(3).batch(1))
    outer = central.make_input_fn_iterator(lambda _: inner.get_next)
    assert rows(central, outer) == rows(central, source) == [0, 1, 2]
    one.close()


@pytest.mark.parametrize("returned", [3, None, [1, 2], "lines"])
def test_an_input_fn_that_returns_no_input(strategy: ts.Strategy, returned: Any) -> None:
    with pytest.raises(ValueError):
        strategy.make_input_fn_iterator(lambda _: returned)


def test_what_an_input_fn_iterator_refuses(strategy: ts.Strategy) -> None:
    for mode in (ts.InputReplicationMode.PER_REPLICA, "PER_REPLICA", "per job"):
        with pytest.raises(ValueError, match="PER_REPLICA"):
            strategy.make_input_fn_iterator(lambda _: numbers(2).batch(1), mode)
    with pytest.raises(TypeError):
        strategy.make_input_fn_iterator(numbers(2))
    with pytest.raises(InvalidArgumentError, match="returned None instead"):
        strategy.make_input_fn_iterator(lambda _: lambda: None).get_next()
    with pytest.raises(ZeroDivisionError):
        strategy.make_input_fn_iterator(lambda _: lambda: 1 // 0).get_next()
    with pytest.raises(TypeError):
        strategy.make_dataset_iterator(3)


# -- experimental_run -----------------------------------------------------------------------------------------------


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
    ids = strategy.experimental_run(lambda: torch.tensor(replica_id()))
    assert components(strategy, ids) == list(range(replicas))


def test_a_refused_run_uses_no_batch_up(central: ts.Strategy) -> None:
    iterator = central.make_dataset_iterator(numbers(2).batch(2))
    with pytest.raises(WrongTypeError, match="experimental_run"):
        central.experimental_run(None, iterator)
    with pytest.raises(ContextError, match="inside replica 0"):
        central.run(lambda: central.experimental_run(torch.sum, iterator))
    with pytest.raises(WrongTypeError, match="make_dataset_iterator"):
        central.experimental_run(torch.sum, numbers(2))
    other = STRATEGIES["mirrored"]()
    with pytest.raises(StrategyMixingError):
        other.experimental_run(torch.sum, iterator)
    other.close()
    assert rows(central, iterator) == [0, 1]


# -- arrays ---------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ContextError, match="inside replica"):
        central.run(lambda: make(np.arange(2)))


# -- session configs ------------------------------------------------------------------------------------------------

CONFIG = {"allow_soft_placement": True, "nested": {"threads": 2}}


def test_a_config_is_changed_in_a_copy(strategy: ts.Strategy) -> None:
    given = {**CONFIG, "isolate_session_state": False}
    changed = strategy.update_config_proto(given)
    assert changed == {**CONFIG, "isolate_session_state": True}
    assert changed["nested"] is not given["nested"]
    assert given["isolate_session_state"] is False
    assert strategy.update_config_proto(types.MappingProxyType(CONFIG)) == changed
    with pytest.raises(WrongTypeError, match="mapping"):
        strategy.update_config_proto(3)


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


def test_configure_changes_the_config_it_is_given(strategy: ts.Strategy) -> None:
    config = dict(CONFIG)
    strategy.configure(config)
    assert config == strategy.update_config_proto(CONFIG)
    strategy.configure()
    with pytest.raises(WrongTypeError, match="mutable"):
        strategy.configure(types.MappingProxyType(CONFIG))
    with pytest.raises(NotImplementedError, match="TF_CONFIG"):
        strategy.configure(cluster_spec={"worker": ["localhost:1"]})


# -- the example programs of the v1 document, line by line ----------------------------------------------------------


def test_example_distribute_and_run(strategy: ts.Strategy) -> None:
    ds = numbers(5).batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(ds)
    results: list[Any] = []
    with strategy.scope():

        def train_step(val: torch.Tensor) -> torch.Tensor:
            return val + 1

        for x in dist_dataset:
            results.append(strategy.run(train_step, args=(x,)))
    found = [row for result in results for part in components(strategy, result) for row in part or []]
    assert found == [1, 2, 3, 4, 5]


def test_example_results_of_a_distributed_dataset() -> None:
    strategy = ts.MirroredStrategy(devices=["cpu:0", "cpu:1"])
    dist_dataset = strategy.experimental_distribute_dataset(numbers(4).batch(2))
    result = [strategy.run(lambda x: x * 2, args=(x,)) for x in dist_dataset]
    assert [components(strategy, one) for one in result] == [[[0], [2]], [[4], [6]]]
    strategy.close()


def test_example_numpy_dataset(strategy: ts.Strategy) -> None:
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(5))
    totals = [strategy.reduce("sum", batch, axis=0) for batch in dist_dataset]
    assert [(total.dtype, total.item()) for total in totals] == [(torch.float32, 5.0)] * 2


def test_example_input_fn(strategy: ts.Strategy) -> None:
    global_batch_size = 12

    def input_fn(input_context: ts.InputContext) -> ts.data.Pipeline:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = ts.data.ArrayDataset(torch.tensor([[[1.0]]])).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn)
        replica_results = strategy.experimental_run(torch.sum, iterator)
    replicas = strategy.num_replicas_in_sync
    assert components(strategy, replica_results) == [global_batch_size / replicas] * replicas


def test_example_get_next_for_each_replica(strategy: ts.Strategy) -> None:
    iterator = strategy.make_input_fn_iterator(lambda _: numbers(6).batch(1))
    iterator.initialize()
    result = strategy.extended.call_for_each_replica(lambda x: x + 1, args=(iterator.get_next(),))
    assert components(strategy, result) == [[index + 1] for index in range(strategy.num_replicas_in_sync)]


def test_example_reduce(strategy: ts.Strategy) -> None:
    per_replica_result = strategy.run(lambda: torch.tensor(replica_id()))
    total = strategy.reduce("SUM", per_replica_result, axis=None)
    assert total.item() == sum(range(strategy.num_replicas_in_sync))


def test_example_which_axis_to_reduce(central: ts.Strategy) -> None:
    full = central.run(lambda x: x, args=(next(iter(central.distribute_dataset([torch.arange(8)]))),))
    assert central.reduce("sum", full, axis=None).tolist() == [4, 6, 8, 10]
    assert central.reduce("sum", full, axis=0).item() == 28
    partial = ts.PerReplica([torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])])
    assert central.reduce(ts.ReduceOp.MEAN, partial, axis=0).item() == 15 / 6


def test_example_run_on_a_constant(strategy: ts.Strategy) -> None:
    result = strategy.run(lambda x: x * 2.0, args=(torch.tensor(3.0),))
    assert components(strategy, result) == [6.0] * strategy.num_replicas_in_sync


def test_example_run_on_distributed_values(strategy: ts.Strategy) -> None:
    values = strategy.experimental_distribute_values_from_function(lambda context: context.num_replicas_in_sync)
    assert strategy.run(lambda x: x * 2, args=(values,)) == 2 * strategy.num_replicas_in_sync


def test_example_all_reduce(strategy: ts.Strategy) -> None:
    values = strategy.experimental_distribute_values_from_function(
        lambda context: torch.tensor(context.replica_id_in_sync_group)
    )

    def replica_fn(value: torch.Tensor) -> torch.Tensor:
        context = ts.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", value)

    replicas = strategy.num_replicas_in_sync
    assert components(strategy, strategy.run(replica_fn, args=(values,))) == [sum(range(replicas))] * replicas


def test_example_variables_in_and_out_of_scope() -> None:
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        mirrored_variable = ts.Variable(1.0)
    regular_variable = ts.Variable(1.0)
    assert components(strategy, mirrored_variable) == [1.0, 1.0]
    assert strategy.extended.variable_created_in_scope(mirrored_variable)
    assert not strategy.extended.variable_created_in_scope(regular_variable)
    strategy.close()
