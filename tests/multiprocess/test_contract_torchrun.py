"""Every training case under every strategy with one replica per process: two processes as torchrun starts them."""

from __future__ import annotations

import shutil
import warnings
from datetime import timedelta

import pytest

from torchstrat.testing import Workers, contract, divergence

pytestmark = pytest.mark.multiprocess

PROCESSES = 2
DIVERGENCE_TIMEOUT = timedelta(seconds=3)


def run_case(case_name: str, row_name: str) -> contract.Snapshot:
    case = contract.CASES[case_name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if case.needs_compiler:
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's modules that inductor imports late
        return contract.run_row(case, contract.TORCHRUN[row_name])


def run_cases(case_names: list[str], row_name: str) -> list[contract.Snapshot]:
    return [run_case(name, row_name) for name in case_names]


def observe(divergence_index: int, row_name: str) -> divergence.Observed:
    strategy = contract.TORCHRUN[row_name].make(timeout=DIVERGENCE_TIMEOUT)
    try:
        return divergence.observe(divergence.CASES[divergence_index], strategy)
    finally:
        strategy.close()


def _parameters() -> list[object]:
    compiler = [
        pytest.mark.soak,  # "compiled" compiles as well, without inductor; and replicas of one process with it
        pytest.mark.deadline(300),
        pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler"),
    ]
    return [
        pytest.param(case, row, id=f"{case.name}-{row.name}", marks=compiler if case.needs_compiler else [])
        for row in contract.TORCHRUN.values()
        for case in contract.CASES.values()
    ]


@pytest.mark.parametrize(("case", "row"), _parameters())
def test_numbers_of_one_device(case: contract.Case, row: contract.Row, two_processes: Workers) -> None:
    snapshots = two_processes.run(run_case, case.name, row.name, timeout_seconds=240)
    contract.check_agreement(case, snapshots)
    expected = contract.reference(case, PROCESSES)
    for snapshot in snapshots:
        contract.check(case, snapshot, expected)


@pytest.mark.parametrize("row", contract.TORCHRUN.values(), ids=lambda row: row.name)
def test_one_strategy_after_the_other(row: contract.Row, two_processes: Workers) -> None:
    """Closing a strategy leaves nothing that the next one in the same processes would meet."""
    names = ["sgd_momentum", "batch_norm", "sgd_momentum"]
    for snapshots in two_processes.run(run_cases, names, row.name):
        for name, snapshot in zip(names, snapshots, strict=True):
            case = contract.CASES[name]
            contract.check(case, snapshot, contract.reference(case, PROCESSES))


@pytest.mark.parametrize("row", contract.TORCHRUN.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("index", range(len(divergence.CASES)), ids=lambda index: divergence.CASES[index].name)
def test_divergence_is_reported_after_the_timeout(index: int, row: contract.Row, two_processes: Workers) -> None:
    divergence.check(divergence.CASES[index], two_processes.run(observe, index, row.name))
