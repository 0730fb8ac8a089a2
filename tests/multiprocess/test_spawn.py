"""`spawn` and `Workers`: real processes, their results, and what is shown when they fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torchstrat.errors import InvalidArgumentError, TorchstratError
from torchstrat.testing import Workers, WorkersError, spawn

pytestmark = pytest.mark.multiprocess


def identity() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "GREETING")
    return {name: os.environ.get(name, "unset") for name in names}


def threads() -> int:
    return torch.get_num_threads()


def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


def summed_ranks(timeout_seconds: float = 60.0) -> float:
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def leave_a_group() -> None:
    dist.init_process_group("gloo")


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int) -> int:
    mine = int(os.environ["RANK"])
    if mine == rank:
        raise ValueError(f"rank {rank} has had enough\nof this")
    return mine


def raise_while_the_other_waits() -> None:
    raise_on(1)
    dist.init_process_group("gloo")  # waits for rank 1


def wait_for_ever() -> None:
    if os.environ["RANK"] == "1":
        threading.Event().wait()


def crash() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSEGV)


def exit_early() -> None:
    if os.environ["RANK"] == "0":
        os._exit(7)


def return_what_cannot_travel() -> Any:
    return threading.Lock()


def load_with_a_worker() -> list[float]:
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, num_workers=1)  # type: ignore[arg-type]
    return [float(batch.sum()) for batch in loader]


def test_each_process_knows_its_place() -> None:
    first, second = spawn(identity, num_processes=2, env={"GREETING": "hello"})
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "GREETING": "hello",
    }
    assert first == {"RANK": "0", "LOCAL_RANK": "0", **common}
    assert second == {"RANK": "1", "LOCAL_RANK": "1", **common}


def test_this_process_keeps_its_environment() -> None:
    before = dict(os.environ)
    spawn(threads, num_processes=1, env={"GREETING": "hello"})
    assert dict(os.environ) == before


def test_groups_of_consecutive_runs_do_not_meet() -> None:
    others = multiprocessing.active_children()  # of groups that several tests share
    with Workers(num_processes=2) as workers:
        processes = workers.run(process_id)
        assert [workers.run(summed_ranks) for _ in range(3)] == [[3.0, 3.0]] * 3
        assert workers.run(process_id) == processes
        assert workers.run(threads) == [1, 1]
        assert torch.equal(workers.run(double, torch.arange(3))[1], torch.tensor([0, 2, 4]))
    assert set(multiprocessing.active_children()) <= set(others)


def test_the_traceback_is_shown_and_the_next_run_works() -> None:
    with Workers(num_processes=2) as workers:
        before = workers.run(process_id)
        with pytest.raises(WorkersError) as raised:
            workers.run(raise_on, 1)
        assert isinstance(raised.value, TorchstratError)
        message = str(raised.value)
        assert message.startswith("raise_on failed in 1 of 2 processes:\n--- rank 1: ValueError: rank 1 has had enough")
        assert 'raise ValueError(f"rank {rank} has had enough' in message
        assert [failure.rank for failure in raised.value.failures] == [1]
        after = workers.run(process_id)
        assert not set(before) & set(after), "a group is used again after it failed"


@pytest.mark.deadline(90)
def test_who_waits_for_a_process_that_failed_is_not_waited_for() -> None:
    with Workers(num_processes=2, timeout_seconds=80) as workers, pytest.raises(WorkersError) as raised:
        workers.run(raise_while_the_other_waits)
    waiting, failed = raised.value.failures
    assert waiting.reason == "still running 10 s after rank 1 had failed"
    assert "in raise_while_the_other_waits" in waiting.details
    assert failed.reason == "ValueError: rank 1 has had enough"


def test_the_stacks_of_what_hangs_are_shown() -> None:
    others = multiprocessing.active_children()
    with Workers(num_processes=2) as workers:
        workers.run(process_id)  # started up, so that the time below is the function's
        with pytest.raises(WorkersError) as raised:
            workers.run(wait_for_ever, timeout_seconds=2)
    assert set(multiprocessing.active_children()) <= set(others)
    (failure,) = raised.value.failures
    assert (failure.rank, failure.reason) == (1, "still running after 2 s")
    assert "in wait_for_ever" in failure.details


@pytest.mark.parametrize(
    ("function", "rank", "reason"),
    [(crash, 1, "died of SIGSEGV before it returned"), (exit_early, 0, "exited with status 7 before it returned")],
)
def test_deaths_are_reported(function: Any, rank: int, reason: str) -> None:
    with pytest.raises(WorkersError) as raised:
        spawn(function, num_processes=2)
    (failure,) = raised.value.failures
    assert (failure.rank, failure.reason) == (rank, reason)
    if function is crash:
        assert "in crash" in failure.details


def test_results_and_functions_that_cannot_travel() -> None:
    with Workers(num_processes=1) as workers:
        with pytest.raises(WorkersError, match=r"cannot pickle '_thread.lock' object"):
            workers.run(return_what_cannot_travel)
        lock = threading.Lock()
        with pytest.raises((AttributeError, TypeError, Exception), match="pickle"):
            workers.run(lambda: lock)


def test_a_process_group_left_behind_is_an_error() -> None:
    with Workers(num_processes=1) as workers, pytest.raises(WorkersError, match=r"end with strategy\.close"):
        workers.run(leave_a_group)


def test_processes_may_have_children() -> None:
    assert spawn(load_with_a_worker, num_processes=1) == [[1.0, 5.0]]


def test_zero_processes() -> None:
    with pytest.raises(InvalidArgumentError, match="num_processes=0"):
        Workers(num_processes=0)


def how_it_was_started() -> tuple[int, list[int], str]:
    """Who started it, NumPy's random state, and what it was told."""
    return os.getppid(), np.random.get_state()[1][:8].tolist(), os.environ["GREETING"]


@pytest.mark.skipif(sys.platform != "linux", reason="forks are Linux's")
def test_forks_are_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREETING", "hello")
    (parent, numbers, greeting), (also, others, _) = spawn(how_it_was_started, num_processes=2)
    assert parent == also != os.getpid()
    assert numbers != others
    assert greeting == "hello"
    monkeypatch.setenv("GREETING", "good day")  # since the fork server was started
    ((_, _, greeting),) = spawn(how_it_was_started, num_processes=1)
    assert greeting == "good day"


@pytest.mark.parametrize("chosen", [{"start_method": "spawn"}, {"env": {"GREETING": "hello"}}])
def test_new_interpreters(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREETING", "hello")
    assert spawn(how_it_was_started, num_processes=1, **chosen)[0][0] == os.getpid()


def test_a_start_method_that_does_not_exist() -> None:
    with pytest.raises(InvalidArgumentError, match="start_method='exec'"):
        Workers(num_processes=1, start_method="exec")  # type: ignore[arg-type]


def test_functions_of_functions_travel() -> None:
    seen = 5
    assert spawn(lambda value: seen + value, 1, (torch.tensor(2),)) == [torch.tensor(7)]


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


@pytest.mark.parametrize("way", ["-c", "a script"])
def test_functions_and_classes_of_a_program(way: str, tmp_path: Path) -> None:
    """A notebook's ``__main__`` has no file, as that of ``python -c``; a script is imported by the others."""
    words = ["-c", CELLS]
    if way == "a script":
        guarded = CELLS.replace("\nwith ", "\nif __name__ == '__main__':\n  with ").replace("\nprint", "\n  print")
        (tmp_path / "program.py").write_text(guarded)
        words = [str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    ranks = [0, 1, 10, 11] if way == "-c" else [0, 1, 0, 1]  # by name: a script's are what its file says
    assert program.stdout == f"{[True] * 4} {ranks}\n", program.stderr
