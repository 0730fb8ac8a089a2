"""Workers that die, stop or are told to end at chosen moments of their lives, and proof that they did.

A plan is a file: for each task a list of faults, which happen one after the other, across restarts of the task. A
process of `torchstrat.server` that finds the variable ``TORCHSTRAT_FAULT_PLAN`` in its environment follows the plan
there. Before a process does anything to itself it appends a line to
the task's log, so that a test can count what has happened::

    plan = FaultPlan(tmp_path)
    plan.add("worker", 1, Fault(phases.INSIDE))
    with Cluster(workers=2, ps=2, env=plan.environment) as cluster:
        ...
    assert [fired.fault for fired in plan.fired("worker", 1)] == [Fault(phases.INSIDE)]

Faults may be added while the processes run. Everything here is for tests.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchstrat.parameter_server import phases
from torchstrat.parameter_server.interface import Task
from torchstrat.parameter_server.phases import (
    PLAN_FILE,
    PLAN_VARIABLE,
    WITHOUT_RECORDS,
    Fault,
    Line,
    Phase,
    follow_plan,
    read_log,
    read_plan,
)

__all__ = ["Fault", "FaultPlan", "Line", "Phase", "Task", "draw_kills", "follow_plan", "phases"]


class FaultPlan:
    """A plan in a folder, as the test sees it.

    Args:
        folder: is made if it is not there. One that holds a plan goes on.
        exactly_once: False: servers forget at once which pushes they have applied, so that a function that runs again
            changes values again. It shows what a test would see without those records.
    """

    def __init__(self, folder: str | os.PathLike[str], *, exactly_once: bool = True) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._content: dict[str, Any] = read_plan(self.folder)
        if not exactly_once:
            self._content[WITHOUT_RECORDS] = True
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        """What the processes that shall follow the plan need in their environment."""
        return {PLAN_VARIABLE: str(self.folder)}

    def add(self, job: str, index: int, *faults: Fault) -> None:
        """These come after what is planned for the task already."""
        self._content.setdefault(str(Task(job, index)), []).extend(asdict(fault) for fault in faults)
        self._write()

    def planned(self, job: str, index: int) -> list[Fault]:
        return [Fault(**fault) for fault in self._content.get(str(Task(job, index)), ())]

    def log(self, job: str, index: int) -> list[Line]:
        """What the processes of a task have written so far."""
        return read_log(self.folder, Task(job, index))

    def fired(self, job: str, index: int) -> list[Line]:
        return [line for line in self.log(job, index) if line.event == "fault"]

    def _write(self) -> None:
        new = self.folder / f"{PLAN_FILE}.new"
        new.write_text(json.dumps(self._content))
        new.replace(self.folder / PLAN_FILE)  # whole at any moment


def draw_kills(
    seed: int, kills: int, workers: int, *, most_functions: int = 20, kinds: Sequence[Phase] = phases.PHASES
) -> dict[int, list[Fault]]:
    """Kills for each worker, of all kinds equally often, shared out equally, in an order drawn with ``seed``.

    Those in phases that each function passes come after 1 to ``most_functions`` of them.
    """
    draw = random.Random(seed)
    drawn = [kinds[number % len(kinds)] for number in range(kills)]
    draw.shuffle(drawn)
    # A process builds its dataset and the iterator over it once.
    faults = [Fault(kind, draw.randint(1, 2 if kind == phases.BUILDING else most_functions)) for kind in drawn]
    return {worker: faults[worker::workers] for worker in range(workers)}
