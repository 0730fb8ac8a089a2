"""Every cell of the tables that run with torch_xla: some steps of theirs always, all of them in soak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.matrix import stand_ins_on_tpu
from tests.matrix.table import Cell, PlantedFault, misses, observe

pytestmark = [pytest.mark.tpu, pytest.mark.filterwarnings("default")]

DEADLINE_SECONDS = 3600
"""Of all cells, in soak."""

TABLE = stand_ins_on_tpu.TABLE


def _cells() -> Iterator[object]:
    for cell in TABLE.cells.values():
        marks = [] if cell.row in stand_ins_on_tpu.sample() else [pytest.mark.soak]
        yield pytest.param(cell, id=cell.row, marks=marks)


def _faults() -> Iterator[object]:
    for place, fault in enumerate(TABLE.faults):
        yield pytest.param(fault, id=fault.name, marks=[pytest.mark.soak] if place > 1 else [])


@pytest.mark.parametrize("cell", list(_cells()))
def test_cell(cell: Cell) -> None:
    wrong = misses(cell.expected, [observe(cell)])
    assert not wrong, wrong


@pytest.mark.parametrize("fault", list(_faults()))
def test_planted_fault_is_caught(fault: PlantedFault) -> None:
    cells = [TABLE.cells[cell_id] for cell_id in fault.cells]
    assert any(misses(cell.expected, [observe(cell, fault)]) for cell in cells), (
        f"with {fault.name!r} planted, all of {list(fault.cells)} come to what they have to"
    )
