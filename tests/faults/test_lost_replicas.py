"""A replica is killed, stopped or gives up in the middle of a job: what the others then say, how soon, what is left."""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from tests.faults.forked import Outcome
from tests.faults.programs import ALL, PLACES, Fault, play, shared_inodes
from tests.support.programs import PYTHON, environment, free_ports, variables_of_ranks, wait_for
from torchstrat.testing import Workers

STOP_TIMEOUT_SECONDS = 4.0
PATIENT_TIMEOUT_SECONDS = 60.0
"""Not waited for: the connection to a process that has died breaks at once."""
LIMIT_SECONDS = 25.0
EXCHANGE = (5, 40, 80, 120)
"""Calls in C of at least 140 that make the sum of gradients, piece by piece."""


IN_EVERY_RUN = ((0, ALL), (1, 0), (2, 2), (3, ALL))
"""Number of the operation, victim: each operation once."""


def calls_waited_in(fault: Fault) -> tuple[str, ...]:
    """The calls in which the others may find out. Errors have to name one of them."""
    if fault.place == "in the step":
        owner_is_gone = fault.strategy == "central" and fault.victim == 0
        return ("SGD.step()",) if owner_is_gone else ("SGD.step()", "the end of a run")
    return {
        "before the step": ("SGD.step()",),
        "in reduce": ("reduce(mean",),
        "in the data iterator": ("the rows of the next step",),
    }.get(fault.place, ("backward()",))


def _drawn() -> list[Fault]:
    """Every place, for processes that are killed and that raise, and some for those that are stopped, which takes as
    long as the timeout; who, and under which strategy, is drawn."""
    draw = random.Random(20)
    faults = []
    for act, places in {"kill": PLACES, "raise": PLACES, "stop": ("in backward", "in the step", "in reduce")}.items():
        for place in places:
            processes = draw.choice((2, 3))
            victim, strategy = draw.randrange(processes), draw.choice(("mirrored", "central"))
            faults.append(Fault(act, place, victim, strategy, processes))
    return faults


FAULTS = [
    *_drawn(),
    Fault("kill", "in the step", 0, "central", 3),
    Fault("kill", "before backward", 0, processes=3, meets_by_tf_config=True),
    Fault("stop", "before backward", 0, processes=3, meets_by_tf_config=True),
    *(Fault("kill", f"operation {EXCHANGE[number]}", victim, processes=3) for number, victim in IN_EVERY_RUN),
    # The same wait of the same pass, and for one that is stopped the same as "in backward".
    *(
        pytest.param(Fault("kill", f"operation {EXCHANGE[number]}", victim, processes=3), marks=pytest.mark.soak)
        for number in range(len(EXCHANGE))
        for victim in (0, 2, ALL)
        if (number, victim) not in IN_EVERY_RUN
    ),
    pytest.param(Fault("stop", f"operation {EXCHANGE[1]}", 1, processes=3), marks=pytest.mark.soak),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_others_name_it_and_the_call(fault: Fault, three_processes: Workers, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    timeout = STOP_TIMEOUT_SECONDS if fault.act == "stop" else PATIENT_TIMEOUT_SECONDS
    outcomes = three_processes.run(play, fault, timeout, LIMIT_SECONDS, str(evidence), *free_ports(1))
    assert evidence.read_text() == str(fault)
    for rank, outcome in enumerate(outcomes[: fault.processes]):
        if fault.victim == ALL:  # one that came later may have found the others dead
            assert outcome.how == "SIGKILL" or "CommunicationError" in outcome.text, outcome
        elif rank == fault.victim:
            _check_victim(fault, outcome)
        else:
            _check_survivor(fault, outcome)
    _check_nothing_is_left(tmp_path)


def _check_victim(fault: Fault, outcome: Outcome) -> None:
    if fault.act == "raise":
        assert (outcome.how, outcome.text) == ("raised", "tests.faults.programs.ReplicaGivesUpError: no more")
    else:
        assert outcome.how == {"kill": "SIGKILL", "stop": "still running"}[fault.act], outcome


def _check_survivor(fault: Fault, outcome: Outcome) -> None:
    assert outcome.how == "raised", outcome
    victim, error = f"replica {fault.victim}", outcome.text.partition(": ")[0]
    if fault.act == "stop":
        assert error == "torchstrat.errors.CommunicationTimeoutError", outcome
        assert re.search(rf"{victim}(, replica \d)* did not come", outcome.text), outcome
        assert outcome.seconds >= STOP_TIMEOUT_SECONDS, outcome
    else:
        assert error == "torchstrat.errors.CommunicationError", outcome
        if fault.act == "raise" and fault.place == "in the data iterator":
            told = f"rank {fault.victim} could not read its next batch: ReplicaGivesUpError: no more"
            assert outcome.text.endswith(told)
            return
        told = f"{victim} raised ReplicaGivesUpError" if fault.act == "raise" else f"nothing was heard from .*{victim}"
        assert re.search(told, outcome.text), outcome
    assert any(f" in {call}" in outcome.text for call in calls_waited_in(fault)), outcome


TOLD = """
import os, sys, time
from datetime import timedelta
import torch, torchstrat as ts

strategy = ts.MultiWorkerMirroredStrategy(collectives="process_group", timeout=timedelta(hours=1))

def step():
    if os.environ["RANK"] == "1":
        raise ValueError("no more")
    ts.get_replica_context().all_reduce("sum", torch.ones(2))

try:
    strategy.run(step)
except (ts.errors.CommunicationError, ValueError):
    if os.environ["RANK"] == "1":
        time.sleep(3600)
    if sys.argv[1] == "raises":
        raise
if sys.argv[1] == "closes":
    strategy.close()
"""


@pytest.mark.parametrize("end", ["raises", "closes", "ends"])
def test_a_process_that_was_told_of_a_failure_ends_though_the_other_stays(end: str) -> None:
    """What it has called in vain is not waited for when Python ends."""
    words = [*PYTHON, "-c", TOLD, end]
    processes = [
        subprocess.Popen(words, env=environment(**variables), stderr=subprocess.PIPE)
        for variables in variables_of_ranks()
    ]
    try:
        wait_for(lambda: processes[0].poll() is not None, "the end of rank 0")
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
        _, said = processes[0].communicate()
        processes[1].communicate()
    assert processes[0].returncode == (end == "raises"), said.decode()
    assert (b"replica 1 raised ValueError: no more" in said) == (end == "raises"), said.decode()


def _check_nothing_is_left(folder: Path) -> None:
    own = {inode for memory in folder.glob("memory of *") for inode in memory.read_text().split()}
    assert own
    for process in filter(str.isdecimal, os.listdir("/proc")):
        assert not own & shared_inodes(process), f"process {process} still maps the memory"
    assert not [name for name in os.listdir("/dev/shm") if "torchstrat" in name]
