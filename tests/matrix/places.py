"""Where cells run: strategies with their launches, and the processes that a launch has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torchstrat as ts
from tests.matrix import catalog
from tests.matrix.table import Cell, Outcome, PlantedFault, Table, observe
from torchstrat.testing import Workers, contract
from torchstrat.testing.contract import Row


def _on_three(class_name: str, **options: Any) -> Any:
    return getattr(ts, class_name)(["cpu:0", "cpu:1", "cpu:2"], **options)


IN_PROCESS: Mapping[str, Row] = {
    **contract.IN_PROCESS,
    "mirrored x3": Row("mirrored x3", 3, partial(_on_three, "MirroredStrategy")),
    "central_storage x3": Row("central_storage x3", 3, partial(_on_three, "CentralStorageStrategy")),
}
"""All replicas in one process, by the place's name."""

TORCHRUN: Mapping[str, Row] = {f"torchrun {name}": row for name, row in contract.TORCHRUN.items()}
"""One replica per process: ``torchrun mirrored``, ``torchrun multi_worker_mirrored`` (on sockets),
``torchrun central_storage``, ``torchrun central_storage on sockets``."""

LOGICAL_DEVICES = "two logical devices"
"""One replica of two processes, which hold pieces of what is cut. A table's cells share a strategy there."""

REPLICAS: Mapping[str, Row] = {**IN_PROCESS, **TORCHRUN}
"""Every place of a synchronous strategy."""


@contextmanager
def opened(place: str, **options: Any) -> Iterator[Any]:
    """The place's strategy in this process, closed at the end."""
    strategy = REPLICAS[place].make(**options)
    try:
        yield strategy
    finally:
        strategy.close()


def processes_of(place: str) -> int:
    """How many processes a cell of this place runs in: 1 where the table starts what it needs itself."""
    if place == LOGICAL_DEVICES:
        return 2
    return TORCHRUN[place].replicas if place in TORCHRUN else 1


class Launcher:
    """Runs cells in the processes of their places, which are started once and kept; a context manager."""

    def __init__(self) -> None:
        self._groups: dict[int, Workers] = {}

    def __enter__(self) -> Launcher:
        self.start()
        return self

    def start(self) -> None:
        """Start the processes that are not running: the first ones, and those of a group whose run has failed."""
        for count in {processes_of(place) for place in TORCHRUN}:
            # Inductor's pool of compilers would outlive the functions that compile.
            group = self._groups.setdefault(count, Workers(count, env={"TORCHINDUCTOR_COMPILE_THREADS": "1"}))
            group.start()

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            group.close()

    def run(self, table: Table, cell: Cell, fault: PlantedFault | None = None, timeout: float = 120) -> list[Outcome]:
        """What the cell came to, by process."""
        count = processes_of(cell.place)
        if count == 1:
            return [observe(cell, fault)]
        return self._groups[count].run(
            observe_by_name, table.name, cell.id, fault and fault.name, timeout_seconds=timeout
        )


_entered: list[Table] = []
"""In a process of a place: the table whose cells it has run last."""


def observe_by_name(table_name: str, cell_id: str, fault_name: str | None) -> Outcome:
    """In a process of a place: `observe` of what was named, since a check itself does not travel."""
    table = catalog.load(table_name)
    for earlier in [one for one in _entered if one is not table]:
        _entered.remove(earlier)
        if earlier.leave is not None:
            earlier.leave()
    if table not in _entered:
        _entered.append(table)
    fault = next((fault for fault in table.faults if fault.name == fault_name), None)
    return observe(table.cells[cell_id], fault)
