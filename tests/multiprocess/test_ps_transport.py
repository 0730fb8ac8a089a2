"""What every `Endpoint` promises, on torch.distributed.rpc between processes and on the in-memory network alike."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.ps_nodes import (
    PATIENCE_SECONDS,
    SECRET,
    Handlers,
    Lost,
    Nodes,
    Telling,
    endpoint_with,
    error_of,
)
from torchstrat.errors import (
    CommunicationError,
    FencedError,
    InvalidArgumentError,
    NotSendableError,
    PeerTimeoutError,
    PeerUnavailableError,
)
from torchstrat.parameter_server.interface import Endpoint, Handler, Peer, Task
from torchstrat.parameter_server.transport.requests import RemoteHandlerError
from torchstrat.parameter_server.transport.rpc import RpcEndpoint
from torchstrat.testing.fake_network import FakeNetwork

HEARTBEAT_SECONDS, DEADLINE_SECONDS = 0.1, 0.5
BEATS = {"heartbeat_seconds": HEARTBEAT_SECONDS, "deadline_seconds": DEADLINE_SECONDS}


class RpcPair:
    """An endpoint ``me`` and a process ``other`` that answers `Handlers`, which it has added."""

    def __init__(self, same_host: bool = False) -> None:
        self._nodes = Nodes(same_host=same_host)
        self._node = self._nodes.start()
        self.other = self._node.peer
        self.me: Endpoint = RpcEndpoint(Task("chief", 0), secret=SECRET, same_host=same_host, **BEATS)
        self.me.add_peer(self.other)
        assert (self.me.describe_way(self.other) == "shared memory") is same_host

    def kill(self) -> None:
        self._node.kill()

    def stop(self) -> None:
        self._node.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._node.signal(signal.SIGCONT)

    def pass_time(self, seconds: float) -> None:
        """At least; on the wire it passes by itself."""

    def have_other_remove_me(self) -> None:
        self._node.run(RpcEndpoint.remove_peer, self.me.peer)

    def new(self) -> Peer:
        """Another process, for the same task, not added."""
        return self._nodes.start().peer

    def end(self) -> None:
        self.me.close()
        self._nodes.close()


class MemoryPair(RpcPair):
    def __init__(self) -> None:
        super().__init__(same_host=True)


class FakePair:
    def __init__(self) -> None:
        self._network = FakeNetwork(**BEATS)
        self._others: list[tuple[Endpoint, Handlers]] = []
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
        self._others[0][0].remove_peer(self.me.peer)

    def new(self) -> Peer:
        endpoint = self._network.endpoint(Task("worker", 0))
        self._others.append((endpoint, Handlers(endpoint)))
        endpoint.serve(self._others[-1][1].table())
        return endpoint.peer

    def end(self) -> None:
        self._network.close()
        for _, handlers in self._others:
            handlers.close()


Pair = RpcPair | FakePair


@pytest.fixture(params=[RpcPair, MemoryPair, FakePair])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = request.param()
    yield made
    made.end()


def ask(pair: Pair, method: str, payload: Any = None) -> Any:
    return pair.me.call(pair.other, method, payload).result(PATIENCE_SECONDS)


def test_calls_are_answered_each_with_its_own_answer_and_handlers_learn_who_asks(pair: Pair) -> None:
    for method in ("echo", "echo_on_executor"):
        for payload in (None, 3, {"nested": [(1, "two"), b"\x00" * 10]}, [b"x" * 300_000]):
            assert ask(pair, method, payload) == payload
    answers = [pair.me.call(pair.other, "echo_on_executor", number) for number in range(100)]
    assert [answer.result(PATIENCE_SECONDS) for answer in answers] == list(range(100))
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
    assert ask(pair, "describe", views) == [
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


def test_what_a_handler_raises_is_raised_at_the_caller(pair: Pair) -> None:
    for method in ("fail", "fail_on_executor"):
        error = error_of(pair.me.call(pair.other, method, "telling"))
        assert type(error) is Telling
        assert error.number == 42
        (note,) = error.__notes__
        assert note.startswith(f"raised by {pair.other}, answering '{method}':\nTraceback (most recent call last):")
        assert "in _fail" in note
    for kind, text in (("odd", "Odd: one and another"), ("exit", "SystemExit: 3")):  # which cannot travel
        error = error_of(pair.me.call(pair.other, "fail", kind))
        assert type(error) is RemoteHandlerError
        assert isinstance(error, RuntimeError)
        assert text in str(error)
        assert "in _fail" in error.__notes__[0]
    assert ask(pair, "echo", 1) == 1


def test_what_cannot_be_asked_or_answered_is_refused(pair: Pair) -> None:
    with pytest.raises(CommunicationError, match=r"worker 0 .* does not answer 'nonsense'; it answers call_back, "):
        ask(pair, "nonsense")
    with pytest.raises(NotSendableError, match="payload of 'echo' cannot be sent"):
        ask(pair, "echo", lambda: None)
    with pytest.raises(NotSendableError, match=r"result of worker 0 .* answering 'lambda' cannot be sent"):
        ask(pair, "lambda")
    with pytest.raises(InvalidArgumentError, match="timeout_seconds=0"):
        pair.me.call(pair.other, "echo", timeout_seconds=0)


def test_methods_can_be_served_later(pair: Pair) -> None:
    with pytest.raises(CommunicationError, match="does not answer 'later'; it answers nothing yet"):
        ask(pair, "call_back", "later")
    pair.me.serve({"later": Handler(lambda _sender, payload: payload)})
    assert ask(pair, "call_back", "later") == "back"
    pair.me.serve({"more": Handler(lambda _sender, _payload: "more")})
    assert ask(pair, "call_back", "later") == "back"
    assert ask(pair, "call_back", "more") == "more"


def test_a_peer_is_called_once_it_is_added_and_beside_the_one_that_was_its_task_before(pair: Pair) -> None:
    unknown = pair.new()
    assert unknown.task == pair.other.task
    error = error_of(pair.me.call(unknown, "echo"))
    assert isinstance(error, PeerUnavailableError)
    assert "add_peer() it first" in str(error)
    with pytest.raises(PeerUnavailableError, match="add_peer"):
        pair.me.watch(unknown, Lost())
    pair.me.add_peer(unknown)
    ask(pair, "echo")
    assert pair.me.call(unknown, "echo", 1).result(PATIENCE_SECONDS) == 1
    pair.kill()
    assert pair.me.call(unknown, "echo", 2).result(PATIENCE_SECONDS) == 2


def test_an_answer_that_takes_too_long(pair: Pair) -> None:
    answer = pair.me.call(pair.other, "wait", timeout_seconds=0.2)
    pair.pass_time(0.3)
    error = error_of(answer)
    assert type(error) is PeerTimeoutError
    assert f"{pair.other} did not answer 'wait' within 0.2 s" in str(error)
    ask(pair, "release")
    assert ask(pair, "wait") is True  # the late answer went nowhere


ENDS = ["it is killed", "it is removed", "this end is closed", "it is stopped and this end closed"]


@pytest.mark.parametrize("what", ENDS)
def test_what_waits_for_a_peer_and_what_is_asked_later_fails_when(pair: Pair, what: str) -> None:
    """And closing waits for nobody."""
    waiting = pair.me.call(pair.other, "wait")
    ask(pair, "echo")
    if what == "it is killed":
        pair.kill()
    elif what.startswith("it is stopped"):
        pair.stop()
    began = time.monotonic()
    for _ in range(2):
        if what == "it is removed":
            pair.me.remove_peer(pair.other)
        elif what.endswith("closed"):
            pair.me.close()
            assert time.monotonic() - began < PATIENCE_SECONDS / 2
            assert waiting.exception(0) is not None
    pair.me.add_peer(pair.other)  # in vain
    for future in (waiting, pair.me.call(pair.other, "echo")):
        error = error_of(future)
        assert isinstance(error, CommunicationError)
        if not what.endswith("closed"):
            assert isinstance(error, PeerUnavailableError)
            assert error.peer == pair.other
            assert str(pair.other) in str(error)
            assert ("was removed" in str(error)) == (what == "it is removed")
    if what == "it is killed":
        began = time.monotonic()
        pair.me.close()
        assert time.monotonic() - began < PATIENCE_SECONDS / 2


def test_a_peer_that_died_before_the_first_call(pair: Pair) -> None:
    pair.kill()
    assert isinstance(error_of(pair.me.call(pair.other, "echo")), PeerUnavailableError)
    lost = Lost()
    pair.me.watch(pair.other, lost)
    lost.wait()


def test_what_a_removed_peer_sends_is_refused_and_who_watches_is_told(pair: Pair) -> None:
    pair.me.serve({"push": Handler(lambda _sender, payload: payload)})
    lost = Lost()
    pair.me.watch(pair.other, lost)
    assert ask(pair, "call_back", "push") == "back"
    pair.have_other_remove_me()
    with pytest.raises(FencedError, match="no longer takes 'echo' from chief 0"):
        ask(pair, "echo")
    pair.pass_time(1)
    lost.wait()


def test_a_watched_peer_that_dies(pair: Pair) -> None:
    first, second, after = Lost(), Lost(), Lost()
    for lost in (first, second):
        pair.me.watch(pair.other, lost)
    ask(pair, "echo")
    pair.kill()
    assert "connection broke" in first.wait()
    second.wait()
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


# What only real processes show.


@pytest.fixture
def me() -> Iterator[RpcEndpoint]:
    with endpoint_with(**BEATS) as endpoint:
        yield endpoint


def test_it_listens_on_loopback_unless_told() -> None:
    with endpoint_with() as me:
        assert me.peer.url.startswith("uv://127.0.0.1:")
    not_here = r"host '192\.0\.2\.1' .* is no address of this machine. Use one of .*127\.0\.0\.1"
    with pytest.raises(InvalidArgumentError, match=not_here):
        RpcEndpoint(Task("chief", 0), secret=SECRET, host="192.0.2.1")


def test_a_process_has_one_endpoint_at_a_time(me: RpcEndpoint) -> None:
    with pytest.raises(CommunicationError, match=r"a ParameterServerStrategy that was not closed.*strategy\.close\(\)"):
        RpcEndpoint(Task("chief", 0), secret=SECRET)
    me.close()
    with endpoint_with() as second:
        second.serve({"echo": Handler(lambda _sender, payload: payload)})
        second.add_peer(second.peer)
        assert second.call(second.peer, "echo", 7).result(PATIENCE_SECONDS) == 7
        assert second.peer.incarnation != me.peer.incarnation


def test_short_calls_and_heartbeats_pass_while_all_executors_are_busy(me: RpcEndpoint) -> None:
    with Nodes() as nodes:
        peer, lost = nodes.start().peer, Lost()
        me.add_peer(peer)
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
from torchstrat.parameter_server.interface import Handler
from torchstrat.parameter_server.interface import Task
from torchstrat.parameter_server.transport.rpc import RpcEndpoint
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
