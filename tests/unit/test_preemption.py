"""`PreemptionHandler` in one process; how several agree is in tests/multiprocess/test_preemption.py."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import torchstrat as ts
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


@pytest.fixture
def handled() -> Iterator[Callable[..., list[int]]]:
    """Gives a signal a handler of the program's; the function returns the signals that it has heard."""
    before: dict[int, Any] = {}

    def handle(number: int) -> list[int]:
        heard: list[int] = []
        before[number] = signal.signal(number, lambda number, _frame: heard.append(number))
        return heard

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int = signal.SIGTERM, times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("times", [1, 100])
def test_a_signal_is_heard_at_the_next_step_boundary(times: int) -> None:
    preemption = ts.PreemptionHandler(grace=LONG)
    for _ in range(2):  # it can be used again
        with preemption:
            assert not preemption.should_stop()
            assert preemption.received is None
            send(times=times)
            assert preemption.should_stop()
            assert preemption.received is signal.SIGTERM
            assert preemption.should_stop(), "it stays so"
    assert preemption.exit_code == 75


def test_only_the_signals_that_were_named_count(handled: Callable[..., list[int]]) -> None:
    heard = handled(signal.SIGUSR1)
    with ts.PreemptionHandler(grace=timedelta(milliseconds=1)) as preemption:
        send(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert not preemption.should_stop()
    with ts.PreemptionHandler(grace=LONG, signals=(signal.SIGTERM, signal.SIGUSR1)) as preemption:
        send(signal.SIGUSR1)
        assert preemption.should_stop()
        assert preemption.received is signal.SIGUSR1


def test_a_handler_that_was_there_is_called_once_and_comes_back(handled: Callable[..., list[int]]) -> None:
    heard = handled(signal.SIGTERM)
    earlier = signal.getsignal(signal.SIGTERM)
    with ts.PreemptionHandler(grace=LONG) as preemption:
        send(times=2)
        assert preemption.should_stop()
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is earlier


def test_a_handler_that_somebody_put_in_its_place_stays() -> None:
    def later(_number: int, _frame: object) -> None: ...

    with ts.PreemptionHandler(grace=LONG):
        signal.signal(signal.SIGTERM, later)
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is later


def test_one_within_another() -> None:
    with ts.PreemptionHandler(grace=LONG) as outer:
        with ts.PreemptionHandler(grace=LONG) as inner:
            send()
            assert inner.should_stop()
        assert outer.should_stop()


def entered() -> None:
    with ts.PreemptionHandler():
        pass


def entered_elsewhere() -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            entered()
        except ContextError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="elsewhere")
    thread.start()
    thread.join()
    raise errors[0]


def entered_twice() -> None:
    with ts.PreemptionHandler() as preemption, preemption:
        pass


def asked_in_a_replica() -> None:
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    try:
        with ts.PreemptionHandler() as preemption:
            strategy.run(preemption.should_stop)
    finally:
        strategy.close()


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: ts.PreemptionHandler().should_stop(), ContextError, "outside the block"),
        (entered_twice, ContextError, "in use"),
        (entered_elsewhere, ContextError, "main thread.*'elsewhere'"),
        (asked_in_a_replica, ContextError, "within a replica"),
        (lambda: ts.PreemptionHandler(grace=25), WrongTypeError, r"grace=25 must be a timedelta"),  # type: ignore[arg-type]
        (lambda: ts.PreemptionHandler(grace=timedelta(0)), InvalidArgumentError, "more than 0"),
        (lambda: ts.PreemptionHandler(timeout=timedelta(seconds=-1)), InvalidArgumentError, "timeout="),
        (lambda: ts.PreemptionHandler(signals=()), InvalidArgumentError, "name at least one"),
        (lambda: ts.PreemptionHandler(signals=[signal.SIGKILL]), InvalidArgumentError, "no process can have a handler"),
        (lambda: ts.PreemptionHandler(signals=[40]), InvalidArgumentError, "40, which is no member of signal.Signals"),
    ],
)
def test_wrong_use_says_what_is_wrong(call: Callable[[], object], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        call()


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
            send()
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

def watched(what):
    # Who ends by itself has as long as a busy machine takes.
    with ts.PreemptionHandler(grace=timedelta(seconds=40 if what == "ends" else 0.2)) as preemption:
        if what == "waits in C":  # where no handler in Python runs: a mutex that is its own already
            import ctypes
            mutex = ctypes.create_string_buffer(64)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        os.kill(os.getpid(), signal.SIGTERM)
        if what == "saves":
            assert preemption.should_stop()
        if what == "ends":
            assert preemption.should_stop()
            sys.exit(preemption.exit_code)
        threading.Event().wait(100)

statuses = {}
for what in sys.argv[1:]:  # forks: each ends as a process that has imported everything
    child = os.fork()
    if not child:
        os.dup2(os.open(what, os.O_WRONLY | os.O_CREAT), 2)
        watched(what)
    statuses[what] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(statuses)
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """What each does → its status, and what it wrote to stderr."""
    folder = tmp_path_factory.mktemp("watched")
    names = ["saves", "computes", "ends", *(["waits in C"] if sys.platform == "linux" else [])]
    command, environment = [sys.executable, "-c", WATCHED, *names], {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=50, check=True)
    return {what: (status, (folder / what).read_text()) for what, status in ast.literal_eval(ended.stdout).items()}


# As for another process, in a collective: Python's handler is not called before that returns.
IN_C = pytest.param(
    "waits in C",
    "it had not reached the end of a step",
    marks=pytest.mark.skipif(sys.platform != "linux", reason="knows how big a mutex is there"),
)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("saves", "0.2 s after SIGTERM, the grace it had, its save had not ended. The process ends now"),
        ("computes", "it had not reached the end of a step"),
        IN_C,
        ("ends", ""),
    ],
)
def test_who_does_not_end_within_its_grace_is_ended_and_says_so(
    endings: dict[str, tuple[int, str]], what: str, says: str
) -> None:
    status, errors = endings[what]
    assert status == 75
    assert says in errors
    assert (errors == "") == (says == "")
