"""`PreemptionHandler` in one process; how several agree is further down, with a fake of their communicator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrat as ts
from torchstrat.collectives.stop_agreement import StopAgreement
from torchstrat.errors import ContextError, InvalidArgumentError, WrongTypeError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no signals to speak of")

LONG = timedelta(minutes=10)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    now = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert now == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_is_heard_at_the_next_step_boundary() -> None:
    with ts.PreemptionHandler(grace=LONG) as preemption:
        assert not preemption.should_stop()
        assert preemption.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.should_stop()
        assert preemption.received is signal.SIGTERM
        assert preemption.should_stop(), "it stays so"
    assert preemption.exit_code == 75


def test_more_signals_break_nothing() -> None:
    with ts.PreemptionHandler(grace=LONG) as preemption:
        for _ in range(100):
            os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.should_stop()


def test_only_the_signals_that_were_named_count() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
    try:
        with ts.PreemptionHandler(grace=timedelta(milliseconds=1)) as preemption:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
            assert not preemption.should_stop()
        with ts.PreemptionHandler(grace=LONG, signals=(signal.SIGTERM, signal.SIGUSR1)) as preemption:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preemption.should_stop()
            assert preemption.received is signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_handler_that_was_there_is_called_once_and_comes_back() -> None:
    heard: list[int] = []

    def earlier(number: int, _frame: object) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, earlier)
    try:
        with ts.PreemptionHandler(grace=LONG) as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption.should_stop()
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is earlier
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_somebody_put_in_its_place_stays() -> None:
    def later(_number: int, _frame: object) -> None: ...

    with ts.PreemptionHandler(grace=LONG):
        signal.signal(signal.SIGTERM, later)
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_one_within_another() -> None:
    with ts.PreemptionHandler(grace=LONG) as outer:
        with ts.PreemptionHandler(grace=LONG) as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.should_stop()
        assert outer.should_stop()


def test_it_can_be_used_again() -> None:
    preemption = ts.PreemptionHandler(grace=LONG)
    with preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.should_stop()
    with preemption:
        assert not preemption.should_stop()


def test_wrong_use_says_what_is_wrong() -> None:
    preemption = ts.PreemptionHandler()
    with pytest.raises(ContextError, match="outside the block"):
        preemption.should_stop()
    with preemption, pytest.raises(ContextError, match="in use"), preemption:
        pass
    errors: list[Exception] = []

    def elsewhere() -> None:
        try:
            with ts.PreemptionHandler():
                pass
        except ContextError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere, name="elsewhere")
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    assert "'elsewhere'" in str(errors[0])

    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with preemption, strategy.scope(), pytest.raises(ContextError, match="within a replica"):
        strategy.run(preemption.should_stop)
    strategy.close()


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"grace": 25}, WrongTypeError, r"grace=25 must be a timedelta"),
        ({"grace": timedelta(0)}, InvalidArgumentError, "more than 0"),
        ({"timeout": timedelta(seconds=-1)}, InvalidArgumentError, "timeout="),
        ({"signals": ()}, InvalidArgumentError, "name at least one"),
        ({"signals": (signal.SIGKILL,)}, InvalidArgumentError, "no process can have a handler"),
    ],
)
def test_bad_arguments(arguments: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        ts.PreemptionHandler(**arguments)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_ends_of_a_signal_and_its_parent_does_not_hear_of_it() -> None:
    with ts.PreemptionHandler(grace=timedelta(milliseconds=1)) as preemption:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:  # only what is safe after a fork of a process with threads
            os.write(writing, b"!")
            signal.pause()
            os._exit(0)
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not preemption.should_stop()
    # The watchdog, which would have ended this process after a millisecond, has been joined by now.


def test_the_wakeup_descriptor_of_others_is_left_to_them() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    try:
        with ts.PreemptionHandler(grace=LONG) as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption.should_stop()
        assert os.read(reading, 1) == bytes([signal.SIGTERM])
        assert signal.set_wakeup_fd(-1) == writing
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)


WATCHED = """
import os, signal, sys, threading
from datetime import timedelta
import torchstrat as ts

with ts.PreemptionHandler(grace=timedelta(seconds=0.2)) as preemption:
    if sys.argv[1] == "waits in C":  # where no handler in Python runs: a mutex that is its own already
        import ctypes
        mutex = ctypes.create_string_buffer(64)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[1] == "saves":
        assert preemption.should_stop()
    if sys.argv[1] == "ends":
        assert preemption.should_stop()
        sys.exit(preemption.exit_code)
    threading.Event().wait(100)
"""


def watched(what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WATCHED, what], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )


def test_who_does_not_end_within_its_grace_is_ended_and_says_so() -> None:
    saving, late = watched("saves"), watched("computes")
    assert (saving.returncode, late.returncode) == (75, 75)
    assert "0.2 s after SIGTERM, the grace it had, its save had not ended. The process ends now" in saving.stderr
    assert "it had not reached the end of a step" in late.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="knows how big a mutex is there")
def test_also_where_it_waits_for_ever_outside_of_python() -> None:
    """As for another process, in a collective: Python's handler is not called before that returns."""
    waiting = watched("waits in C")
    assert waiting.returncode == 75
    assert "it had not reached the end of a step" in waiting.stderr


def test_who_ends_in_time_says_nothing() -> None:
    ended = watched("ends")
    assert (ended.returncode, ended.stderr) == (75, "")


# ---- agreement -------------------------------------------------------------------------------------------------------


class Tied:
    """Processes in one: what they add up to is known when all have asked."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds: list[list[torch.Tensor]] = []

    def end_of(self, rank: int) -> Any:
        tied = self

        class End:
            asked = 0
            closed = False

            def all_reduce(self, tensor: torch.Tensor, what: str) -> Any:
                assert "PreemptionHandler" in what
                if self.asked == len(tied.rounds):
                    tied.rounds.append([])
                tied.rounds[self.asked].append(tensor.clone())
                number = self.asked
                self.asked += 1

                class Work:
                    def wait(self) -> None:
                        assert len(tied.rounds[number]) == tied.size, f"rank {rank} would wait for ever"
                        tensor.copy_(torch.stack(tied.rounds[number]).sum(dim=0))

                return Work()

            def close(self) -> None:
                self.closed = True

        return End()


@pytest.mark.parametrize("told", [{0}, {2}, {0, 1, 2}])
def test_all_stop_after_the_same_step_whoever_was_told(told: set[int]) -> None:
    tied = Tied(3)
    agreements = [StopAgreement(tied.end_of(rank)) for rank in range(3)]
    for step in range(5):
        answers = [agreement.next(step >= 3 and rank in told) for rank, agreement in enumerate(agreements)]
        assert answers == [step == 4] * 3
    for agreement in agreements:
        agreement.close(wait=True)


def test_who_ends_without_a_signal_leaves_nothing_under_way() -> None:
    tied = Tied(2)
    ends = [tied.end_of(rank) for rank in range(2)]
    agreements = [StopAgreement(end) for end in ends]
    assert [agreement.next(False) for agreement in agreements] == [False, False]
    for agreement in agreements:
        agreement.close(wait=True)
    assert [end.closed for end in ends] == [True, True]


def test_after_an_error_nobody_is_waited_for() -> None:
    end = Tied(2).end_of(0)
    agreement = StopAgreement(end)
    agreement.next(False)
    agreement.close(wait=False)  # the other has never asked
    assert end.closed
