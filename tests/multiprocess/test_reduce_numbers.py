"""`reduce` of plain Python numbers where every replica has a process: as in one process, and equal everywhere."""

from __future__ import annotations

from typing import Any

import pytest

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
