"""`Variable` and `StrategyExtended` with one replica per process: every process applies the same to its own copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess

SUM, MEAN = ts.VariableAggregation.SUM, ts.VariableAggregation.MEAN
FIRST = ts.VariableAggregation.ONLY_FIRST_REPLICA


def rank() -> int:
    context = ts.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


@contextmanager
def opened(kind: str) -> Iterator[ts.Strategy]:
    strategy = ts.CentralStorageStrategy() if kind == "central" else ts.MirroredStrategy()
    yield strategy
    strategy.close()


def shown(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def assignments(kind: str) -> dict[str, Any]:
    with opened(kind) as strategy:
        with strategy.scope():
            started = ts.Variable(lambda: torch.rand(2) + int(not strategy.is_chief))
            flag = ts.Variable(strategy.is_chief)
            variables = {kind: ts.Variable(10.0, aggregation=kind) for kind in (SUM, MEAN, FIRST)}
            table = ts.Variable(torch.zeros(3, 1), aggregation=SUM)
            signed = ts.Variable([-0.0, 0.0])
            turned = ts.Variable(torch.complex(torch.tensor([-0.0, 0.0]), torch.tensor([0.0, -0.0])))
            count, seen = ts.Variable(1, aggregation=FIRST), ts.Variable(0, aggregation=SUM)
        found: dict[str, Any] = {"initial": started.read_value(), "flag": bool(flag)}
        found["signs"] = torch.signbit(signed.read_value())
        found["signs of complex"] = torch.signbit(torch.view_as_real(turned.read_value()))

        def step() -> torch.Tensor:
            for variable in variables.values():
                variable.assign_add(torch.tensor(rank() + 1.0))
            variables[MEAN].assign_sub(0.5)  # a Python number, the same everywhere
            rows = rank() + 1  # unequal
            indices = torch.stack([torch.arange(rows), torch.zeros(rows, dtype=torch.int64)])
            table.scatter_add(torch.sparse_coo_tensor(indices, torch.ones(rows), (3, 1), check_invariants=True))
            count.assign(7 + rank())
            return variables[SUM].read_value()

        found["in run"] = strategy.local_results(strategy.run(step))[0]
        found |= {kind.name: variable.read_value() for kind, variable in variables.items()}
        found |= {"table": table.read_value().flatten(), "count": int(count)}
        with strategy.scope():
            variables[SUM].assign(5.0)
        found |= {"across": variables[SUM].read_value(), "reduce": strategy.reduce("sum", table, axis=0)}
        for batch in strategy.distribute_dataset([torch.ones(4), torch.ones(1)]):  # of which the second has none
            strategy.run(lambda x: seen.assign_add(torch.tensor(len(x))), args=(batch,))
        return {name: shown(value) for name, value in (found | {"rows": seen.read_value()}).items()}


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_assignments_are_combined_over_processes(kind: str, two_processes: Workers) -> None:
    first, second = two_processes.run(assignments, kind)
    assert first == second
    assert all(number < 1 for number in first.pop("initial"))
    assert first == {
        "flag": True,
        "signs": [True, False],
        "signs of complex": [[True, False], [False, True]],
        "in run": 13.0,
        "SUM": 13.0,
        "MEAN": 11.0,
        "ONLY_FIRST_REPLICA": 11.0,
        "table": [2.0, 1.0, 0.0],
        "count": 7,
        "across": 5.0,
        "reduce": [6.0],
        "rows": 5,
    }


def copies_and_errors() -> dict[str, Any]:
    with opened("mirrored") as strategy:
        with strategy.scope():
            own = ts.Variable(0.0)
            on_read = ts.Variable(1.0, aggregation=SUM, synchronization=ts.VariableSynchronization.ON_READ)
            total = ts.Variable(0.0, aggregation=SUM)
        strategy.run(lambda: (own.assign(float(rank())), on_read.assign_add(torch.tensor(rank() + 1.0)))[0])
        found = {"own": float(own), "on_read": float(on_read)}
        on_read.assign(8.0)
        found["component"] = [float(one.read_value()) for one in strategy.local_results(on_read)]
        made = strategy.run(
            lambda: ts.Variable(torch.tensor(rank() + 3.0), aggregation=SUM).assign_add(torch.tensor(1.0))
        )
        found["made in run"] = float(strategy.local_results(made)[0].read_value())
        with pytest.raises(ValueError, match=r"a float of Python, .* once or once per replica is ambiguous"):
            strategy.run(lambda: total.assign_add(2.0 + rank()))
        return found


def test_copies_that_differ_and_errors(two_processes: Workers) -> None:
    # Made in the run: replica 0's initial value, plus one from each replica.
    expected = {"on_read": 5.0, "component": [4.0], "made in run": 5.0}
    assert two_processes.run(copies_and_errors) == [{"own": 0.0, **expected}, {"own": 1.0, **expected}]


def extended(kind: str) -> dict[str, Any]:
    with opened(kind) as strategy:
        with strategy.scope():
            layer = nn.Linear(2, 1, bias=False)
            variable = ts.Variable(torch.zeros(2), aggregation=SUM)
        value = strategy.run(lambda: (rank() + 1) * torch.tensor([1.0, 2.0]))
        on = strategy.extended
        found = {
            "to device": on.reduce_to("sum", value, "cpu:0"),
            "to value": strategy.local_results(on.reduce_to("mean", value, value))[0],
            "to variable": strategy.local_results(on.reduce_to("sum", value, variable))[0],
            "to parameter": on.reduce_to("sum", value, layer.weight),
            "broadcast": strategy.local_results(on.broadcast_to(torch.tensor(3.0), value))[0],
        }
        with strategy.scope():
            on.update(variable, lambda one, x: one.assign(x), args=(value,))
        found["updated"] = variable.read_value()
        strategy.run(lambda: on.update(variable, lambda one, x: one.assign_add(x), args=(torch.ones(2),)))
        found["updated in run"] = variable.read_value()
        on.update(layer.weight, lambda weight: weight.fill_(2.0))
        found["weight"] = layer.weight.detach()
        return {name: shown(value) for name, value in found.items()}


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_extended_over_processes(kind: str, two_processes: Workers) -> None:
    for index, found in enumerate(two_processes.run(extended, kind)):
        own = [1.0, 2.0] if kind == "central" or index == 0 else [2.0, 4.0]
        assert found == {
            **{f"to {place}": [3.0, 6.0] for place in ("device", "variable", "parameter")},
            "to value": [1.5, 3.0],
            "broadcast": 3.0,
            "updated": own,
            "updated in run": [number + 1 for number in own],
            "weight": [[2.0, 2.0]],
        }


class Counter:
    """Of the program's own: no module and no `ts.Variable`."""

    def __init__(self) -> None:
        self.steps = self.numbers = 0


def counted(batches: list[int]) -> tuple[int, list[str]]:
    """What the object of this process counts, and what is said of it."""
    counter = Counter()

    def step(x: torch.Tensor) -> None:
        counter.steps += 1
        counter.numbers += x.numel()

    with opened("mirrored") as strategy, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in strategy.distribute_dataset([torch.ones(rows, 2) for rows in batches]):
            strategy.run(step, args=(batch,))
    return counter.steps, [str(warning.message).split(" has grown")[0] for warning in caught]


def test_a_count_of_steps_that_a_rank_without_rows_misses_is_said_there(two_processes: Workers) -> None:
    assert two_processes.run(counted, [4, 1, 4, 1]) == [(4, []), (2, ["Counter.steps"])]
    assert two_processes.run(counted, [4, 4]) == [(2, []), (2, [])]


def used_before_it_is_combined(kind: str) -> list[str]:
    """What is said to a program that uses what a run of one replica returned in each process."""
    said = []
    with opened(kind) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1)
        (batch,) = strategy.distribute_dataset([torch.ones(1, 1)])
        found = strategy.run(lambda x: x.sum(), args=(batch,))
        for use in (
            lambda: strategy.extended.update(model.bias, lambda bias, x: bias.add_(x), args=(found,)),
            lambda: strategy.extended.broadcast_to(found, "cpu:0"),
        ):
            try:
                use()
            except ValueError as error:
                said.append(str(error))
    return said


def test_a_value_without_a_component_in_a_process_is_said_there(two_processes: Workers) -> None:
    first, second = two_processes.run(used_before_it_is_combined, "mirrored")
    assert first == []
    assert len(second) == 2
    assert all("no component in this process, which had no rows" in text for text in second)


DRIFTS: list[tuple[Callable[[nn.Linear], object], Callable[[nn.Linear], object]]] = [
    (lambda model: model.weight.data.mul_(2), lambda model: model.weight.data.div_(2)),
    (lambda model: model.bias.requires_grad_(False), lambda model: model.bias.requires_grad_()),
]


def drifted() -> list[str]:
    """What `check_replicas` says of two models whose parameters have the same names, edited one by one."""
    said = []
    with opened("mirrored") as strategy:
        with strategy.scope():
            models = nn.Linear(2, 1), nn.Linear(2, 1)
        for model in models:
            for edit, undo in DRIFTS:
                if not strategy.is_chief:
                    edit(model)
                try:
                    strategy.extended.check_replicas()
                except ts.errors.ReplicaDriftError as error:
                    said.append(str(error).split(" is not the same")[0])
                if not strategy.is_chief:
                    undo(model)
        strategy.extended.check_replicas()
    return said


def test_what_differs_is_found_in_each_of_two_models_whose_parameters_have_the_same_names(
    two_processes: Workers,
) -> None:
    expected = [
        text
        for number in range(2)
        for text in (
            f"parameter weight (weight of module {number})",
            f"requires_grad of bias (bias of module {number})",
        )
    ]
    assert two_processes.run(drifted) == [expected, expected]


def set_rates_of_own() -> list[float]:
    """Each rank that of another optimizer, as where its own losses say which one is to be slower."""
    with opened("mirrored") as strategy:
        with strategy.scope():
            optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2)]

        def step() -> None:
            optimizers[rank()].param_groups[0]["lr"] = 0.5

        with pytest.warns(UserWarning, match="have set lr of group 0 of SGD differently"):
            strategy.run(step)
        return [float(one.param_groups[0]["lr"]) for one in optimizers]


def test_rates_that_ranks_set_of_different_optimizers_are_the_first_ranks(two_processes: Workers) -> None:
    assert two_processes.run(set_rates_of_own) == [[0.5, 0.1]] * 2
