"""Cells on parameter servers of real processes: they run in a program of their own, whose tasks can have a fault.

The program is a module's ``main``, which calls `answer`; all cells that are asked for together share what it starts. A
fault is planted there, and in its workers and servers; in the process of the test it is a mark, see `marked`.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torchstrat as ts
from tests.matrix import catalog
from tests.matrix.table import Cell, Expected, Table, observe
from tests.support.fork_servers import clusters_of_this_program
from tests.support.programs import ROOT, scripts

Answer = tuple[str, dict[str, Any]]
"""A cell, as ``row | column``, and what its outcome is made of."""

PROCESSES = "processes: 2 servers, 2 workers"

SECONDS = 220.0
"""For a program; below the deadline of a test."""

_marked: list[str] = []


# -- in the process of the test ---------------------------------------------------------------------------------------


@contextmanager
def marked(fault: str, plant: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """A fault that is planted here, and in the programs that run cells meanwhile."""
    with plant():
        _marked.append(fault)
        try:
            yield
        finally:
            _marked.clear()


def fault_now() -> str | None:
    return _marked[0] if _marked else None


def cells_of(table: Table, place: str, fault: str | None) -> list[tuple[str, str]]:
    """Row and column of all cells of a place, or of those that have to notice a fault."""
    ids = None if fault is None else next(one for one in table.faults if one.name == fault).cells
    cells = (cell for cell in table.cells.values() if cell.place == place)
    return [(cell.row, cell.column) for cell in cells if ids is None or cell.id in ids]


def cell(table: str, row: str, column: str, expected: Expected, module: str) -> Cell:
    """A cell of `PROCESSES`; ``module`` is the program that runs it."""
    return Cell(row, column, PROCESSES, partial(_check, table, row, column, module), expected)


def _check(table: str, row: str, column: str, module: str) -> None:
    """Raise what the cell came to. Those that run with it do so when the first of them is asked for."""
    cells = _cells_with(catalog.load(table), row, column)
    raise_outcome(_outcomes(module, cells, fault_now())[f"{row} | {column}"])


def _cells_with(table: Table, row: str, column: str) -> tuple[tuple[str, str], ...]:
    """Those that a program runs together with this one: that notice the fault, or are in the sample if it is."""
    cells = cells_of(table, PROCESSES, fault_now())
    if fault_now() is None:
        sampled = [f"{row} | {column} | {PROCESSES}" in table.sample for row, column in [*cells, (row, column)]]
        cells = [cell for cell, is_sampled in zip(cells, sampled, strict=False) if is_sampled == sampled[-1]]
    return tuple(cells)


@functools.cache
def _outcomes(module: str, cells: tuple[tuple[str, str], ...], fault: str | None) -> Any:
    return run_program(module, cells, fault)


def run_program(module: str, cells: Sequence[tuple[str, str]], fault: str | None, **more: Any) -> Any:
    """The outcomes of these cells, by ``row | column``. ``more``: what else the module's function wants to know."""
    words = [ROOT.joinpath(*module.split(".")).with_suffix(".py"), json.dumps({"cells": cells, "fault": fault, **more})]
    with tempfile.TemporaryDirectory() as folder:
        (program,) = scripts(Path(folder), (words, {}), seconds=SECONDS)
    found = dict(json.loads(line) for line in program.stdout.splitlines() if line.startswith('["'))
    if len(found) != len(cells):
        raise RuntimeError(f"the program ended early: {program.stderr[-4000:]}")
    return found


def raise_outcome(outcome: Mapping[str, Any]) -> None:
    """Raise what a cell came to there, if it is not right."""
    if outcome["kind"] == "refused":
        raise getattr(ts.errors, outcome["classes"][0])(outcome["text"])
    if outcome["kind"] == "failed":
        raise RuntimeError(outcome["text"])
    assert outcome["kind"] == "right", outcome["text"]


# -- in the program ---------------------------------------------------------------------------------------------------


def answer(run_cells: Callable[[Mapping[str, Any]], Iterable[Answer]], *, are_measured: bool = False) -> None:
    """The program: print what becomes of the cells that its argument wants. ``are_measured``: processes of clusters."""
    with clusters_of_this_program(are_measured=are_measured):
        for line in run_cells(json.loads(sys.argv[1])):
            print(json.dumps(line), flush=True)


def on_one_cluster(
    table: str, check_of: Callable[[str, str, Any], Callable[[], None]], wanted: Mapping[str, Any]
) -> Iterator[Answer]:
    """The outcome of each of the wanted cells, all on one cluster of processes, whose resolver ``check_of`` is given
    with row and column."""
    fault = wanted["fault"]
    with planted(table, fault), ts.testing.LocalCluster(**cluster_with(table, fault)) as cluster:
        for row, column in wanted["cells"]:
            yield outcome(Cell(row, column, PROCESSES, check_of(row, column, cluster.resolver)))


def outcome(cell: Cell) -> Answer:
    return f"{cell.row} | {cell.column}", observe(cell)._asdict()


def planted(table: str, fault: str | None) -> AbstractContextManager[object]:
    return next((one.plant() for one in catalog.load(table).faults if one.name == fault), nullcontext())


def cluster_with(table: str, fault: str | None) -> dict[str, Any]:
    """Options of a `LocalCluster` whose workers and servers have the fault."""
    command = f"from tests.matrix.on_servers import serve; serve({table!r}, {fault!r})"
    return {"workers": 2, "ps": 2} | ({"server_command": (sys.executable, "-c", command)} if fault else {})


def serve(table: str, fault: str) -> None:
    """A worker or a server, as ``python -m torchstrat.server``, with a fault."""
    from torchstrat.server import main

    with planted(table, fault):
        main()
