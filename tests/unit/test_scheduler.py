"""The coordinator's decisions: every rule by an example, and generated histories against what must always hold."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchstrat.errors import InvalidArgumentError, ParameterServerUnavailable
from torchstrat.parameter_server import scheduler as scheduler_module
from torchstrat.parameter_server.scheduler import Scheduler
from torchstrat.parameter_server.scheduler_events import (
    Action,
    AllDone,
    Cancel,
    Complete,
    Dispatch,
    DispatchHeld,
    DispatchReleased,
    ErrorTaken,
    Event,
    Fail,
    Failed,
    Finished,
    Forget,
    HandedBack,
    Quiet,
    Release,
    ServersLost,
    ServersRestored,
    Submitted,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)

WRONG = ValueError("the function's own")
WRONG_TOO = KeyError("another function's own")
LOST = ParameterServerUnavailable("ps 0 is gone")


def play(scheduler: Scheduler, *events: Event) -> list[Action]:
    """The actions of all events, in order."""
    actions = []
    for event in events:
        actions += scheduler.handle(event)
        scheduler.check()
    return actions


def submitted(*functions: int) -> list[Event]:
    return [Submitted(function) for function in functions]


def joined(*workers: int) -> list[Event]:
    return [WorkerJoined(worker, f"{worker}a") for worker in workers]


def sent(actions: list[Action]) -> list[tuple[int, int]]:
    """(function, worker) of what is dispatched."""
    return [(action.function, action.worker) for action in actions if isinstance(action, Dispatch)]


# ---- how functions run -----------------------------------------------------------------------------------------------


def test_functions_go_out_in_order_to_whoever_is_free() -> None:
    scheduler = Scheduler()
    assert sent(play(scheduler, *submitted(0, 1, 2, 3), *joined(0, 1))) == [(0, 0), (1, 1)]
    assert (scheduler.queued, scheduler.in_flight, scheduler.unfinished, scheduler.done) == (2, 2, 4, False)
    assert play(scheduler, Finished(1, "1a", 1)) == [Complete(1), Dispatch(2, 1, "1a", rested=False)]
    assert play(scheduler, Finished(0, "0a", 0)) == [Complete(0), Dispatch(3, 0, "0a", rested=False)]
    assert play(scheduler, Finished(0, "0a", 3)) == [Complete(3)]
    assert play(scheduler, Finished(1, "1a", 2)) == [Complete(2), Forget(4), AllDone()]
    assert scheduler.done


def test_a_worker_is_rested_when_it_had_nothing_to_do() -> None:
    scheduler = Scheduler()
    assert play(scheduler, *joined(0), *submitted(0)) == [Dispatch(0, 0, "0a", rested=True)]
    play(scheduler, Finished(0, "0a", 0))
    assert play(scheduler, *submitted(1, 2)) == [Dispatch(1, 0, "0a", rested=True)]
    assert play(scheduler, Finished(0, "0a", 1))[1:] == [Dispatch(2, 0, "0a", rested=False)]


def test_idle_workers_come_before_a_second_function() -> None:
    scheduler = Scheduler(in_flight_per_worker=2)
    actions = play(scheduler, *joined(0, 1, 2), *submitted(*range(7)))
    assert sent(actions) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
    assert [action.rested for action in actions if isinstance(action, Dispatch)] == [True] * 3 + [False] * 3
    assert scheduler.functions_at(0) == [0, 3]
    assert scheduler.worker_of(4) == 1
    assert scheduler.worker_of(6) is None


def test_whoever_waits_longest_is_next() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1, 2), *submitted(0, 1, 2), Finished(1, "1a", 1), Finished(0, "0a", 0))
    assert sent(play(scheduler, *submitted(3, 4))) == [(3, 1), (4, 0)]


def test_a_lost_function_runs_before_those_that_never_ran() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(0, 1, 2, 3))
    assert play(scheduler, WorkerLost(0, "0a")) == []
    assert sent(play(scheduler, Finished(1, "1a", 1))) == [(0, 1)]
    assert sent(play(scheduler, WorkerJoined(0, "0b"))) == [(2, 0)]


def test_lost_functions_run_again_oldest_first() -> None:
    scheduler = Scheduler(in_flight_per_worker=2)
    play(scheduler, *joined(0, 1), *submitted(*range(6)))
    play(scheduler, WorkerLost(1, "1a"), WorkerLost(0, "0a"))
    assert sent(play(scheduler, WorkerJoined(5, "5a"), WorkerJoined(6, "6a"))) == [(0, 5), (1, 5), (2, 6), (3, 6)]


def test_a_lost_function_goes_to_a_free_worker_at_once() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(0))
    assert play(scheduler, WorkerLost(0, "0a")) == [Dispatch(0, 1, "1a", rested=True)]


def test_a_new_incarnation_implies_the_loss_of_the_old_one() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), *submitted(0))
    assert play(scheduler, WorkerJoined(0, "0b")) == [Dispatch(0, 0, "0b", rested=True)]
    assert play(scheduler, WorkerLost(0, "0a"), Finished(0, "0a", 0)) == []
    assert play(scheduler, Finished(0, "0b", 0)) == [Complete(0), Forget(1), AllDone()]


@pytest.mark.parametrize("when", ["queued", "elsewhere"])
def test_a_result_of_a_given_up_process_does_not_count(when: str) -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), *submitted(0), WorkerLost(0, "0a"))
    if when == "elsewhere":
        assert sent(play(scheduler, WorkerJoined(0, "0b"))) == [(0, 0)]
    assert play(scheduler, Finished(0, "0a", 0), Failed(0, "0a", 0, WRONG), HandedBack(0, "0a", 0)) == []
    assert scheduler.unfinished == 1
    assert scheduler.pending_error is None


def test_news_that_makes_no_sense_changes_nothing() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(0, 1, 2), Finished(0, "0a", 0))
    for event in (
        Finished(0, "0a", 0),  # twice
        Finished(0, "0a", 1),  # runs elsewhere
        Finished(1, "0a", 1),
        Finished(0, "0a", 7),  # unknown
        Failed(0, "0a", 0, WRONG),
        HandedBack(0, "0a", 1),
        HandedBack(1, "1b", None),
        WorkerLost(1, "1b"),
        WorkerLost(9, "9a"),
        WorkerJoined(0, "0a"),  # again
        ServersRestored(),
        ErrorTaken(),
    ):
        assert play(scheduler, event) == [], event
        assert (scheduler.in_flight, scheduler.queued, scheduler.pending_error) == (2, 0, None)
        assert scheduler.workers == {0: "0a", 1: "1a"}


def test_a_given_up_process_does_not_join_again() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), WorkerLost(0, "0a"), WorkerJoined(0, "0b"), WorkerJoined(0, "0a"))
    assert scheduler.workers == {0: "0b"}
    play(scheduler, WorkerLost(1, "1a"), WorkerJoined(1, "1a"))  # dead before it was introduced
    assert scheduler.workers == {0: "0b"}


def test_submissions_are_numbered_without_a_gap() -> None:
    scheduler = Scheduler(first_function=100)
    play(scheduler, *joined(0), Submitted(100))
    with pytest.raises(InvalidArgumentError, match=r"function 102 .* 101 is the next"):
        scheduler.handle(Submitted(102))
    with pytest.raises(InvalidArgumentError, match="function 100"):
        scheduler.handle(Submitted(100))
    assert scheduler.next_function == 101
    assert play(scheduler, Finished(0, "0a", 100)) == [Complete(100), Forget(101), AllDone()]


@pytest.mark.parametrize("wrong", [{"in_flight_per_worker": 0}, {"forget_every": 0}])
def test_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}=0"):
        Scheduler(**wrong)


# ---- workers that leave ----------------------------------------------------------------------------------------------


def test_a_function_that_is_handed_back_runs_elsewhere_first() -> None:
    scheduler = Scheduler(in_flight_per_worker=2)
    play(scheduler, *joined(0, 1), *submitted(*range(6)))
    assert play(scheduler, HandedBack(0, "0a", 0)) == []
    assert scheduler.workers == {1: "1a"}
    assert sent(play(scheduler, Finished(1, "1a", 1))) == [(0, 1)]
    assert play(scheduler, Finished(0, "0a", 2)) == [Complete(2)], "it may finish what it has, and gets no more"
    assert sent(play(scheduler, WorkerLost(0, "0a"), WorkerJoined(0, "0b"))) == [(4, 0), (5, 0)]


def test_an_idle_process_that_leaves_gets_nothing() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), HandedBack(0, "0a", None))
    assert sent(play(scheduler, *submitted(0, 1))) == [(0, 1)]
    assert sent(play(scheduler, WorkerJoined(0, "0b"))) == [(1, 0)]


def test_a_removed_worker_finishes_and_is_released() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(0, 1, 2))
    assert play(scheduler, WorkerDraining(0), WorkerDraining(0)) == []
    assert play(scheduler, Finished(0, "0a", 0)) == [Complete(0), Release(0, "0a")]
    assert scheduler.workers == {1: "1a"}
    assert sent(play(scheduler, Finished(1, "1a", 1))) == [(2, 1)]


def test_a_removed_worker_is_released_whatever_ends_its_function() -> None:
    for event, expected in (
        (Failed(0, "0a", 0, WRONG), [Fail(0, WRONG), Release(0, "0a"), Forget(1), Quiet()]),
        (HandedBack(0, "0a", 0), [Release(0, "0a")]),
        (WorkerLost(0, "0a"), [Release(0, "0a")]),
        (WorkerJoined(0, "0b"), [Release(0, "0a")]),
    ):
        scheduler = Scheduler()
        play(scheduler, *joined(0), *submitted(0), WorkerDraining(0))
        assert play(scheduler, event) == expected, event
        assert scheduler.workers == {}


def test_an_idle_worker_is_released_at_once() -> None:
    scheduler = Scheduler()
    assert play(scheduler, *joined(0), WorkerDraining(0)) == [Release(0, "0a")]
    assert play(scheduler, WorkerDraining(7), WorkerJoined(7, "7a"), *submitted(0)) == []


def test_a_removed_worker_stays_out_until_it_is_readmitted() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), WorkerDraining(0), WorkerJoined(0, "0b"), *submitted(0))
    assert scheduler.workers == {}
    assert sent(play(scheduler, WorkerJoined(0, "0b", readmit=True))) == [(0, 0)]
    assert sent(play(scheduler, WorkerJoined(0, "0c"))) == [(0, 0)], "from then on it is a worker like others"


# ---- after an error --------------------------------------------------------------------------------------------------


def test_an_error_stops_the_queue_until_it_is_taken() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(*range(5)))
    assert play(scheduler, Failed(0, "0a", 0, WRONG)) == [Fail(0, WRONG)]
    assert scheduler.pending_error is WRONG
    assert play(scheduler, WorkerJoined(2, "2a")) == []
    assert play(scheduler, Finished(1, "1a", 1)) == [Complete(1), Quiet()]
    assert scheduler.quiet
    cancelled = [Cancel(function, WRONG) for function in (2, 3, 4)]
    assert play(scheduler, ErrorTaken()) == [*cancelled, Forget(5), AllDone()]
    assert scheduler.pending_error is None
    assert sent(play(scheduler, *submitted(5))) == [(5, 0)]


def test_only_the_first_error_is_kept() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(0, 1), Failed(1, "1a", 1, WRONG))
    assert play(scheduler, Failed(0, "0a", 0, WRONG_TOO)) == [Fail(0, WRONG_TOO), Forget(2), Quiet()]
    assert scheduler.pending_error is WRONG
    play(scheduler, ErrorTaken())
    assert scheduler.pending_error is None


def test_what_a_lost_worker_gives_back_after_an_error_is_cancelled_in_order() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1, 2), *submitted(*range(5)), Failed(1, "1a", 1, WRONG), WorkerLost(2, "2a"))
    assert play(scheduler, HandedBack(0, "0a", 0)) == [Quiet()]
    taken = play(scheduler, ErrorTaken())
    assert taken == [*(Cancel(function, WRONG) for function in (0, 2, 3, 4)), Forget(5), AllDone()]


@pytest.mark.parametrize("end", [WorkerLost(1, "1a"), HandedBack(1, "1a", 1), WorkerJoined(1, "1b")])
def test_what_was_submitted_before_an_error_was_taken_never_runs_again(end: Event) -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(0, 1), Failed(0, "0a", 0, WRONG), ErrorTaken())
    assert play(scheduler, *submitted(2)) == [Dispatch(2, 0, "0a", rested=True)]
    assert play(scheduler, end) == [Cancel(1, WRONG)]


def test_what_was_submitted_before_an_error_was_taken_raises_no_second_one() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(0, 1), Failed(0, "0a", 0, WRONG), ErrorTaken())
    assert play(scheduler, Failed(1, "1a", 1, WRONG_TOO)) == [Fail(1, WRONG_TOO), Forget(2), AllDone()]
    assert scheduler.pending_error is None


def test_a_submission_while_an_error_is_pending_is_cancelled_with_the_rest() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), *submitted(0), Failed(0, "0a", 0, WRONG))
    assert play(scheduler, *submitted(1)) == [Quiet()]
    assert play(scheduler, ErrorTaken()) == [Cancel(1, WRONG), Forget(2), AllDone()]


# ---- lost servers ----------------------------------------------------------------------------------------------------


def test_lost_servers_stop_everything_until_they_are_back() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(*range(4)))
    assert play(scheduler, ServersLost(LOST)) == []
    assert scheduler.pending_error is LOST
    assert play(scheduler, Finished(0, "0a", 0)) == [Complete(0)]
    unreachable = ParameterServerUnavailable("ps 0 does not answer")
    assert play(scheduler, Failed(1, "1a", 1, unreachable)) == [Cancel(1, LOST), Quiet()]
    assert play(scheduler, ErrorTaken()) == [Cancel(2, LOST), Cancel(3, LOST), Forget(4), AllDone()]
    assert scheduler.servers_lost
    assert play(scheduler, *submitted(4)) == [Quiet()], "the shell is told at once"
    assert sent(play(scheduler, ServersRestored())) == [(4, 0)]
    assert not scheduler.servers_lost


def test_lost_servers_go_before_a_functions_error_and_are_taken_together() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), *submitted(0, 1), Failed(0, "0a", 0, WRONG), ServersLost(LOST))
    assert scheduler.pending_error is LOST
    assert play(scheduler, ErrorTaken()) == [Cancel(1, LOST), Forget(2), AllDone()]
    assert scheduler.pending_error is None


def test_a_functions_own_error_stays_its_own_when_servers_are_lost() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), *submitted(0), ServersLost(LOST))
    assert play(scheduler, Failed(0, "0a", 0, WRONG))[0] == Fail(0, WRONG)


def test_a_loss_is_told_even_if_the_servers_are_back() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), *submitted(0, 1), ServersLost(LOST), ServersRestored(), Finished(0, "0a", 0))
    assert scheduler.pending_error is LOST
    assert play(scheduler, ErrorTaken()) == [Cancel(1, LOST), Forget(2), AllDone()]
    assert sent(play(scheduler, *submitted(2))) == [(2, 0)]


def test_a_failure_that_a_loss_caused_is_no_new_error_after_the_recovery() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(0), ServersLost(LOST), ErrorTaken(), ServersRestored(), *submitted(1))
    assert play(scheduler, Failed(0, "0a", 0, LOST)) == [Cancel(0, LOST)]
    assert play(scheduler, Failed(1, "1a", 1, LOST)) == [Fail(1, LOST), Forget(2), Quiet()], "this one was later"


def test_a_second_loss_is_told_too() -> None:
    scheduler = Scheduler()
    second = ParameterServerUnavailable("ps 1 is gone")
    assert play(scheduler, ServersLost(LOST), ServersLost(second)) == [Quiet()]
    assert scheduler.pending_error is LOST
    assert play(scheduler, ErrorTaken()) == [AllDone()]
    assert play(scheduler, ServersLost(second)) == [Quiet()]
    assert scheduler.pending_error is second


# ---- the watermark ---------------------------------------------------------------------------------------------------


def test_forget_waits_for_the_oldest_and_comes_in_portions() -> None:
    scheduler = Scheduler(forget_every=4)
    play(scheduler, *joined(0, 1), *submitted(*range(12)))
    seen = []
    for function in range(1, 10):
        seen += play(scheduler, Finished(1, "1a", function))
    assert not [action for action in seen if isinstance(action, Forget)], "function 0 is in flight"
    assert Forget(10) in play(scheduler, Finished(0, "0a", 0))
    assert play(scheduler, Finished(1, "1a", 10)) == [Complete(10)]
    assert play(scheduler, Finished(0, "0a", 11)) == [Complete(11), Forget(12), AllDone()]


# ---- speed -----------------------------------------------------------------------------------------------------------


def test_no_event_takes_longer_because_the_queue_is_long() -> None:
    """Counted in lines of Python, which no busy machine disturbs."""
    short, long = (_lines_run(queue) for queue in (10, 20_000))
    assert short == long


def _lines_run(queue: int) -> list[int]:
    scheduler = Scheduler(in_flight_per_worker=2)
    counts = []
    lines = 0

    def trace(frame: FrameType, what: str, _arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != scheduler_module.__file__:
            return None
        lines += what == "line"
        return trace

    for function in range(queue):
        scheduler.handle(Submitted(function))
    events = [
        *joined(0, 1, 2),
        Submitted(queue),
        *(Finished(function % 3, f"{function % 3}a", function) for function in range(3)),
        WorkerLost(0, "0a"),
        WorkerJoined(0, "0b"),
        WorkerDraining(1),
        Failed(2, "2a", 5, WRONG),
    ]
    previous = sys.gettrace()
    for event in events:
        sys.settrace(trace)
        try:
            scheduler.handle(event)
        finally:
            sys.settrace(previous)
        counts.append(lines)
    return counts


def test_a_full_queue_is_no_burden() -> None:
    scheduler, functions = Scheduler(), 262_144
    for function in range(functions):
        assert scheduler.handle(Submitted(function)) == []
    assert scheduler.queued == functions
    assert sent(play(scheduler, *joined(0))) == [(0, 0)]
    for function in range(1000):
        assert sent(scheduler.handle(Finished(0, "0a", function))) == [(function + 1, 0)]
    scheduler.check()
    assert play(scheduler, Failed(0, "0a", 1000, WRONG)) == [Fail(1000, WRONG), Quiet()]
    cancelled = play(scheduler, ErrorTaken())
    assert cancelled[:-2] == [Cancel(function, WRONG) for function in range(1001, functions)]
    assert cancelled[-2:] == [Forget(functions), AllDone()]


# ---- generated histories ---------------------------------------------------------------------------------------------

WORKERS = 4
ERRORS = [WRONG, WRONG_TOO, LOST]


class History(RuleBasedStateMachine):
    """Any events, sensible and not. What the actions say is kept in a book of its own, and held against the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted = 0
        self.sent: dict[int, tuple[int, str]] = {}  # function → where it is in flight
        self.first_dispatches: list[int] = []
        self.outcomes: dict[int, Action] = {}
        self.live: dict[int, str] = {}
        self.dead: list[tuple[int, str]] = []
        self.removed: set[int] = set()
        self.draining: set[tuple[int, str]] = set()
        self.leaving: set[tuple[int, str]] = set()
        self.names = (f"incarnation-{number}" for number in itertools.count())
        self.error: BaseException | None = None
        self.loss: BaseException | None = None
        self.lost = False
        self.held = False
        self.taken_below = 0
        self.forgotten = 0

    @initialize(room=st.integers(1, 3), forget_every=st.integers(1, 5), workers=st.integers(0, WORKERS))
    def start(self, room: int, forget_every: int, workers: int) -> None:
        self.room = room
        self.forget_every = forget_every
        self.scheduler = Scheduler(room, forget_every)
        for worker in range(workers):
            self.join(worker, readmit=False)
        self.submit(workers * room)

    # -- the book

    def tell(self, event: Event) -> list[Action]:
        actions = self.scheduler.handle(event)
        self.scheduler.check()
        for action in actions:
            if isinstance(action, Dispatch):
                self.book_dispatch(action)
            elif isinstance(action, Complete | Fail | Cancel):
                assert action.function not in self.outcomes, "a second outcome"
                assert action.function < self.submitted
                self.outcomes[action.function] = action
                self.sent.pop(action.function, None)
            elif isinstance(action, Release):
                where = (action.worker, action.incarnation)
                self.draining.remove(where)
                assert where not in self.sent.values(), "released with something in flight"
                self.bury(where)
            elif isinstance(action, Forget):
                assert action.below > self.forgotten
                self.forgotten = action.below
        waiting_to_be_forgotten = self.done_below() - self.forgotten
        assert waiting_to_be_forgotten >= 0, "forgets what is not over"
        assert waiting_to_be_forgotten < self.forget_every
        return actions

    def book_dispatch(self, action: Dispatch) -> None:
        where = (action.worker, action.incarnation)
        assert self.pending() is None
        assert not self.lost
        assert action.function not in self.outcomes
        assert action.function not in self.sent, "in flight twice"
        assert where in self.usable(), "sent to a process that takes nothing"
        assert self.load(where) == min(map(self.load, self.usable())) < self.room, "another worker had less to do"
        assert not (action.rested and self.load(where))
        if action.function not in self.first_dispatches:
            assert not self.first_dispatches or action.function > self.first_dispatches[-1], "out of order"
            assert not self.waiting_again(), "something older waited"
            assert not self.held, "begun while dispatch is held"
            self.first_dispatches.append(action.function)
        else:
            assert action.function >= self.taken_below, "it belongs to an error that the user has seen"
            assert action.function == min(self.waiting_again())
        self.sent[action.function] = where

    def waiting_again(self) -> list[int]:
        return [function for function in self.first_dispatches if function not in self.sent.keys() | self.outcomes]

    def usable(self) -> list[tuple[int, str]]:
        return [where for where in self.live.items() if where not in self.draining | self.leaving]

    def load(self, where: tuple[int, str]) -> int:
        return list(self.sent.values()).count(where)

    def pending(self) -> BaseException | None:
        return self.error if self.loss is None else self.loss

    def done_below(self) -> int:
        return next(function for function in itertools.count(self.forgotten) if function not in self.outcomes)

    def bury(self, where: tuple[int, str]) -> None:
        if self.live.get(where[0]) == where[1]:
            del self.live[where[0]]
        self.dead.append(where)
        self.sent = {function: at for function, at in self.sent.items() if at != where}

    def pick_sent(self, data: st.DataObject) -> tuple[int, tuple[int, str]]:
        return data.draw(st.sampled_from(sorted(self.sent.items())))

    # -- events as they come

    @rule(number=st.integers(1, 5))
    def submit(self, number: int) -> None:
        for _ in range(number):
            self.submitted += 1
            actions = self.tell(Submitted(self.submitted - 1))
            assert (Quiet() in actions) == (not self.sent and (self.lost or self.pending() is not None))

    @rule(worker=st.integers(0, WORKERS - 1), readmit=st.booleans())
    def join(self, worker: int, readmit: bool) -> None:
        new = (worker, next(self.names))
        if worker in self.live:
            self.bury((worker, self.live[worker]))
        if readmit:
            self.removed.discard(worker)
        if worker not in self.removed:
            self.live[worker] = new[1]
        self.tell(WorkerJoined(*new, readmit))
        assert (new in self.scheduler.workers.items()) == (worker not in self.removed)
        assert not {where for where in self.draining if where[0] == worker}, "the loss of the old one releases it"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(sorted(self.live.items())))
        given_back = {function for function, at in self.sent.items() if at == where}
        self.bury(where)
        self.tell(WorkerLost(*where))
        for function in given_back:
            assert (function < self.taken_below) == isinstance(self.outcomes.get(function), Cancel)

    @rule(worker=st.integers(0, WORKERS - 1))
    def drain(self, worker: int) -> None:
        self.removed.add(worker)
        where = (worker, self.live.get(worker, ""))
        again = where in self.draining
        if worker in self.live:
            self.draining.add(where)
        actions = self.tell(WorkerDraining(worker))
        assert (Release(*where) in actions) == (where[1] != "" and not again and where not in self.sent.values())

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        function, where = self.pick_sent(data)
        assert self.tell(Finished(*where, function))[0] == Complete(function)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), error=st.sampled_from(ERRORS))
    def fail(self, data: st.DataObject, error: BaseException) -> None:
        function, where = self.pick_sent(data)
        outcome = self.tell(Failed(*where, function, error))[0]
        if isinstance(outcome, Cancel):
            assert error is LOST
            assert outcome.because is LOST
        else:
            assert outcome == Fail(function, error)
            assert error is not LOST or not self.lost, "a failure that the loss explains"
            if self.error is None and function >= self.taken_below:
                self.error = error

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        function, where = self.pick_sent(data)
        self.leaving.add(where)
        del self.sent[function]
        self.tell(HandedBack(*where, function))
        assert (function < self.taken_below) == isinstance(self.outcomes.get(function), Cancel)

    @rule()
    def lose_servers(self) -> None:
        self.lost, self.loss = True, self.loss or LOST
        self.tell(ServersLost(LOST))

    @rule()
    def restore_servers(self) -> None:
        self.lost = False
        self.tell(ServersRestored())

    @rule()
    def hold(self) -> None:
        self.held = True
        assert not self.tell(DispatchHeld())
        if self.scheduler.at_rest:  # nothing half-way: what was begun has its outcome, or never will
            assert not self.sent
            assert self.pending() is not None or set(self.first_dispatches) <= self.outcomes.keys()

    @rule()
    def release(self) -> None:
        self.held = False
        self.tell(DispatchReleased())

    @precondition(lambda self: self.pending() is not None)
    @rule()
    def take_error(self) -> None:
        error, self.error, self.loss = self.pending(), None, None
        self.taken_below = self.submitted
        queued = [f for f in range(self.submitted) if f not in self.sent.keys() | self.outcomes.keys()]
        actions = self.tell(ErrorTaken())
        assert actions[: len(queued)] == [Cancel(function, error) for function in queued]
        assert (AllDone() in actions) == (not self.sent)

    # -- events that come too late, twice, or from nowhere

    @precondition(lambda self: self.dead)
    @rule(data=st.data(), kind=st.sampled_from([Finished, Failed, HandedBack, WorkerLost, WorkerJoined]))
    def hear_from_the_dead(self, data: st.DataObject, kind: type) -> None:
        where = data.draw(st.sampled_from(self.dead))
        function = data.draw(st.integers(0, self.submitted))
        arguments = {Finished: (function,), Failed: (function, WRONG), HandedBack: (function,)}.get(kind, ())
        assert self.tell(kind(*where, *arguments)) == []

    @precondition(lambda self: self.live)
    @rule(data=st.data(), kind=st.sampled_from([Finished, Failed, HandedBack]))
    def hear_nonsense(self, data: st.DataObject, kind: type) -> None:
        where = data.draw(st.sampled_from(sorted(self.live.items())))
        elsewhere = [function for function in range(self.submitted + 1) if self.sent.get(function) != where]
        function = data.draw(st.sampled_from(elsewhere))
        assert self.tell(kind(*where, function, *([WRONG] if kind is Failed else []))) == []

    # -- what holds in between

    @invariant()
    def the_machine_agrees_with_the_book(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert scheduler.in_flight == len(self.sent)
        assert scheduler.unfinished == self.submitted - len(self.outcomes)
        assert scheduler.queued == scheduler.unfinished - len(self.sent)
        assert scheduler.done == (len(self.outcomes) == self.submitted)
        assert scheduler.pending_error is self.pending()
        assert scheduler.servers_lost == self.lost
        assert scheduler.workers == dict(self.usable())
        assert {function: scheduler.worker_of(function) for function in self.sent} == {
            function: where[0] for function, where in self.sent.items()
        }
        if scheduler.queued and self.pending() is None and not self.lost and not self.held:
            assert all(self.load(where) == self.room for where in self.usable()), "a worker idles"

    def teardown(self) -> None:
        """Whatever happened, the job comes to its end once there are a worker and servers: nothing was forgotten."""
        if not hasattr(self, "scheduler"):
            return
        self.restore_servers()
        self.release()
        for _ in range(self.submitted + 5):
            if self.pending() is not None:
                self.take_error()
            elif self.scheduler.queued and not self.sent:
                self.join(0, readmit=True)
            for function, where in list(self.sent.items()):
                self.tell(Finished(*where, function))
        assert sorted(self.outcomes) == list(range(self.submitted))
        assert self.forgotten == self.submitted
        assert self.first_dispatches == sorted(self.first_dispatches)


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
