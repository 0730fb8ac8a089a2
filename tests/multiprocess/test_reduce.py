"""`reduce` of plain Python numbers, and by weights, where every replica has a process: as in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.support.replicas import replica
from torchstrat.testing import Workers

PAIRS: dict[str, tuple[complex, complex]] = {
    "different": (3, 4),
    "equal": (3, 3),
    "zero": (0, 0),
    "bools": (True, False),
}


def reduced() -> dict[str, Any]:
    strategy = ts.MirroredStrategy(["cpu"])
    found: dict[str, Any] = {}
    for name, pair in PAIRS.items():
        own = pair[int(not strategy.is_chief)]
        for op in ("sum", "mean"):
            returned = strategy.reduce(op, strategy.run(lambda own=own: own))
            within = strategy.run(lambda own=own, op=op: ts.get_replica_context().all_reduce(op, own))  # type: ignore[union-attr]
            numbers = returned, strategy.local_results(within)[0], strategy.reduce(op, own)
            found[f"{op} of {name}"] = [float(number) for number in numbers]
    kept = strategy.reduce("mean", 2.5)
    strategy.close()
    return {**found, "kept": (type(kept), kept)}


def test_numbers_of_processes(two_processes: Workers) -> None:
    sums = {f"sum of {name}": [float(sum(pair).real)] * 3 for name, pair in PAIRS.items()}
    means = {f"mean of {name}": [float(sum(pair).real) / 2] * 3 for name, pair in PAIRS.items()}
    assert two_processes.run(reduced) == [{**sums, **means, "kept": (float, 2.5)}] * 2


def by_keys() -> list[dict[str, float]]:
    """What each exchange makes of dicts that each process has filled in an order of its own."""
    strategy = ts.MirroredStrategy(["cpu"])
    values = {"loss": 1.0, "rows": 100.0}
    names = sorted(values, reverse=strategy.is_chief)
    (batch,) = strategy.distribute_dataset([torch.zeros(2)])

    def step(_: object = None) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([values[name]]) for name in names}

    def exchanged() -> list[Any]:
        here: Any = ts.get_replica_context()
        return [here.all_reduce("mean", step()), here.all_gather(step(), axis=0)]

    found = strategy.local_results(strategy.run(exchanged))[0]
    returned = strategy.run(step)
    found += [strategy.reduce("mean", returned), strategy.gather(returned, axis=0)]
    found.append(strategy.reduce("mean", strategy.run(step, args=(batch,)), weighted=True))
    strategy.close()
    return [{name: float(one.mean()) for name, one in each.items()} for each in found]


def test_what_has_one_key_goes_together(two_processes: Workers) -> None:
    assert two_processes.run(by_keys) == [[{"loss": 1.0, "rows": 100.0}] * 5] * 2


def weighted(kind: str) -> dict[str, Any]:
    strategy = ts.registry.create(kind)
    rows = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    found: dict[str, Any] = {}
    for count in (5, 1):
        for part in strategy.distribute_dataset([rows[:count]]):
            means = strategy.run(torch.mean, args=(part,))
            found[f"{count} rows"] = float(strategy.reduce("mean", means, weighted=True))

    def step(is_weighed: bool) -> torch.Tensor:
        if is_weighed:
            ts.get_replica_context().set_weight(1.0 + 2 * replica())  # type: ignore[union-attr]
        return torch.tensor(float(replica()))

    found["said"] = float(strategy.reduce("mean", strategy.run(step, args=(True,)), weighted=True))
    found["equal"] = strategy.reduce("mean", 2.5, weighted=True)
    unknown = {
        "nobody": lambda: strategy.run(step, args=(False,)),
        "one of two": lambda: strategy.run(step, args=(strategy.is_chief,)),
        "numbers": lambda: float(strategy.is_chief),
    }
    for name, value in unknown.items():
        with pytest.raises(ValueError, match="nothing says how much each replica counts"):
            strategy.reduce("mean", value(), weighted=True)
        found[name] = "refused"
    strategy.close()
    return found


@pytest.mark.parametrize("kind", ["mirrored", "central_storage"])
def test_weighted_means_over_processes(kind: str, two_processes: Workers) -> None:
    refused = dict.fromkeys(["nobody", "one of two", "numbers"], "refused")
    expected = {"5 rows": 6.2, "1 rows": 1.0, "said": 0.75, "equal": 2.5, **refused}
    assert two_processes.run(weighted, kind) == [expected] * 2


def sums() -> list[str]:
    strategy = ts.MirroredStrategy(["cpu"])
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part in strategy.distribute_dataset([torch.ones(4, 2)] * 2):
            strategy.run(lambda x: torch.nn.MSELoss(reduction="sum")(model(x), x[:, :1]).backward(), args=(part,))
    strategy.close()
    return [str(one.message) for one in caught]


def test_the_sum_of_a_loss_is_told_of_by_every_process(two_processes: Workers) -> None:
    for messages in two_processes.run(sums):
        assert ["gradient_reduce_op='sum'" in message for message in messages] == [True]
