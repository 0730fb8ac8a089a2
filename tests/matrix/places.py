"""Where cells run: strategies with their launches, and the processes that a launch has."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torchstrat as ts
from tests.matrix import catalog, forked_cells
from tests.matrix.table import Cell, Outcome, PlantedFault, Table, observe
from torchstrat.testing import Workers, contract
from torchstrat.testing.contract import Row
from torchstrat.testing.fake_tpu import fake_tpu_strategy


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

TPU = "tpu x2, computed on the CPU"
"""Two replicas of one recorded program, which the tests' runtime computes."""

LOGICAL_ON_SOCKETS = "two logical devices on sockets"
"""The same where tensors go through sockets, which compare no calls."""

CENTRAL_ON_SOCKETS = "torchrun central_storage on sockets"
"""Where rank 0 alone has the optimizer's state, as the documents say."""

REPLICAS: Mapping[str, Row] = {**IN_PROCESS, **TORCHRUN}
"""Every place of a synchronous strategy that runs a step for each replica."""

_OPENED: Mapping[str, Row] = {**REPLICAS, TPU: Row(TPU, 2, partial(fake_tpu_strategy, 2))}


@contextmanager
def opened(place: str, **options: Any) -> Iterator[Any]:
    """The place's strategy in this process, closed at the end."""
    strategy = _OPENED[place].make(**options)
    try:
        yield strategy
    finally:
        strategy.close()


def launch_of(place: str) -> str:
    """Of places that differ in the strategy, in how many replicas it has, or in what carries its numbers: what starts
    their replicas. `Table.alike`."""
    if place in TORCHRUN:
        return "torchrun"
    if place in (LOGICAL_DEVICES, LOGICAL_ON_SOCKETS):
        return LOGICAL_DEVICES
    return "in process" if place in IN_PROCESS else place


def processes_of(place: str) -> int:
    """How many processes a cell of this place runs in: 1 where the table starts what it needs itself."""
    if place in (LOGICAL_DEVICES, LOGICAL_ON_SOCKETS):
        return 2
    return TORCHRUN[place].replicas if place in TORCHRUN else 1


class Launcher:
    """Runs cells in the processes of their places, which are started once and kept; a context manager."""

    def __init__(self, *, forks: bool = False) -> None:
        """``forks``: whether there are tables whose cells run in forks."""
        self._groups: dict[int, Workers] = {}
        self._forking = Workers(2) if forks else None
        self._found: dict[tuple[str, str], list[Outcome]] = {}
        """Of the bundles that have run, what nobody has asked for yet."""

    def __enter__(self) -> Launcher:
        self.start()
        return self

    def start(self) -> None:
        """Start the processes that are not running: the first ones, and those of a group whose run has failed."""
        for count in {processes_of(place) for place in TORCHRUN}:
            group = self._groups.setdefault(count, Workers(count))
            group.start()
        if self._forking is not None:
            self._forking.start()

    def __exit__(self, *_: object) -> None:
        for group in (*self._groups.values(), self._forking):
            if group is not None:
                group.close()

    def run(self, table: Table, cell: Cell, fault: PlantedFault | None = None, timeout: float = 120) -> list[Outcome]:
        """What the cell came to, by process."""
        count = processes_of(cell.place)
        if count == 1:
            return [observe(cell, fault)]
        key = table.name, cell.id
        if fault is not None or key not in self._found:
            ids = [cell.id] if fault is not None else table.bundles[cell.id]
            found = self._run(table, count, ids, fault and fault.name, timeout)
            outcomes = {(table.name, name): [of_rank[name] for of_rank in found] for name in ids}
            if fault is not None:
                return outcomes[key]
            self._found.update(outcomes)  # cells of other places come in between
        return self._found.pop(key)

    def _run(
        self, table: Table, count: int, ids: Sequence[str], fault: str | None, timeout: float
    ) -> list[dict[str, Outcome]]:
        if not table.in_forks:
            return self._groups[count].run(observe_by_name, table.name, ids, fault, timeout_seconds=timeout)
        assert self._forking is not None
        with tempfile.TemporaryDirectory() as folder:
            seconds = len(ids) * forked_cells.LIMIT_SECONDS + timeout
            return self._forking.run(forked_cells.observe, table.name, ids, fault, folder, timeout_seconds=seconds)


def observe_by_name(table_name: str, cell_ids: Sequence[str], fault_name: str | None) -> dict[str, Outcome]:
    """In a process of a place: `observe` of what was named, since a check itself does not travel."""
    table = catalog.load(table_name)
    fault = next((fault for fault in table.faults if fault.name == fault_name), None)
    try:
        return {cell_id: observe(table.cells[cell_id], fault) for cell_id in cell_ids}
    finally:
        if table.leave is not None:
            table.leave()
