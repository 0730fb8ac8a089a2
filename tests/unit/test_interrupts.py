"""`held_back`: Ctrl-C after a call and not in its middle."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from torchstrat.parameter_server.interrupts import held_back


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


def test_one_is_raised_at_the_end_of_the_outermost_block() -> None:
    done = []

    def call() -> None:
        with held_back:
            with held_back:
                interrupt()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert done == ["inner", "outer"]
    with held_back:
        done.append("nothing is left of it")


def test_a_second_one_is_raised_at_once() -> None:
    done = []

    def call() -> None:
        with held_back:
            interrupt()
            done.append("first")
            interrupt()
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert done == ["first"]
    with held_back:
        pass


@pytest.mark.parametrize("before", [True, False])
def test_what_waits_in_a_block_is_interrupted(before: bool) -> None:
    done = []

    def call(*, waits: bool) -> None:
        with held_back:
            if before:
                interrupt()
            done.append("begun")
            if waits:
                with held_back.let_through():
                    interrupt()
                    done.append("waited")
            done.append("over")

    with pytest.raises(KeyboardInterrupt):
        call(waits=True)
    assert done == ["begun"]
    if before:
        with pytest.raises(KeyboardInterrupt):
            call(waits=False)
        assert done == ["begun", "begun", "over"]


def test_outside_of_blocks_it_is_as_ever_and_the_handler_can_be_put_back() -> None:
    with held_back:
        pass
    with pytest.raises(KeyboardInterrupt):
        interrupt()
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


def test_other_threads_may_use_it() -> None:
    def work() -> None:
        with held_back, held_back.let_through():
            interrupt()

    def call() -> None:
        with held_back:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            done.append("joined")

    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        call()
    assert done == ["joined"]
