"""`held_back`: Ctrl-C after a call and not in its middle."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from tests.support.parameter_servers import Parts, on_servers
from torchstrat.parameter_server.waiting import held_back

Note = Callable[[str], None]


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    held_back.put_back()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # handlers run between bytecodes
        pass


def within_another(note: Note) -> None:
    with held_back:
        with held_back:
            interrupt()
            note("inner")
        note("outer")


def twice(note: Note) -> None:
    with held_back:
        interrupt()
        note("first")
        interrupt()
        note("second")


def before_a_wait(note: Note) -> None:
    with held_back:
        interrupt()
        note("begun")
        with held_back.let_through():
            note("waits")


def in_a_wait(note: Note) -> None:
    with held_back:
        note("begun")
        with held_back.let_through():
            interrupt()
            note("waited")


def outside(note: Note) -> None:
    with held_back:
        note("block")
    interrupt()
    note("over")


def from_another_thread(note: Note) -> None:
    def work() -> None:
        with held_back, held_back.let_through():
            interrupt()

    with held_back:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        note("joined")


@pytest.mark.parametrize(
    ("call", "done"),
    [
        (within_another, ["inner", "outer"]),
        (twice, ["first"]),
        (before_a_wait, ["begun"]),
        (in_a_wait, ["begun"]),
        (outside, ["block"]),
        (from_another_thread, ["joined"]),
    ],
)
def test_it_is_raised_at_the_end_of_the_outermost_block_a_second_one_and_in_waits_at_once(call, done) -> None:
    noted: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        call(noted.append)
    assert noted == done
    with held_back:
        noted.append("nothing is left of it")
    held_back.put_back()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_programs_own_handler_stays() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with held_back:
        interrupt()
        assert seen == [signal.SIGINT]
    held_back.put_back()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _when(function: str, act: Callable[[], object]) -> Callable[[FrameType, str, object], None]:
    """For `sys.setprofile`: once, as a function of this name of torchstrat's returns."""
    left = [act]

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code.co_name == function and "torchstrat" in frame.f_code.co_filename and left:
            left.pop()()

    return look


@pytest.mark.parametrize("function", ["_dispatch_held", "_wait_for_rest", "_dispatch_released"])
def test_functions_run_after_a_pause_that_was_interrupted(function: str) -> None:
    with on_servers(Parts) as program:
        assert program.run(lambda: 1) == 1
        sys.setprofile(_when(function, interrupt))
        try:
            with pytest.raises(KeyboardInterrupt):
                program.made.optimizer.step()  # waits until no function is half-way
        finally:
            sys.setprofile(None)
        assert program.run(lambda: 2) == 2
