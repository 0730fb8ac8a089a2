"""Every training case under every strategy that runs its replicas in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta

import pytest

from torchstrat.testing import contract, divergence

pytestmark = pytest.mark.unit


@pytest.fixture
def compiles_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Inductor compiles in this process: its pool of compilers would outlive the test."""
    if not request.getfixturevalue("case").needs_compiler:
        yield
        return
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


def _parameters() -> list[object]:
    marks = {
        "compiled": [pytest.mark.deadline(120)],
        "compiled_inductor": [
            pytest.mark.deadline(300),
            pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler"),
            # torch's own modules, which inductor imports late, use what torch has deprecated.
            pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
            pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
        ],
    }
    return [
        pytest.param(case, row, id=f"{case.name}-{row.name}", marks=marks.get(case.name, []))
        for row in contract.IN_PROCESS.values()
        for case in contract.CASES.values()
    ]


@pytest.mark.usefixtures("compiles_alone")
@pytest.mark.parametrize(("case", "row"), _parameters())
def test_numbers_of_one_device(case: contract.Case, row: contract.Row) -> None:
    contract.check(case, contract.run_row(case, row), contract.reference(case, row.replicas))


SEVERAL = [row for row in contract.IN_PROCESS.values() if row.replicas > 1]


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
