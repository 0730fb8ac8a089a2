"""Variables of `ParameterServerStrategy`: where they are put, how they are split, what their first values are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.errors import ContextError, InvalidArgumentError, UnsupportedError
from torchstrat.partitioners import FixedShardsPartitioner, MinSizePartitioner
from torchstrat.testing.fake_cluster import FakeCluster

EIGHT = torch.arange(8.0).reshape(4, 2)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(workers=1, ps=3) as cluster:
        yield cluster


def shard_values(variable: Any) -> list[Any]:
    return [shard.read_value().tolist() for shard in variable.variables]


# -- places -----------------------------------------------------------------------------------------------------------


def test_round_robin_and_every_shard_counts_as_one(cluster: FakeCluster) -> None:
    strategy = cluster.strategy(FixedShardsPartitioner(2))
    with strategy.scope():
        split: Any = ts.Variable(EIGHT)
        scalar = ts.Variable(1.0)
        other: Any = ts.Variable(EIGHT)
    places = [strategy.extended.device_of(one) for one in (*split.variables, scalar, *other.variables)]
    assert places == ["ps:0", "ps:1", "ps:2", "ps:0", "ps:1"]


def test_the_place_of_what_is_in_shards_names_every_server(cluster: FakeCluster) -> None:
    strategy = cluster.strategy(FixedShardsPartitioner(2))
    with strategy.scope():
        split: Any = ts.Variable(EIGHT)
        table = nn.Embedding(8, 2)
        whole = ts.Variable(1.0)
    extended = strategy.extended
    assert [extended.device_of(one) for one in (split, table.weight, whole)] == ["ps:0, ps:1", "ps:0, ps:1", "ps:2"]
    for place in (split, table.weight, whole, "ps:0", "ps:0, ps:1", "/job:ps/replica:0/task:1/device:CPU:0", "cpu:0"):
        assert extended.reduce_to("sum", EIGHT, place) is EIGHT
    for nowhere in (None, "", ["ps:0"], "server:0"):
        with pytest.raises(InvalidArgumentError):
            extended.reduce_to("sum", EIGHT, nowhere)


def test_what_each_server_holds_is_described(cluster: FakeCluster) -> None:
    strategy = cluster.strategy(FixedShardsPartitioner(2))
    assert "variables on parameter servers;" in strategy.extended.describe()
    with strategy.scope():
        variable = ts.Variable(torch.zeros(5, dtype=torch.float64))  # 3 and 2 numbers
        model = nn.Linear(4, 3)  # 2 rows and 1, 2 numbers and 1
    ts.ClusterCoordinator(strategy)
    held = "ps 0 (40 bytes), ps 1 (24 bytes), ps 2 (36 bytes)"
    assert f"variables on {held};" in strategy.extended.describe()
    del variable, model


def test_variables_made_outside_of_the_scope_stay_on_the_coordinator(cluster: FakeCluster) -> None:
    strategy = cluster.strategy(FixedShardsPartitioner(2))
    before = ts.Variable(EIGHT)
    with strategy.scope():
        inside = ts.Variable(1.0)
    assert isinstance(before, ts.Variable)
    assert strategy.extended.device_of(before) == "cpu:0"
    assert strategy.extended.device_of(inside) == "ps:0"
    assert not cluster.service("ps", 1).store.catalog()["variables"]


def test_a_colocated_variable_is_whole_beside_the_other_and_takes_no_turn(cluster: FakeCluster) -> None:
    strategy = cluster.strategy(FixedShardsPartitioner(2))
    with strategy.scope():
        first, second = ts.Variable(0.0), ts.Variable(0.0)
        with strategy.extended.colocate_vars_with(second):
            beside = ts.Variable(EIGHT)
        third = ts.Variable(0.0)
    assert isinstance(beside, ts.Variable)
    places = [strategy.extended.device_of(one) for one in (first, second, beside, third)]
    assert places == ["ps:0", "ps:1", "ps:1", "ps:2"]


def test_a_parameter_whose_place_is_asked_for_in_the_scope_is_created_at_its_end(cluster: FakeCluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        model = nn.Linear(3, 2)
        place = strategy.extended.device_of(model.weight)
        with strategy.extended.colocate_vars_with(model.bias):
            beside = ts.Variable(2.0)
    coordinator = ts.ClusterCoordinator(strategy)
    weight, value = coordinator.schedule(lambda: (model.weight, beside.read_value())).get()
    assert place == strategy.extended.device_of(model.weight) == "ps:0"
    assert strategy.extended.device_of(beside) == strategy.extended.device_of(model.bias) == "ps:1"
    assert torch.equal(weight, model.weight)
    assert value == 2.0


def test_what_was_placed_and_dropped_in_the_scope_is_not_created(cluster: FakeCluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        model = nn.Linear(3, 2)
        strategy.extended.device_of(model.weight)
        del model
        kept = nn.Linear(1, 1)
    names = [
        described["shape"]
        for index in range(3)
        for described in cluster.service("ps", index).store.catalog()["variables"]
    ]
    assert sorted(names) == [[1], [1, 1]]
    assert ts.ClusterCoordinator(strategy).schedule(lambda: kept.bias.shape[0]).get() == 1


# -- partitioners -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [[0, 1], [], None, [1, 2], [2, 2], [-1, 1], [0], 2, "21", [2.0, 1]])
def test_a_partitioner_that_returns_nonsense_is_named_and_nothing_is_lost(cluster: FakeCluster, answer: Any) -> None:
    def mine(shape: Any, dtype: Any) -> Any:
        return answer

    strategy = cluster.strategy(mine)
    with strategy.scope(), pytest.raises(InvalidArgumentError, match="mine returned"):
        ts.Variable(EIGHT)
    with strategy.scope():
        scalar = ts.Variable(3.0)  # is not asked about
    assert not ts.has_strategy()
    assert ts.ClusterCoordinator(strategy).schedule(scalar.read_value).get() == 3.0


@pytest.mark.parametrize("answer", [[2, 1], (2, 1), [2], torch.Size([2, 1]), np.array([2, 1]), [2, 1, 1]])
def test_kinds_of_answers(cluster: FakeCluster, answer: Any) -> None:
    with cluster.strategy(lambda shape, dtype: answer).scope():
        variable = ts.Variable(EIGHT)
    assert shard_values(variable) == [EIGHT[:2].tolist(), EIGHT[2:].tolist()]


def test_a_partitioner_whose_answer_for_a_module_is_nonsense_fails_when_the_scope_ends(cluster: FakeCluster) -> None:
    strategy = cluster.strategy(lambda shape, dtype: [1, 2])
    scope = strategy.scope()
    scope.__enter__()
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match="first dimension only"):
        scope.__exit__(None, None, None)
    assert not ts.has_strategy()
    del model
    with strategy.scope():
        ts.Variable(1.0)


def test_more_shards_than_rows_and_a_single_row(cluster: FakeCluster) -> None:
    with cluster.strategy(FixedShardsPartitioner(9)).scope():
        four, one = ts.Variable(EIGHT), ts.Variable(EIGHT[:1])
    assert shard_values(four) == [[row.tolist()] for row in EIGHT]
    assert isinstance(one, ts.Variable)


def test_a_variable_without_rows(cluster: FakeCluster) -> None:
    with (
        cluster.strategy(lambda shape, dtype: [2, 1]).scope(),
        pytest.raises(InvalidArgumentError, match="without rows"),
    ):
        ts.Variable(torch.zeros(0, 4))
    for partitioner in (MinSizePartitioner(1, 5), FixedShardsPartitioner(2)):
        with cluster.strategy(partitioner).scope():
            assert isinstance(ts.Variable(torch.zeros(0, 4)), ts.Variable)


@pytest.mark.parametrize(("rows", "shards", "sizes"), [(13, 5, [3, 3, 3, 2, 2]), (7, 3, [3, 2, 2]), (6, 3, [2, 2, 2])])
def test_the_first_shards_are_the_larger(cluster: FakeCluster, rows: int, shards: int, sizes: list[int]) -> None:
    with cluster.strategy(FixedShardsPartitioner(shards)).scope():
        variable: Any = ts.Variable(torch.arange(rows))
    assert [len(values) for values in shard_values(variable)] == sizes
    assert torch.equal(torch.as_tensor(variable), torch.arange(rows))


def test_names(cluster: FakeCluster) -> None:
    with cluster.strategy(FixedShardsPartitioner(2)).scope():
        named: Any = ts.Variable(EIGHT, name="table")
        unnamed: Any = ts.Variable(EIGHT)
        whole = ts.Variable(EIGHT[:1], name="row")
    assert [shard.name for shard in named.variables] == ["table/part_0", "table/part_1"]
    assert [shard.name for shard in unnamed.variables] == ["Variable", "Variable"]
    assert (named.name, whole.name) == ("ShardedVariable", "row")


def test_aggregation_and_synchronization_are_those_asked_for(cluster: FakeCluster) -> None:
    asked: Any = {
        "aggregation": ts.VariableAggregation.SUM,
        "synchronization": ts.VariableSynchronization.ON_READ,
    }
    with cluster.strategy(FixedShardsPartitioner(2)).scope():
        split: Any = ts.Variable(EIGHT, **asked)
        whole = ts.Variable(1.0, **asked)
    for one in (*split.variables, whole):
        assert one.aggregation is ts.VariableAggregation.SUM
        assert one.synchronization is ts.VariableSynchronization.ON_READ


# -- first values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [EIGHT, EIGHT.numpy(), EIGHT.tolist(), EIGHT.int(), EIGHT.bool()])
def test_a_value_is_cut_and_keeps_its_dtype(cluster: FakeCluster, value: Any) -> None:
    with cluster.strategy(FixedShardsPartitioner(3)).scope():
        variable: Any = ts.Variable(value)
    assert torch.equal(torch.as_tensor(variable), torch.as_tensor(value))


def test_a_function_without_shape_and_dtype_is_called_once(cluster: FakeCluster) -> None:
    calls: list[None] = []

    def first() -> torch.Tensor:
        calls.append(None)
        return EIGHT

    with cluster.strategy(FixedShardsPartitioner(2)).scope():
        for given in ({}, {"shape": (4, 2)}, {"dtype": torch.float64}, {"shape": (None, 2), "dtype": torch.float32}):
            calls.clear()
            variable: Any = ts.Variable(first, **given)  # type: ignore[arg-type]
            assert len(calls) == 1
            assert torch.as_tensor(variable).tolist() == EIGHT.tolist()
            assert variable.dtype == given.get("dtype", torch.float32)


def test_a_function_of_no_arguments_is_called_per_shard_and_cut(cluster: FakeCluster) -> None:
    calls: list[None] = []

    def first() -> torch.Tensor:
        calls.append(None)
        return EIGHT

    with cluster.strategy(FixedShardsPartitioner(2)).scope():
        variable: Any = ts.Variable(first, shape=(4, 2), dtype=torch.float32)
    assert len(calls) == 2
    assert shard_values(variable) == [EIGHT[:2].tolist(), EIGHT[2:].tolist()]


def of_keywords(partition_shape: Any = None, partition_offset: Any = None) -> torch.Tensor:
    return torch.full(partition_shape, float(partition_offset[0]))


def of_any_keywords(**part: Any) -> torch.Tensor:
    return of_keywords(**part)


def of_shard_info(shard_info: Any) -> torch.Tensor:
    return of_keywords(shard_info.shape, shard_info.offset)


@pytest.mark.parametrize("first", [of_keywords, of_any_keywords, of_shard_info])
def test_a_function_that_can_makes_its_own_shard(cluster: FakeCluster, first: Callable[..., Any]) -> None:
    with cluster.strategy(FixedShardsPartitioner(2)).scope():
        variable: Any = ts.Variable(first, shape=[5, 2], dtype=torch.float64)
    assert variable.dtype == torch.float64
    assert shard_values(variable) == [[[0.0, 0.0]] * 3, [[3.0, 3.0]] * 2]


def test_keywords_that_are_not_meant_for_the_function_do_no_harm(cluster: FakeCluster) -> None:
    def ignores(**_: Any) -> torch.Tensor:
        return EIGHT

    def hands_on(**given: Any) -> torch.Tensor:
        return torch.full((4, 2), 3.0, **given)

    with cluster.strategy(FixedShardsPartitioner(2)).scope():
        ignored: Any = ts.Variable(ignores, shape=(4, 2), dtype=torch.float32)
        handed_on: Any = ts.Variable(hands_on, shape=(4, 2), dtype=torch.float32)
    assert torch.equal(torch.as_tensor(ignored), EIGHT)
    assert torch.equal(torch.as_tensor(handed_on), torch.full((4, 2), 3.0))


def test_an_error_of_a_function_that_makes_shards_is_its_own(cluster: FakeCluster) -> None:
    def fails(partition_shape: Any, partition_offset: Any) -> torch.Tensor:
        raise ValueError("no such file")

    with cluster.strategy(FixedShardsPartitioner(2)).scope(), pytest.raises(ValueError, match="no such file"):
        ts.Variable(fails, shape=(4, 2), dtype=torch.float32)


@pytest.mark.parametrize("given", [{"shape": (3, 2)}, {"shape": (4,)}, {"shape": (6, 2), "dtype": torch.float32}])
@pytest.mark.parametrize("first", [EIGHT, lambda: EIGHT])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_value_of_another_shape_than_the_one_asked_for(
    cluster: FakeCluster, first: Any, given: Any, shards: int
) -> None:
    with (
        cluster.strategy(FixedShardsPartitioner(shards)).scope(),
        pytest.raises(InvalidArgumentError, match="must agree"),
    ):
        ts.Variable(first, **given)


def test_no_value_and_trained_variables(cluster: FakeCluster) -> None:
    with cluster.strategy(FixedShardsPartitioner(2)).scope():
        with pytest.raises(InvalidArgumentError, match="initial_value"):
            ts.Variable(None, shape=(4, 2), dtype=torch.float32)
        with pytest.raises(UnsupportedError, match="Parameter"):
            ts.Variable(EIGHT, trainable=True)


# -- use --------------------------------------------------------------------------------------------------------------


def test_assignments_reach_the_servers_from_both_sides(cluster: FakeCluster) -> None:
    strategy = cluster.strategy(FixedShardsPartitioner(3))
    with strategy.scope():
        table: Any = ts.Variable(torch.zeros(4, 2))
        total = ts.Variable(0.0)
    coordinator = ts.ClusterCoordinator(strategy)

    def step() -> Any:
        table.assign_add(EIGHT)
        total.assign_sub(1.0)
        return table[1:3]

    table.assign(torch.ones(4, 2))
    rows = coordinator.schedule(step).get()
    assert torch.equal(rows, (1 + EIGHT)[1:3])
    assert torch.equal(torch.as_tensor(table), 1 + EIGHT)
    assert float(total) == -1.0


@pytest.mark.parametrize("convert", [torch.as_tensor, torch.tensor, torch.from_dlpack])
@pytest.mark.parametrize("value", [EIGHT, EIGHT[:, :1], EIGHT.bool(), EIGHT.bfloat16(), torch.tensor(3), EIGHT[:0]])
def test_conversion_gives_a_copy_of_the_same_shape(cluster: FakeCluster, convert: Any, value: torch.Tensor) -> None:
    with cluster.strategy().scope():
        remote = ts.Variable(value)
    for variable in (remote, ts.Variable(value)):
        converted = convert(variable)
        assert converted.dtype == value.dtype
        assert converted.shape == value.shape
        assert torch.equal(converted, value)
        converted.zero_()
        assert torch.equal(variable.read_value(), value)


def test_run_on_the_coordinator_logs_and_runs_here(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    strategy = cluster.strategy()
    assert strategy.run(lambda: torch.tensor(3.0)) == 3.0
    assert "coordinator.schedule(fn)" in caplog.text
    assert strategy.reduce("sum", torch.tensor(2.0), axis=None) == 2.0
    assert strategy.reduce("mean", torch.tensor([1.0, 3.0]), axis=0) == 2.0
    assert strategy.num_replicas_in_sync == 1


def test_a_variable_says_what_it_is_when_its_servers_are_gone(cluster: FakeCluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        variable = ts.Variable(1.0, name="counter")
    cluster.kill_server(0)
    with pytest.raises(ts.errors.ParameterServerUnavailable):
        variable.read_value()
    assert "counter" in repr(variable)
    assert "server 0" in repr(variable)


def test_a_closed_strategy_says_so(cluster: FakeCluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        ts.Variable(1.0)
    strategy.close()
    strategy.close()
    with pytest.raises(ContextError, match="closed"), strategy.scope():
        pass
    with pytest.raises(ContextError, match="closed"):
        ts.ClusterCoordinator(strategy)
    with cluster.strategy().scope():
        ts.Variable(2.0)


# -- sharded variables as variables of the strategy -------------------------------------------------------------------


def test_a_sharded_variable_is_one_of_its_strategy(cluster: FakeCluster) -> None:
    strategy, other = cluster.strategy(FixedShardsPartitioner(2)), ts.OneDeviceStrategy("cpu")
    with strategy.scope():
        split: Any = ts.Variable(EIGHT)
    assert strategy.extended.variable_created_in_scope(split)
    assert not other.extended.variable_created_in_scope(split)
    value = strategy.extended.read_var(split)
    assert torch.equal(value, EIGHT)
    value.zero_()
    assert torch.equal(torch.as_tensor(split), EIGHT)
    with strategy.scope(), pytest.raises(InvalidArgumentError, match=r"name one of its \.variables"):
        strategy.extended.colocate_vars_with(split).__enter__()
    other.close()
