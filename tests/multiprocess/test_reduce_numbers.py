"""`reduce` of plain Python numbers, and by weights, where every replica has a process: as in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import torchstrat as ts
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess


def reduced() -> dict[str, Any]:
    strategy = ts.MirroredStrategy(["cpu"])
    rank = int(not strategy.is_chief)
    pairs: dict[str, list[complex]] = {"different": [3, 4], "equal": [3, 3], "zero": [0, 0], "bools": [True, False]}
    found: dict[str, Any] = {}
    for name, pair in pairs.items():
        own = pair[rank]
        for op in ("sum", "mean"):
            returned = strategy.reduce(op, strategy.run(lambda own=own: own))
            context = strategy.run(lambda own=own, op=op: ts.get_replica_context().all_reduce(op, own))  # type: ignore[union-attr]
            within = strategy.local_results(context)[0]
            found[f"{op} of {name}"] = [float(returned), float(within), float(strategy.reduce(op, own))]
    kept = strategy.reduce("mean", 2.5)
    found["kept"] = (type(kept), kept)
    strategy.close()
    return found


def test_numbers_of_processes(two_processes: Workers) -> None:
    for one in two_processes.run(reduced):
        assert one == {
            "sum of different": [7.0] * 3,
            "mean of different": [3.5] * 3,
            "sum of equal": [6.0] * 3,
            "mean of equal": [3.0] * 3,
            "sum of zero": [0.0] * 3,
            "mean of zero": [0.0] * 3,
            "sum of bools": [1.0] * 3,
            "mean of bools": [0.5] * 3,
            "kept": (float, 2.5),
        }


def weighted(kind: str) -> dict[str, Any]:
    strategy = ts.CentralStorageStrategy() if kind == "central" else ts.MirroredStrategy()
    rank = int(not strategy.is_chief)
    rows = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    found: dict[str, Any] = {}
    for count in (5, 1):
        for part in strategy.distribute_dataset([rows[:count]]):
            found[f"{count} rows"] = float(
                strategy.reduce("mean", strategy.run(torch.mean, args=(part,)), weighted=True)
            )

    def step(is_weighed: bool) -> torch.Tensor:
        context = ts.get_replica_context()
        assert context is not None
        if is_weighed:
            context.set_weight(3.0 if rank else 1.0)
        return torch.tensor(float(rank))

    found["said"] = float(strategy.reduce("mean", strategy.run(step, args=(True,)), weighted=True))
    found["equal"] = strategy.reduce("mean", 2.5, weighted=True)
    for name, value in (
        ("nobody", lambda: strategy.run(step, args=(False,))),
        ("one of two", lambda: strategy.run(step, args=(rank == 0,))),
        ("numbers", lambda: float(rank)),
    ):
        with pytest.raises(ValueError, match="nothing says how much each replica counts"):
            strategy.reduce("mean", value(), weighted=True)
        found[name] = "refused"
    strategy.close()
    return found


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_weighted_means_over_processes(kind: str, two_processes: Workers) -> None:
    refused = dict.fromkeys(["nobody", "one of two", "numbers"], "refused")
    for one in two_processes.run(weighted, kind):
        assert one == {"5 rows": 6.2, "1 rows": 1.0, "said": 0.75, "equal": 2.5, **refused}


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
