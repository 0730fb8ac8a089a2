"""The steps that engines easily get wrong, with one replica per process: two processes as torchrun starts them."""

from __future__ import annotations

import warnings

import pytest

from tests.unit.test_in_process_numbers import CASES
from torchstrat.testing import Workers, contract

pytestmark = pytest.mark.multiprocess

PROCESSES = 2
BY_NAME = {case.name: case for case in CASES}
EVERYWHERE = tuple(contract.TORCHRUN)
KNOWN_WRONG = {
    "B10": ("lookahead", ("central_storage", "central_storage on sockets"), "attributes of a wrapper that one steps"),
    "B18": ("parameter_made_in_forward", EVERYWHERE, "a leaf tensor first made in the step"),
}


def run_case(name: str, row_name: str) -> contract.Snapshot:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if any(name == wrong for wrong, _, _ in KNOWN_WRONG.values()):
            warnings.filterwarnings("ignore", message="the replicas have changed")  # which is noticed, at least
        return contract.run_row(BY_NAME[name], contract.TORCHRUN[row_name])


def _parameters() -> list[object]:
    return [
        pytest.param(
            case.name,
            row,
            id=f"{case.name}-{row}",
            marks=[
                pytest.mark.xfail(reason=f"{number}: {cause}", strict=True, raises=AssertionError)
                for number, (name, rows, cause) in KNOWN_WRONG.items()
                if case.name == name and row in rows
            ],
        )
        for row in EVERYWHERE
        for case in CASES
    ]


@pytest.mark.parametrize(("name", "row"), _parameters())
def test_numbers_of_a_plain_loop(name: str, row: str, two_processes: Workers) -> None:
    snapshots = two_processes.run(run_case, name, row)
    expected = contract.reference(BY_NAME[name], PROCESSES)
    for snapshot in snapshots:
        contract.check(BY_NAME[name], snapshot, expected)
