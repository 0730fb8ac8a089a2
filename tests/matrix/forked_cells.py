"""Cells that end or stop processes, or leave their groups unusable: each process of a place runs them in a fork.

Forks of a process that has imported torch and started nothing take milliseconds to start.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from tests.faults.forked import in_fork
from tests.matrix import catalog
from tests.matrix.table import Cell, Outcome, PlantedFault
from tests.matrix.table import observe as observe_here

LIMIT_SECONDS = 45.0
"""For one cell; what still runs then is killed, and has failed."""

_FOLDER = "TORCHSTRAT_TESTS_CELL_FOLDER"


def folder() -> Path:
    """In a fork: a folder that the processes of its cell have in common."""
    return Path(os.environ[_FOLDER])


def leave(how: signal.Signals) -> NoReturn:
    """In a fork: end this process, or stop it for good."""
    _evidence(int(os.environ["RANK"])).touch()
    os.kill(os.getpid(), how)
    raise AssertionError("a process that was ended or stopped goes on")


def others_have_ended() -> bool:
    me = int(os.environ["RANK"])
    return all(_ended(rank).exists() for rank in range(int(os.environ["WORLD_SIZE"])) if rank != me)


def observe(table_name: str, cell_ids: Sequence[str], fault_name: str | None, parent: str) -> dict[str, Outcome]:
    """In a process that has started nothing: what the cells came to in forks of it, one after the other."""
    table = catalog.load(table_name)
    cells = table.cells
    fault = next((fault for fault in table.faults if fault.name == fault_name), None)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first one of a process imports torch's compiler
    return {name: _observe_one(cells[name], fault, Path(parent) / str(number)) for number, name in enumerate(cell_ids)}


def _observe_one(cell: Cell, fault: PlantedFault | None, place: Path) -> Outcome:
    place.mkdir(exist_ok=True)
    os.environ[_FOLDER] = str(place)
    me = int(os.environ["RANK"])

    def is_over() -> bool:
        """A stopped process never ends by itself; it is of no more interest once the others have."""
        return _evidence(me).exists() and others_have_ended()

    found = in_fork(LIMIT_SECONDS, is_over, _told, cell, fault)
    _ended(me).touch()
    _wait_for_others()
    if found.how == "returned":
        return Outcome(*json.loads(found.text))
    if _evidence(me).exists() and found.how in ("SIGKILL", "still running"):
        return Outcome("gone", found.how)
    return Outcome("failed", f"{found.how} after {found.seconds:.1f} s {found.text}")


def _wait_for_others() -> None:
    """Or this process's next cell would meet theirs of this one, in the store of all."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not others_have_ended() and time.monotonic() < deadline:
        time.sleep(0.01)


def _told(cell: Cell, fault: PlantedFault | None) -> str:
    return json.dumps(observe_here(cell, fault))


def _evidence(rank: int) -> Path:
    return folder() / f"{rank} leaves"


def _ended(rank: int) -> Path:
    return folder() / f"{rank} has ended"
