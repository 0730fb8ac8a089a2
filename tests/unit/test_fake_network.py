"""Faults of the in-memory network: they happen where they were put, and to nobody else.

That it answers as real processes do is shown in tests/multiprocess/test_ps_transport.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from torchstrat.errors import (
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    PeerTimeoutError,
    PeerUnavailableError,
)
from torchstrat.testing.fake_network import FakeEndpoint, FakeNetwork, Handler, Peer, Task

PATIENCE_SECONDS = 20.0


@pytest.fixture
def network() -> Iterator[FakeNetwork]:
    with FakeNetwork() as network:
        yield network


class Server:
    """Keeps what is pushed, as a parameter server would."""

    def __init__(self, network: FakeNetwork, index: int = 0) -> None:
        self.peer = (endpoint := network.endpoint(Task("ps", index))).peer
        self.pushed: list[Any] = []
        endpoint.serve({"push": Handler(self._push), "pull": Handler(lambda _sender, _payload: len(self.pushed))})

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


@pytest.fixture
def other(network: FakeNetwork, worker: FakeEndpoint) -> Server:
    other = Server(network, 1)
    worker.add_peer(other.peer)
    return other


def error_of(future: Future[Any]) -> BaseException:
    error = future.exception(PATIENCE_SECONDS)
    assert error is not None
    return error


@pytest.mark.parametrize("victim", ["server", "worker"])
@pytest.mark.parametrize(("when", "pushed"), [("before", []), ("after", [1])])
def test_a_kill_before_or_between_push_and_answer(
    network: FakeNetwork, worker: FakeEndpoint, server: Server, when: Any, pushed: list[int], victim: str
) -> None:
    with network.hold(server.peer, "push", when) as held:
        answer = worker.call(server.peer, "push", 1)
        held.wait_until_reached()
        assert server.pushed == pushed
        assert not answer.done()
        network.kill(server.peer if victim == "server" else worker.peer)
    error = error_of(answer)
    assert isinstance(error, CommunicationError)
    if victim == "server":
        assert isinstance(error, PeerUnavailableError)
        assert error.peer == server.peer
    assert isinstance(error_of(worker.call(server.peer, "push", 2)), CommunicationError)
    assert server.pushed == pushed


def test_a_hold_holds_one_method_of_one_peer(
    network: FakeNetwork, worker: FakeEndpoint, server: Server, other: Server
) -> None:
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


def test_those_who_watch_are_told_of_a_kill_before_it_returns(
    network: FakeNetwork, worker: FakeEndpoint, server: Server
) -> None:
    told: list[tuple[Peer, str]] = []
    for _ in range(2):
        worker.watch(server.peer, lambda *news: told.append(news))
    for _ in range(2):
        network.kill(server.peer)
        network.advance(1_000)
        assert told == [(server.peer, "its connection broke: the process has ended")] * 2


@pytest.mark.parametrize("stopped", ["server", "worker"])
def test_a_stopped_process_neither_hears_nor_speaks(
    network: FakeNetwork, worker: FakeEndpoint, server: Server, other: Server, stopped: str
) -> None:
    peer = server.peer if stopped == "server" else worker.peer
    network.stop(peer)
    answer = worker.call(server.peer, "push", 1)
    network.advance(59)
    if stopped == "server":
        assert worker.call(other.peer, "push", 1).result(PATIENCE_SECONDS) == 1
    assert server.pushed == []
    network.resume(peer)
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
    for seconds in (0.5, 100):
        network.advance(seconds)
        assert told == ["gave no sign of life for 3.5 s (deadline 3 s): stopped, hung or cut off"]


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


def test_what_makes_no_sense_is_refused(network: FakeNetwork, server: Server) -> None:
    with pytest.raises(InvalidArgumentError, match="ps 7 is no endpoint of this network; it has ps 0"):
        network.kill(Peer(Task("ps", 7), "0" * 16, "fake://ps/7"))
    with pytest.raises(InvalidArgumentError, match=r"advance\(-1\)"):
        network.advance(-1)
    held = network.hold(server.peer, "push")
    with pytest.raises(CommunicationTimeoutError, match=r"waited 0\.01 s for 1 calls of 'push' to reach ps 0"):
        held.wait_until_reached(timeout_seconds=0.01)
    for _ in range(2):
        held.release()
