"""What every `Endpoint` promises, on torch.distributed.rpc between processes and on the in-memory network alike."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import pytest
import torch

from tests.ps_nodes import PATIENCE_SECONDS, SECRET, Handlers, Nodes, Telling
from torchstrat.errors import (
    CommunicationError,
    FencedError,
    InvalidArgumentError,
    NotSendableError,
    PeerTimeoutError,
    PeerUnavailableError,
)
from torchstrat.parameter_server.endpoint import Endpoint, Handler
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.parameter_server.transport import RpcEndpoint
from torchstrat.parameter_server.wire.answers import RemoteHandlerError
from torchstrat.testing.fake_network import FakeNetwork

HEARTBEAT_SECONDS, DEADLINE_SECONDS = 0.1, 0.5


class Pair(Protocol):
    """An endpoint ``me`` and a process ``other`` that answers `Handlers`, which it has added."""

    me: Endpoint
    other: Peer

    def kill(self) -> None: ...
    def stop(self) -> None: ...
    def resume(self) -> None: ...
    def pass_time(self, seconds: float) -> None:
        """At least; on the wire it passes by itself."""

    def have_other_remove_me(self) -> None: ...
    def new(self) -> Peer:
        """Another process, for the same task, not added."""


class RpcPair:
    same_host = False

    def __init__(self) -> None:
        self._nodes = Nodes(same_host=self.same_host)
        self._node = self._nodes.start()
        self.other = self._node.peer
        self.me: Endpoint = RpcEndpoint(
            Task("chief", 0),
            secret=SECRET,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            deadline_seconds=DEADLINE_SECONDS,
            same_host=self.same_host,
        )
        self.me.add_peer(self.other)
        assert (self.me.describe_way(self.other) == "shared memory") is self.same_host

    def kill(self) -> None:
        self._node.kill()

    def stop(self) -> None:
        self._node.signal(19)

    def resume(self) -> None:
        self._node.signal(18)

    def pass_time(self, seconds: float) -> None:
        pass

    def have_other_remove_me(self) -> None:
        self._node.run(_remove, self.me.peer)

    def new(self) -> Peer:
        return self._nodes.start().peer

    def end(self) -> None:
        self.me.close()
        self._nodes.end()


class MemoryPair(RpcPair):
    same_host = True


class FakePair:
    def __init__(self) -> None:
        self._network = FakeNetwork(heartbeat_seconds=HEARTBEAT_SECONDS, deadline_seconds=DEADLINE_SECONDS)
        self._handlers: list[Handlers] = []
        self.other = self.new()
        self.me: Endpoint = self._network.endpoint(Task("chief", 0))
        self.me.add_peer(self.other)

    def kill(self) -> None:
        self._network.kill(self.other)

    def stop(self) -> None:
        self._network.stop(self.other)

    def resume(self) -> None:
        self._network.resume(self.other)

    def pass_time(self, seconds: float) -> None:
        self._network.advance(seconds)

    def have_other_remove_me(self) -> None:
        self._network._endpoint(self.other).remove_peer(self.me.peer)

    def new(self) -> Peer:
        endpoint = self._network.endpoint(Task("worker", 0))
        self._handlers.append(Handlers(endpoint))
        endpoint.serve(self._handlers[-1].table())
        return endpoint.peer

    def end(self) -> None:
        self._network.close()
        for handlers in self._handlers:
            handlers.close()


def _remove(endpoint: RpcEndpoint, peer: Peer) -> None:
    endpoint.remove_peer(peer)


@pytest.fixture(params=[RpcPair, MemoryPair, FakePair])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = request.param()
    yield made
    made.end()


def ask(pair: Pair, method: str, payload: Any = None) -> Any:
    return pair.me.call(pair.other, method, payload).result(PATIENCE_SECONDS)


def error_of(future: Future[Any]) -> BaseException:
    error = future.exception(PATIENCE_SECONDS)
    assert error is not None
    return error


class Lost:
    """A callback for `Endpoint.watch` that remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[Peer, str]] = []
        self._event = threading.Event()

    def __call__(self, peer: Peer, reason: str) -> None:
        self.told.append((peer, reason))
        self._event.set()

    def wait(self) -> str:
        assert self._event.wait(PATIENCE_SECONDS), "nobody was told"
        return self.told[0][1]


@pytest.mark.parametrize("method", ["echo", "echo_on_executor"])
@pytest.mark.parametrize("payload", [None, 3, {"nested": [(1, "two"), b"\x00" * 10]}, [b"x" * 300_000]])
def test_calls_are_answered(pair: Pair, method: str, payload: Any) -> None:
    assert ask(pair, method, payload) == payload


def test_many_calls_at_once_get_their_own_answers(pair: Pair) -> None:
    answers = [pair.me.call(pair.other, "echo_on_executor", number) for number in range(100)]
    assert [answer.result(PATIENCE_SECONDS) for answer in answers] == list(range(100))


def test_handlers_learn_who_asks(pair: Pair) -> None:
    assert ask(pair, "who") == pair.me.peer


def test_tensors_arrive_as_values(pair: Pair) -> None:
    base = torch.arange(12.0).view(3, 4)
    sent = {
        "plain": base,
        "view": base[:2],
        "columns": base[:, 1:3],
        "transposed": base.t(),
        "expanded": torch.ones(1).expand(5),
        "scalar": base[0, 3],
        "empty": base[:0],
        "nothing": torch.empty(0),
        "bool": base > 3,
        "half": base.bfloat16(),
        "float8": base.to(torch.float8_e5m2),
        "unsigned": base.to(torch.uint16),
        "complex": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 2), (3, 2), check_invariants=True),
    }
    for method in ("echo", "echo_on_executor"):
        arrived = ask(pair, method, sent)
        assert arrived.keys() == sent.keys()
        for name, tensor in sent.items():
            assert arrived[name].dtype == tensor.dtype, name
            assert arrived[name].to_dense().tolist() == tensor.to_dense().tolist(), name


def test_a_received_tensor_is_the_receivers_own_and_no_larger(pair: Pair) -> None:
    parameter = torch.nn.Parameter(torch.arange(100.0))
    views = [parameter, parameter[:60], parameter[:10], torch.ones(1).expand(4, 5)]
    described = ask(pair, "describe", views)
    assert described == [
        ((100,), torch.float32, False, 400),
        ((60,), torch.float32, False, 240),
        ((10,), torch.float32, False, 40),
        ((4, 5), torch.float32, False, 80),
    ]
    first, second = ask(pair, "echo", [parameter, parameter.detach()])
    first.add_(1)
    assert torch.equal(parameter, second)
    second.add_(1)
    assert torch.equal(parameter, torch.arange(100.0))


@pytest.mark.parametrize("method", ["fail", "fail_on_executor"])
def test_what_a_handler_raises_is_raised_at_the_caller(pair: Pair, method: str) -> None:
    error = error_of(pair.me.call(pair.other, method, "telling"))
    assert type(error) is Telling
    assert error.number == 42
    (note,) = error.__notes__
    assert note.startswith(f"raised by {pair.other}, answering '{method}':\nTraceback (most recent call last):")
    assert "in _fail" in note


@pytest.mark.parametrize(("kind", "text"), [("odd", "Odd: one and another"), ("exit", "SystemExit: 3")])
def test_what_cannot_travel_arrives_as_text(pair: Pair, kind: str, text: str) -> None:
    error = error_of(pair.me.call(pair.other, "fail", kind))
    assert type(error) is RemoteHandlerError
    assert isinstance(error, RuntimeError)
    assert text in str(error)
    assert "in _fail" in error.__notes__[0]
    assert ask(pair, "echo", 1) == 1


def test_unknown_methods_are_refused(pair: Pair) -> None:
    with pytest.raises(CommunicationError, match=r"worker 0 .* does not answer 'nonsense'; it answers call_back, "):
        ask(pair, "nonsense")


def test_what_cannot_be_pickled_is_refused_at_either_end(pair: Pair) -> None:
    with pytest.raises(NotSendableError, match="payload of 'echo' cannot be sent"):
        ask(pair, "echo", lambda: None)
    with pytest.raises(NotSendableError, match=r"result of worker 0 .* answering 'lambda' cannot be sent"):
        ask(pair, "lambda")


def test_methods_can_be_served_later(pair: Pair) -> None:
    with pytest.raises(CommunicationError, match="does not answer 'later'; it answers nothing yet"):
        ask(pair, "call_back", "later")
    pair.me.serve({"later": Handler(lambda _sender, payload: payload)})
    assert ask(pair, "call_back", "later") == "back"
    pair.me.serve({"more": Handler(lambda _sender, _payload: "more")})
    assert ask(pair, "call_back", "later") == "back"
    assert ask(pair, "call_back", "more") == "more"


def test_a_peer_that_was_never_added(pair: Pair) -> None:
    unknown = pair.new()
    error = error_of(pair.me.call(unknown, "echo"))
    assert isinstance(error, PeerUnavailableError)
    assert "add_peer() it first" in str(error)
    with pytest.raises(PeerUnavailableError, match="add_peer"):
        pair.me.watch(unknown, Lost())
    pair.me.add_peer(unknown)
    assert pair.me.call(unknown, "echo", 1).result(PATIENCE_SECONDS) == 1


def test_an_answer_that_takes_too_long(pair: Pair) -> None:
    answer = pair.me.call(pair.other, "wait", timeout_seconds=0.2)
    pair.pass_time(0.3)
    error = error_of(answer)
    assert type(error) is PeerTimeoutError
    assert f"{pair.other} did not answer 'wait' within 0.2 s" in str(error)
    ask(pair, "release")
    assert ask(pair, "wait") is True  # the late answer went nowhere


def test_a_killed_peer_is_unavailable(pair: Pair) -> None:
    waiting = pair.me.call(pair.other, "wait")
    ask(pair, "echo")
    pair.kill()
    for future in (waiting, pair.me.call(pair.other, "echo")):
        error = error_of(future)
        assert isinstance(error, PeerUnavailableError)
        assert error.peer == pair.other
        assert str(pair.other) in str(error)


def test_a_peer_that_died_before_the_first_call(pair: Pair) -> None:
    pair.kill()
    assert isinstance(error_of(pair.me.call(pair.other, "echo")), PeerUnavailableError)
    lost = Lost()
    pair.me.watch(pair.other, lost)
    lost.wait()


def test_the_next_process_of_a_task_is_called_beside_the_old_one(pair: Pair) -> None:
    restarted = pair.new()
    assert restarted.task == pair.other.task
    pair.me.add_peer(restarted)
    ask(pair, "echo")
    pair.kill()
    assert pair.me.call(restarted, "echo", 1).result(PATIENCE_SECONDS) == 1


def test_a_removed_peer(pair: Pair) -> None:
    ask(pair, "echo")
    waiting = pair.me.call(pair.other, "wait")
    pair.me.remove_peer(pair.other)
    for future in (waiting, pair.me.call(pair.other, "echo")):
        error = error_of(future)
        assert isinstance(error, PeerUnavailableError)
        assert "was removed" in str(error)
    pair.me.remove_peer(pair.other)
    pair.me.add_peer(pair.other)
    assert isinstance(error_of(pair.me.call(pair.other, "echo")), PeerUnavailableError)


def test_what_a_removed_peer_sends_is_refused(pair: Pair) -> None:
    pair.me.serve({"push": Handler(lambda _sender, payload: payload)})
    assert ask(pair, "call_back", "push") == "back"
    pair.have_other_remove_me()
    with pytest.raises(FencedError, match="no longer takes 'echo' from chief 0"):
        ask(pair, "echo")


def test_a_watched_peer_that_dies(pair: Pair) -> None:
    first, second = Lost(), Lost()
    pair.me.watch(pair.other, first)
    pair.me.watch(pair.other, second)
    ask(pair, "echo")
    pair.kill()
    assert "connection broke" in first.wait()
    second.wait()
    after = Lost()
    pair.me.watch(pair.other, after)
    after.wait()
    assert [len(lost.told) for lost in (first, second, after)] == [1, 1, 1]
    assert first.told[0][0] == pair.other


def test_a_watched_peer_that_is_stopped(pair: Pair) -> None:
    lost = Lost()
    pair.me.watch(pair.other, lost)
    ask(pair, "echo")
    pair.stop()
    late = pair.me.call(pair.other, "echo", 1)
    pair.pass_time(10 * DEADLINE_SECONDS)
    assert "gave no sign of life" in lost.wait()
    assert not late.done()
    pair.resume()
    assert late.result(PATIENCE_SECONDS) == 1
    assert len(lost.told) == 1


def test_a_watched_peer_that_has_removed_this_process(pair: Pair) -> None:
    lost = Lost()
    pair.me.watch(pair.other, lost)
    ask(pair, "echo")
    pair.have_other_remove_me()
    pair.pass_time(1)
    lost.wait()


def test_nobody_is_told_of_a_removed_peer(pair: Pair) -> None:
    lost, of_another = Lost(), Lost()
    pair.me.watch(pair.other, lost)
    ask(pair, "echo")
    pair.me.remove_peer(pair.other)
    pair.me.watch(pair.other, lost)
    another = pair.new()
    pair.me.add_peer(another)
    pair.me.watch(another, of_another)
    pair.kill()
    pair.me.close()
    assert lost.told == []


def test_closing_fails_what_waits(pair: Pair) -> None:
    waiting = pair.me.call(pair.other, "wait")
    pair.me.close()
    pair.me.close()
    for future in (waiting, pair.me.call(pair.other, "echo")):
        with pytest.raises(CommunicationError):
            future.result(PATIENCE_SECONDS)


def test_times_that_are_none(pair: Pair) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout_seconds=0"):
        pair.me.call(pair.other, "echo", timeout_seconds=0)


# What only real processes show.


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.end()


@pytest.fixture
def me() -> Iterator[RpcEndpoint]:
    endpoint = RpcEndpoint(
        Task("chief", 0), secret=SECRET, heartbeat_seconds=HEARTBEAT_SECONDS, deadline_seconds=DEADLINE_SECONDS
    )
    yield endpoint
    endpoint.close()


def test_it_listens_on_loopback_unless_told(me: RpcEndpoint) -> None:
    assert me.peer.url.startswith("uv://127.0.0.1:")


def test_a_host_that_is_not_here() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"host '192\.0\.2\.1' .* is no address of this machine. Use one of .*127\.0\.0\.1"
    ):
        RpcEndpoint(Task("chief", 0), secret=SECRET, host="192.0.2.1")


def test_a_process_has_one_endpoint_at_a_time(me: RpcEndpoint) -> None:
    with pytest.raises(CommunicationError, match=r"uses torch\.distributed\.rpc already"):
        RpcEndpoint(Task("chief", 0), secret=SECRET)
    me.close()
    second = RpcEndpoint(Task("chief", 0), secret=SECRET)
    second.serve({"echo": Handler(lambda _sender, payload: payload)})
    second.add_peer(second.peer)
    assert second.call(second.peer, "echo", 7).result(PATIENCE_SECONDS) == 7
    assert second.peer.incarnation != me.peer.incarnation
    second.close()


def test_short_calls_and_heartbeats_pass_while_all_executors_are_busy(me: RpcEndpoint, nodes: Nodes) -> None:
    peer = nodes.start().peer
    me.add_peer(peer)
    lost = Lost()
    me.watch(peer, lost)
    waiting = [me.call(peer, "wait") for _ in range(30)]
    for _ in range(10):  # so that several deadlines pass
        assert isinstance(error_of(me.call(peer, "wait", timeout_seconds=DEADLINE_SECONDS / 5)), PeerTimeoutError)
        assert me.call(peer, "echo", 1).result(PATIENCE_SECONDS) == 1
    assert lost.told == []
    me.call(peer, "release").result(PATIENCE_SECONDS)
    assert all(answer.result(PATIENCE_SECONDS) for answer in waiting)


LEAVES_WITHOUT_CLOSING = """
import sys
from concurrent.futures import ThreadPoolExecutor
from torchstrat.parameter_server.endpoint import Handler
from torchstrat.parameter_server.tasks import Task
from torchstrat.parameter_server.transport import RpcEndpoint
import threading

endpoint = RpcEndpoint(Task("worker", 0), secret=b"secret")
endpoint.serve({"never": Handler(lambda sender, payload: threading.Event().wait())})
endpoint.add_peer(endpoint.peer)
endpoint.watch(endpoint.peer, print)
endpoint.call(endpoint.peer, "never")
sys.exit(7)
"""


def test_an_interpreter_ends_with_its_endpoint_open_and_calls_waiting() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_WITHOUT_CLOSING], timeout=PATIENCE_SECONDS, capture_output=True, check=False
    )
    assert ended.returncode == 7, ended.stderr.decode()
