"""Every cell of every table of the main environment: a covering sample always, all of them in soak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.matrix import catalog
from tests.matrix.places import Launcher
from tests.matrix.table import Cell, PlantedFault, Table, misses

TABLES = [table for name in catalog.MODULES if (table := catalog.load(name)).environment == "main"]


def _cells(*, whole: bool) -> Iterator[object]:
    for table in TABLES:
        for cell in table.cells.values():
            if whole or cell.id in table.sample:
                marks = [] if cell.id in table.sample else [pytest.mark.soak]
                yield pytest.param(table, cell, id=f"{table.name}: {cell.id}", marks=marks)


def _faults() -> Iterator[object]:
    for table in TABLES:
        for fault in table.faults:
            yield pytest.param(table, fault, id=f"{table.name}: {fault.name}", marks=pytest.mark.soak)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_cell:
        # 26,000 tests that are then deselected take longer than most tables.
        whole = metafunc.config.getoption("markexpr") != "not soak"
        metafunc.parametrize(("table", "cell"), list(_cells(whole=whole)))


def test_cell(table: Table, cell: Cell, launcher: Launcher) -> None:
    wrong = misses(cell.expected, launcher.run(table, cell))
    assert not wrong, wrong


@pytest.mark.parametrize(("table", "fault"), list(_faults()))
def test_planted_fault_is_caught(table: Table, fault: PlantedFault, launcher: Launcher) -> None:
    cells = [table.cells[cell_id] for cell_id in fault.cells]
    assert any(misses(cell.expected, launcher.run(table, cell, fault)) for cell in cells), (
        f"with {fault.name!r} planted, all of {list(fault.cells)} come to what they have to"
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_what_a_planted_fault_switches_off_is_there(table: Table) -> None:
    for fault in table.faults:
        with fault.plant():
            pass
