"""Named places in the life of a worker, and of a server, so that a test can make one die exactly there.

What is to happen at them a process reads in a plan, where its environment names one: see
`torchstrat.testing.fault_plan`, which writes plans.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.distributed.cluster import PARAMETER_SERVER
from torchstrat.parameter_server.interface import Task

IDLE: Final = "idle"
UNPICKLING: Final = "while unpickling"
BUILDING: Final = "while building a dataset"
INSIDE: Final = "inside a function"
PUSHED_TO_ONE: Final = "between two answers"
"""One of several servers has applied a push and said so; the others may have or not."""
PUSHED: Final = "between push and answer"
"""All servers have applied a push and said so; nothing is done with fresh values yet."""
PHASES: Final = (IDLE, UNPICKLING, BUILDING, INSIDE, PUSHED_TO_ONE, PUSHED)

WRITING_GRADIENTS: Final = "while writing gradients"
"""Some tensors of a push are in shared memory, and the server has not been told. Not where RPC carries them."""
APPLIED: Final = "between applying a push and its answer"
"""On a server, which holds the variables' locks."""
WRITING_VALUES: Final = "while writing values"
"""On a server: some of the fresh values are written, to the worker's parameters where it shares memory."""
IN_MEMORY: Final = (WRITING_GRADIENTS, APPLIED, WRITING_VALUES)

_observer: Callable[[str], None] | None = None


def observe(observer: Callable[[str], None] | None) -> None:
    """Call ``observer(phase)`` whenever this process reaches one; None ends it."""
    global _observer
    _observer = observer


def is_observed() -> bool:
    return _observer is not None


def reached(phase: str) -> None:
    if _observer is not None:
        _observer(phase)


# -- plans -------------------------------------------------------------------------------------------------------------

PLAN_VARIABLE: Final = "TORCHSTRAT_FAULT_PLAN"
"""The folder of the plan to follow."""

PLAN_FILE: Final = "plan.json"
WITHOUT_RECORDS: Final = "without_exactly_once"

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
"""Moments in the life of a worker, or of a server: the last two. Above is a constant for each, and what is so then."""


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
        known = (*PHASES, *IN_MEMORY)
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
    observe(_Follower(path, task))
    if task.job == PARAMETER_SERVER and read_plan(path).get(WITHOUT_RECORDS):
        from torchstrat.parameter_server.server.deduplication import AppliedRecords

        AppliedRecords.is_applied = lambda *_: False  # type: ignore[method-assign]


class _Follower:
    """Sees this process pass its phases. Called on any of its threads."""

    def __init__(self, folder: Path, task: Task) -> None:
        self._folder, self._task = folder, task
        self._lock = threading.Lock()
        self._version: tuple[int, int] | None = None
        self._faults: list[Fault] = []
        self._done = sum(line.event == "fault" for line in read_log(folder, task))
        self._counted = 0
        self._has_run = False

    def __call__(self, phase: str) -> None:
        with self._lock:
            if phase == INSIDE and not self._has_run:
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
        stat = (self._folder / PLAN_FILE).stat()
        if self._version != (stat.st_mtime_ns, stat.st_ino):
            self._version = stat.st_mtime_ns, stat.st_ino
            self._faults = [Fault(**fault) for fault in read_plan(self._folder).get(str(self._task), ())]
        return self._faults[self._done] if self._done < len(self._faults) else None


def process_start() -> float:
    """When this process was started, on the clock of `time.time`; now, where there is no /proc."""
    now = time.time()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return now
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def read_plan(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, object] = json.loads((folder / PLAN_FILE).read_text())
    except FileNotFoundError:
        return {}
    return content


def _log_of(folder: Path, task: Task) -> Path:
    return folder / f"{task.job}-{task.index}.log"


def read_log(folder: Path, task: Task) -> list[Line]:
    try:
        rows = _log_of(folder, task).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    whole = [json.loads(row) for row in rows if row.endswith("\n")]
    return [Line(**{**row, "fault": Fault(**row["fault"]) if row["fault"] else None}) for row in whole]


def _append(folder: Path, task: Task, event: str, fault: Fault | None = None, **about: object) -> None:
    row = {"event": event, "pid": os.getpid(), "time": time.time(), "fault": fault and asdict(fault), **about}
    descriptor = os.open(_log_of(folder, task), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(row).encode() + b"\n")  # in the kernel's hands: it survives what comes next
    finally:
        os.close(descriptor)
