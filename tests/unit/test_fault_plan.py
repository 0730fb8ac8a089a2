"""Plans of what processes do to themselves, and what they log of it."""

from __future__ import annotations

import collections
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchstrat.errors import InvalidArgumentError
from torchstrat.testing.fault_plan import Fault, FaultPlan, Line, Task, draw_kills, follow_plan, phases

ME = Task("worker", 1)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that this process has sent itself."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGUSR1, before)
    phases.observe(None)


def test_faults_happen_one_after_the_other_and_are_logged_first(heard: list[int], tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path)
    faults = [Fault(phases.IDLE, 2, "SIGUSR1"), Fault(phases.INSIDE, 1, "SIGUSR1")]
    plan.add("worker", 1, *faults)
    follow_plan(plan.environment["TORCHSTRAT_FAULT_PLAN"], ME)
    counts = []
    for phase in (phases.INSIDE, phases.IDLE, phases.IDLE, phases.IDLE, phases.INSIDE, phases.INSIDE):
        phases.reached(phase)
        counts.append(len(heard))
    assert counts == [0, 0, 1, 1, 2, 2]
    log = plan.log("worker", 1)
    assert [line.event for line in log] == ["start", "first function", "fault", "fault"]
    assert [line.fault for line in plan.fired("worker", 1)] == faults
    assert {line.pid for line in log} == {os.getpid()}
    assert 0 < time.time() - log[0].time < 3600

    # A process that comes after goes on with what is left, also with what is added while it runs.
    follow_plan(str(tmp_path), ME)
    phases.reached(phases.INSIDE)
    assert len(heard) == 2
    plan.add("worker", 1, Fault(phases.BUILDING, 1, "SIGUSR1"))
    phases.reached(phases.BUILDING)
    assert len(heard) == 3


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path)
    (tmp_path / "worker-1.log").write_text('{"event": "start", "pid": 1, "time": 2.0, "fault": null}\n{"event": "fau')
    assert plan.log("worker", 1) == [Line("start", 1, 2.0)]


def test_kills_are_drawn_equally_often_and_the_same_again() -> None:
    kills = draw_kills(7, 200, 3)
    assert draw_kills(7, 200, 3) == kills != draw_kills(8, 200, 3)
    counts = collections.Counter(fault.phase for faults in kills.values() for fault in faults)
    assert counts.keys() == set(phases.PHASES)
    assert set(counts.values()) <= {33, 34}
    assert sorted(len(faults) for faults in kills.values()) == [66, 67, 67]


@pytest.mark.parametrize("fault", [{"phase": "asleep"}, {"phase": phases.IDLE, "count": 0}])
def test_faults_that_never_happen_are_refused(fault: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        Fault(**fault)  # type: ignore[arg-type]
