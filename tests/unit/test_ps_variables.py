"""Variables of `ParameterServerStrategy`: where they are put, how they are split, what their first values are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.errors import InvalidArgumentError, NotSendableError, ParameterServerUnavailable, UnsupportedError
from torchstrat.partitioners import FixedShardsPartitioner, MinSizePartitioner
from torchstrat.testing.fake_cluster import FakeCluster

EIGHT = torch.arange(8.0).reshape(4, 2)
HALVES = [EIGHT[:2].tolist(), EIGHT[2:].tolist()]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(workers=1, ps=3) as cluster:
        yield cluster


@pytest.fixture
def strategy(cluster: FakeCluster) -> ts.Strategy:
    """It cuts everything in two."""
    return cluster.strategy(FixedShardsPartitioner(2))


def shard_values(variable: Any) -> list[Any]:
    return [shard.read_value().tolist() for shard in variable.variables]


# -- places -----------------------------------------------------------------------------------------------------------


def test_round_robin_in_which_every_shard_counts_as_one(cluster: FakeCluster, strategy: Any) -> None:
    before, extended = ts.Variable(EIGHT), strategy.extended
    assert "variables on parameter servers;" in extended.describe()
    with strategy.scope():
        split: Any = ts.Variable(EIGHT)
        scalar = ts.Variable(1.0)
        with extended.colocate_vars_with(scalar):
            beside = ts.Variable(EIGHT)  # is whole, and takes no turn
        table = nn.Embedding(8, 2)
        last = ts.Variable(torch.zeros(1, dtype=torch.float64))
    places = [extended.device_of(one) for one in (*split.variables, scalar, beside, last, before)]
    assert places == ["ps:0", "ps:1", "ps:2", "ps:2", "ps:0", "cpu:0"]
    assert [extended.device_of(one) for one in (split, table.weight)] == ["ps:0, ps:1", "ps:1, ps:2"]
    for place in (split, table.weight, scalar, "ps:0", "ps:0, ps:1", "/job:ps/replica:0/task:1/device:CPU:0", "cpu:0"):
        assert extended.reduce_to("sum", EIGHT, place) is EIGHT
    for nowhere in (None, "", ["ps:0"], "server:0"):
        with pytest.raises(InvalidArgumentError):
            extended.reduce_to("sum", EIGHT, nowhere)
    held = "ps 0 (24 bytes), ps 1 (48 bytes), ps 2 (68 bytes)"
    assert f"variables on {held};" in extended.describe(), "and none of what was made outside of the scope"


def test_a_parameter_whose_place_is_asked_for_in_the_scope_is_created_at_its_end(cluster: FakeCluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        dropped = nn.Linear(5, 2)
        strategy.extended.device_of(dropped.weight)
        del dropped  # and so is not created
        model = nn.Linear(3, 2)
        place = strategy.extended.device_of(model.weight)
        with strategy.extended.colocate_vars_with(model.bias):
            beside = ts.Variable(2.0)
    coordinator = ts.ClusterCoordinator(strategy)
    weight, value = coordinator.schedule(lambda: (model.weight, beside.read_value())).get()
    assert place == strategy.extended.device_of(model.weight)
    assert strategy.extended.device_of(beside) == strategy.extended.device_of(model.bias)
    assert torch.equal(weight, model.weight)
    assert value == 2.0
    assert sum(cluster.service("ps", index).status()["variables"] for index in range(3)) == 3


# -- partitioners -----------------------------------------------------------------------------------------------------


def test_few_rows(cluster: FakeCluster) -> None:
    with cluster.strategy(FixedShardsPartitioner(9)).scope():
        assert shard_values(ts.Variable(EIGHT)) == [[row.tolist()] for row in EIGHT]
        assert isinstance(ts.Variable(EIGHT[:1]), ts.Variable)


def test_no_rows(cluster: FakeCluster) -> None:
    for partitioner in (MinSizePartitioner(1, 5), FixedShardsPartitioner(2)):
        with cluster.strategy(partitioner).scope():
            assert isinstance(ts.Variable(torch.zeros(0, 4)), ts.Variable)
    none = pytest.raises(InvalidArgumentError, match="without rows")
    with cluster.strategy(lambda shape, dtype: [2, 1]).scope(), none:
        ts.Variable(torch.zeros(0, 4))


# -- first values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [EIGHT, EIGHT.numpy(), EIGHT.tolist(), EIGHT.int(), EIGHT.bool()])
def test_a_value_is_cut_and_keeps_its_dtype(strategy: Any, value: Any) -> None:
    with strategy.scope():
        assert torch.equal(torch.as_tensor(ts.Variable(value)), torch.as_tensor(value))


@pytest.mark.parametrize(
    ("given", "times"),
    [
        ({}, 1),
        ({"shape": (4, 2)}, 1),
        ({"dtype": torch.float64}, 1),
        ({"shape": (None, 2), "dtype": torch.float32}, 1),
        ({"shape": (4, 2), "dtype": torch.float32}, 2),
    ],
)
def test_a_function_is_called_once_or_for_each_shard(strategy: Any, given: Any, times: int) -> None:
    """For each where shape and dtype are known before; its value is cut."""
    calls: list[None] = []

    def first() -> torch.Tensor:
        calls.append(None)
        return EIGHT

    with strategy.scope():
        variable: Any = ts.Variable(first, **given)
    assert len(calls) == times
    assert shard_values(variable) == HALVES
    assert variable.dtype == given.get("dtype", torch.float32)


def of_keywords(partition_shape: Any = None, partition_offset: Any = None) -> torch.Tensor:
    return torch.full(partition_shape, float(partition_offset[0]))


def of_any_keywords(**part: Any) -> torch.Tensor:
    return of_keywords(**part)


def of_shard_info(shard_info: Any) -> torch.Tensor:
    return of_keywords(shard_info.shape, shard_info.offset)


@pytest.mark.parametrize("first", [of_keywords, of_any_keywords, of_shard_info])
def test_a_function_that_can_makes_its_own_shard(strategy: Any, first: Callable[..., Any]) -> None:
    with strategy.scope():
        variable: Any = ts.Variable(first, shape=[5, 2], dtype=torch.float64)
    assert variable.dtype == torch.float64
    assert shard_values(variable) == [[[0.0, 0.0]] * 3, [[3.0, 3.0]] * 2]


@pytest.mark.parametrize("first", [lambda **_: EIGHT, lambda **given: torch.full((4, 2), 3.0, **given) * 0 + EIGHT])
def test_keywords_that_are_not_meant_for_the_function_do_no_harm(strategy: Any, first: Callable[..., Any]) -> None:
    with strategy.scope():
        assert shard_values(ts.Variable(first, shape=(4, 2), dtype=torch.float32)) == HALVES


@pytest.mark.parametrize(
    ("first", "given", "error", "says"),
    [
        *(
            (first, given, InvalidArgumentError, "must agree")
            for first in (EIGHT, lambda: EIGHT)
            for given in ({"shape": (3, 2)}, {"shape": (4,)}, {"shape": (6, 2), "dtype": torch.float32})
        ),
        (None, {"shape": (4, 2), "dtype": torch.float32}, InvalidArgumentError, "initial_value"),
        (EIGHT, {"trainable": True}, UnsupportedError, "Parameter"),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_first_values_that_are_refused(cluster, shards, first, given, error, says) -> None:
    with cluster.strategy(FixedShardsPartitioner(shards)).scope(), pytest.raises(error, match=says):
        ts.Variable(first, **given)


# -- use --------------------------------------------------------------------------------------------------------------


def test_assignments_reach_the_servers_from_both_sides(strategy: Any) -> None:
    with strategy.scope():
        table: Any = ts.Variable(torch.zeros(4, 2))
        total = ts.Variable(0.0)

    def step() -> Any:
        table.assign_add(EIGHT)
        total.assign_sub(1.0)
        return table[1:3]

    table.assign(torch.ones(4, 2))
    assert torch.equal(ts.ClusterCoordinator(strategy).schedule(step).get(), (1 + EIGHT)[1:3])
    assert torch.equal(torch.as_tensor(table), 1 + EIGHT)
    assert float(total) == -1.0


def test_rows_are_read_and_edited_where_they_are(cluster: FakeCluster, strategy: Any) -> None:
    with strategy.scope():
        table: Any = ts.Variable(EIGHT)
    pushes, reads, whole = (cluster.network.record(f"ps.{method}") for method in ("push", "read_rows", "read"))
    assert torch.equal(table[3], EIGHT[3])
    rows = torch.sparse_coo_tensor(torch.tensor([[3, 0]]), torch.full((2, 2), 50.0), (4, 2), check_invariants=True)
    table.scatter_max(rows)
    table.assign_sub(torch.ones(4, 2))
    asked = [(one.peer.task.index, one.value[0].ids.tolist()) for one in reads if one.kind == "call"]
    assert asked == [(1, [1])]
    edits = [(one.peer.task.index, edit) for one in pushes if one.kind == "call" for edit in one.value.edits]
    found = [(index, edit.op, None if edit.rows is None else edit.rows.tolist()) for index, edit in edits]
    assert sorted(found[:2]) == [(0, "max", [0]), (1, "max", [1])]
    assert sorted(found[2:]) == [(0, "sub", None), (1, "sub", None)]
    assert not whole
    assert torch.as_tensor(table).tolist() == [[49, 49], [1, 2], [3, 4], [49, 49]]


@pytest.mark.parametrize("convert", [torch.as_tensor, torch.tensor, torch.from_dlpack])
def test_conversion_gives_a_copy_of_the_same_shape(cluster: FakeCluster, convert: Any) -> None:
    values = (EIGHT, EIGHT[:, :1], EIGHT.bool(), EIGHT.bfloat16(), torch.tensor(3), EIGHT[:0])
    with cluster.strategy().scope():
        variables = [ts.Variable(value) for value in values]
    for value, variable in zip(values, variables, strict=True):
        converted = convert(variable)
        assert (converted.dtype, converted.shape) == (value.dtype, value.shape)
        assert torch.equal(converted, value)
        converted.zero_()
        assert torch.equal(variable.read_value(), value)


def test_a_variable_says_what_it_is_when_its_servers_are_gone(cluster: FakeCluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        variable = ts.Variable(1.0, name="counter")
    cluster.kill_server(0)
    with pytest.raises(ParameterServerUnavailable):
        variable.read_value()
    assert "counter" in repr(variable)
    assert "server 0" in repr(variable)


def test_a_sharded_variable_is_one_of_its_strategy(strategy: Any) -> None:
    with strategy.scope():
        split: Any = ts.Variable(EIGHT)
    assert strategy.extended.variable_created_in_scope(split)
    other = ts.OneDeviceStrategy("cpu")
    assert not other.extended.variable_created_in_scope(split)
    other.close()
    value = strategy.extended.read_var(split)
    assert torch.equal(value, EIGHT)
    value.zero_()
    assert torch.equal(torch.as_tensor(split), EIGHT)
    with strategy.scope(), pytest.raises(InvalidArgumentError, match=r"name one of its \.variables"):
        strategy.extended.colocate_vars_with(split).__enter__()


# -- what servers or workers cannot take is refused where it is brought, and where it is used; nothing else is ---------


class Job:
    """A coordinator's program; steps of an ordinary model change the sum of its weights by 0.8."""

    def __init__(self, strategy: ts.ParameterServerStrategy) -> None:
        self.strategy, self.coordinator = strategy, ts.ClusterCoordinator(strategy)

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        def step() -> float:
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            return float(next(model.parameters()).detach().sum())

        return self.coordinator.schedule(step).get(timeout=30)

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        with self.strategy.scope():
            return ordinary()

    def assert_trains(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before = float(model.state_dict()["weight"].sum())
        assert self.run(model, optimizer) == pytest.approx(before - 0.1 * 2 * 4, abs=1e-5)


def ordinary(**attributes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    vars(model).update(attributes)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class WithLock(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.lock = threading.Lock()


def bad_layout() -> Any:
    model, optimizer = ordinary()
    model.register_buffer("mask", torch.ones(2).to_sparse())
    return model, optimizer


def tied_by_memory() -> Any:
    model, optimizer = ordinary()
    model.bias.data = model.weight.data[:, 0]
    return model, optimizer


def with_optimizer(kind: Any) -> Any:
    model = nn.Linear(2, 2)
    return model, kind(model.parameters())


@pytest.fixture
def job() -> Iterator[Job]:
    with FakeCluster(workers=1, ps=2) as cluster:
        yield Job(cluster.strategy())


@pytest.mark.parametrize(
    ("make", "error", "fails_at"),
    [
        (lambda: with_optimizer(torch.optim.LBFGS), UnsupportedError, "scope"),
        (lambda: with_optimizer(WithLock), NotSendableError, "scope"),
        (bad_layout, NotImplementedError, "scope"),
        (tied_by_memory, UnsupportedError, "scope"),
        (lambda: ordinary(lock=threading.Lock()), NotSendableError, "use"),
    ],
    ids=["an optimizer with closures", "an optimizer with a lock", "a layout", "shared memory", "a module with a lock"],
)
def test_what_is_refused_is_not_in_the_way_of_the_rest(job: Job, make: Any, error: Any, fails_at: str) -> None:
    earlier = job.made()
    job.assert_trains(*earlier)
    refused = beside = None
    with pytest.raises(error) if fails_at == "scope" else nullcontext(), job.strategy.scope():
        beside, refused = ordinary(), make()
    job.assert_trains(*earlier)
    later = job.made()
    job.assert_trains(*later)
    for _ in range(2):
        with pytest.raises(error):
            job.run(*refused)
    job.assert_trains(*later)
    if error is UnsupportedError:
        job.assert_trains(*beside)


def test_columns_of_one_matrix_share_no_memory(job: Job) -> None:
    def cut() -> Any:
        model, optimizer = ordinary()
        model.weight.data, rest = torch.ones(2, 3).split([2, 1], dim=1)
        model.bias.data = rest[:, 0]
        return model, optimizer

    with job.strategy.scope():
        made = cut()
    assert job.run(*made) == pytest.approx(job.run(*made) + 0.8, abs=1e-5)


def test_a_module_is_taken_once_what_was_refused_has_gone(job: Job) -> None:
    with job.strategy.scope():
        model, optimizer = ordinary(lock=threading.Lock())
    with pytest.raises(NotSendableError, match="lock"):
        job.run(model, optimizer)
    del model.lock
    job.assert_trains(model, optimizer)


class WholeTables(torch.optim.Optimizer):
    """Of a script: nothing is known of it, so what it steps is on one server, whole."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise AssertionError("nobody steps it")


def test_a_whole_table_that_fits_on_no_server_is_refused_when_it_is_created() -> None:
    with FakeCluster(workers=1, ps=2) as cluster:
        job, made = Job(cluster.strategy(ts.partitioners.FixedShardsPartitioner(2))), []
        refusal = r"weight.*whole.*elementwise_optimizers=\[WholeTables\]"
        with pytest.raises(InvalidArgumentError, match=refusal), job.strategy.scope():  # noqa: PT012
            made.append(nn.Embedding(2**36, 8, device="meta"))
            made.append(WholeTables(made[0].parameters()))
        job.assert_trains(*job.made())
        with pytest.raises(InvalidArgumentError, match="whole"):
            job.coordinator.schedule(lambda: made[0])
