"""Workers that die, stop or are told to end at chosen moments of their lives, and proof that they did.

A plan is a file: for each task a list of faults, which happen one after the other, across restarts of the task. A
process of `torchstrat.server` that finds the variable ``TORCHSTRAT_FAULT_PLAN`` in its environment follows the plan
there; one that does not find it imports nothing of this. Before a process does anything to itself it appends a line to
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
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.distributed.cluster_spec import PARAMETER_SERVER
from torchstrat.parameter_server import phases
from torchstrat.parameter_server.interface import Task
from torchstrat.parameter_server.membership.task_server import PLAN_VARIABLE

__all__ = ["Fault", "FaultPlan", "Line", "Phase", "Task", "draw_kills", "follow_plan", "phases"]

_PLAN = "plan.json"
_WITHOUT_RECORDS = "without_exactly_once"


Phase: TypeAlias = Literal[
    "idle",
    "while unpickling",
    "while building a dataset",
    "inside a function",
    "between two answers",
    "between push and answer",
    "while writing gradients",
    "between applying a push and its answer",
    "while writing values",
]
"""Moments in the life of a worker, or of a server: the last two. `torchstrat.parameter_server.phases` has a
constant for each, and says what is so then."""


@dataclass(frozen=True)
class Fault:
    """What a process does to itself: at the ``count``-th time it reaches ``phase`` it sends itself ``signal_name``.

    Args:
        phase: of a worker: ``"idle"``, between functions; ``"while unpickling"`` one; ``"while building a dataset"``;
            ``"inside a function"``; ``"between two answers"`` of several servers, of which one has applied a push;
            ``"between push and answer"``, when all have; ``"while writing gradients"`` to shared memory. Of a server:
            ``"between applying a push and its answer"``; ``"while writing values"`` to shared memory.
        count: at which time.
        signal_name: such as ``"SIGKILL"``, ``"SIGSTOP"``, ``"SIGTERM"``.

    It counts from the moment that the fault is its next one: from its start, or from when the fault before it, which
    did not end it, happened or the fault was added.
    """

    phase: Phase
    count: int = 1
    signal_name: str = "SIGKILL"

    def __post_init__(self) -> None:
        known = (*phases.PHASES, *phases.IN_MEMORY)
        if self.phase not in known:
            raise InvalidArgumentError(f"phase {self.phase!r} is none of {', '.join(map(repr, known))}.")
        if self.count < 1:
            raise InvalidArgumentError(f"count={self.count} must be at least 1.")
        signal.Signals[self.signal_name]


@dataclass(frozen=True)
class Line:
    """One line of a task's log.

    Args:
        event: "start" (of a process), "first function" (the process reached its first), "fault" (is about to happen).
        pid: of the process.
        time: seconds, on the clock of `time.time`.
        fault: for "fault", which.
    """

    event: str
    pid: int
    time: float
    fault: Fault | None = None


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
        self._content: dict[str, Any] = _read_plan(self.folder)
        if not exactly_once:
            self._content[_WITHOUT_RECORDS] = True
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
        return _read_log(self.folder, Task(job, index))

    def fired(self, job: str, index: int) -> list[Line]:
        return [line for line in self.log(job, index) if line.event == "fault"]

    def _write(self) -> None:
        new = self.folder / f"{_PLAN}.new"
        new.write_text(json.dumps(self._content))
        new.replace(self.folder / _PLAN)  # whole at any moment


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


def _send_to_itself(number: signal.Signals) -> None:
    if number is signal.SIGSTOP:
        # Through this thread, which then goes no further; another one would have to be woken up before all are stopped.
        signal.pthread_kill(threading.get_ident(), number)
    else:  # Python runs handlers in its main thread, which only a signal to the process wakes up
        os.kill(os.getpid(), number)


def follow_plan(folder: str, task: Task) -> None:
    """Have this process, which is ``task``, follow the plan in a folder from now on."""
    path = Path(folder)
    _append(path, task, "start", time=process_start())
    phases.observe(_Follower(path, task))
    if task.job == PARAMETER_SERVER and _read_plan(path).get(_WITHOUT_RECORDS):
        from torchstrat.parameter_server.server.deduplication import AppliedRecords

        AppliedRecords._is_applied = lambda *_: False  # type: ignore[method-assign]


class _Follower:
    """Sees this process pass its phases. Called on any of its threads."""

    def __init__(self, folder: Path, task: Task) -> None:
        self._folder, self._task = folder, task
        self._lock = threading.Lock()
        self._version: tuple[int, int] | None = None
        self._faults: list[Fault] = []
        self._done = sum(line.event == "fault" for line in _read_log(folder, task))
        self._counted = 0
        self._has_run = False

    def __call__(self, phase: str) -> None:
        with self._lock:
            if phase == phases.INSIDE and not self._has_run:
                self._has_run = True
                _append(self._folder, self._task, "first function")
            fault = self._next()
            if fault is None or fault.phase != phase:
                return
            self._counted += 1
            if self._counted < fault.count:
                return
            self._done += 1
            self._counted = 0
            _append(self._folder, self._task, "fault", fault)
            _send_to_itself(signal.Signals[fault.signal_name])

    def _next(self) -> Fault | None:
        stat = (self._folder / _PLAN).stat()
        if self._version != (stat.st_mtime_ns, stat.st_ino):
            self._version = stat.st_mtime_ns, stat.st_ino
            self._faults = [Fault(**fault) for fault in _read_plan(self._folder).get(str(self._task), ())]
        return self._faults[self._done] if self._done < len(self._faults) else None


def process_start() -> float:
    """When this process was started, on the clock of `time.time`; now, where there is no /proc."""
    now = time.time()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return now
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _read_plan(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / _PLAN).read_text())
    except FileNotFoundError:
        return {}
    return content


def _log_of(folder: Path, task: Task) -> Path:
    return folder / f"{task.job}-{task.index}.log"


def _read_log(folder: Path, task: Task) -> list[Line]:
    try:
        rows = _log_of(folder, task).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    whole = [json.loads(row) for row in rows if row.endswith("\n")]
    return [Line(**{**row, "fault": Fault(**row["fault"]) if row["fault"] else None}) for row in whole]


def _append(folder: Path, task: Task, event: str, fault: Fault | None = None, **about: Any) -> None:
    row = {"event": event, "pid": os.getpid(), "time": time.time(), "fault": fault and asdict(fault), **about}
    descriptor = os.open(_log_of(folder, task), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(row).encode() + b"\n")  # in the kernel's hands: it survives what comes next
    finally:
        os.close(descriptor)
