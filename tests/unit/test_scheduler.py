"""The coordinator's decisions: generated histories against a book of its own, and the rules by examples."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.scheduler_invariants import check
from torchstrat.errors import FunctionSetAsideError, InvalidArgumentError, ParameterServerUnavailable
from torchstrat.parameter_server import scheduler as scheduler_module
from torchstrat.parameter_server import scheduler_events as ev
from torchstrat.parameter_server.scheduler import LARGEST_BATCH, Scheduler
from torchstrat.parameter_server.scheduler_events import Action, Event

WRONG = ValueError("the function's own")
WRONG_TOO = KeyError("another function's own")
LOST, LOST_TOO = ParameterServerUnavailable("ps 0 is gone"), ParameterServerUnavailable("ps 1 is gone")


def play(scheduler: Scheduler, *events: Event) -> list[Action]:
    """The actions of all events, in order."""
    actions = []
    for event in events:
        actions += scheduler.handle(event)
        check(scheduler)
    return actions


def submitted(*functions: int) -> list[Event]:
    return [ev.Submitted(function) for function in functions]


def joined(*workers: int) -> list[Event]:
    return [ev.WorkerJoined(worker, f"{worker}a") for worker in workers]


def sent(actions: list[Action]) -> list[tuple[int, int]]:
    """(function, worker) of what is dispatched."""
    return [(function, each.worker) for each in actions if isinstance(each, ev.Dispatch) for function in each.functions]


def finished(worker: int, incarnation: str, *functions: int, seconds: float = 1.0) -> ev.Finished:
    """Functions so long that batches hold one."""
    return ev.Finished(worker, incarnation, functions, seconds * len(functions))


# ---- how functions run -----------------------------------------------------------------------------------------------


def test_whoever_waits_longest_is_next() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1, 2), *submitted(0, 1, 2), finished(1, "1a", 1), finished(0, "0a", 0))
    assert sent(play(scheduler, *submitted(3, 4))) == [(3, 1), (4, 0)]


def test_news_that_makes_no_sense_changes_nothing() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(0, 1, 2), finished(0, "0a", 0))
    for event in (
        finished(0, "0a", 0),  # twice
        finished(0, "0a", 1),  # runs elsewhere
        finished(1, "0a", 1),
        finished(0, "0a", 7),  # unknown
        ev.Failed(0, "0a", 0, WRONG),
        ev.HandedBack(0, "0a", (1,)),
        ev.WorkerLeaves(1, "1b"),
        ev.WorkerLost(1, "1b"),
        ev.WorkerLost(9, "9a"),
        ev.WorkerJoined(0, "0a"),  # again
        ev.ServersRestored(),
        ev.ErrorTaken(),
    ):
        assert play(scheduler, event) == [], event
        assert (scheduler.in_flight, scheduler.queued, scheduler.pending_error) == (2, 0, None)
        assert scheduler.workers == {0: "0a", 1: "1a"}


def test_a_given_up_process_does_not_join_again() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0), ev.WorkerLost(0, "0a"), ev.WorkerJoined(0, "0b"), ev.WorkerJoined(0, "0a"))
    assert scheduler.workers == {0: "0b"}
    play(scheduler, ev.WorkerLost(1, "1a"), ev.WorkerJoined(1, "1a"))  # dead before it was introduced
    assert scheduler.workers == {0: "0b"}


def test_submissions_are_numbered_without_a_gap() -> None:
    scheduler = Scheduler(1, first_function=100)
    play(scheduler, *joined(0), ev.Submitted(100))
    with pytest.raises(InvalidArgumentError, match=r"function 102 .* 101 is the next"):
        scheduler.handle(ev.Submitted(102))
    with pytest.raises(InvalidArgumentError, match="function 100"):
        scheduler.handle(ev.Submitted(100))
    assert scheduler.next_function == 101
    assert play(scheduler, finished(0, "0a", 100)) == [ev.Complete((100,))]


@pytest.mark.parametrize("wrong", [{"batches_per_worker": 0}, {"forget_every": 0}])
def test_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}=0"):
        Scheduler(**wrong)


def test_a_failure_that_a_loss_caused_is_no_new_error_after_the_recovery() -> None:
    scheduler = Scheduler(1)
    play(
        scheduler,
        *joined(0, 1),
        *submitted(0),
        ev.ServersLost(LOST),
        ev.ErrorTaken(),
        ev.ServersRestored(),
        *submitted(1),
    )
    assert play(scheduler, ev.Failed(0, "0a", 0, LOST)) == [ev.Cancel(0, LOST)]
    assert play(scheduler, ev.Failed(1, "1a", 1, LOST)) == [ev.Fail(1, LOST)], "this one was later"


# ---- batches ---------------------------------------------------------------------------------------------------------

SHORT = 1e-5


def batches(actions: list[Action]) -> list[tuple[tuple[int, ...], int]]:
    """(functions, worker) of what is dispatched."""
    return [(each.functions, each.worker) for each in actions if isinstance(each, ev.Dispatch)]


def timed(seconds: float, workers: int = 1, batches_per_worker: int = 2) -> Scheduler:
    """Functions 0 to 9 ran; they took that long each. The next is 10."""
    scheduler = Scheduler(batches_per_worker)
    play(scheduler, *joined(*range(workers)))
    for function in range(10):
        (dispatch,) = play(scheduler, ev.Submitted(function))
        assert isinstance(dispatch, ev.Dispatch)
        where = (dispatch.worker, dispatch.incarnation)
        play(scheduler, finished(*where, function, seconds=seconds))
    return scheduler


def test_batches_hold_one_until_it_is_known_how_long_functions_take() -> None:
    scheduler = Scheduler()
    assert batches(play(scheduler, *submitted(*range(100)), *joined(0))) == [((0,), 0), ((1,), 0)]
    assert len(batches(play(scheduler, finished(0, "0a", 0, seconds=SHORT)))[0][0]) == 98 // 4


@pytest.mark.parametrize(("waiting", "size"), [(1, 1), (7, 1), (8, 2), (100, 25), (1024, 256), (1100, 256)])
def test_a_batch_of_short_functions_is_a_share_of_what_waits(waiting: int, size: int) -> None:
    scheduler = timed(SHORT)
    play(scheduler, ev.WorkerLost(0, "0a"), *submitted(*range(10, 10 + waiting)))
    (functions, _), *_ = batches(play(scheduler, ev.WorkerJoined(0, "0b")))
    assert functions == tuple(range(10, 10 + size))


@pytest.mark.parametrize(("seconds", "size"), [(1e-5, 250), (1e-4, 50), (1e-3, 5), (5e-3, 1), (1.0, 1), (0.0, 250)])
def test_a_batch_takes_about_five_milliseconds(seconds: float, size: int) -> None:
    scheduler = timed(seconds)
    play(scheduler, ev.WorkerLost(0, "0a"), *submitted(*range(10, 1010)))
    (functions, _), *_ = batches(play(scheduler, ev.WorkerJoined(0, "0b")))
    assert abs(len(functions) - size) <= 1


def test_one_long_function_is_soon_forgotten() -> None:
    scheduler, ended = timed(SHORT), 0
    play(scheduler, *submitted(*range(10, 2000)))
    sizes = batches(play(scheduler, finished(0, "0a", 10)))
    while len(sizes[-1][0]) < 100:
        first = scheduler.functions_at(0)[0]
        sizes += batches(play(scheduler, finished(0, "0a", first, seconds=SHORT)))
        ended += 1
        assert ended < 300


# ---- recall ----------------------------------------------------------------------------------------------------------


def behind_a_slow_one(functions: int) -> Scheduler:
    """Worker 0 has this many functions, from 10, and runs the first; worker 1 has just joined, and nothing waits."""
    scheduler = timed(SHORT, workers=1, batches_per_worker=200)
    play(scheduler, *submitted(*range(10, 10 + functions)))
    assert len(scheduler.functions_at(0)) == functions
    assert play(scheduler, *joined(1)) == ([ev.AwaitMoment()] if functions > 1 else [])
    return scheduler


def test_functions_behind_a_slow_one_are_taken_away_by_halves() -> None:
    scheduler = behind_a_slow_one(100)
    assert play(scheduler, ev.MomentPassed()) == [ev.AwaitMoment()], "the first moment was not a whole one for it"
    recall, _ = play(scheduler, ev.MomentPassed())
    assert recall == ev.Recall(tuple(range(60, 110)), 0, "0a")
    assert play(scheduler, ev.MomentPassed()) == [ev.AwaitMoment()], "it is not asked twice"
    moved = []
    left = 100
    while isinstance(recall, ev.Recall):
        actions = play(scheduler, ev.HandedBack(0, "0a", recall.functions))
        left -= len(recall.functions)
        while at_one := scheduler.functions_at(1):
            assert {worker for _, worker in sent(actions)} <= {1}, "back to the one that it was taken from"
            moved += at_one
            actions = play(scheduler, ev.Finished(1, "1a", tuple(at_one), SHORT * len(at_one)))
        (recall,) = [each for each in actions if isinstance(each, ev.Recall)] or [None]
        assert recall is None or len(recall.functions) == left // 2
    assert sorted(moved) == list(range(11, 110))
    assert scheduler.functions_at(0) == [10]
    assert batches(play(scheduler, *submitted(110, 111))) == [((110,), 1), ((111,), 1)], "none goes behind the slow one"
    assert play(scheduler, finished(0, "0a", 10))[0] == ev.Complete((10,))
    assert batches(play(scheduler, *submitted(112))) == [((112,), 0)]


def test_who_reports_keeps_what_it_has() -> None:
    scheduler = behind_a_slow_one(10)
    for function in range(10, 19):
        assert ev.Recall not in map(type, play(scheduler, ev.MomentPassed()))
        play(scheduler, finished(0, "0a", function, seconds=SHORT))


def test_who_is_asked_and_has_nothing_to_give_is_asked_again_after_its_next_outcome() -> None:
    scheduler = behind_a_slow_one(10)
    play(scheduler, ev.MomentPassed())
    assert ev.Recall in map(type, play(scheduler, ev.MomentPassed()))
    for _ in range(3):  # it has begun them all, and answered so
        assert play(scheduler, ev.MomentPassed()) == [ev.AwaitMoment()]
    play(scheduler, finished(0, "0a", 10, seconds=SHORT), ev.MomentPassed())
    assert ev.Recall in map(type, play(scheduler, ev.MomentPassed()))


def test_what_was_lost_twice_waits_for_what_is_behind_others_at_workers() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), *submitted(0), ev.WorkerLost(0, "0a"), ev.WorkerJoined(0, "0b"))
    assert sent(play(scheduler, *submitted(1, 2), *joined(1))) == [(1, 1), (2, 1)], "beside nothing that was lost"
    assert sent(play(scheduler, ev.WorkerLost(0, "0b"), ev.WorkerJoined(0, "0c"))) == [], "2 has not begun"
    play(scheduler, ev.MomentPassed())
    assert play(scheduler, ev.MomentPassed())[0] == ev.Recall((2,), 1, "1a")
    assert sent(play(scheduler, ev.HandedBack(1, "1a", (2,)))) == [(2, 0)]
    assert sent(play(scheduler, finished(0, "0c", 2))) == [(0, 0)], "beside 1, which has begun"


def test_what_was_lost_twice_waits_for_nothing_that_a_held_dispatch_does_not_begin() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), *submitted(0), ev.WorkerLost(0, "0a"), ev.WorkerJoined(0, "0b"))
    play(scheduler, *submitted(1, 2), *joined(1), ev.WorkerLost(0, "0b"), ev.WorkerJoined(0, "0c"))
    assert sent(play(scheduler, ev.DispatchHeld())) == [(0, 0)], "the job is not at rest before it has ended"


# ---- speed -----------------------------------------------------------------------------------------------------------


class Lines:
    """Counts the lines of the scheduler that run within it, which no busy machine disturbs."""

    count = 0

    def __enter__(self) -> None:
        self._previous = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_error: object) -> None:
        sys.settrace(self._previous)

    def _trace(self, frame: FrameType, what: str, _arg: Any) -> Any:
        if frame.f_code.co_filename != scheduler_module.__file__:
            return None
        self.count += what == "line"
        return self._trace


def lines_per_event(queue: int) -> list[int]:
    scheduler, lines, counts = Scheduler(batches_per_worker=2), Lines(), []
    for event in submitted(*range(queue)):
        scheduler.handle(event)
    for event in (
        *joined(0, 1, 2),
        ev.Submitted(queue),
        *(finished(function % 3, f"{function % 3}a", function) for function in range(3)),
        ev.WorkerLost(0, "0a"),
        ev.WorkerJoined(0, "0b"),
        ev.MomentPassed(),
        ev.HandedBack(2, "2a", (5,)),
        ev.WorkerDraining(1),
        ev.Failed(2, "2a", 9, WRONG),
    ):
        with lines:
            scheduler.handle(event)
        counts.append(lines.count)
    return counts


def test_no_event_takes_longer_because_the_queue_is_long() -> None:
    assert lines_per_event(2_000) == lines_per_event(20_000)


def lines_per_function(workers: int) -> float:
    """Of short functions in large batches, in a long queue."""
    scheduler = timed(SHORT, workers)
    for event in submitted(*range(10, 100_000)):
        scheduler.handle(event)
    waiting = [(tuple(scheduler.functions_at(worker)), worker) for worker in range(workers)]
    lines, ended = Lines(), 0
    for number in range(workers * 2 + 60):
        if number == workers * 2:  # batches have the size that they keep
            lines, ended = Lines(), 0
        functions, worker = waiting.pop(0)
        with lines:
            actions = scheduler.handle(finished(worker, f"{worker}a", *functions, seconds=SHORT))
        waiting += batches(actions)
        ended += len(functions)
    return lines.count / ended


def test_no_function_takes_longer_because_there_are_many_workers() -> None:
    assert lines_per_function(64) == pytest.approx(lines_per_function(2), rel=0.05)


def test_a_long_queue_is_no_burden() -> None:
    scheduler, functions = Scheduler(1), 40_000
    for function in range(functions):
        assert scheduler.handle(ev.Submitted(function)) == []
    assert scheduler.queued == functions
    assert sent(play(scheduler, *joined(0))) == [(0, 0)]
    for function in range(1000):
        assert sent(scheduler.handle(finished(0, "0a", function))) == [(function + 1, 0)]
    check(scheduler)
    assert play(scheduler, ev.Failed(0, "0a", 1000, WRONG)) == [ev.Fail(1000, WRONG)]
    cancelled = play(scheduler, ev.ErrorTaken())
    assert cancelled[:-1] == [ev.Cancel(function, WRONG) for function in range(1001, functions)]
    assert cancelled[-1] == ev.Forget(functions)


# ---- generated histories ---------------------------------------------------------------------------------------------

WORKERS = 4
ERRORS = [WRONG, WRONG_TOO, LOST]


class History(RuleBasedStateMachine):
    """Any events, sensible and not. What the actions say is kept in a book of its own, and held against the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted = 0
        self.sent: dict[int, tuple[int, str]] = {}  # function → where it is in flight
        self.batches: dict[tuple[int, str], list[set[int]]] = {}
        self.first_dispatches: list[int] = []
        self.losses: dict[int, int] = {}  # how often each was lost with a worker
        self.later: dict[int, int] = {}  # what was lost twice waits until all below a number have begun; in this order
        self.limits: dict[int, int | None] = {}
        self.aside: int | None = None  # what this event has to set aside
        self.recalled: set[tuple[int, tuple[int, str]]] = set()
        self.waits_for_moment = False
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
        self.fails = False
        self.loss_told: BaseException | None = None  # the last loss, which explains failures of what was in flight then
        self.loss_below = 0
        self.error_taken: BaseException | None = None
        self.taken_below = 0
        self.forgotten = 0
        self.reporting: tuple[int, str] | None = None

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
        self.reporting = (event.worker, event.incarnation) if isinstance(event, ev.Finished | ev.Failed) else None
        actions = self.scheduler.handle(event)
        check(self.scheduler)
        for action in actions:
            if isinstance(action, ev.Dispatch):
                self.book_dispatch(action)
            elif isinstance(action, ev.Complete | ev.Fail | ev.Cancel):
                if isinstance(action, ev.Fail) and isinstance(action.error, FunctionSetAsideError):
                    assert (action.function, len(action.error.losses)) == (self.aside, self.losses[action.function])
                    self.aside, self.error = None, self.error or action.error
                for function in action.functions if isinstance(action, ev.Complete) else (action.function,):
                    assert function not in self.outcomes, "a second outcome"
                    assert function < self.submitted
                    self.outcomes[function] = action
                    self.unbook(function)
            elif isinstance(action, ev.Recall):
                where = (action.worker, action.incarnation)
                for function in action.functions:
                    assert self.sent[function] == where
                    self.recalled.add((function, where))
                is_asked_for_all = self.fails or self.lost or self.held or where in self.draining
                assert is_asked_for_all or len(action.functions) == self.load(where) // 2
            elif isinstance(action, ev.AwaitMoment):
                assert not self.waits_for_moment
                self.waits_for_moment = True
            elif isinstance(action, ev.Release):
                where = (action.worker, action.incarnation)
                self.draining.remove(where)
                assert where not in self.sent.values(), "released with something in flight"
                self.bury(where)
            elif isinstance(action, ev.Forget):
                assert action.below > self.forgotten
                self.forgotten = action.below
        assert self.aside is None, "it has used up its attempts"
        self.fails = False
        waiting_to_be_forgotten = self.done_below() - self.forgotten
        assert waiting_to_be_forgotten >= 0, "forgets what is not over"
        assert waiting_to_be_forgotten < self.forget_every
        return actions

    def check_asked_for_all(self, actions: list[Action], processes: list[tuple[int, str]]) -> None:
        """But for a function that is alone: it has been begun, or is about to be."""
        recalls = [action for action in actions if isinstance(action, ev.Recall)]
        asked = {(frozenset(recall.functions), recall.worker, recall.incarnation) for recall in recalls}
        for where in processes:
            there = frozenset(function for function, at in self.sent.items() if at == where)
            assert len(there) < 2 or (there, *where) in asked

    def check_cancelled(self, functions: Iterable[int]) -> None:
        """What came back, if the user has seen the error since; else it runs again, or was set aside."""
        for function in functions:
            outcome = self.outcomes.get(function)
            if isinstance(outcome, ev.Fail):
                assert function >= self.taken_below
                continue
            assert (function < self.taken_below) == isinstance(outcome, ev.Cancel)
            assert outcome is None or outcome == ev.Cancel(function, self.error_taken)

    def book_dispatch(self, action: ev.Dispatch) -> None:
        where = (action.worker, action.incarnation)
        assert self.pending() is None
        assert not self.lost
        assert where in self.usable(), "sent to a process that takes nothing"
        levels = {at: len(self.open_batches(at)) for at in self.usable() if not self.runs_a_lost_one(at)}
        assert where in levels, "beside one that was lost"
        assert action.is_repeated == (self.next_again() in self.losses), "something older waited"
        assert not action.is_repeated or (len(action.functions) == 1 and not self.load(where)), "not by itself"
        assert levels[where] < self.room, "more batches than agreed"
        others = [at for at in levels if levels[at] < levels[where]]
        assert all(self.load(at) and at in self.stalled() for at in others), "another worker had less to do"
        assert action.rested == (not self.load(where) and where != self.reporting)
        assert 0 < len(action.functions) <= LARGEST_BATCH
        assert len(action.functions) <= max(1, self.queued() // 4)
        for function in action.functions:
            assert function not in self.outcomes
            assert function not in self.sent, "in flight twice"
            if function not in self.first_dispatches:
                assert not self.first_dispatches or function > self.first_dispatches[-1], "out of order"
                assert all(other in self.later for other in self.waiting_again()), "something older waited"
                assert not self.held, "begun while dispatch is held"
                self.first_dispatches.append(function)
            else:
                assert function >= self.taken_below, "it belongs to an error that the user has seen"
                assert action.is_repeated == (function in self.losses)
                assert function == self.next_again()
                assert function in self.losses or not self.held, "begun while dispatch is held"
            self.sent[function] = where
        self.batches.setdefault(where, []).append(set(action.functions))

    def unbook(self, function: int) -> None:
        where = self.sent.pop(function, None)
        if where is not None:
            for batch in self.batches[where]:
                batch.discard(function)

    def open_batches(self, where: tuple[int, str]) -> list[set[int]]:
        return [batch for batch in self.batches.get(where, []) if batch]

    def stalled(self) -> set[tuple[int, str]]:
        return {(process.worker, process.incarnation) for process in self.scheduler._stalled}

    def queued(self) -> int:
        return self.submitted - len(self.outcomes) - len(self.sent)

    def waiting_again(self) -> list[int]:
        return [f for f in self.first_dispatches if f not in self.sent and f not in self.outcomes]

    def next_again(self) -> int | None:
        """Of what was sent before: which has to go next; none, where others come before them."""
        waiting = self.waiting_again()
        once = [function for function in waiting if function in self.losses and function not in self.later]
        back = [function for function in waiting if function not in self.losses]
        if once or (back and not self.held):
            return min(once or back)
        often = [function for function in self.later if function in waiting]
        have_begun = self.first_never_sent() >= self.later[often[0]] if often else False
        have_begun = have_begun and all(self.load(where) < 2 for where in self.live.items())
        return often[0] if often and (self.held or have_begun) else None

    def first_never_sent(self) -> int:
        known = self.outcomes.keys() | set(self.first_dispatches)
        return next(function for function in itertools.count() if function not in known)

    def runs_a_lost_one(self, where: tuple[int, str]) -> bool:
        return any(at == where and function in self.losses for function, at in self.sent.items())

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
        lost = sorted(function for function, at in self.sent.items() if at == where)
        for function in lost:
            self.losses[function] = self.losses.get(function, 0) + 1
            self.unbook(function)
        self.put_behind(lost)
        if len(lost) == 1 and lost[0] >= self.taken_below:
            limit = self.limits.get(lost[0], 5)
            if limit is not None and self.losses[lost[0]] >= limit:
                self.aside, self.fails = lost[0], True

    def put_behind(self, functions: Iterable[int]) -> None:
        for function in sorted(functions):
            if self.losses.get(function, 0) > 1:
                self.later.pop(function, None)
                self.later[function] = self.submitted

    def pick_sent(self, data: st.DataObject) -> tuple[int, tuple[int, str]]:
        return data.draw(st.sampled_from(sorted(self.sent.items())))

    def pick_several(self, data: st.DataObject) -> tuple[tuple[int, ...], tuple[int, str]]:
        _, where = self.pick_sent(data)
        there = sorted(function for function, at in self.sent.items() if at == where)
        return tuple(data.draw(st.lists(st.sampled_from(there), min_size=1, unique=True))), where

    # -- events as they come

    @rule(number=st.sampled_from([1, 2, 5, 40]), limit=st.sampled_from([5, 5, 1, 2, None]))
    def submit(self, number: int, limit: int | None = 5) -> None:
        for _ in range(number):
            self.limits[self.submitted] = limit
            self.submitted += 1
            self.announced = None
            self.tell(ev.Submitted(self.submitted - 1, limit))

    @rule(worker=st.integers(0, WORKERS - 1), readmit=st.booleans())
    def join(self, worker: int, readmit: bool) -> None:
        new = (worker, next(self.names))
        if worker in self.live:
            self.bury((worker, self.live[worker]))
        if readmit:
            self.removed.discard(worker)
        if worker not in self.removed:
            self.live[worker] = new[1]
        self.tell(ev.WorkerJoined(*new, readmit))
        assert (new in self.scheduler.workers.items()) == (worker not in self.removed)
        assert not {where for where in self.draining if where[0] == worker}, "the loss of the old one releases it"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(sorted(self.live.items())))
        given_back = {function for function, at in self.sent.items() if at == where}
        self.bury(where)
        self.tell(ev.WorkerLost(*where))
        assert where not in self.draining, "the loss releases it"
        self.check_cancelled(given_back)

    @rule(worker=st.integers(0, WORKERS - 1))
    def drain(self, worker: int) -> None:
        self.removed.add(worker)
        where = (worker, self.live.get(worker, ""))
        again = where in self.draining
        if worker in self.live:
            self.draining.add(where)
        actions = self.tell(ev.WorkerDraining(worker))
        self.check_asked_for_all(actions, [where] if where in self.live.items() and not again else [])
        assert (ev.Release(*where) in actions) == (where[1] != "" and not again and where not in self.sent.values())

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 1e-5, 1e-3, 1.0]))
    def finish(self, data: st.DataObject, seconds: float) -> None:
        functions, where = self.pick_several(data)
        late = [one for one in data.draw(st.sets(st.integers(0, self.submitted))) if self.sent.get(one) != where]
        assert self.tell(ev.Finished(*where, (*functions, *late), seconds))[0] == ev.Complete(functions)

    @precondition(lambda self: self.waits_for_moment)
    @rule()
    def pass_a_moment(self) -> None:
        self.waits_for_moment = False
        self.tell(ev.MomentPassed())

    @precondition(lambda self: any(self.sent.get(function) == where for function, where in self.recalled))
    @rule(data=st.data())
    def answer_recall(self, data: st.DataObject) -> None:
        askable = sorted((where, function) for function, where in self.recalled if self.sent.get(function) == where)
        where, _ = data.draw(st.sampled_from(askable))
        self.give_back(tuple(function for at, function in askable if at == where), where)

    def give_back(self, functions: tuple[int, ...], where: tuple[int, str]) -> None:
        for function in functions:
            self.unbook(function)
            self.recalled.discard((function, where))
        self.put_behind(functions)
        self.tell(ev.HandedBack(*where, functions))
        self.check_cancelled(functions)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), error=st.sampled_from(ERRORS))
    def fail(self, data: st.DataObject, error: BaseException) -> None:
        function, where = self.pick_sent(data)
        is_explained = error is LOST and (self.loss is not None or function < self.loss_below)
        is_first = not is_explained and self.error is None and function >= self.taken_below
        if is_first:
            self.error = error
        self.fails = True
        outcome, *rest = self.tell(ev.Failed(*where, function, error))
        assert outcome == (ev.Cancel(function, self.loss_told) if is_explained else ev.Fail(function, error))
        if is_first:
            self.check_asked_for_all(rest, [other for other in self.live.items() if other != where])

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), leaves=st.booleans())
    def hand_back(self, data: st.DataObject, leaves: bool) -> None:
        functions, where = self.pick_several(data)
        if leaves:
            self.leaving.add(where)
            self.tell(ev.WorkerLeaves(*where))
        self.give_back(functions, where)

    @rule(loss=st.sampled_from([LOST, LOST_TOO]))
    def lose_servers(self, loss: BaseException) -> None:
        was_lost = self.lost
        if self.loss is None:
            self.loss = self.loss_told = loss
        self.lost = True
        self.check_asked_for_all(self.tell(ev.ServersLost(loss)), [] if was_lost else [*self.live.items()])

    @rule()
    def restore_servers(self) -> None:
        self.lost = False
        self.tell(ev.ServersRestored())

    @rule()
    def hold(self) -> None:
        self.held = True
        actions = self.tell(ev.DispatchHeld())
        assert {type(action) for action in actions} <= {ev.Recall, ev.AwaitMoment, ev.Dispatch}
        self.check_asked_for_all(actions, [*self.live.items()])

    @rule()
    def release(self) -> None:
        self.held = False
        self.tell(ev.DispatchReleased())

    @rule()
    def take_error(self) -> None:
        error = self.pending()
        if error is None:
            assert self.tell(ev.ErrorTaken()) == []
            return
        if self.loss is not None:
            self.loss_below = self.submitted
        self.error = self.loss = self.announced = None
        self.error_taken, self.taken_below = error, self.submitted
        queued = [f for f in range(self.submitted) if f not in self.sent.keys() | self.outcomes.keys()]
        actions = self.tell(ev.ErrorTaken())
        assert actions[: len(queued)] == [ev.Cancel(function, error) for function in queued]

    @precondition(lambda self: self.dead or self.live)
    @rule(data=st.data())
    def hear_what_is_out_of_date(self, data: st.DataObject) -> None:
        """From a process that is dead, or of a function that is not there."""
        where = data.draw(st.sampled_from(self.dead + sorted(self.live.items())))
        elsewhere = [function for function in range(self.submitted + 1) if self.sent.get(function) != where]
        function = data.draw(st.sampled_from(elsewhere))
        several = (function,)
        news = [ev.Finished(*where, several, 1.0), ev.Failed(*where, function, WRONG), ev.HandedBack(*where, several)]
        if where in self.dead:
            news += [kind(*where) for kind in (ev.WorkerLeaves, ev.WorkerLost, ev.WorkerJoined)]
        assert self.tell(data.draw(st.sampled_from(news))) == []

    # -- what holds in between

    @invariant()
    def the_machine_agrees_with_the_book(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert scheduler.in_flight == len(self.sent)
        assert scheduler.queued == self.submitted - len(self.outcomes) - len(self.sent)
        assert scheduler.pending_error is self.pending()
        assert scheduler.servers_lost == self.lost
        half_way = self.pending() is None and not self.losses.keys() <= self.outcomes.keys()
        assert scheduler.at_rest == (self.held and not self.sent and not half_way)
        assert scheduler.workers == {where[0]: where[1] for where in self.usable() if where not in self.stalled()}
        assert all(self.load(where) for where in self.draining), "released as soon as it has nothing"
        assert {function: scheduler.worker_of(function) for function in self.sent} == {
            function: where[0] for function, where in self.sent.items()
        }
        may_go = self.next_again() is not None or self.first_never_sent() < self.submitted
        if may_go and self.pending() is None and not self.lost and not self.held:
            takers = [
                where for where in self.usable() if where not in self.stalled() and not self.runs_a_lost_one(where)
            ]
            room = 1 if self.next_again() in self.losses else self.room
            assert all(len(self.open_batches(where)) >= room for where in takers), "a worker idles"
            assert all(self.load(where) for where in self.stalled())

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
                self.tell(ev.Finished(*where, (function,), 1e-3))
        assert sorted(self.outcomes) == list(range(self.submitted))
        assert self.first_dispatches == sorted(self.first_dispatches)


def histories(number: int) -> settings:
    slow = [HealthCheck.too_slow]
    return settings(max_examples=number, stateful_step_count=50, deadline=None, suppress_health_check=slow)


TestHistory = History.TestCase
TestHistory.settings = histories(30)


@pytest.mark.soak  # the more, the rarer
class TestManyHistories(History.TestCase):  # type: ignore[misc]
    settings = histories(300)
