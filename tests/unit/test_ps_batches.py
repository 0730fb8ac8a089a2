"""Functions in batches, over a cluster of threads: what is sent, what comes back before the end, what is taken back.

Which functions are sent when, and taken back why, is in tests/unit/test_scheduler.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrat as ts
from tests.support.gates import DEADLINE_SECONDS, await_arrivals, close_gate, note_run, pass_gate, take_runs
from torchstrat.errors import CancelledError, CommunicationTimeoutError, NotSendableError
from torchstrat.parameter_server import scheduler_events as ev
from torchstrat.parameter_server import worker_sessions
from torchstrat.parameter_server.scheduler import LARGEST_BATCH, Scheduler
from torchstrat.parameter_server.serialization.captured_objects import Lifetimes
from torchstrat.parameter_server.waiting import GRACE_SECONDS, TimeLimits
from torchstrat.testing.fake_cluster import FakeCluster

FIRST = 20
"""The number of the first function of a test."""


class Job:
    """A coordinator that knows already that functions are short."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.coordinator = ts.ClusterCoordinator(cluster.strategy())
        for _ in range(FIRST):
            self.coordinator.schedule(note_run, ("warm-up",))
        self.coordinator.join(DEADLINE_SECONDS)
        self.scheduler = self.coordinator._dispatcher._scheduler
        self.scheduler._durations.seconds = 0.0  # the first one imports
        take_runs()

    @contextmanager
    def all_at_once(self) -> Iterator[None]:
        """What is scheduled in the block is sent at its end, so that the sizes of batches are known."""
        with self.coordinator._dispatcher.paused(DEADLINE_SECONDS, "the test"):
            yield

    def note(self, numbers: Sequence[int]) -> list[Any]:
        return [self.coordinator.schedule(note_run, (number,)) for number in numbers]


@contextmanager
def job(workers: int = 1) -> Iterator[Job]:
    with FakeCluster(workers=workers, ps=1) as cluster:
        yield Job(cluster)


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_batches_are_limited_and_two_are_at_a_worker() -> None:
    with job(2) as one:
        messages = one.cluster.network.record("worker.run")
        with one.all_at_once():
            values = one.note(range(3000))
        assert one.coordinator.fetch(values) == list(range(3000))
        there: Counter[Any] = Counter()
        for message in messages:
            there[message.peer] += 1 if message.kind == "call" else -1
            assert there[message.peer] <= 2
        sizes = [len(message.value.functions) for message in messages if message.kind == "call"]
        assert sum(sizes) >= 3000
        assert 64 < max(sizes) <= LARGEST_BATCH
        assert len(sizes) < 300, "messages for 3000 functions"
        assert sorted(take_runs()) == list(range(3000))  # type: ignore[type-var]


def test_what_a_batch_has_in_common_goes_once() -> None:
    with job() as one:
        messages = one.cluster.network.record("worker.run")

        def add(number: int) -> int:
            return number + 1

        with one.all_at_once():
            values = [one.coordinator.schedule(add, (number,)) for number in range(100)]
        assert one.coordinator.fetch(values) == list(range(1, 101))
        sent = [message.value for message in messages if message.kind == "call"]
        codes = [code for batch in sent for code in batch.codes]
        assert [packed is None for _, packed in codes] == [False] + [True] * (len(sent) - 1)
        assert len({digest for digest, _ in codes}) == 1
        assert [batch.number for batch in sent] == list(range(sent[0].number, sent[0].number + len(sent)))


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_outcomes_do_not_wait_for_the_rest_of_their_batch() -> None:
    with job() as one:
        gate = close_gate("partial")
        with one.all_at_once():
            before = one.note(range(5))
            slow = one.coordinator.schedule(pass_gate, ("partial",))
            behind = one.note(range(6, 40))
        assert [value.get(DEADLINE_SECONDS) for value in before] == list(range(5))
        with pytest.raises(CommunicationTimeoutError, match="it runs on worker 0"):
            slow.get(0.01)
        assert f"it waits on worker 0, behind function {FIRST + 5}" in repr(behind[0])
        says = rf"function {FIRST + 5} on worker 0 \(with \d+ behind it\) is running"
        with pytest.raises(CommunicationTimeoutError, match=says):
            one.coordinator.join(0.01)
        gate.set()
        assert one.coordinator.fetch(behind) == list(range(6, 40))
        assert take_runs() == [*range(5), *range(6, 40)]


def test_a_worker_that_is_killed_in_a_batch_repeats_only_what_was_not_reported() -> None:
    with job() as one:
        gate = close_gate("killed")

        def work(number: int) -> object:
            note_run(number)
            return pass_gate("killed") if number == 5 else number

        with one.all_at_once():
            values = [one.coordinator.schedule(work, (number,)) for number in range(40)]
        assert [value.get(DEADLINE_SECONDS) for value in values[:5]] == list(range(5))
        await_arrivals("killed", 1)
        one.cluster.kill_worker(0)
        gate.set()
        one.cluster.start_worker(1)
        assert one.coordinator.fetch(values) == [*range(5), "through", *range(6, 40)]
        one.coordinator.join(DEADLINE_SECONDS)
        runs = take_runs()
        assert [runs.count(number) for number in range(6)] == [1] * 5 + [2]
        assert set(runs) == set(range(40))


def bad() -> None:
    raise KeyError("bad")


def test_after_a_function_that_raised_nothing_of_its_batch_runs() -> None:
    with job() as one:
        with one.all_at_once():
            first = one.note(range(3))
            failing = one.coordinator.schedule(bad)
            behind = one.note(range(4, 200))
        with pytest.raises(KeyError):
            one.coordinator.join(DEADLINE_SECONDS)
        assert take_runs() == [0, 1, 2]
        assert one.coordinator.fetch(first) == [0, 1, 2]
        with pytest.raises(KeyError):
            failing.get()
        for value in behind:
            with pytest.raises(CancelledError) as cancelled:
                value.get()
            assert isinstance(cancelled.value.__cause__, KeyError)
        assert one.note([200])[0].get(DEADLINE_SECONDS) == 200, "the worker goes on"


def test_an_error_that_another_thread_takes_meanwhile_is_not_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with job() as one:
        with suppress(KeyError):
            one.coordinator.schedule(bad).get(DEADLINE_SECONDS)
        take, calls = one.coordinator._dispatcher.raise_pending, []

        def take_late() -> None:
            calls.append(None)
            if len(calls) > 1:  # the first time it has not come yet
                with suppress(KeyError):
                    take()  # as by another thread
                take()

        monkeypatch.setattr(one.coordinator._dispatcher, "raise_pending", take_late)
        assert one.note([1])[0].get(DEADLINE_SECONDS) == 1


# -- what cannot be sent -----------------------------------------------------------------------------------------------


def test_arguments_that_the_wire_refuses_are_one_functions_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with job() as one:
        endpoint, pack = one.coordinator._job.endpoint, worker_sessions.pack
        call = endpoint.call

        def refuse(value: Any) -> Any:
            if isinstance(value, bytes) and b"unsendable" in value:
                raise TypeError("not on this wire")
            return pack(value)

        def call_or_refuse(to: Any, method: str, payload: Any = None, **options: Any) -> Future[Any]:
            if method == "worker.run":
                try:
                    for _, _, arguments, _ in payload.functions:
                        refuse(arguments)
                except TypeError as error:
                    failed: Future[Any] = Future()
                    failed.set_exception(NotSendableError(f"the payload of 'worker.run' cannot be sent: {error}"))
                    return failed
            return call(to, method, payload, **options)

        monkeypatch.setattr(worker_sessions, "pack", refuse)
        monkeypatch.setattr(endpoint, "call", call_or_refuse)
        with one.all_at_once():
            first = one.note(range(3))
            refused = one.coordinator.schedule(note_run, ("unsendable",))
            behind = one.note(range(40))
        with pytest.raises(NotSendableError, match=rf"arguments of function {FIRST + 3} .* not on this wire"):
            one.coordinator.join(DEADLINE_SECONDS)
        with pytest.raises(NotSendableError):
            refused.get()
        for value in (*first, *behind):
            with suppress(CancelledError):
                value.get(DEADLINE_SECONDS)
        assert "unsendable" not in take_runs()
        assert one.note([9])[0].get(DEADLINE_SECONDS) == 9


def test_without_an_endpoint_functions_wait_for_another_worker() -> None:
    with job() as one:
        peer = one.cluster.peer("worker", 0)
        with one.cluster.network.hold(peer, "worker.run") as held:
            values = one.note(range(10))
            held.wait_until_reached()
            one.cluster.network._endpoint(peer).close()
        one.cluster.start_worker(1)
        assert one.coordinator.fetch(values) == list(range(10))


def test_a_worker_that_was_removed_is_used_when_it_is_added_again() -> None:
    with job() as one:
        one.coordinator.remove_worker(0, DEADLINE_SECONDS)
        for is_added in (False, True):
            if is_added:
                one.coordinator.add_worker(0, "worker0:1")
            one.cluster.kill_worker(0)
            one.cluster.start_worker(0)
            (value,) = one.note([is_added])
            with nullcontext() if is_added else pytest.raises(CommunicationTimeoutError):
                assert value.get(DEADLINE_SECONDS if is_added else 0.05) == is_added


# -- limits of time --------------------------------------------------------------------------------------------------


def test_a_limit_counts_from_when_a_function_is_the_first_of_its_worker() -> None:
    now = 100.0
    limits = TimeLimits(lambda: now)
    assert limits.due == math.inf
    assert limits.look([("a", 0, 5.0), ("b", 1, 2.0)])
    assert limits.due == 102.0
    now = 101.0
    assert not limits.look([("a", 0, 5.0), ("b", 2, 4.0)]), "function 1 has ended"
    assert limits.due == 105.0
    now = 105.0
    assert limits.passed() == [], "its end may be on its way"
    assert limits.due == 105.0 + GRACE_SECONDS
    now += GRACE_SECONDS
    limits.look([("a", 3, 5.0), ("b", 2, 4.0)])
    assert limits.passed() == [("b", 2)]
    assert limits.passed() == []
    limits.look([])
    assert limits.due == math.inf


# -- the stamp: no function meets a number that was released ----------------------------------------------------------

EVENTS = st.lists(st.tuples(st.sampled_from("sssdjlfbx"), st.integers(0, 7)), min_size=10, max_size=60)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_what_is_released_is_named_by_no_function_that_may_still_run(events: list[tuple[str, int]]) -> None:
    """Functions name everything that is alive when they are scheduled; they are lost, repeated, handed back."""
    scheduler, lifetimes = Scheduler(), Lifetimes()
    lifetimes.watch(lambda: scheduler.next_function, lambda: None)
    alive, made = {("parameter", -1)}, 0
    names: dict[int, set[Any]] = {}  # of functions without an outcome
    incarnations = dict.fromkeys(range(3), 0)
    for kind, number in events:
        worker = number % 3
        where, at = (worker, f"{worker}.{incarnations[worker]}"), scheduler.functions_at(worker)
        happened: list[ev.Event] = []
        if kind == "s":
            names[scheduler.next_function] = set(alive)
            happened = [ev.Submitted(scheduler.next_function)]
        elif kind == "d":
            lifetimes.died(alive.pop())
            alive.add(("parameter", made))
            made += 1
        elif kind == "j":
            happened = [ev.WorkerJoined(*where)]
        elif kind == "l":
            happened = [ev.WorkerLost(*where)]
            incarnations[worker] += 1
        elif kind == "b" and at:
            happened = [ev.HandedBack(*where, tuple(at[1:]))]
        elif kind == "f" and at:
            happened = [ev.Finished(*where, (at[0],), 1.0)]
        elif kind == "x" and at:
            happened = [ev.Failed(*where, at[0], ValueError()), ev.ErrorTaken()]
        for action in (action for event in happened for action in scheduler.handle(event)):
            if isinstance(action, ev.Complete):
                for function in action.functions:
                    del names[function]
            elif isinstance(action, ev.Fail | ev.Cancel):
                del names[action.function]
        released = set(lifetimes.take_released(scheduler.ended_below))
        named = [function for function, tokens in names.items() if tokens & released]
        assert not named, f"functions {named} may still run"


def test_deaths_are_told_once_until_somebody_looks() -> None:
    told: list[str] = []
    lifetimes = Lifetimes()
    lifetimes.watch(lambda: 5, lambda: told.append("now"))
    for number in range(3):
        lifetimes.died(("module", number))
    assert told == ["now"]
    assert lifetimes.has_dead
    assert lifetimes.take_released(4) == ()
    lifetimes.died(("module", 3))
    assert told == ["now"] * 2
    assert lifetimes.take_released(5) == tuple(("module", number) for number in range(4))
    assert lifetimes.take_dead() == tuple(("module", number) for number in range(4))
    assert lifetimes.take_released(9) == lifetimes.take_dead() == ()
