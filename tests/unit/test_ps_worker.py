"""A worker's own parts: the queue of batches, the thread of functions, and outcomes on their way."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from torchstrat.errors import CommunicationError, NotSendableError
from torchstrat.parameter_server.dispatch import Batch, Report
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.parameter_server.worker.batch_queue import BatchQueue
from torchstrat.parameter_server.worker.function_thread import FunctionThread
from torchstrat.parameter_server.worker.outcomes import Outcomes
from torchstrat.parameter_server.worker.service import FunctionWorker
from torchstrat.testing.fake_network import FakeNetwork

DEADLINE_SECONDS = 60
CHIEF = Peer(Task("chief", 0), "c", "", "here", 0)


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_what_has_not_begun_is_given_once() -> None:
    queue = BatchQueue()
    queue.begin([1, 2, 3, 4])
    assert queue.take(1)
    assert queue.recall(((0, (1, 3, 4)),)) == (3, 4), "1 has begun"
    assert queue.recall(((0, (1, 3, 4)),)) == ()
    assert [queue.take(function) for function in (2, 3, 4)] == [True, False, False]
    queue.end()
    assert queue.recall(((0, (1, 2, 3)),)) == (), "the batch is over"


def test_a_recall_may_come_before_its_batch_and_a_function_again_in_a_later_one() -> None:
    queue = BatchQueue()
    assert queue.recall(((1, (5, 6)), (0, (2,)))) == (5, 6, 2)
    assert queue.recall(((1, (5, 7)),)) == (7,)
    queue.begin([1, 2, 3])
    assert queue.take_rest() == (1, 3)
    queue.end()
    queue.begin([4, 5, 6, 7, 8])
    assert queue.take_rest() == (4, 8)
    assert not queue.take(4)
    queue.end()
    queue.begin([2, 6])
    assert queue.recall(((1, (6,)), (2, (2,)))) == (2,)
    assert queue.take_rest() == (6,)


# -- the thread --------------------------------------------------------------------------------------------------------


def test_work_within_work() -> None:
    thread, order, begun = FunctionThread("test"), list[str](), threading.Event()

    def early() -> str:
        begun.set()
        assert thread.run_next()
        order.append("early")
        return "early"

    first = thread.submit(early)
    assert begun.wait(DEADLINE_SECONDS)
    second = thread.submit(order.append, "late")
    assert first.result(DEADLINE_SECONDS) == "early"
    assert second.done()
    assert order == ["late", "early"]
    assert isinstance(thread.submit(dict, 1).exception(DEADLINE_SECONDS), TypeError)
    thread.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        thread.submit(early)


def test_at_the_end_nothing_is_left_waiting() -> None:
    thread, begun, go_on = FunctionThread("test"), threading.Event(), threading.Event()

    def waits() -> bool:
        begun.set()
        go_on.wait(DEADLINE_SECONDS)
        return thread.run_next()

    first = thread.submit(waits)
    assert begun.wait(DEADLINE_SECONDS)
    second = thread.submit(waits)
    thread.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    assert first.result(DEADLINE_SECONDS) is False
    assert second.cancelled()
    thread.shutdown()


# -- outcomes ----------------------------------------------------------------------------------------------------------


class Coordinator:
    """Notes what is reported to it. Results that are functions cannot be sent."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.came = threading.Semaphore(0)

    def call(self, to: Peer, method: str, payload: Report, *, timeout_seconds: float) -> Future[Any]:
        assert (to, method) == (CHIEF, "coordinator.outcomes")
        future: Future[Any] = Future()
        if any(callable(result) for result in payload.results):
            future.set_exception(NotSendableError("no functions"))
            return future
        self.reports.append(payload)
        self.came.release()
        future.set_result(None)
        return future


def test_outcomes_are_reported_once_the_oldest_has_waited_and_those_that_cannot_be_sent_as_errors() -> None:
    coordinator, now = Coordinator(), [0.0]
    outcomes = Outcomes(lambda: coordinator, clock=lambda: now[0])  # type: ignore[arg-type, return-value]
    before = threading.active_count()
    outcomes.add(CHIEF, 1, None, 0.5, is_last=True)
    assert outcomes.rest() == Report((1,), (None,), 0.5)
    assert threading.active_count() == before, "a batch of one needs no thread"
    outcomes.add(CHIEF, 2, "two", 0.5, is_last=False)
    outcomes.add(CHIEF, 3, lambda: 3, 0.25, is_last=False)
    now[0] = 1.0
    assert coordinator.came.acquire(timeout=DEADLINE_SECONDS)
    outcomes.add(CHIEF, 4, "four", 0.25, is_last=False)
    now[0] = 2.0
    assert coordinator.came.acquire(timeout=DEADLINE_SECONDS)
    sent, later = coordinator.reports
    assert (sent.finished, sent.results, sent.seconds) == ((2,), ("two",), 0.75)
    assert [function for function, _ in sent.ended] == [3]
    assert later == Report((4,), ("four",), 0.25)
    assert outcomes.rest(stops=3) == Report(stops=3)
    outcomes.close()
    outcomes.join()


def test_each_outcome_is_in_one_report() -> None:
    coordinator = Coordinator()
    outcomes = Outcomes(lambda: coordinator)  # type: ignore[arg-type, return-value]
    for function in range(20_000):
        outcomes.add(CHIEF, function, None, 0.0, is_last=False)
    last = outcomes.rest()
    outcomes.close()
    outcomes.join()
    reported = [function for report in (*coordinator.reports, last) for function in report.finished]
    assert reported == list(range(20_000))


# -- batches that arrive in another order ------------------------------------------------------------------------------


def test_batches_are_begun_in_the_order_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    is_here = threading.Event()
    queue_of, run_batch = FunctionWorker._queue_of, FunctionWorker._run_batch

    def note_arrival(worker: FunctionWorker, sender: Peer) -> BatchQueue:
        is_here.set()
        return queue_of(worker, sender)

    def note_order(worker: FunctionWorker, session: Any, queue: BatchQueue, batch: Batch) -> Report:
        order.append(batch.number)
        return run_batch(worker, session, queue, batch)

    monkeypatch.setattr(FunctionWorker, "_queue_of", note_arrival)
    monkeypatch.setattr(FunctionWorker, "_run_batch", note_order)
    with FakeNetwork() as network:
        chief, mine = network.endpoint(Task("chief", 0)), network.endpoint(Task("worker", 0))
        worker = FunctionWorker(0)
        worker.attach(mine)
        mine.serve(worker.handlers())
        chief.add_peer(mine.peer)
        mine.add_peer(chief.peer)
        worker.coordinator_arrived(chief.peer)

        def run(number: int, *functions: Any) -> Future[Any]:
            return chief.call(mine.peer, "worker.run", Batch(number, 0, False, functions))

        second = run(1, (1, 0, None, 0))
        assert is_here.wait(DEADLINE_SECONDS)
        first = run(0)
        assert first.result(DEADLINE_SECONDS) == second.result(DEADLINE_SECONDS) == Report()
        assert order == [0, 1]
        assert run(0).result(DEADLINE_SECONDS) == Report()
        early = run(7)
        worker.close()
        with pytest.raises(CommunicationError):
            early.result(DEADLINE_SECONDS)
        worker.join()
