"""Functions in batches, over a cluster of threads: what is sent, what comes back before the end, what is taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import torchstrat as ts
from tests.unit.gates import DEADLINE_SECONDS, await_arrivals, close_gate, note_run, pass_gate, take_runs
from torchstrat.errors import CancelledError, CommunicationTimeoutError, NotSendableError
from torchstrat.parameter_server import known_worker
from torchstrat.parameter_server.dispatch import Batch
from torchstrat.parameter_server.scheduler import LARGEST_BATCH
from torchstrat.testing.fake_cluster import FakeCluster


@contextmanager
def cluster_of(workers: int) -> Iterator[tuple[FakeCluster, ts.ClusterCoordinator]]:
    """A coordinator that knows already that functions are short."""
    with FakeCluster(workers=workers, ps=1) as cluster:
        coordinator = ts.ClusterCoordinator(cluster.strategy())
        for _ in range(20):
            coordinator.schedule(note_run, ("warm-up",))
        coordinator.join(DEADLINE_SECONDS)
        coordinator._dispatcher._scheduler._seconds = 0.0  # the first one imports
        take_runs()
        yield cluster, coordinator


@contextmanager
def all_at_once(coordinator: ts.ClusterCoordinator) -> Iterator[None]:
    """What is scheduled in the block is sent at its end, so that the sizes of batches are known."""
    with coordinator._dispatcher.paused(DEADLINE_SECONDS, "the test"):
        yield


def sent_by(coordinator: ts.ClusterCoordinator, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Batch, int]]:
    """(worker, batch, batches that have no answer there, with it), as they are sent from now on."""
    sent: list[tuple[Any, Batch, int]] = []
    open_batches: dict[Any, set[int]] = {}
    endpoint, lock = coordinator._job.endpoint, threading.Lock()
    call = endpoint.call

    def record(to: Any, method: str, payload: Any = None, **options: Any) -> Future[Any]:
        if method != "worker.run":
            return call(to, method, payload, **options)
        with lock:
            there = open_batches.setdefault(to, set())
            there.add(payload.number)
            sent.append((to, payload, len(there)))
        future = call(to, method, payload, **options)

        def answered(_: Any) -> None:
            with lock:
                there.discard(payload.number)

        # Before the dispatcher's own callback, which may send the next one.
        future.add_done_callback(answered)
        return future

    monkeypatch.setattr(endpoint, "call", record)
    return sent


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_batches_are_limited_and_two_are_at_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(2) as (_, coordinator):
        sent = sent_by(coordinator, monkeypatch)
        with all_at_once(coordinator):
            values = [coordinator.schedule(note_run, (number,)) for number in range(3000)]
        assert coordinator.fetch(values) == list(range(3000))
        sizes = [len(batch.functions) for _, batch, _ in sent]
        assert sum(sizes) >= 3000
        assert 64 < max(sizes) <= LARGEST_BATCH
        assert len(sizes) < 300, "messages for 3000 functions"
        assert max(at_once for _, _, at_once in sent) == 2
        assert sorted(take_runs()) == list(range(3000))  # type: ignore[type-var]


def test_what_a_batch_has_in_common_goes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(1) as (_, coordinator):
        sent = sent_by(coordinator, monkeypatch)

        def add(number: int) -> int:
            return number + 1

        with all_at_once(coordinator):
            values = [coordinator.schedule(add, (number,)) for number in range(100)]
        assert coordinator.fetch(values) == list(range(1, 101))
        codes = [code for _, batch, _ in sent for code in batch.codes]
        assert [packed is None for _, packed in codes] == [False] + [True] * (len(sent) - 1)
        assert len({digest for digest, _ in codes}) == 1
        assert [batch.number for _, batch, _ in sent] == list(range(sent[0][1].number, sent[0][1].number + len(sent)))


def test_learning_rates_are_those_at_the_call_within_one_batch() -> None:
    import torch
    from torch import nn

    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        coordinator = ts.ClusterCoordinator(strategy)

        def rate() -> float:
            return optimizer.param_groups[0]["lr"]

        assert coordinator.fetch([coordinator.schedule(rate) for _ in range(4)]) == [0.0] * 4
        coordinator._dispatcher._scheduler._seconds = 0.0
        values = []
        with all_at_once(coordinator):
            for number in range(40):
                optimizer.param_groups[0]["lr"] = number // 3
                values.append(coordinator.schedule(rate))
        assert coordinator.fetch(values) == [number // 3 for number in range(40)]


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_outcomes_do_not_wait_for_the_rest_of_their_batch() -> None:
    with cluster_of(1) as (_, coordinator):
        gate = close_gate("partial")
        with all_at_once(coordinator):
            before = [coordinator.schedule(note_run, (number,)) for number in range(5)]
            slow = coordinator.schedule(pass_gate, ("partial",))
            behind = [coordinator.schedule(note_run, (number,)) for number in range(6, 40)]
        assert [value.get(DEADLINE_SECONDS) for value in before] == list(range(5))
        with pytest.raises(CommunicationTimeoutError, match="it runs on worker 0"):
            slow.get(0.01)
        assert "it waits on worker 0, behind function 25" in repr(behind[0])
        with pytest.raises(
            CommunicationTimeoutError, match=r"function 25 on worker 0 \(with \d+ behind it\) is running"
        ):
            coordinator.join(0.01)
        gate.set()
        assert coordinator.fetch(behind) == list(range(6, 40))
        assert take_runs() == [*range(5), *range(6, 40)]


def test_a_worker_that_is_killed_in_a_batch_repeats_only_what_was_not_reported() -> None:
    with cluster_of(1) as (cluster, coordinator):
        gate = close_gate("killed")

        def work(number: int) -> object:
            note_run(number)
            return pass_gate("killed") if number == 5 else number

        with all_at_once(coordinator):
            values = [coordinator.schedule(work, (number,)) for number in range(40)]
        assert [value.get(DEADLINE_SECONDS) for value in values[:5]] == list(range(5))
        await_arrivals("killed", 1)
        cluster.kill_worker(0)
        gate.set()
        cluster.start_worker(1)
        assert coordinator.fetch(values) == [*range(5), "through", *range(6, 40)]
        coordinator.join(DEADLINE_SECONDS)
        runs = take_runs()
        assert [runs.count(number) for number in range(6)] == [1] * 5 + [2]
        assert set(runs) == set(range(40))


def test_after_a_function_that_raised_nothing_of_its_batch_runs() -> None:
    def bad() -> None:
        raise KeyError("bad")

    with cluster_of(1) as (_, coordinator):
        with all_at_once(coordinator):
            first = [coordinator.schedule(note_run, (number,)) for number in range(3)]
            failing = coordinator.schedule(bad)
            behind = [coordinator.schedule(note_run, (number,)) for number in range(4, 200)]
        with pytest.raises(KeyError):
            coordinator.join(DEADLINE_SECONDS)
        assert take_runs() == [0, 1, 2]
        assert coordinator.fetch(first) == [0, 1, 2]
        with pytest.raises(KeyError):
            failing.get()
        for value in behind:
            with pytest.raises(CancelledError):
                value.get()
        assert coordinator.schedule(note_run, (200,)).get(DEADLINE_SECONDS) == 200, "the worker goes on"


def test_an_error_takes_back_what_other_workers_have_not_begun() -> None:
    def bad() -> None:
        pass_gate("bad")
        raise KeyError("bad")

    with cluster_of(2) as (_, coordinator):
        gates = [close_gate("bad"), close_gate("other")]
        with all_at_once(coordinator):
            failing = coordinator.schedule(bad)
            behind = [coordinator.schedule(note_run, (number,)) for number in range(1, 10)]
            other = coordinator.schedule(pass_gate, ("other",))  # the first of the second batch
            behind += [coordinator.schedule(note_run, (number,)) for number in range(11, 42)]
        await_arrivals("bad", 1)
        await_arrivals("other", 1)
        gates[0].set()
        with pytest.raises(KeyError):
            failing.get(DEADLINE_SECONDS)
        dispatcher = coordinator._dispatcher
        with dispatcher._changed:
            assert dispatcher._wait_for(lambda: dispatcher._scheduler.in_flight == 1, DEADLINE_SECONDS)
        gates[1].set()
        with pytest.raises(KeyError):
            coordinator.join(DEADLINE_SECONDS)
        assert other.get() == "through"
        assert take_runs() == []
        for value in behind:
            with pytest.raises(CancelledError):
                value.get()


# -- what is taken back ------------------------------------------------------------------------------------------------


def test_functions_behind_a_slow_one_run_elsewhere() -> None:
    with cluster_of(1) as (cluster, coordinator):
        gate = close_gate("slow")
        with all_at_once(coordinator):
            slow = coordinator.schedule(pass_gate, ("slow",))
            behind = [coordinator.schedule(note_run, (number,)) for number in range(1, 200)]
        await_arrivals("slow", 1)
        assert len(coordinator._dispatcher._scheduler.functions_at(0)) > 20
        cluster.start_worker(1)
        assert [value.get(DEADLINE_SECONDS) for value in behind] == list(range(1, 200))
        assert sorted(take_runs()) == list(range(1, 200))  # type: ignore[type-var]
        assert coordinator._dispatcher._scheduler.functions_at(0) == [20]
        gate.set()
        assert slow.get(DEADLINE_SECONDS) == "through"
        coordinator.join(DEADLINE_SECONDS)


def test_a_pause_is_as_long_as_the_function_that_runs() -> None:
    with cluster_of(1) as (_, coordinator):
        gate = close_gate("pause")
        with all_at_once(coordinator):
            slow = coordinator.schedule(pass_gate, ("pause",))
            behind = [coordinator.schedule(note_run, (number,)) for number in range(1, 100)]
        await_arrivals("pause", 1)
        scheduler = coordinator._dispatcher._scheduler
        assert scheduler.in_flight > 20

        def open_when_it_is_alone() -> None:
            dispatcher = coordinator._dispatcher
            with dispatcher._changed:
                assert dispatcher._wait_for(lambda: scheduler.in_flight == 1, DEADLINE_SECONDS)
            gate.set()

        opening = threading.Thread(target=open_when_it_is_alone)
        opening.start()
        with coordinator._dispatcher.paused(DEADLINE_SECONDS, "the test"):
            assert take_runs() == []
            assert slow.get(DEADLINE_SECONDS) == "through"
            assert scheduler.queued == 99
        opening.join()
        assert coordinator.fetch(behind) == list(range(1, 100))
        assert take_runs() == list(range(1, 100))


def test_a_worker_that_leaves_finishes_one_function_and_hands_back_the_others() -> None:
    with cluster_of(1) as (cluster, coordinator):
        gate = close_gate("leaves")
        with all_at_once(coordinator):
            slow = coordinator.schedule(pass_gate, ("leaves",))
            behind = [coordinator.schedule(note_run, (number,)) for number in range(1, 100)]
        await_arrivals("leaves", 1)
        leaving = threading.Thread(target=cluster.service("worker", 0).drain, args=(DEADLINE_SECONDS,))
        leaving.start()
        dispatcher = coordinator._dispatcher
        with dispatcher._changed:
            assert dispatcher._wait_for(lambda: not dispatcher._scheduler.workers, DEADLINE_SECONDS)
        gate.set()
        leaving.join(DEADLINE_SECONDS)
        assert slow.get(DEADLINE_SECONDS) == "through"
        assert take_runs() == []
        assert dispatcher._scheduler.in_flight == 0
        cluster.start_worker(1)
        assert coordinator.fetch(behind) == list(range(1, 100))


def test_a_removed_worker_gives_back_what_it_has_not_begun() -> None:
    with cluster_of(1) as (cluster, coordinator):
        gate = close_gate("removed")
        with all_at_once(coordinator):
            slow = coordinator.schedule(pass_gate, ("removed",))
            behind = [coordinator.schedule(note_run, (number,)) for number in range(1, 100)]
        await_arrivals("removed", 1)
        with pytest.raises(CommunicationTimeoutError, match="worker 0"):
            coordinator.remove_worker(0, timeout=0.01)
        cluster.start_worker(1)
        assert [value.get(DEADLINE_SECONDS) for value in behind] == list(range(1, 100))
        gate.set()
        coordinator.remove_worker(0, timeout=DEADLINE_SECONDS)
        assert slow.get(DEADLINE_SECONDS) == "through"


# -- what cannot be sent -----------------------------------------------------------------------------------------------


def test_arguments_that_the_wire_refuses_are_one_functions_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(1) as (_, coordinator):
        endpoint, pack = coordinator._job.endpoint, known_worker.pack
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

        monkeypatch.setattr(known_worker, "pack", refuse)
        monkeypatch.setattr(endpoint, "call", call_or_refuse)
        with all_at_once(coordinator):
            first = [coordinator.schedule(note_run, (number,)) for number in range(3)]
            refused = coordinator.schedule(note_run, ("unsendable",))
            behind = [coordinator.schedule(note_run, (number,)) for number in range(40)]
        with pytest.raises(NotSendableError, match=r"arguments of function 23 .* not on this wire"):
            coordinator.join(DEADLINE_SECONDS)
        with pytest.raises(NotSendableError):
            refused.get()
        for value in (*first, *behind):
            with suppress(CancelledError):
                value.get(DEADLINE_SECONDS)
        assert "unsendable" not in take_runs()
        assert coordinator.schedule(note_run, ("after",)).get(DEADLINE_SECONDS) == "after"


def test_without_an_endpoint_functions_wait_for_another_worker() -> None:
    with cluster_of(1) as (cluster, coordinator):
        with cluster.network.hold(cluster.peer("worker", 0), "worker.run") as held:
            values = [coordinator.schedule(note_run, (number,)) for number in range(10)]
            held.wait_until_reached()
            cluster.network._endpoint(cluster.peer("worker", 0)).close()
        cluster.start_worker(1)
        assert coordinator.fetch(values) == list(range(10))
