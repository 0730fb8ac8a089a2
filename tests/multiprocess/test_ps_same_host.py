"""Calls within a host: what is different from RPC, between real processes."""

from __future__ import annotations

import os
import queue
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ps_nodes import PATIENCE_SECONDS, SECRET, Node, Nodes, wait_until
from torchstrat.collectives.shared_memory.segment import NoRoomError, Segment
from torchstrat.errors import PeerTimeoutError, PeerUnavailableError
from torchstrat.parameter_server.same_host.greeting import name_of
from torchstrat.parameter_server.same_host.message import DTYPES
from torchstrat.parameter_server.same_host.neighbours import SWITCH
from torchstrat.parameter_server.tasks import Task
from torchstrat.parameter_server.transport import RpcEndpoint
from torchstrat.testing._process import forking

SUM = 4 * 2**20 // 4  # elements that `Handlers` adds up

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name is Linux's")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.end()


@pytest.fixture
def me() -> Iterator[RpcEndpoint]:
    endpoint = RpcEndpoint(Task("chief", 0), secret=SECRET)
    yield endpoint
    endpoint.close()


@pytest.fixture
def other(me: RpcEndpoint, nodes: Nodes) -> Node:
    node = nodes.start("ps", 0)
    me.add_peer(node.peer)
    assert me.describe_way(node.peer) == "shared memory"
    return node


def ask(me: RpcEndpoint, node: Node, method: str, payload: Any = None, **options: Any) -> Any:
    return me.call(node.peer, method, payload, **options).result(PATIENCE_SECONDS)


def no_rpc(me: RpcEndpoint, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a call that goes another way fails."""
    ask(me, other, "echo")  # RPC is to tell who is alive
    monkeypatch.setattr(me, "_send", None)


def test_tensors_of_every_kind_and_size_come_back_as_they_were(
    me: RpcEndpoint, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_rpc(me, other, monkeypatch)
    for dtype in DTYPES:
        for shape in [(), (0, 3), (1,), (3, 5), (700, 3), (300, 1000)]:
            made = (torch.rand(shape) * 100).to(dtype)
            for sent in (made, made.t() if made.dim() == 2 else made):
                found = ask(me, other, "echo", {"a": [sent], "b": sent.clone()})
                assert found["a"][0].dtype == dtype
                assert torch.equal(found["a"][0], sent)
                assert torch.equal(found["b"], sent)


def test_an_answer_is_written_where_the_caller_wants_it(me: RpcEndpoint, other: Node) -> None:
    into = me.empty((SUM,), torch.float32)
    for number in (1, 2, 3):
        answer = ask(me, other, "push_in_place", torch.ones(SUM), into=[into])
        assert answer is into
        assert bool((into == number).all())


def test_the_caller_is_told_what_is_written_before_there_is_an_answer(me: RpcEndpoint, other: Node) -> None:
    into = [me.empty((SUM,), torch.float32).zero_() for _ in range(2)]
    told: queue.Queue[int] = queue.Queue()
    future = me.call(other.peer, "write_two", into=into, on_written=told.put)
    assert told.get(timeout=PATIENCE_SECONDS) == 0
    assert told.get(timeout=PATIENCE_SECONDS) == 1
    assert bool((into[0] == 1).all())
    assert not future.done()
    ask(me, other, "release")
    assert [answer is place for answer, place in zip(future.result(PATIENCE_SECONDS), into, strict=True)] == [True] * 2
    assert bool((into[1] == 2).all())
    assert told.empty()


def test_the_caller_is_not_told_of_what_could_not_be_written_where_it_is_wanted(me: RpcEndpoint, other: Node) -> None:
    told: queue.Queue[int] = queue.Queue()
    wrong = [me.empty((SUM // 2,), torch.float32), me.empty((SUM,), torch.float32)]
    future = me.call(other.peer, "write_two", into=wrong, on_written=told.put)
    assert told.get(timeout=PATIENCE_SECONDS) == 0
    ask(me, other, "release")
    first, second = future.result(PATIENCE_SECONDS)
    assert bool((first == 1).all())
    assert second is wrong[1]
    assert told.empty()


def test_memory_that_does_not_fit_is_not_written_to(me: RpcEndpoint, other: Node) -> None:
    wrong = me.empty((SUM // 2,), torch.float32).fill_(7)
    own = torch.full((SUM,), 7.0)  # not memory that others see
    for into in (wrong, own):
        answer = ask(me, other, "push_in_place", torch.ones(SUM), into=[into])
        assert answer is not into
        assert answer.shape == (SUM,)
        assert bool((into == 7).all())


def test_gradients_that_lie_in_shared_memory_are_not_copied(
    me: RpcEndpoint, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = me.empty((SUM,), torch.float32).fill_(1)
    monkeypatch.setattr("torchstrat.parameter_server.same_host.caller.put", None)
    assert float(ask(me, other, "push", gradient)[0]) == 1


def test_what_a_handler_keeps_is_its_own(me: RpcEndpoint, other: Node) -> None:
    gradient = me.empty((SUM,), torch.float32).fill_(1)
    ask(me, other, "keep", gradient)
    gradient.fill_(2)
    assert bool((ask(me, other, "kept") == 1).all())


def test_memory_comes_back(me: RpcEndpoint, other: Node) -> None:
    assert me._neighbours is not None
    for _ in range(50):
        ask(me, other, "push_in_place", torch.ones(SUM), into=[me.empty((SUM,), torch.float32)])
    # Two calls' worth: one that is made, and one whose end the thread that brought it is about to forget.
    assert me._neighbours.pool.total_bytes <= 2 * 2 * 4 * SUM


def test_rare_calls_leave_no_memory_behind(me: RpcEndpoint, other: Node) -> None:
    large = torch.ones(16 << 20)
    before = _shared_bytes()
    for _ in range(3):
        assert torch.equal(ask(me, other, "echo", large), large)
    ask(me, other, "echo")
    _wait_for_shared_bytes(before + large.nbytes // 4)


def test_long_texts_travel_too(me: RpcEndpoint, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    no_rpc(me, other, monkeypatch)
    text = "x" * 5_000_000
    many = [torch.full((600,), float(number)) for number in range(300)]
    found = ask(me, other, "echo", (text, many))
    assert found[0] == text
    assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(found[1], many, strict=True))


def test_a_late_answer_writes_to_memory_that_nobody_uses(me: RpcEndpoint, other: Node) -> None:
    into = me.empty((SUM,), torch.float32)
    address = into.data_ptr()
    other.signal(signal.SIGSTOP)
    late = me.call(other.peer, "push_in_place", torch.ones(SUM), timeout_seconds=0.2, into=[into])
    assert isinstance(late.exception(PATIENCE_SECONDS), PeerTimeoutError)
    del into
    fresh = [me.empty((SUM,), torch.float32).fill_(5) for _ in range(4)]
    assert address not in {tensor.data_ptr() for tensor in fresh}
    other.signal(signal.SIGCONT)
    assert float(ask(me, other, "push", torch.ones(SUM))[0]) == 2, "the late one was applied, and then this one"
    assert all(bool((tensor == 5).all()) for tensor in fresh)


def test_a_process_that_was_given_up_writes_to_memory_that_nobody_uses(me: RpcEndpoint, other: Node) -> None:
    into = me.empty((SUM,), torch.float32)
    address = into.data_ptr()
    other.signal(signal.SIGSTOP)
    call = me.call(other.peer, "push_in_place", torch.ones(SUM), into=[into])
    me.remove_peer(other.peer)
    assert isinstance(call.exception(PATIENCE_SECONDS), PeerUnavailableError)
    del into, call
    fresh = [me.empty((SUM,), torch.float32).fill_(5) for _ in range(4)]
    assert address not in {tensor.data_ptr() for tensor in fresh}
    other.signal(signal.SIGCONT)
    other.run(_nothing)
    assert all(bool((tensor == 5).all()) for tensor in fresh)


def _nothing(_endpoint: RpcEndpoint) -> None:
    """Tells that the process goes on."""


def test_without_memory_calls_go_through_rpc(me: RpcEndpoint, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, **_: Any) -> Segment:
        raise NoRoomError(12, f"{size} bytes are too much")

    monkeypatch.setattr(Segment, "allocate", refuse)
    into = me.empty((SUM,), torch.float32)
    answer = ask(me, other, "push_in_place", torch.ones(SUM), into=[into])
    assert bool((answer == 1).all())


def test_forked_children_hold_no_connection(me: RpcEndpoint, other: Node) -> None:
    """A child that outlives this process must not keep others from seeing its end."""
    child = os.fork()
    if not child:
        sockets = 0
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                continue
            sockets += target.startswith("socket:") and _is_sequenced_unix(int(descriptor))
        os._exit(sockets)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(me, other, "echo", 1) == 1


def _is_sequenced_unix(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as found:
        return found.family == socket.AF_UNIX and found.type == socket.SOCK_SEQPACKET


def test_a_stranger_is_told_nothing(me: RpcEndpoint, other: Node) -> None:
    for message in (b"", b"GET / HTTP/1.1\r\n", os.urandom(4000)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(PATIENCE_SECONDS)
            stranger.connect(name_of(other.peer))
            stranger.send(message)
            assert stranger.recv(100) == b""
    outsider = RpcOutsider(other)
    assert outsider.way.startswith("torch.distributed.rpc (")
    assert ask(me, other, "echo", 1) == 1


class RpcOutsider:
    """A process that knows another secret; in a process of its own, for there is one endpoint in each."""

    def __init__(self, other: Node) -> None:
        context = forking()
        mine, theirs = context.Pipe()
        process = context.Process(target=_meet_as_outsider, args=(theirs, other.peer))
        process.start()
        theirs.close()
        assert mine.poll(PATIENCE_SECONDS)
        self.way: str = mine.recv()
        process.join(PATIENCE_SECONDS)


def _meet_as_outsider(connection: Any, peer: Any) -> None:
    endpoint = RpcEndpoint(Task("worker", 7), secret=b"another secret")
    endpoint.add_peer(peer)
    connection.send(endpoint.describe_way(peer))


def test_the_switch(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    me = RpcEndpoint(Task("chief", 0), secret=SECRET)
    try:
        node = nodes.start("ps", 0)
        me.add_peer(node.peer)
        assert me.describe_way(node.peer) == f"torch.distributed.rpc ({SWITCH}=off)"
        assert ask(me, node, "echo", torch.ones(3)).tolist() == [1, 1, 1]
    finally:
        me.close()


def test_nothing_is_left_when_both_are_killed(nodes: Nodes) -> None:
    """Its memory has no name, and is gone with the last process that maps it."""
    before = _shared_bytes()
    caller, callee = nodes.start("worker", 0), nodes.start("ps", 0)
    caller.run(_hold_memory, callee.peer)
    assert _shared_bytes() - before > 60 << 20
    for node in (caller, callee):
        node.kill()
    _wait_for_shared_bytes(before + (8 << 20))


_held: list[Any] = []


def _hold_memory(endpoint: RpcEndpoint, peer: Any) -> None:
    endpoint.add_peer(peer)
    assert endpoint.describe_way(peer) == "shared memory"
    _held.append(endpoint.empty((64 << 20,), torch.uint8))
    endpoint.call(peer, "echo", _held[0], into=[]).result(PATIENCE_SECONDS)


def _wait_for_shared_bytes(most: int) -> None:
    """Of the whole machine: others may share memory as well."""
    wait_until(lambda: _shared_bytes() <= most, f"at most {most:,} bytes of shared memory")


def _shared_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")
