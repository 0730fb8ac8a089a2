"""Every training case under every strategy that runs its replicas in this process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.support.replicas import COMPILER, reference
from torchstrat.testing import contract, divergence

ROWS = [*contract.IN_PROCESS.values(), *contract.APART.values()]
SEVERAL = [row for row in contract.IN_PROCESS.values() if row.replicas > 1]
MARKS: dict[str, list[Any]] = {
    "compiled": [pytest.mark.deadline(120)],
    "compiled_inductor": [
        pytest.mark.soak,  # half a minute of g++: "compiled" goes through the same lines of this package
        *COMPILER,
        # torch's own modules, which inductor imports late, use what torch has deprecated.
        pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
        pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    ],
}
IN_EVERY_RUN = ("one_device", "mirrored x2", "central_storage apart x3")
"""One replica; several; and several, of which some have no rows, with variables elsewhere. Other numbers, and variables
where a replica is, go through the same lines: in soak."""
CELLS = [
    pytest.param(
        case,
        row,
        id=f"{case.name}-{row.name}",
        marks=[*MARKS.get(case.name, []), *([] if row.name in IN_EVERY_RUN else [pytest.mark.soak])],
    )
    for row in ROWS
    for case in contract.CASES.values()
    # The numbers of one device are drawn otherwise than those of one replica that is apart.
    if row in contract.IN_PROCESS.values() or not (case.needs_compiler or case.name == "dropout")
]


@pytest.mark.parametrize(("case", "row"), CELLS)
def test_numbers_of_one_device(case: contract.Case, row: contract.Row) -> None:
    contract.check(case, contract.run_row(case, row), reference(case, row.replicas))


@pytest.mark.parametrize("row", SEVERAL, ids=lambda row: row.name)
@pytest.mark.parametrize("case", divergence.CASES, ids=lambda case: case.name)
def test_divergence_is_reported_at_once(case: divergence.Divergence, row: contract.Row) -> None:
    # Far longer than the test's own deadline: nothing here may wait for it.
    strategy = row.make(timeout=timedelta(hours=1))
    try:
        divergence.check(case, [divergence.observe(case, strategy)])
    finally:
        strategy.close()


@pytest.mark.parametrize("row", SEVERAL, ids=lambda row: row.name)
def test_random_numbers_repeat(row: contract.Row) -> None:
    case = contract.CASES["dropout"]
    contract.check(case, contract.run_row(case, row), contract.run_row(case, row))
