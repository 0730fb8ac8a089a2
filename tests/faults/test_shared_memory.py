"""A replica is killed or stopped while the others add gradients up in memory that all of them share."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.faults.forked import Outcome, in_fork
from torchstrat.collectives.shared_memory import futex
from torchstrat.collectives.shared_memory.in_place_sum import InPlaceSum
from torchstrat.errors import CommunicationError
from torchstrat.testing import Workers

pytestmark = pytest.mark.skipif(futex.why_not() is not None, reason=str(futex.why_not()))

PHASES = ("_publish", "_add_up", "_meet", "_read_back")
"""Of a sum in chunks, in the order in which each chunk passes them."""

FATAL_STEP = 1
PATIENT_SECONDS = 60.0
"""Not waited for: whoever dies is missed at once."""
SOON_SECONDS = 10.0
"""Far less than that, and enough for a machine that does other things; a tenth of a second is usual."""
STOP_SECONDS = 4.0
LIMIT_SECONDS = 40.0


def play(phase: str, act: int, victims: tuple[int, ...], timeout_seconds: float, folder: str) -> Outcome:
    """Train in a fork, in every process of a group."""
    me = int(os.environ["RANK"])
    evidence = Path(folder)
    others = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank not in victims]

    def is_over() -> bool:
        """A stopped process never ends by itself; it is of no more interest once the others have."""
        return me in victims and bool(others) and all((evidence / f"{rank} has ended").exists() for rank in others)

    outcome = in_fork(LIMIT_SECONDS, is_over, _train, phase, act, me in victims, timeout_seconds, evidence)
    (evidence / f"{me} has ended").touch()
    return outcome


def _train(phase: str, act: int, is_victim: bool, timeout_seconds: float, evidence: Path) -> str:
    me = os.environ["RANK"]
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=timeout_seconds), collectives="shared_memory")
    (evidence / f"memory of {me}").write_text("\n".join(sorted(_shared_inodes("self"))))
    with strategy.scope():
        model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))  # 2.9 MB of gradients: several chunks
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    try:
        for step in range(3):
            if is_victim and step == FATAL_STEP:
                _act_in(phase, act, evidence, strategy._engine._world._in_place_sum)
            strategy.run(train_step, args=(torch.ones(4, 600),))
    except CommunicationError as error:
        killed = [float(path.read_text()) for path in evidence.glob("* acted at")]
        return f"{time.monotonic() - max(killed):.3f} s after: {type(error).__name__}: {error}"
    return "trained to the end"


def _act_in(phase: str, act: int, evidence: Path, add_up: InPlaceSum) -> None:
    """In the middle of the second time that ``phase`` comes: between it and what follows."""
    real, count = getattr(add_up, phase), [0]

    def then_act(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        count[0] += 1
        if count[0] == 2:
            (evidence / f"{os.environ['RANK']} acted at").write_text(str(time.monotonic()))
            os.kill(os.getpid(), act)

    setattr(add_up, phase, then_act)


def _shared_inodes(process: str) -> set[str]:
    """Of the memory that torchstrat shares, as ``process`` maps it."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:  # it has ended, or is another user's
        return set()
    return {line.split()[4] for line in lines if "memfd:torchstrat" in line}


def check_nothing_is_left(folder: Path, processes: int) -> None:
    own = {inode for rank in range(processes) for inode in (folder / f"memory of {rank}").read_text().split()}
    assert own
    for process in filter(str.isdecimal, os.listdir("/proc")):
        assert not own & _shared_inodes(process), f"process {process} still maps the memory"
    assert not [name for name in os.listdir("/dev/shm") if "torchstrat" in name]


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("phase", PHASES)
def test_one_is_killed_in_the_middle_of_a_sum(
    phase: str, victim: int, three_processes: Workers, tmp_path: Path
) -> None:
    outcomes = three_processes.run(play, phase, signal.SIGKILL, (victim,), PATIENT_SECONDS, str(tmp_path))
    assert outcomes[victim].how == "SIGKILL"
    for rank in {0, 1, 2} - {victim}:
        outcome = outcomes[rank]
        assert outcome.how == "returned", outcome
        seconds, text = outcome.text.split(" s after: ")
        assert text.startswith("CommunicationError: "), outcome
        assert re.search(rf"the process has ended, and nothing was heard from .*replica {victim}", text), outcome
        assert "in backward()" in text, outcome
        assert float(seconds) < SOON_SECONDS, outcome
    check_nothing_is_left(tmp_path, 3)


@pytest.mark.parametrize("phase", PHASES)
def test_all_are_killed_in_the_middle_of_a_sum(phase: str, three_processes: Workers, tmp_path: Path) -> None:
    outcomes = three_processes.run(play, phase, signal.SIGKILL, (0, 1, 2), PATIENT_SECONDS, str(tmp_path))
    assert [outcome.how for outcome in outcomes].count("SIGKILL") >= 1
    for outcome in outcomes:  # one that came later may have found the others dead
        assert outcome.how == "SIGKILL" or "CommunicationError" in outcome.text, outcome
    check_nothing_is_left(tmp_path, 3)


def test_one_is_stopped_in_the_middle_of_a_sum(three_processes: Workers, tmp_path: Path) -> None:
    outcomes = three_processes.run(play, "_publish", signal.SIGSTOP, (1,), STOP_SECONDS, str(tmp_path))
    assert outcomes[1].how == "still running"
    for rank in (0, 2):
        seconds, text = outcomes[rank].text.split(" s after: ")
        assert text.startswith("CommunicationTimeoutError: "), outcomes[rank]
        assert re.search(r"replica 1(, replica \d)* did not come", text), outcomes[rank]
        assert float(seconds) >= STOP_SECONDS - 0.5, outcomes[rank]
    check_nothing_is_left(tmp_path, 3)
