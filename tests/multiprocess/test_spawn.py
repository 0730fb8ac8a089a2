"""`spawn` and `Workers`: real processes, their results, and what is shown when they fail."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.programs import PYTHON, run
from torchstrat.errors import InvalidArgumentError, TorchstratError
from torchstrat.testing import Workers, WorkersError, spawn


def rank() -> int:
    return int(os.environ["RANK"])


def identity() -> tuple[int, dict[str, str]]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "GREETING")
    return os.getppid(), {name: os.environ.get(name, "unset") for name in names}


def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


def summed_ranks() -> float:
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def how_it_was_started() -> tuple[int, list[int], str]:
    """Who started it, NumPy's random state, and what it was told."""
    assert multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0], "as in any program"
    return os.getppid(), np.random.get_state()[1][:8].tolist(), os.environ["GREETING"]


def load_with_a_worker() -> list[float]:
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, num_workers=1)  # type: ignore[arg-type]
    return [float(batch.sum()) for batch in loader]


@pytest.fixture
def others() -> Iterator[None]:
    """No process is left but those of groups that several tests share."""
    before = multiprocessing.active_children()
    yield
    assert set(multiprocessing.active_children()) <= set(before)


def test_each_process_knows_its_place_and_this_one_keeps_its_environment() -> None:
    before = dict(os.environ)
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "GREETING": "hello",
    }
    found = spawn(identity, num_processes=2, env={"GREETING": "hello"})
    new = os.getpid()  # with an environment each is a new interpreter, and no fork of another process
    assert found == [(new, {"RANK": place, "LOCAL_RANK": place, **common}) for place in ("0", "1")]
    assert dict(os.environ) == before


def warn() -> str:
    warnings.warn("a warning")
    return "still here"


@pytest.mark.usefixtures("others")
def test_groups_of_consecutive_runs_do_not_meet() -> None:
    with Workers(num_processes=2) as workers:
        processes = workers.run(os.getpid)
        assert [workers.run(summed_ranks) for _ in range(3)] == [[3.0, 3.0]] * 3
        assert workers.run(os.getpid) == processes
        assert workers.run(torch.get_num_threads) == [1, 1]
        assert min(workers.run(gc.get_freeze_count)) > 10_000, "collections leave alone what was imported"
        assert torch.equal(workers.run(double, torch.arange(3))[1], torch.tensor([0, 2, 4]))
        assert workers.run(load_with_a_worker) == [[1.0, 5.0]] * 2, "they may have children"
        workers.run(warnings.simplefilter, "error")
        assert workers.run(warn) == ["still here"] * 2, "filters of warnings end with the function"


def test_functions_of_functions_travel() -> None:
    seen = 5
    assert spawn(lambda value: seen + value, 1, (torch.tensor(2),)) == [torch.tensor(7)]


# -- failures ----------------------------------------------------------------------------------------------------------


def raise_on(mine: int) -> int:
    if rank() == mine:
        raise ValueError(f"rank {mine} has had enough\nof this")
    return mine


def raise_while_the_other_waits() -> None:
    raise_on(1)
    dist.init_process_group("gloo")  # waits for rank 1


def wait_for_ever() -> None:
    if rank() == 1:
        threading.Event().wait()


def crash() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def exit_early() -> None:
    if rank() == 0:
        os._exit(7)


def leave_a_group() -> None:
    dist.init_process_group("gloo")


def test_the_traceback_is_shown_and_the_next_run_works() -> None:
    with Workers(num_processes=2) as workers:
        before = workers.run(os.getpid)
        with pytest.raises(WorkersError) as raised:
            workers.run(raise_on, 1)
        assert isinstance(raised.value, TorchstratError)
        message = str(raised.value)
        assert message.startswith("raise_on failed in 1 of 2 processes:\n--- rank 1: ValueError: rank 1 has had enough")
        assert 'raise ValueError(f"rank {mine} has had enough' in message
        assert not set(before) & set(workers.run(os.getpid)), "a group is used again after it failed"


FAILURES: dict[str, tuple[Any, float, list[tuple[int, str, str]]]] = {
    "a crash": (crash, 60, [(1, "died of SIGSEGV before it returned", "in crash")]),
    "an exit": (exit_early, 60, [(0, "exited with status 7 before it returned", "")]),
    "a hang": (wait_for_ever, 2, [(1, "still running after 2 s", "in wait_for_ever")]),
    "who waits for one that failed": (
        raise_while_the_other_waits,
        80,
        [
            (0, "still running 10 s after rank 1 had failed", "in raise_while_the_other_waits"),
            (1, "ValueError: rank 1 has had enough", ""),
        ],
    ),
}


@pytest.mark.deadline(90)
@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_reported_with_the_stacks_of_what_hangs(name: str) -> None:
    function, seconds, expected = FAILURES[name]
    with Workers(num_processes=2) as workers:
        workers.run(os.getpid)  # started up, so that the time below is the function's
        with pytest.raises(WorkersError) as raised:
            workers.run(function, timeout_seconds=seconds)
    assert [(failure.rank, failure.reason) for failure in raised.value.failures] == [one[:2] for one in expected]
    assert all(one[2] in failure.details for failure, one in zip(raised.value.failures, expected, strict=True))


def test_what_cannot_travel_and_what_is_left_behind_are_errors() -> None:
    lock = threading.Lock()
    with Workers(num_processes=1) as workers:
        with pytest.raises(WorkersError, match=r"cannot pickle '_thread.lock' object"):
            workers.run(threading.Lock)
        with pytest.raises(Exception, match="pickle"):
            workers.run(lambda: lock)
        with pytest.raises(WorkersError, match=r"end with strategy\.close"):
            workers.run(leave_a_group)


@pytest.mark.parametrize("options", [{"num_processes": 0}, {"num_processes": 1, "start_method": "exec"}])
def test_groups_that_cannot_be(options: dict[str, Any]) -> None:
    name, value = list(options.items())[-1]
    with pytest.raises(InvalidArgumentError, match=f"{name}={value!r}"):
        Workers(**options)


# -- how they start ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="forks are Linux's")
def test_forks_are_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREETING", "hello")
    (parent, numbers, greeting), (also, others, _) = spawn(how_it_was_started, num_processes=2)
    assert parent == also != os.getpid()
    assert numbers != others
    assert greeting == "hello"
    monkeypatch.setenv("GREETING", "good day")  # since the fork server was started
    assert spawn(how_it_was_started, num_processes=1)[0][2] == "good day"


def test_new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREETING", "hello")
    assert spawn(how_it_was_started, num_processes=1, start_method="spawn")[0][0] == os.getpid()


CELLS = """
import os, torch, torchstrat as ts

class Answer:
    def __init__(self, rank):
        self.rank = rank

def helper():
    return int(os.environ["RANK"])

def cell():
    return Answer(helper())

with ts.testing.Workers(2, timeout_seconds=100) as workers:
    first = workers.run(cell)
    def helper():
        return 10 + int(os.environ["RANK"])
    second = workers.run(cell)
print([type(one) is Answer for one in first + second], [one.rank for one in first + second])
"""


def test_functions_and_classes_of_a_notebook() -> None:
    """Its ``__main__`` has no file, as that of ``python -c``."""
    program = run(*PYTHON, "-c", CELLS)
    assert program.stdout == f"{[True] * 4} [0, 1, 10, 11]\n", program.stderr


@pytest.mark.soak  # multiprocessing imports a script by itself, as it imports the modules of all other tests here
def test_functions_and_classes_of_a_script(tmp_path: Path) -> None:
    """The others import it."""
    guarded = CELLS.replace("\nwith ", "\nif __name__ == '__main__':\n  with ").replace("\nprint", "\n  print")
    (tmp_path / "program.py").write_text(guarded)
    program = run(*PYTHON, tmp_path / "program.py")
    assert program.stdout == f"{[True] * 4} [0, 1, 0, 1]\n", program.stderr  # by name: they are what its file says


def test_processes_of_a_main_module_without_a_guard_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(InvalidArgumentError, match="__main__"):
        Workers(1)
