"""Every training case with two replicas of two processes each, of which nothing is cut: numbers of the replica axis."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import torchstrat as ts
from torchstrat.testing import Workers, contract

pytestmark = pytest.mark.multiprocess

CASES = [case for case in contract.CASES.values() if not case.needs_compiler]
PARTS = [[case.name for case in CASES[start::4]] for start in range(4)]


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Workers]:
    with Workers(4, timeout_seconds=180) as workers:
        yield workers


def run_cases(names: list[str]) -> list[contract.Snapshot]:
    row = contract.Row("2x2", 2, lambda **options: ts.MirroredStrategy(logical_devices_per_replica=2, **options))
    warnings.simplefilter("error")
    return [contract.run_row(contract.CASES[name], row) for name in names]


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_numbers_of_one_device(part: int, four_processes: Workers) -> None:
    of_ranks = four_processes.run(run_cases, PARTS[part])
    for number, name in enumerate(PARTS[part]):
        case = contract.CASES[name]
        snapshots = [snapshots[number] for snapshots in of_ranks]
        contract.check_agreement(case, snapshots)
        expected = contract.reference(case, 2)
        for snapshot in snapshots:
            contract.check(case, snapshot, expected)
