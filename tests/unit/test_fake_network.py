"""Faults of the in-memory network: they happen where they were put, and to nobody else.

That it answers as real processes do is shown in tests/multiprocess/test_ps_transport.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from torchstrat.errors import (
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    PeerTimeoutError,
    PeerUnavailableError,
)
from torchstrat.parameter_server.endpoint import Endpoint, Handler
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.testing.fake_network import FakeEndpoint, FakeNetwork

PATIENCE_SECONDS = 20.0


@pytest.fixture
def network() -> Iterator[FakeNetwork]:
    with FakeNetwork() as network:
        yield network


class Server:
    """Counts what is pushed, as a parameter server would."""

    def __init__(self, network: FakeNetwork, index: int = 0) -> None:
        self.endpoint = network.endpoint(Task("ps", index))
        self.peer = self.endpoint.peer
        self.pushed: list[Any] = []
        self.endpoint.serve({"push": Handler(self._push), "pull": Handler(lambda _sender, _payload: len(self.pushed))})

    def _push(self, _sender: Peer, payload: Any) -> int:
        self.pushed.append(payload)
        return len(self.pushed)


@pytest.fixture
def server(network: FakeNetwork) -> Server:
    return Server(network)


@pytest.fixture
def worker(network: FakeNetwork, server: Server) -> FakeEndpoint:
    worker = network.endpoint(Task("worker", 0))
    worker.add_peer(server.peer)
    return worker


def error_of(future: Future[Any]) -> BaseException:
    error = future.exception(PATIENCE_SECONDS)
    assert error is not None
    return error


def test_it_is_an_endpoint(worker: FakeEndpoint) -> None:
    endpoint: Endpoint = worker
    assert str(endpoint.peer.task) == "worker 0"


def test_values_are_copied_as_between_processes(worker: FakeEndpoint, server: Server) -> None:
    sent = {"gradient": torch.zeros(3), "steps": [1, 2]}
    worker.call(server.peer, "push", sent).result(PATIENCE_SECONDS)
    sent["gradient"].add_(1)
    sent["steps"].append(3)
    assert server.pushed[0]["gradient"].tolist() == [0, 0, 0]
    assert server.pushed[0]["steps"] == [1, 2]


def test_a_kill_between_push_and_answer(network: FakeNetwork, worker: FakeEndpoint, server: Server) -> None:
    with network.hold(server.peer, "push", "after") as held:
        answer = worker.call(server.peer, "push", 1)
        held.wait_until_reached()
        assert server.pushed == [1]
        assert not answer.done()
        network.kill(server.peer)
    error = error_of(answer)
    assert isinstance(error, PeerUnavailableError)
    assert error.peer == server.peer


def test_a_kill_before_the_push(network: FakeNetwork, worker: FakeEndpoint, server: Server) -> None:
    with network.hold(server.peer, "push") as held:
        answer = worker.call(server.peer, "push", 1)
        held.wait_until_reached()
        network.kill(server.peer)
    assert isinstance(error_of(answer), PeerUnavailableError)
    assert server.pushed == []


def test_a_hold_holds_one_method_of_one_peer(network: FakeNetwork, worker: FakeEndpoint, server: Server) -> None:
    other = Server(network, 1)
    worker.add_peer(other.peer)
    with network.hold(server.peer, "push") as held:
        answers = [worker.call(server.peer, "push", number) for number in range(3)]
        held.wait_until_reached(3)
        assert worker.call(server.peer, "pull").result(PATIENCE_SECONDS) == 0
        assert worker.call(other.peer, "push").result(PATIENCE_SECONDS) == 1
        assert not any(answer.done() for answer in answers)
    assert sorted(answer.result(PATIENCE_SECONDS) for answer in answers) == [1, 2, 3]


def test_a_held_answer_does_not_hold_the_handlers_thread(network: FakeNetwork, worker: FakeEndpoint) -> None:
    other = network.endpoint(Task("ps", 1))
    worker.add_peer(other.peer)
    with ThreadPoolExecutor(1) as executor:
        other.serve({name: Handler(lambda _sender, payload: payload, executor) for name in ("push", "pull")})
        with network.hold(other.peer, "push", "after") as held:
            answer = worker.call(other.peer, "push", 1)
            held.wait_until_reached()
            assert worker.call(other.peer, "pull", 2).result(PATIENCE_SECONDS) == 2
        assert answer.result(PATIENCE_SECONDS) == 1


def test_a_hold_that_nothing_reaches_says_so(network: FakeNetwork, server: Server) -> None:
    held = network.hold(server.peer, "push")
    with pytest.raises(CommunicationTimeoutError, match=r"waited 0\.01 s for 1 calls of 'push' to reach ps 0"):
        held.wait_until_reached(timeout_seconds=0.01)
    held.release()
    held.release()


def test_those_who_watch_are_told_of_a_kill_before_it_returns(
    network: FakeNetwork, worker: FakeEndpoint, server: Server
) -> None:
    told: list[tuple[Peer, str]] = []
    worker.watch(server.peer, lambda *news: told.append(news))
    worker.watch(server.peer, lambda *news: told.append(news))
    network.kill(server.peer)
    network.kill(server.peer)
    network.advance(1_000)
    assert told == [(server.peer, "its connection broke: the process has ended")] * 2


def test_a_stopped_process_neither_hears_nor_answers(
    network: FakeNetwork, worker: FakeEndpoint, server: Server
) -> None:
    other = Server(network, 1)
    worker.add_peer(other.peer)
    network.stop(server.peer)
    answer = worker.call(server.peer, "push", 1)
    assert worker.call(other.peer, "push", 1).result(PATIENCE_SECONDS) == 1
    network.resume(server.peer)
    assert answer.result(PATIENCE_SECONDS) == 1


def test_what_a_stopped_process_asks_arrives_when_it_goes_on(
    network: FakeNetwork, worker: FakeEndpoint, server: Server
) -> None:
    network.stop(worker.peer)
    answer = worker.call(server.peer, "push", 1)
    network.advance(59)
    assert server.pushed == []
    network.resume(worker.peer)
    assert answer.result(PATIENCE_SECONDS) == 1


def test_a_stopped_process_is_lost_at_the_deadline_only(
    network: FakeNetwork, worker: FakeEndpoint, server: Server
) -> None:
    told: list[str] = []
    worker.watch(server.peer, lambda _peer, reason: told.append(reason))
    network.advance(1_000)
    network.stop(server.peer)
    network.advance(3)
    assert told == []
    network.advance(0.5)
    assert told == ["gave no sign of life for 3.5 s (deadline 3 s): stopped, hung or cut off"]
    network.advance(100)
    assert len(told) == 1


def test_a_late_answer_is_dropped(network: FakeNetwork, worker: FakeEndpoint, server: Server) -> None:
    with network.hold(server.peer, "push", "after") as held:
        answer = worker.call(server.peer, "push", 1, timeout_seconds=5)
        held.wait_until_reached()
        network.advance(4.9)
        assert not answer.done()
        network.advance(0.1)
        with pytest.raises(PeerTimeoutError, match=r"ps 0 .* did not answer 'push' within 5 s"):
            answer.result(0)
    assert worker.call(server.peer, "push", 2).result(PATIENCE_SECONDS) == 2


def test_the_calls_of_a_killed_process_fail_and_reach_nobody(
    network: FakeNetwork, worker: FakeEndpoint, server: Server
) -> None:
    with network.hold(server.peer, "push") as held:
        answer = worker.call(server.peer, "push", 1)
        held.wait_until_reached()
        network.kill(worker.peer)
    assert isinstance(error_of(answer), CommunicationError)
    assert isinstance(error_of(worker.call(server.peer, "push", 2)), CommunicationError)
    assert server.pushed == []


def test_the_next_process_of_a_task_is_another_peer(network: FakeNetwork, worker: FakeEndpoint, server: Server) -> None:
    network.kill(server.peer)
    restarted = Server(network)
    assert restarted.peer.task == server.peer.task
    worker.add_peer(restarted.peer)
    assert worker.call(restarted.peer, "push", 1).result(PATIENCE_SECONDS) == 1
    assert isinstance(error_of(worker.call(server.peer, "push", 1)), PeerUnavailableError)


def test_who_watches_a_process_that_gave_it_up_is_told(
    network: FakeNetwork, worker: FakeEndpoint, server: Server
) -> None:
    told: list[str] = []
    worker.watch(server.peer, lambda _peer, reason: told.append(reason))
    server.endpoint.remove_peer(worker.peer)
    network.advance(1)
    assert len(told) == 1
    assert "has given this process up" in told[0]


def test_handlers_may_call(network: FakeNetwork, worker: FakeEndpoint, server: Server) -> None:
    def relay(_sender: Peer, payload: Any) -> Any:
        return worker.call(server.peer, "push", payload).result(PATIENCE_SECONDS)

    worker.serve({"relay": Handler(relay)})
    chief = network.endpoint(Task("chief", 0))
    chief.add_peer(worker.peer)
    assert chief.call(worker.peer, "relay", "x").result(PATIENCE_SECONDS) == 1
    assert server.pushed == ["x"]


def test_nothing_is_left_when_it_closes() -> None:
    before = set(threading.enumerate())
    with FakeNetwork() as network:
        server = Server(network)
        worker = network.endpoint(Task("worker", 0))
        worker.add_peer(server.peer)
        held = network.hold(server.peer, "push", "after")
        answers = [worker.call(server.peer, "push", number) for number in range(5)]
        held.wait_until_reached(5)
    assert all(isinstance(error_of(answer), CommunicationError) for answer in answers)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_what_makes_no_sense_is_refused(network: FakeNetwork, worker: FakeEndpoint, server: Server) -> None:
    stranger = Peer(Task("ps", 7), "0" * 16, "fake://ps/7")
    with pytest.raises(InvalidArgumentError, match="ps 7 is no endpoint of this network; it has ps 0"):
        network.kill(stranger)
    with pytest.raises(InvalidArgumentError, match=r"advance\(-1\)"):
        network.advance(-1)
    with pytest.raises(InvalidArgumentError, match="timeout_seconds=0"):
        worker.call(server.peer, "push", timeout_seconds=0)
