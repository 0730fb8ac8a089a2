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
from torchstrat.parameter_server.scheduler import LARGEST_BATCH, Scheduler
from torchstrat.parameter_server.scheduler_events import (
    Action,
    AllDone,
    AwaitMoment,
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
    MomentPassed,
    Quiet,
    Recall,
    Release,
    ServersLost,
    ServersRestored,
    Submitted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeaves,
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
    return [(function, each.worker) for each in actions if isinstance(each, Dispatch) for function in each.functions]


def finished(worker: int, incarnation: str, *functions: int, seconds: float = 1.0) -> Finished:
    """Functions so long that batches hold one."""
    return Finished(worker, incarnation, functions, seconds * len(functions))


# ---- how functions run -----------------------------------------------------------------------------------------------


def test_functions_go_out_in_order_to_whoever_is_free() -> None:
    scheduler = Scheduler(1)
    assert sent(play(scheduler, *submitted(0, 1, 2, 3), *joined(0, 1))) == [(0, 0), (1, 1)]
    assert (scheduler.queued, scheduler.in_flight, scheduler.unfinished, scheduler.done) == (2, 2, 4, False)
    assert play(scheduler, finished(1, "1a", 1)) == [Complete((1,)), Dispatch((2,), 1, "1a", rested=False)]
    assert play(scheduler, finished(0, "0a", 0)) == [Complete((0,)), Dispatch((3,), 0, "0a", rested=False)]
    assert play(scheduler, finished(0, "0a", 3)) == [Complete((3,))]
    assert play(scheduler, finished(1, "1a", 2)) == [Complete((2,)), AllDone()]
    assert scheduler.done


def test_a_worker_is_rested_when_it_had_nothing_to_do() -> None:
    scheduler = Scheduler(1)
    assert play(scheduler, *joined(0), *submitted(0)) == [Dispatch((0,), 0, "0a", rested=True)]
    play(scheduler, finished(0, "0a", 0))
    assert play(scheduler, *submitted(1, 2)) == [Dispatch((1,), 0, "0a", rested=True)]
    assert play(scheduler, finished(0, "0a", 1))[1:] == [Dispatch((2,), 0, "0a", rested=False)]


def test_idle_workers_come_before_a_second_function() -> None:
    scheduler = Scheduler(batches_per_worker=2)
    actions = play(scheduler, *joined(0, 1, 2), *submitted(*range(7)))
    assert sent(actions) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
    assert [action.rested for action in actions if isinstance(action, Dispatch)] == [True] * 3 + [False] * 3
    assert scheduler.functions_at(0) == [0, 3]
    assert scheduler.worker_of(4) == 1
    assert scheduler.worker_of(6) is None


def test_whoever_waits_longest_is_next() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1, 2), *submitted(0, 1, 2), finished(1, "1a", 1), finished(0, "0a", 0))
    assert sent(play(scheduler, *submitted(3, 4))) == [(3, 1), (4, 0)]


def test_a_lost_function_runs_before_those_that_never_ran() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(0, 1, 2, 3))
    assert play(scheduler, WorkerLost(0, "0a")) == []
    assert sent(play(scheduler, finished(1, "1a", 1))) == [(0, 1)]
    assert sent(play(scheduler, WorkerJoined(0, "0b"))) == [(2, 0)]


def test_lost_functions_run_again_oldest_first() -> None:
    scheduler = Scheduler(batches_per_worker=2)
    play(scheduler, *joined(0, 1), *submitted(*range(6)))
    play(scheduler, WorkerLost(1, "1a"), WorkerLost(0, "0a"))
    assert sent(play(scheduler, WorkerJoined(5, "5a"), WorkerJoined(6, "6a"))) == [(0, 5), (1, 5), (2, 6), (3, 6)]


def test_a_lost_function_goes_to_a_free_worker_at_once() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(0))
    assert play(scheduler, WorkerLost(0, "0a")) == [Dispatch((0,), 1, "1a", rested=True)]


def test_a_new_incarnation_implies_the_loss_of_the_old_one() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0), *submitted(0))
    assert play(scheduler, WorkerJoined(0, "0b")) == [Dispatch((0,), 0, "0b", rested=True)]
    assert play(scheduler, WorkerLost(0, "0a"), finished(0, "0a", 0)) == []
    assert play(scheduler, finished(0, "0b", 0)) == [Complete((0,)), AllDone()]


@pytest.mark.parametrize("when", ["queued", "elsewhere"])
def test_a_result_of_a_given_up_process_does_not_count(when: str) -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0), *submitted(0), WorkerLost(0, "0a"))
    if when == "elsewhere":
        assert sent(play(scheduler, WorkerJoined(0, "0b"))) == [(0, 0)]
    assert play(scheduler, finished(0, "0a", 0), Failed(0, "0a", 0, WRONG), HandedBack(0, "0a", (0,))) == []
    assert scheduler.unfinished == 1
    assert scheduler.pending_error is None


def test_news_that_makes_no_sense_changes_nothing() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(0, 1, 2), finished(0, "0a", 0))
    for event in (
        finished(0, "0a", 0),  # twice
        finished(0, "0a", 1),  # runs elsewhere
        finished(1, "0a", 1),
        finished(0, "0a", 7),  # unknown
        Failed(0, "0a", 0, WRONG),
        HandedBack(0, "0a", (1,)),
        WorkerLeaves(1, "1b"),
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
    scheduler = Scheduler(1)
    play(scheduler, *joined(0), WorkerLost(0, "0a"), WorkerJoined(0, "0b"), WorkerJoined(0, "0a"))
    assert scheduler.workers == {0: "0b"}
    play(scheduler, WorkerLost(1, "1a"), WorkerJoined(1, "1a"))  # dead before it was introduced
    assert scheduler.workers == {0: "0b"}


def test_submissions_are_numbered_without_a_gap() -> None:
    scheduler = Scheduler(1, first_function=100)
    play(scheduler, *joined(0), Submitted(100))
    with pytest.raises(InvalidArgumentError, match=r"function 102 .* 101 is the next"):
        scheduler.handle(Submitted(102))
    with pytest.raises(InvalidArgumentError, match="function 100"):
        scheduler.handle(Submitted(100))
    assert scheduler.next_function == 101
    assert play(scheduler, finished(0, "0a", 100)) == [Complete((100,)), AllDone()]


@pytest.mark.parametrize("wrong", [{"batches_per_worker": 0}, {"forget_every": 0}])
def test_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}=0"):
        Scheduler(**wrong)


# ---- workers that leave ----------------------------------------------------------------------------------------------


def test_a_function_that_is_handed_back_runs_elsewhere_first() -> None:
    scheduler = Scheduler(batches_per_worker=2)
    play(scheduler, *joined(0, 1), *submitted(*range(6)))
    assert play(scheduler, WorkerLeaves(0, "0a"), HandedBack(0, "0a", (0,))) == []
    assert scheduler.workers == {1: "1a"}
    assert sent(play(scheduler, finished(1, "1a", 1))) == [(0, 1)]
    assert play(scheduler, finished(0, "0a", 2)) == [Complete((2,))], "it may finish what it has, and gets no more"
    assert sent(play(scheduler, WorkerLost(0, "0a"), WorkerJoined(0, "0b"))) == [(4, 0), (5, 0)]


def test_an_idle_process_that_leaves_gets_nothing() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), WorkerLeaves(0, "0a"))
    assert sent(play(scheduler, *submitted(0, 1))) == [(0, 1)]
    assert sent(play(scheduler, WorkerJoined(0, "0b"))) == [(1, 0)]


def test_a_removed_worker_finishes_and_is_released() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(0, 1, 2))
    assert play(scheduler, WorkerDraining(0), WorkerDraining(0)) == []
    assert play(scheduler, finished(0, "0a", 0)) == [Complete((0,)), Release(0, "0a")]
    assert scheduler.workers == {1: "1a"}
    assert sent(play(scheduler, finished(1, "1a", 1))) == [(2, 1)]


def test_a_removed_worker_is_released_whatever_ends_its_function() -> None:
    for event, expected in (
        (Failed(0, "0a", 0, WRONG), [Fail(0, WRONG), Release(0, "0a"), Quiet()]),
        (HandedBack(0, "0a", (0,)), [Release(0, "0a")]),
        (WorkerLost(0, "0a"), [Release(0, "0a")]),
        (WorkerJoined(0, "0b"), [Release(0, "0a")]),
    ):
        scheduler = Scheduler(1)
        play(scheduler, *joined(0), *submitted(0), WorkerDraining(0))
        assert play(scheduler, event) == expected, event
        assert scheduler.workers == {}


def test_an_idle_worker_is_released_at_once() -> None:
    scheduler = Scheduler(1)
    assert play(scheduler, *joined(0), WorkerDraining(0)) == [Release(0, "0a")]
    assert play(scheduler, WorkerDraining(7), WorkerJoined(7, "7a"), *submitted(0)) == []


def test_a_removed_worker_stays_out_until_it_is_readmitted() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0), WorkerDraining(0), WorkerJoined(0, "0b"), *submitted(0))
    assert scheduler.workers == {}
    assert sent(play(scheduler, WorkerJoined(0, "0b", readmit=True))) == [(0, 0)]
    assert sent(play(scheduler, WorkerJoined(0, "0c"))) == [(0, 0)], "from then on it is a worker like others"


# ---- after an error --------------------------------------------------------------------------------------------------


def test_an_error_stops_the_queue_until_it_is_taken() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(*range(5)))
    assert play(scheduler, Failed(0, "0a", 0, WRONG)) == [Fail(0, WRONG)]
    assert scheduler.pending_error is WRONG
    assert play(scheduler, WorkerJoined(2, "2a")) == []
    assert play(scheduler, finished(1, "1a", 1)) == [Complete((1,)), Quiet()]
    assert scheduler.quiet
    cancelled = [Cancel(function, WRONG) for function in (2, 3, 4)]
    assert play(scheduler, ErrorTaken()) == [*cancelled, AllDone()]
    assert scheduler.pending_error is None
    assert sent(play(scheduler, *submitted(5))) == [(5, 0)]


def test_only_the_first_error_is_kept() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(0, 1), Failed(1, "1a", 1, WRONG))
    assert play(scheduler, Failed(0, "0a", 0, WRONG_TOO)) == [Fail(0, WRONG_TOO), Quiet()]
    assert scheduler.pending_error is WRONG
    play(scheduler, ErrorTaken())
    assert scheduler.pending_error is None


def test_what_a_lost_worker_gives_back_after_an_error_is_cancelled_in_order() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1, 2), *submitted(*range(5)), Failed(1, "1a", 1, WRONG), WorkerLost(2, "2a"))
    assert play(scheduler, HandedBack(0, "0a", (0,))) == [Quiet()]
    taken = play(scheduler, ErrorTaken())
    assert taken == [*(Cancel(function, WRONG) for function in (0, 2, 3, 4)), AllDone()]


@pytest.mark.parametrize("end", [WorkerLost(1, "1a"), HandedBack(1, "1a", (1,)), WorkerJoined(1, "1b")])
def test_what_was_submitted_before_an_error_was_taken_never_runs_again(end: Event) -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(0, 1), Failed(0, "0a", 0, WRONG), ErrorTaken())
    assert play(scheduler, *submitted(2)) == [Dispatch((2,), 0, "0a", rested=True)]
    assert play(scheduler, end) == [Cancel(1, WRONG)]


def test_what_was_submitted_before_an_error_was_taken_raises_no_second_one() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(0, 1), Failed(0, "0a", 0, WRONG), ErrorTaken())
    assert play(scheduler, Failed(1, "1a", 1, WRONG_TOO)) == [Fail(1, WRONG_TOO), AllDone()]
    assert scheduler.pending_error is None


def test_a_submission_while_an_error_is_pending_is_cancelled_with_the_rest() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0), *submitted(0), Failed(0, "0a", 0, WRONG))
    assert play(scheduler, *submitted(1)) == [Quiet()]
    assert play(scheduler, ErrorTaken()) == [Cancel(1, WRONG), AllDone()]


# ---- lost servers ----------------------------------------------------------------------------------------------------


def test_lost_servers_stop_everything_until_they_are_back() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(*range(4)))
    assert play(scheduler, ServersLost(LOST)) == []
    assert scheduler.pending_error is LOST
    assert play(scheduler, finished(0, "0a", 0)) == [Complete((0,))]
    unreachable = ParameterServerUnavailable("ps 0 does not answer")
    assert play(scheduler, Failed(1, "1a", 1, unreachable)) == [Cancel(1, LOST), Quiet()]
    assert play(scheduler, ErrorTaken()) == [Cancel(2, LOST), Cancel(3, LOST), AllDone()]
    assert scheduler.servers_lost
    assert play(scheduler, *submitted(4)) == [Quiet()], "the shell is told at once"
    assert sent(play(scheduler, ServersRestored())) == [(4, 0)]
    assert not scheduler.servers_lost


def test_lost_servers_go_before_a_functions_error_and_are_taken_together() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0), *submitted(0, 1), Failed(0, "0a", 0, WRONG), ServersLost(LOST))
    assert scheduler.pending_error is LOST
    assert play(scheduler, ErrorTaken()) == [Cancel(1, LOST), AllDone()]
    assert scheduler.pending_error is None


def test_a_functions_own_error_stays_its_own_when_servers_are_lost() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0), *submitted(0), ServersLost(LOST))
    assert play(scheduler, Failed(0, "0a", 0, WRONG))[0] == Fail(0, WRONG)


def test_a_loss_is_told_even_if_the_servers_are_back() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0), *submitted(0, 1), ServersLost(LOST), ServersRestored(), finished(0, "0a", 0))
    assert scheduler.pending_error is LOST
    assert play(scheduler, ErrorTaken()) == [Cancel(1, LOST), AllDone()]
    assert sent(play(scheduler, *submitted(2))) == [(2, 0)]


def test_a_failure_that_a_loss_caused_is_no_new_error_after_the_recovery() -> None:
    scheduler = Scheduler(1)
    play(scheduler, *joined(0, 1), *submitted(0), ServersLost(LOST), ErrorTaken(), ServersRestored(), *submitted(1))
    assert play(scheduler, Failed(0, "0a", 0, LOST)) == [Cancel(0, LOST)]
    assert play(scheduler, Failed(1, "1a", 1, LOST)) == [Fail(1, LOST), Quiet()], "this one was later"


def test_a_second_loss_is_told_too() -> None:
    scheduler = Scheduler(1)
    second = ParameterServerUnavailable("ps 1 is gone")
    assert play(scheduler, ServersLost(LOST), ServersLost(second)) == [Quiet()]
    assert scheduler.pending_error is LOST
    assert play(scheduler, ErrorTaken()) == [AllDone()]
    assert play(scheduler, ServersLost(second)) == [Quiet()]
    assert scheduler.pending_error is second


# ---- batches ---------------------------------------------------------------------------------------------------------

SHORT = 1e-5


def batches(actions: list[Action]) -> list[tuple[tuple[int, ...], int]]:
    """(functions, worker) of what is dispatched."""
    return [(each.functions, each.worker) for each in actions if isinstance(each, Dispatch)]


def timed(seconds: float, workers: int = 1, batches_per_worker: int = 2) -> Scheduler:
    """Functions 0 to 9 ran; they took that long each. The next is 10."""
    scheduler = Scheduler(batches_per_worker)
    play(scheduler, *joined(*range(workers)))
    for function in range(10):
        (dispatch,) = play(scheduler, Submitted(function))
        assert isinstance(dispatch, Dispatch)
        where = (dispatch.worker, dispatch.incarnation)
        play(scheduler, finished(*where, function, seconds=seconds))
    return scheduler


def test_batches_hold_one_until_it_is_known_how_long_functions_take() -> None:
    scheduler = Scheduler()
    assert batches(play(scheduler, *submitted(*range(100)), *joined(0))) == [((0,), 0), ((1,), 0)]
    assert len(batches(play(scheduler, finished(0, "0a", 0, seconds=SHORT)))[0][0]) == 98 // 4


@pytest.mark.parametrize(("waiting", "size"), [(1, 1), (7, 1), (8, 2), (100, 25), (1024, 256), (100_000, 256)])
def test_a_batch_of_short_functions_is_a_share_of_what_waits(waiting: int, size: int) -> None:
    scheduler = timed(SHORT, workers=0 + 1)
    play(scheduler, WorkerLost(0, "0a"), *submitted(*range(10, 10 + waiting)))
    (functions, _), *_ = batches(play(scheduler, WorkerJoined(0, "0b")))
    assert functions == tuple(range(10, 10 + size))


@pytest.mark.parametrize(("seconds", "size"), [(1e-5, 250), (1e-4, 50), (1e-3, 5), (5e-3, 1), (1.0, 1), (0.0, 250)])
def test_a_batch_takes_about_five_milliseconds(seconds: float, size: int) -> None:
    scheduler = timed(seconds)
    play(scheduler, WorkerLost(0, "0a"), *submitted(*range(10, 1010)))
    (functions, _), *_ = batches(play(scheduler, WorkerJoined(0, "0b")))
    assert abs(len(functions) - size) <= 1


def test_one_long_function_is_soon_forgotten() -> None:
    scheduler = timed(SHORT)
    play(scheduler, *submitted(*range(10, 2000)))
    play(scheduler, finished(0, "0a", 10, seconds=1.0))
    ended = 0
    while max(len(batch.functions) for batch in scheduler._processes[0].batches) < 100:
        first = next(iter(scheduler._processes[0].batches)).functions
        ended += len(first)
        assert ended < 300
        play(scheduler, finished(0, "0a", *first, seconds=SHORT))


def test_many_workers_get_shares_of_one_size() -> None:
    scheduler = timed(SHORT)
    play(scheduler, WorkerLost(0, "0a"), *submitted(*range(10, 650)))
    sizes = [len(functions) for functions, _ in batches(play(scheduler, *joined(*range(1, 17))))]
    assert len(sizes) == 32
    assert sizes[0] == 640 // 4, "the first is alone when it joins"
    assert all(size <= 20 for size in sizes[20:])


def test_two_batches_at_most_until_one_has_all_its_outcomes() -> None:
    scheduler = timed(SHORT)
    play(scheduler, WorkerLost(0, "0a"), *submitted(*range(10, 110)))
    (first, _), (second, _) = batches(play(scheduler, WorkerJoined(0, "0b")))
    assert (len(first), len(second)) == (25, 18)
    actions = play(scheduler, Finished(0, "0b", first[:-1], SHORT))
    assert actions == [Complete(first[:-1])], "partial outcomes make no room"
    actions = play(scheduler, Finished(0, "0b", second, SHORT))
    assert batches(actions) == [(tuple(range(53, 53 + 57 // 4)), 0)]
    assert play(scheduler, Finished(0, "0b", (*first, *second), SHORT))[0] == Complete(first[-1:]), "each counts once"


def test_what_was_lost_goes_in_batches_before_the_rest() -> None:
    scheduler = timed(SHORT)
    play(scheduler, WorkerLost(0, "0a"), *submitted(*range(10, 30)))
    (first, _), (second, _) = batches(play(scheduler, WorkerJoined(0, "0b")))
    assert (first, second) == ((10, 11, 12, 13, 14), (15, 16, 17))
    play(scheduler, Finished(0, "0b", (10, 11), SHORT), WorkerLost(0, "0b"))
    (first, _), *_ = batches(play(scheduler, WorkerJoined(0, "0c")))
    assert first == (12, 13, 14, 15), "only what was not reported"


def test_news_of_a_batch_are_each_taken_for_itself() -> None:
    scheduler = timed(SHORT)
    play(scheduler, WorkerLost(0, "0a"), *submitted(*range(10, 30)), WorkerJoined(0, "0b"))
    assert play(scheduler, Failed(0, "0b", 12, WRONG)) == [Fail(12, WRONG)]
    assert play(scheduler, Finished(0, "0b", (10, 11, 12), SHORT)) == [Complete((10, 11))]
    assert play(scheduler, HandedBack(0, "0b", (13, 14, 15, 16, 17))) == [Quiet()]
    assert play(scheduler, ErrorTaken()) == [*(Cancel(function, WRONG) for function in range(13, 30)), AllDone()]


# ---- recall ----------------------------------------------------------------------------------------------------------


def behind_a_slow_one(functions: int) -> Scheduler:
    """Worker 0 has this many functions, from 10, and runs the first; worker 1 has just joined, and nothing waits."""
    scheduler = timed(SHORT, workers=1, batches_per_worker=200)
    play(scheduler, *submitted(*range(10, 10 + functions)))
    assert len(scheduler.functions_at(0)) == functions
    assert play(scheduler, *joined(1)) == ([AwaitMoment()] if functions > 1 else [])
    return scheduler


def test_functions_behind_a_slow_one_are_taken_away_by_halves() -> None:
    scheduler = behind_a_slow_one(100)
    assert play(scheduler, MomentPassed()) == [AwaitMoment()], "the first moment was not a whole one for it"
    recall, _ = play(scheduler, MomentPassed())
    assert recall == Recall(tuple(range(60, 110)), 0, "0a")
    assert play(scheduler, MomentPassed()) == [AwaitMoment()], "it is not asked twice"
    moved = []
    left = 100
    while isinstance(recall, Recall):
        actions = play(scheduler, HandedBack(0, "0a", recall.functions))
        left -= len(recall.functions)
        while at_one := scheduler.functions_at(1):
            assert {worker for _, worker in sent(actions)} <= {1}, "back to the one that it was taken from"
            moved += at_one
            actions = play(scheduler, Finished(1, "1a", tuple(at_one), SHORT * len(at_one)))
        (recall,) = [each for each in actions if isinstance(each, Recall)] or [None]
        assert recall is None or len(recall.functions) == left // 2
    assert sorted(moved) == list(range(11, 110))
    assert scheduler.functions_at(0) == [10]
    assert batches(play(scheduler, *submitted(110, 111))) == [((110,), 1), ((111,), 1)], "none goes behind the slow one"
    assert play(scheduler, finished(0, "0a", 10))[0] == Complete((10,))
    assert batches(play(scheduler, *submitted(112))) == [((112,), 0)]


def test_who_reports_keeps_what_it_has() -> None:
    scheduler = behind_a_slow_one(10)
    for function in range(10, 19):
        assert Recall not in map(type, play(scheduler, MomentPassed()))
        play(scheduler, finished(0, "0a", function, seconds=SHORT))


def test_who_is_asked_and_has_nothing_to_give_is_asked_again_after_its_next_outcome() -> None:
    scheduler = behind_a_slow_one(10)
    play(scheduler, MomentPassed())
    assert Recall in map(type, play(scheduler, MomentPassed()))
    for _ in range(3):  # it has begun them all, and answered so
        assert play(scheduler, MomentPassed()) == [AwaitMoment()]
    play(scheduler, finished(0, "0a", 10, seconds=SHORT), MomentPassed())
    assert Recall in map(type, play(scheduler, MomentPassed()))


@pytest.mark.parametrize("end", [WorkerLost(0, "0a"), WorkerJoined(0, "0b")])
def test_a_worker_that_is_lost_while_it_is_asked(end: Event) -> None:
    scheduler = behind_a_slow_one(4)
    play(scheduler, MomentPassed(), MomentPassed(), end)
    assert play(scheduler, HandedBack(0, "0a", (12, 13))) == []
    assert scheduler.in_flight == 4


def test_a_worker_that_leaves_while_it_is_asked_hands_back_all_the_same() -> None:
    scheduler = behind_a_slow_one(4)
    play(scheduler, MomentPassed(), MomentPassed(), WorkerLeaves(0, "0a"))
    assert sent(play(scheduler, HandedBack(0, "0a", (12, 13)))) == [(12, 1), (13, 1)]
    assert sent(play(scheduler, HandedBack(0, "0a", (11,)))) == [(11, 1)]
    assert scheduler.functions_at(0) == [10]


def test_everybody_is_asked_for_all_when_an_error_comes_up() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1, 2), *submitted(*range(6)))
    assert play(scheduler, Failed(0, "0a", 0, WRONG))[1:] == [Recall((1, 4), 1, "1a"), Recall((2, 5), 2, "2a")]
    assert play(scheduler, Failed(1, "1a", 1, WRONG_TOO)) == [Fail(1, WRONG_TOO)], "once"
    play(scheduler, HandedBack(0, "0a", (3,)), HandedBack(1, "1a", (4,)), HandedBack(2, "2a", (5,)))
    assert play(scheduler, finished(2, "2a", 2)) == [Complete((2,)), Quiet()]
    assert play(scheduler, ErrorTaken()) == [Cancel(3, WRONG), Cancel(4, WRONG), Cancel(5, WRONG), AllDone()]


@pytest.mark.parametrize("event", [ServersLost(LOST), DispatchHeld(), WorkerDraining(0)])
def test_other_reasons_to_ask_for_all(event: Event) -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0), *submitted(0, 1))
    assert Recall((0, 1), 0, "0a") in play(scheduler, event)


def test_while_dispatch_is_held_only_what_may_have_been_begun_runs() -> None:
    scheduler = Scheduler()
    play(scheduler, *joined(0, 1), *submitted(*range(4)), WorkerLost(0, "0a"), DispatchHeld())
    assert sent(play(scheduler, WorkerJoined(0, "0b"))) == [(0, 0), (2, 0)], "lost: they may have changed something"
    assert play(scheduler, HandedBack(1, "1a", (3,))) == []
    play(scheduler, finished(1, "1a", 1), HandedBack(0, "0b", (2,)))
    assert scheduler.functions_at(1) == [2], "handed back by the second, perhaps begun by the first"
    assert not scheduler.at_rest
    play(scheduler, finished(0, "0b", 0), finished(1, "1a", 2))
    assert scheduler.at_rest
    assert scheduler.queued == 1
    assert sent(play(scheduler, DispatchReleased())) == [(3, 0)]


# ---- the watermark ---------------------------------------------------------------------------------------------------


def test_forget_waits_for_the_oldest_and_comes_in_portions() -> None:
    scheduler = Scheduler(1, forget_every=4)
    play(scheduler, *joined(0, 1), *submitted(*range(12)))
    seen = []
    for function in range(1, 10):
        seen += play(scheduler, finished(1, "1a", function))
    assert not [action for action in seen if isinstance(action, Forget)], "function 0 is in flight"
    assert Forget(10) in play(scheduler, finished(0, "0a", 0))
    assert play(scheduler, finished(1, "1a", 10)) == [Complete((10,))]
    assert play(scheduler, finished(0, "0a", 11)) == [Complete((11,)), AllDone()]


# ---- speed -----------------------------------------------------------------------------------------------------------


def test_no_event_takes_longer_because_the_queue_is_long() -> None:
    """Counted in lines of Python, which no busy machine disturbs."""
    short, long = (_lines_run(queue) for queue in (2_000, 20_000))
    assert short == long


def test_no_function_takes_longer_because_there_are_many_workers() -> None:
    few, many = (_lines_per_function(workers) for workers in (2, 64))
    assert many == pytest.approx(few, rel=0.05)


def _lines_per_function(workers: int) -> float:
    """Of short functions in large batches, in a long queue."""
    scheduler = timed(SHORT, workers)
    for function in range(10, 100_000):
        scheduler.handle(Submitted(function))
    waiting = [(worker, f"{worker}a", tuple(scheduler.functions_at(worker))) for worker in range(workers)]
    lines, ended = _Lines(), 0
    for number in range(workers * 2 + 60):
        if number == workers * 2:  # batches have the size that they keep
            lines, ended = _Lines(), 0
        worker, incarnation, functions = waiting.pop(0)
        with lines:
            actions = scheduler.handle(Finished(worker, incarnation, functions, SHORT * len(functions)))
        waiting += [(each.worker, each.incarnation, each.functions) for each in actions if isinstance(each, Dispatch)]
        ended += len(functions)
    return lines.count / ended


class _Lines:
    """Counts the lines of the scheduler that run within it."""

    def __init__(self) -> None:
        self.count = 0

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


def _lines_run(queue: int) -> list[int]:
    scheduler = Scheduler(batches_per_worker=2)
    counts = []
    lines = _Lines()
    for function in range(queue):
        scheduler.handle(Submitted(function))
    events = [
        *joined(0, 1, 2),
        Submitted(queue),
        *(finished(function % 3, f"{function % 3}a", function) for function in range(3)),
        WorkerLost(0, "0a"),
        WorkerJoined(0, "0b"),
        MomentPassed(),
        HandedBack(2, "2a", (5,)),
        WorkerDraining(1),
        Failed(2, "2a", 9, WRONG),
    ]
    for event in events:
        with lines:
            scheduler.handle(event)
        counts.append(lines.count)
    return counts


def test_a_full_queue_is_no_burden() -> None:
    scheduler, functions = Scheduler(1), 262_144
    for function in range(functions):
        assert scheduler.handle(Submitted(function)) == []
    assert scheduler.queued == functions
    assert sent(play(scheduler, *joined(0))) == [(0, 0)]
    for function in range(1000):
        assert sent(scheduler.handle(finished(0, "0a", function))) == [(function + 1, 0)]
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
        self.batches: dict[tuple[int, str], list[set[int]]] = {}
        self.first_dispatches: list[int] = []
        self.touched: set[int] = set()  # lost with a worker
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
                for function in action.functions if isinstance(action, Complete) else (action.function,):
                    assert function not in self.outcomes, "a second outcome"
                    assert function < self.submitted
                    self.outcomes[function] = action
                    self.unbook(function)
            elif isinstance(action, Recall):
                where = (action.worker, action.incarnation)
                for function in action.functions:
                    assert self.sent[function] == where
                    self.recalled.add((function, where))
                is_asked_for_all = self.fails or self.lost or self.held or where in self.draining
                assert is_asked_for_all or len(action.functions) == self.load(where) // 2
            elif isinstance(action, AwaitMoment):
                assert not self.waits_for_moment
                self.waits_for_moment = True
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
        assert where in self.usable(), "sent to a process that takes nothing"
        levels = {at: len(self.open_batches(at)) for at in self.usable()}
        assert levels[where] < self.room, "more batches than agreed"
        others = [at for at in levels if levels[at] < levels[where]]
        assert all(self.load(at) and at in self.stalled() for at in others), "another worker had less to do"
        assert not (action.rested and self.load(where))
        assert 0 < len(action.functions) <= LARGEST_BATCH
        assert len(action.functions) <= max(1, self.queued() // 4)
        for function in action.functions:
            assert function not in self.outcomes
            assert function not in self.sent, "in flight twice"
            if function not in self.first_dispatches:
                assert not self.first_dispatches or function > self.first_dispatches[-1], "out of order"
                assert not self.waiting_again(), "something older waited"
                assert not self.held, "begun while dispatch is held"
                self.first_dispatches.append(function)
            else:
                assert function >= self.taken_below, "it belongs to an error that the user has seen"
                first = [waiting for waiting in self.waiting_again() if waiting in self.touched]
                assert function == min(first or self.waiting_again())
                assert function in self.touched or not self.held, "begun while dispatch is held"
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
        lost = [function for function, at in self.sent.items() if at == where]
        self.touched.update(lost)
        for function in lost:
            self.unbook(function)

    def pick_sent(self, data: st.DataObject) -> tuple[int, tuple[int, str]]:
        return data.draw(st.sampled_from(sorted(self.sent.items())))

    def pick_several(self, data: st.DataObject) -> tuple[tuple[int, ...], tuple[int, str]]:
        _, where = self.pick_sent(data)
        there = sorted(function for function, at in self.sent.items() if at == where)
        return tuple(data.draw(st.lists(st.sampled_from(there), min_size=1, unique=True))), where

    # -- events as they come

    @rule(number=st.sampled_from([1, 2, 5, 40]))
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
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 1e-5, 1e-3, 1.0]))
    def finish(self, data: st.DataObject, seconds: float) -> None:
        functions, where = self.pick_several(data)
        assert self.tell(Finished(*where, functions, seconds))[0] == Complete(functions)

    @precondition(lambda self: self.waits_for_moment)
    @rule()
    def pass_a_moment(self) -> None:
        self.waits_for_moment = False
        self.tell(MomentPassed())

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
        self.tell(HandedBack(*where, functions))
        for function in functions:
            assert (function < self.taken_below) == isinstance(self.outcomes.get(function), Cancel)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), error=st.sampled_from(ERRORS))
    def fail(self, data: st.DataObject, error: BaseException) -> None:
        function, where = self.pick_sent(data)
        self.fails = True
        outcome = self.tell(Failed(*where, function, error))[0]
        self.fails = False
        if isinstance(outcome, Cancel):
            assert error is LOST
            assert outcome.because is LOST
        else:
            assert outcome == Fail(function, error)
            assert error is not LOST or not self.lost, "a failure that the loss explains"
            if self.error is None and function >= self.taken_below:
                self.error = error

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), leaves=st.booleans())
    def hand_back(self, data: st.DataObject, leaves: bool) -> None:
        functions, where = self.pick_several(data)
        if leaves:
            self.leaving.add(where)
            self.tell(WorkerLeaves(*where))
        self.give_back(functions, where)

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
        assert {type(action) for action in self.tell(DispatchHeld())} <= {Recall, AwaitMoment}
        if self.scheduler.at_rest:  # nothing half-way: what was begun has its outcome, or never will
            assert not self.sent
            assert self.pending() is not None or self.touched <= self.outcomes.keys()

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
    @rule(data=st.data(), kind=st.sampled_from([Finished, Failed, HandedBack, WorkerLeaves, WorkerLost, WorkerJoined]))
    def hear_from_the_dead(self, data: st.DataObject, kind: type) -> None:
        where = data.draw(st.sampled_from(self.dead))
        function = data.draw(st.integers(0, self.submitted))
        arguments = self.arguments_of(kind, function)
        assert self.tell(kind(*where, *arguments)) == []

    @precondition(lambda self: self.live)
    @rule(data=st.data(), kind=st.sampled_from([Finished, Failed, HandedBack]))
    def hear_nonsense(self, data: st.DataObject, kind: type) -> None:
        where = data.draw(st.sampled_from(sorted(self.live.items())))
        elsewhere = [function for function in range(self.submitted + 1) if self.sent.get(function) != where]
        function = data.draw(st.sampled_from(elsewhere))
        assert self.tell(kind(*where, *self.arguments_of(kind, function))) == []

    @staticmethod
    def arguments_of(kind: type, function: int) -> tuple[Any, ...]:
        several = (function,)
        return {Finished: (several, 1.0), Failed: (function, WRONG), HandedBack: (several,)}.get(kind, ())

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
        assert scheduler.workers == {where[0]: where[1] for where in self.usable() if where not in self.stalled()}
        assert {function: scheduler.worker_of(function) for function in self.sent} == {
            function: where[0] for function, where in self.sent.items()
        }
        if scheduler.queued and self.pending() is None and not self.lost and not self.held:
            takers = [where for where in self.usable() if where not in self.stalled()]
            assert all(len(self.open_batches(where)) == self.room for where in takers), "a worker idles"
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
                self.tell(Finished(*where, (function,), 1e-3))
        assert sorted(self.outcomes) == list(range(self.submitted))
        assert self.first_dispatches == sorted(self.first_dispatches)


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
