"""`Variable` and `StrategyExtended` with one replica per process: every process applies the same to its own copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess

SUM, MEAN = ts.VariableAggregation.SUM, ts.VariableAggregation.MEAN
FIRST, NONE = ts.VariableAggregation.ONLY_FIRST_REPLICA, ts.VariableAggregation.NONE


def rank() -> int:
    context = ts.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def make(kind: str) -> ts.Strategy:
    return ts.CentralStorageStrategy() if kind == "central" else ts.MirroredStrategy()


def assignments(kind: str) -> dict[str, Any]:
    strategy = make(kind)
    found: dict[str, Any] = {}
    with strategy.scope():
        started = ts.Variable(lambda: torch.rand(2) + strategy._engine.local_replicas[0])
        flag = ts.Variable(strategy.is_chief)
        variables = {kind: ts.Variable(10.0, aggregation=kind) for kind in (SUM, MEAN, FIRST)}
        table = ts.Variable(torch.zeros(3, 1), aggregation=SUM)
        count = ts.Variable(1, aggregation=FIRST)
    found["initial"], found["flag"] = started.read_value(), bool(flag)

    def step() -> torch.Tensor:
        for variable in variables.values():
            variable.assign_add(torch.tensor(rank() + 1.0))
        variables[MEAN].assign_sub(0.5)  # a Python number, the same everywhere
        count_of_rows = rank() + 1  # unequal
        indices = torch.stack([torch.arange(count_of_rows), torch.zeros(count_of_rows, dtype=torch.int64)])
        table.scatter_add(torch.sparse_coo_tensor(indices, torch.ones(count_of_rows), (3, 1), check_invariants=True))
        count.assign(7)
        return variables[SUM].read_value()

    found["in run"] = strategy.local_results(strategy.run(step))[0]
    found.update({kind.name: variable.read_value() for kind, variable in variables.items()})
    found["table"], found["count"] = table.read_value().flatten(), int(count)
    with strategy.scope():
        variables[SUM].assign(5.0)
    found["across"] = variables[SUM].read_value()
    found["reduce"] = strategy.reduce("sum", table, axis=0)
    strategy.close()
    return found


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_assignments_are_combined_over_processes(kind: str, two_processes: Workers) -> None:
    found = two_processes.run(assignments, kind)
    for one in found:
        torch.testing.assert_close(one["initial"], found[0]["initial"], rtol=0, atol=0)
        assert bool((one["initial"] < 1).all())
        assert one["flag"] is True
        assert one["in run"] == one["SUM"] == 13.0
        assert one["MEAN"] == 11.0
        assert one["ONLY_FIRST_REPLICA"] == 11.0
        assert one["table"].tolist() == [2.0, 1.0, 0.0]
        assert one["count"] == 7
        assert one["across"] == 5.0
        assert one["reduce"].tolist() == [6.0]


def copies_and_errors() -> dict[str, Any]:
    strategy = make("mirrored")
    found: dict[str, Any] = {}
    with strategy.scope():
        own = ts.Variable(0.0)
        on_read = ts.Variable(1.0, aggregation=SUM, synchronization=ts.VariableSynchronization.ON_READ)
        total = ts.Variable(0.0, aggregation=SUM)
    strategy.run(lambda: (own.assign(float(rank())), on_read.assign_add(torch.tensor(rank() + 1.0)))[0])
    found["own"], found["on_read"] = own.read_value(), on_read.read_value()
    on_read.assign(8.0)
    found["components"] = [one.read_value() for one in strategy.local_results(on_read)]
    made = strategy.run(lambda: ts.Variable(torch.tensor(rank() + 3.0), aggregation=SUM).assign_add(torch.tensor(1.0)))
    found["made in run"] = strategy.local_results(made)[0].read_value()
    with pytest.raises(ValueError, match="the same everywhere is ambiguous"):
        strategy.run(lambda: total.assign_add(2.0))
    strategy.close()
    return found


def test_copies_that_differ_and_errors(two_processes: Workers) -> None:
    for index, one in enumerate(two_processes.run(copies_and_errors)):
        assert one["own"] == index
        assert one["on_read"] == 5.0
        assert one["components"] == [4.0]
        assert one["made in run"] == 5.0  # replica 0's initial value, plus one from each replica


def extended(kind: str) -> dict[str, Any]:
    strategy = make(kind)
    with strategy.scope():
        layer = nn.Linear(2, 1, bias=False)
        variable = ts.Variable(torch.zeros(2), aggregation=SUM)
    value = strategy.run(lambda: (rank() + 1) * torch.tensor([1.0, 2.0]))
    found = {
        "to device": strategy.extended.reduce_to("sum", value, "cpu:0"),
        "to value": strategy.local_results(strategy.extended.reduce_to("mean", value, value))[0],
        "to variable": strategy.local_results(strategy.extended.reduce_to("sum", value, variable))[0],
        "to parameter": strategy.extended.reduce_to("sum", value, layer.weight),
        "broadcast": strategy.local_results(strategy.extended.broadcast_to(torch.tensor(3.0), value))[0],
    }
    with strategy.scope():
        strategy.extended.update(variable, lambda one, x: one.assign(x), args=(value,))
    found["updated"] = variable.read_value()
    strategy.run(lambda: strategy.extended.update(variable, lambda one, x: one.assign_add(x), args=(torch.ones(2),)))
    found["updated in run"] = variable.read_value()
    strategy.extended.update(layer.weight, lambda weight: weight.fill_(2.0))
    found["weight"] = layer.weight.detach()
    strategy.close()
    return found


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_extended_over_processes(kind: str, two_processes: Workers) -> None:
    for index, one in enumerate(two_processes.run(extended, kind)):
        assert one["to device"].tolist() == one["to variable"].tolist() == one["to parameter"].tolist() == [3.0, 6.0]
        assert one["to value"].tolist() == [1.5, 3.0]
        assert one["broadcast"] == 3.0
        own = [1.0, 2.0] if kind == "central" or index == 0 else [2.0, 4.0]
        assert one["updated"].tolist() == own
        assert one["updated in run"].tolist() == [number + 1 for number in own]
        assert one["weight"].tolist() == [[2.0, 2.0]]


def rows_for_the_first_only(kind: str) -> float:
    strategy = make(kind)
    with strategy.scope():
        seen = ts.Variable(0, aggregation=SUM)
    for batch in strategy.distribute_dataset([torch.ones(4), torch.ones(1)]):
        strategy.run(lambda x: seen.assign_add(torch.tensor(len(x))), args=(batch,))
    strategy.close()
    return float(seen)


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_a_process_without_rows_gets_the_others_value(kind: str, two_processes: Workers) -> None:
    assert two_processes.run(rows_for_the_first_only, kind) == [5.0, 5.0]
