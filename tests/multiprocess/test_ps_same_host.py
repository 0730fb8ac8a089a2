"""Calls within a host: what is different from RPC, between real processes."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.counting import wait_until
from tests.support.ps_nodes import (
    ELEMENTS,
    PATIENCE_SECONDS,
    Node,
    Nodes,
    endpoint_with,
    error_of,
)
from torchstrat.distributed.collectives.shared_memory.common_memory import NoRoomError, Segment
from torchstrat.errors import PeerTimeoutError, PeerUnavailableError
from torchstrat.parameter_server.same_host.channel import DTYPES
from torchstrat.parameter_server.same_host.peers import SWITCH, name_of
from torchstrat.parameter_server.transport.rpc import RpcEndpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name is Linux's")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes() as nodes:
        yield nodes


@pytest.fixture
def me() -> Iterator[RpcEndpoint]:
    with endpoint_with() as endpoint:
        yield endpoint


@pytest.fixture
def other(me: RpcEndpoint, nodes: Nodes) -> Node:
    node = nodes.start("ps", 0)
    me.add_peer(node.peer)
    assert me.describe_way(node.peer) == "shared memory"
    return node


def sums(me: RpcEndpoint, value: float = 0.0, elements: int = ELEMENTS) -> torch.Tensor:
    """Memory that the others of this host can write to."""
    return me.empty((elements,), torch.float32).fill_(value)


def are(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


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


def test_long_texts_travel_too(me: RpcEndpoint, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    no_rpc(me, other, monkeypatch)
    text = "x" * 5_000_000
    many = [torch.full((600,), float(number)) for number in range(300)]
    found = ask(me, other, "echo", (text, many))
    assert found[0] == text
    assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(found[1], many, strict=True))


def test_an_answer_is_written_where_the_caller_wants_it_and_it_fits(me: RpcEndpoint, other: Node) -> None:
    into = sums(me)
    for number in (1, 2, 3):
        assert ask(me, other, "push_in_place", torch.ones(ELEMENTS), into=[into]) is into
        assert are(into, number)
    own = torch.full((ELEMENTS,), 7.0)  # not memory that others see
    for wrong in (sums(me, 7, ELEMENTS // 2), own):
        answer = ask(me, other, "push_in_place", torch.ones(ELEMENTS), into=[wrong])
        assert answer is not wrong
        assert answer.shape == (ELEMENTS,)
        assert are(wrong, 7)


@pytest.mark.parametrize("fits", [True, False])
def test_the_caller_is_told_what_is_written_where_it_is_wanted_before_there_is_an_answer(
    me: RpcEndpoint, other: Node, fits: bool
) -> None:
    into = [sums(me, elements=ELEMENTS if fits else ELEMENTS // 2), sums(me)]
    told: queue.Queue[int] = queue.Queue()
    future = me.call(other.peer, "write_two", into=into, on_written=told.put)
    assert told.get(timeout=PATIENCE_SECONDS) == 0
    if fits:
        assert told.get(timeout=PATIENCE_SECONDS) == 1
        assert are(into[0], 1)
    assert not future.done()
    ask(me, other, "release")
    first, second = future.result(PATIENCE_SECONDS)
    assert (first is into[0], second is into[1]) == (fits, True)
    assert are(first, 1)
    assert are(second, 2)
    assert told.empty()


def test_gradients_that_lie_in_shared_memory_are_not_copied(
    me: RpcEndpoint, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = sums(me, 1)
    monkeypatch.setattr("torchstrat.parameter_server.same_host.connection.put", None)
    assert float(ask(me, other, "push", gradient)[0]) == 1


def test_what_a_handler_keeps_is_its_own(me: RpcEndpoint, other: Node) -> None:
    gradient = sums(me, 1)
    ask(me, other, "keep", gradient)
    gradient.fill_(2)
    assert are(ask(me, other, "kept"), 1)


def test_memory_comes_back(me: RpcEndpoint, other: Node) -> None:
    assert me._neighbours is not None
    for _ in range(50):
        ask(me, other, "push_in_place", torch.ones(ELEMENTS), into=[sums(me)])
    # Two calls' worth: one that is made, and one whose end the thread that brought it is about to forget.
    assert me._neighbours.pool.total_bytes <= 2 * 2 * 4 * ELEMENTS


def test_rare_calls_leave_no_memory_behind(me: RpcEndpoint, other: Node) -> None:
    large = torch.ones(16 << 20)
    both = (os.getpid(), other.process.pid)
    before = _segments(*both)
    for _ in range(3):
        assert torch.equal(ask(me, other, "echo", large), large)
    ask(me, other, "echo")
    wait_until(lambda: sum((_segments(*both) - before).values()) <= large.nbytes // 4, "an end of its memory")


@pytest.mark.parametrize("gives_up", [False, True], ids=["a late answer", "a process that was given up"])
def test_what_comes_too_late_writes_to_memory_that_nobody_uses(me: RpcEndpoint, other: Node, gives_up: bool) -> None:
    into = sums(me)
    address = into.data_ptr()
    other.signal(signal.SIGSTOP)
    timeout = None if gives_up else 0.2
    late = me.call(other.peer, "push_in_place", torch.ones(ELEMENTS), timeout_seconds=timeout, into=[into])
    if gives_up:
        me.remove_peer(other.peer)
    assert isinstance(error_of(late), PeerUnavailableError if gives_up else PeerTimeoutError)
    del into, late
    fresh = [sums(me, 5) for _ in range(4)]
    assert address not in {tensor.data_ptr() for tensor in fresh}
    other.signal(signal.SIGCONT)
    if gives_up:
        assert other.call(other.peer, "echo", 1) == 1, "the process goes on"
    else:
        assert are(ask(me, other, "push", torch.ones(ELEMENTS)), 2), "the late one was applied, and then this one"
    assert all(are(tensor, 5) for tensor in fresh)


def test_without_memory_calls_go_through_rpc(me: RpcEndpoint, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, **_: Any) -> Segment:
        raise NoRoomError(12, f"{size} bytes are too much")

    monkeypatch.setattr(Segment, "allocate", refuse)
    assert are(ask(me, other, "push_in_place", torch.ones(ELEMENTS), into=[sums(me)]), 1)


def test_forked_children_hold_no_connection(me: RpcEndpoint, other: Node) -> None:
    """A child that outlives this process must not keep others from seeing its end."""
    child = os.fork()
    if not child:
        os._exit(sum(map(_is_sequenced_unix, os.listdir("/proc/self/fd"))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(me, other, "echo", 1) == 1


def _is_sequenced_unix(descriptor: str) -> bool:
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as found:
            return found.family == socket.AF_UNIX and found.type == socket.SOCK_SEQPACKET
    except OSError:  # no socket, or the descriptor of this very listing
        return False


def test_a_stranger_is_told_nothing(me: RpcEndpoint, other: Node, nodes: Nodes) -> None:
    for message in (b"", b"GET / HTTP/1.1\r\n", os.urandom(4000)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(PATIENCE_SECONDS)
            stranger.connect(name_of(other.peer))
            stranger.send(message)
            assert stranger.recv(100) == b""
    outsider = nodes.start("worker", 7, secret=b"another secret")
    assert outsider.run(_way_to, other.peer).startswith("torch.distributed.rpc (")
    assert ask(me, other, "echo", 1) == 1


def _way_to(endpoint: RpcEndpoint, peer: Any) -> str:
    endpoint.add_peer(peer)
    return endpoint.describe_way(peer)


def test_the_switch(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    with endpoint_with() as me:
        node = nodes.start("ps", 0)
        me.add_peer(node.peer)
        assert me.describe_way(node.peer) == f"torch.distributed.rpc ({SWITCH}=off)"
        assert ask(me, node, "echo", torch.ones(3)).tolist() == [1, 1, 1]


def test_nothing_is_left_when_both_are_killed(nodes: Nodes) -> None:
    """Its memory has no name, and is gone with the last process that maps it."""
    caller, callee = nodes.start("worker", 0), nodes.start("ps", 0)
    caller.run(_hold_memory, callee.peer)
    theirs = _segments(caller.process.pid, callee.process.pid)
    assert sum(theirs.values()) > 60 << 20
    for node in (caller, callee):
        node.kill()
    wait_until(lambda: not theirs.keys() & _segments(*_all_processes()).keys(), "an end of their memory")


_held: list[Any] = []


def _hold_memory(endpoint: RpcEndpoint, peer: Any) -> None:
    assert _way_to(endpoint, peer) == "shared memory"
    _held.append(endpoint.empty((64 << 20,), torch.uint8))
    endpoint.call(peer, "echo", _held[0], into=[]).result(PATIENCE_SECONDS)


def _segments(*pids: int) -> Counter[int]:
    """Inode → bytes of the shared memory that these processes map or hold open; for which others do does not count."""
    found: Counter[int] = Counter()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or not ours
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                if "/memfd:torchstrat" in line:
                    span, _, _, _, inode = line.split(maxsplit=5)[:5]
                    start, end = (int(side, 16) for side in span.split("-"))
                    found[int(inode)] = max(found[int(inode)], end - start)
            for held in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if "/memfd:torchstrat" in os.readlink(held):
                        found[held.stat().st_ino] = max(found[held.stat().st_ino], held.stat().st_size)
    return found


def _all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
