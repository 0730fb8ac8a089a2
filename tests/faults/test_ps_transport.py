"""Processes of a cluster are killed, stopped and started again while others call them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.faults.counting import wait_until
from tests.support.ps_nodes import ELEMENTS, PATIENCE_SECONDS, Lost, Node, Nodes, endpoint_with, error_of
from torchstrat.errors import PeerTimeoutError, PeerUnavailableError
from torchstrat.parameter_server.interface import Peer
from torchstrat.parameter_server.transport.rpc import RpcEndpoint

NOTICE_SECONDS = 20.0
"""A death takes 20 to 80 ms to be seen; the rest is for a busy machine. That it is seen by the connection, and not by a
heartbeat's deadline, is in what is said."""

LISTENING = "0A"
MORE_MEMORY = 4


@pytest.fixture(params=[False, True], ids=["rpc", "memory"])
def same_host(request: pytest.FixtureRequest) -> bool:
    """How calls travel."""
    return bool(request.param)


@pytest.fixture
def nodes(same_host: bool) -> Iterator[Nodes]:
    with Nodes(same_host=same_host) as nodes:
        yield nodes


@pytest.fixture
def me(request: pytest.FixtureRequest, same_host: bool) -> Iterator[RpcEndpoint]:
    with endpoint_with(same_host=same_host, **getattr(request, "param", {})) as endpoint:
        yield endpoint


def meet(me: RpcEndpoint, node: Node, same_host: bool, is_called: bool = True) -> Lost:
    """What is told of it."""
    lost = Lost()
    me.add_peer(node.peer)
    assert (me.describe_way(node.peer) == "shared memory") is same_host
    me.watch(node.peer, lost)
    if is_called:
        me.call(node.peer, "echo").result(PATIENCE_SECONDS)
    return lost


def connect(endpoint: RpcEndpoint, peer: Peer) -> None:
    """By RPC, whichever way calls go."""
    endpoint._ping(peer)
    wait_until(lambda: not endpoint._links[peer.incarnation].is_asked, "an answer by RPC")


class Load:
    """Pushes 4 MiB to a server and takes 4 MiB back, over and over, from a thread of this process.

    Each push adds 1 to every element; a torn or lost answer shows as elements that differ, or a sum that is too small.
    """

    def __init__(self, me: RpcEndpoint, peer: Peer) -> None:
        self._me, self._peer = me, peer
        self._rounds = 0
        self._ended: BaseException | None = None
        self._progress = threading.Condition()
        self._leaving = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_rounds(self, more: int) -> None:
        with self._progress:
            goal = self._rounds + more
            assert self._progress.wait_for(lambda: self._rounds >= goal or self._ended is not None, PATIENCE_SECONDS)
            assert self._rounds >= goal, f"the load ended: {self._ended!r}"

    def wait_for_end(self) -> BaseException | None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        return self._ended

    def leave(self) -> None:
        self._leaving = True
        assert self.wait_for_end() is None

    def _run(self) -> None:
        gradient, into = torch.ones(ELEMENTS), self._me.empty((ELEMENTS,), torch.float32)
        try:
            while not self._leaving:
                values = self._me.call(self._peer, "push_in_place", gradient, into=[into]).result(PATIENCE_SECONDS)
                first = float(values[0])
                assert first >= self._rounds + 1, "an update was lost"
                assert bool((values == first).all()), "torn"
                with self._progress:
                    self._rounds += 1
                    self._progress.notify_all()
        except BaseException as error:
            with self._progress:
                self._ended = error
                self._progress.notify_all()


class Resources(NamedTuple):
    """What this process holds.

    ``memory``: descriptors of memory for calls. A pool keeps what its busiest moment took, so that there may be more of
    them later: ``MORE_MEMORY`` of them, which is less than one for each kill of a test.
    ``connections``: TCP, whatever their state; not the sockets it listens on.
    """

    descriptors: int
    memory: int
    connections: int
    threads: int


def resources(_endpoint: RpcEndpoint | None = None) -> Resources:
    gc.collect()  # an error that this test keeps holds, in a cycle, the memory of the call that raised it
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this very listing
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    connections = sum(f"socket:[{row[9]}]" in targets and row[3] != LISTENING for row in rows)
    memory = sum(target.startswith("/memfd:") for target in targets)
    return Resources(len(targets) - memory, memory, connections, len(os.listdir("/proc/self/task")))


def no_more_than(now: Resources, before: Resources) -> bool:
    allowed = before._replace(memory=before.memory + MORE_MEMORY)
    return all(there <= here for there, here in zip(now, allowed, strict=True))


def wait_for_no_more_than(before: Resources, find: Callable[[], Resources] = resources) -> None:
    wait_until(lambda: no_more_than(find(), before), lambda: f"{find()}, at most {before},")


def wait_for_connections(most: int) -> None:
    wait_until(lambda: resources().connections <= most, "the connections to those who were removed are closed")


@pytest.mark.parametrize("rounds", [8, pytest.param(24, marks=pytest.mark.soak)])  # what leaks slowly
def test_kills_and_restarts_under_load_are_noticed_disturb_nobody_else_and_leave_nothing_behind(
    me: RpcEndpoint, nodes: Nodes, same_host: bool, rounds: int
) -> None:
    steady = nodes.start("ps", 1)
    lost_steady = meet(me, steady, same_host)
    load_beside = Load(me, steady.peer)
    at_rest = resources()
    for number in range(rounds if same_host else rounds // 2):  # see MORE_MEMORY; without it the first leak shows
        victim = nodes.start("ps", 0)
        lost = meet(me, victim, same_host)
        load = Load(me, victim.peer)
        load.wait_for_rounds(2)
        killed_at = time.monotonic()
        victim.kill()
        assert "connection broke" in lost.wait()
        assert lost.at - killed_at < NOTICE_SECONDS
        assert isinstance(load.wait_for_end(), PeerUnavailableError)
        if number % 2:
            me.remove_peer(victim.peer)
        victim.end()
        assert [peer for peer, _ in lost.told] == [victim.peer]
        load_beside.wait_for_rounds(1)
        if number < 2:
            at_rest = resources()  # torch starts some of its own threads in the first rounds
        else:
            wait_for_no_more_than(at_rest)
    load_beside.wait_for_rounds(5)
    load_beside.leave()
    assert lost_steady.told == []


@pytest.mark.parametrize("me", [{"heartbeat_seconds": 0.25, "deadline_seconds": 3.0}], indirect=True)
def test_a_stopped_process_is_noticed_removed_and_its_late_answers_are_harmless(
    me: RpcEndpoint, nodes: Nodes, same_host: bool
) -> None:
    stopped, other = nodes.start("worker", 0), nodes.start("worker", 1)
    lost, lost_other = (meet(me, node, same_host) for node in (stopped, other))
    for node in (stopped, other):
        connect(me, node.peer)
    before = resources().connections
    stopped.signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    waiting = [me.call(stopped.peer, "echo", torch.ones(ELEMENTS)) for _ in range(3)]
    assert isinstance(error_of(me.call(stopped.peer, "echo", timeout_seconds=0.1)), PeerTimeoutError)

    assert "gave no sign of life" in lost.wait()
    assert lost.at - stopped_at >= 2.0, "the deadline had not passed"
    me.remove_peer(stopped.peer)
    assert all(isinstance(error_of(future), PeerUnavailableError) for future in waiting)
    wait_for_connections(before - 1)

    stopped.signal(signal.SIGCONT)
    assert stopped.call(stopped.peer, "echo", 1) == 1  # alive, and has worked through what it got
    assert me.call(other.peer, "echo", 1).result(PATIENCE_SECONDS) == 1
    assert [peer for peer, _ in lost.told] == [stopped.peer]
    assert lost_other.told == []


_told: list[str] = []


def _begin_to_watch(endpoint: RpcEndpoint, peer: Peer) -> None:
    endpoint.add_peer(peer)
    endpoint.watch(peer, lambda _peer, reason: _told.append(reason))
    endpoint.call(peer, "echo").result(PATIENCE_SECONDS)
    connect(endpoint, peer)  # who dies in the midst of its handshake is another test's


def _told_after(_endpoint: RpcEndpoint, seconds: float) -> list[str]:
    time.sleep(seconds)
    return _told


@pytest.mark.parametrize("same_host", [False])  # heartbeats go by RPC in any case
def test_a_process_that_was_stopped_itself_declares_nobody_dead(nodes: Nodes) -> None:
    watcher = nodes.start("chief", 0, heartbeat_seconds=0.1, deadline_seconds=3.0)
    watched = nodes.start("ps", 0)
    watcher.run(_begin_to_watch, watched.peer)
    watcher.signal(signal.SIGSTOP)
    time.sleep(7.0)  # several deadlines; there is nothing to wait for in a process that is stopped
    watcher.signal(signal.SIGCONT)
    assert watcher.run(_told_after, 3.5) == []  # longer than a deadline
    watched.kill()
    wait_until(lambda: watcher.run(_told_after, 0.0), "the end of the watched one was told")


@pytest.mark.parametrize("when", ["later", "while it is connected to"])
def test_removing_a_living_peer_closes_the_connection(
    me: RpcEndpoint, nodes: Nodes, same_host: bool, when: str
) -> None:
    before, links = resources().connections, []
    for index in range(3):
        node = nodes.start("worker", index)
        meet(me, node, same_host, is_called=when == "later")
        links.append(me._links[node.peer.incarnation])
        me.remove_peer(node.peer)
        assert node.call(node.peer, "echo", 1) == 1
    wait_until(lambda: not any(link.is_held for link in links), "the connections to removed peers were closed")
    wait_for_connections(before)


# Heartbeats go by RPC in any case.
@pytest.mark.parametrize("same_host", [pytest.param(False, marks=pytest.mark.soak), True], ids=["rpc", "memory"])
def test_those_who_watch_cost_the_watched_nothing_once_they_are_gone(nodes: Nodes) -> None:
    watched = nodes.start("ps", 0)
    for index in range(7):
        if index <= 2:
            before = watched.run(resources)  # torch starts some of its own threads in the first rounds
        watcher = nodes.start("worker", index)
        watcher.run(_begin_to_watch, watched.peer)
        watcher.kill()
    wait_for_no_more_than(before, lambda: watched.run(resources))


def test_a_process_that_is_killed_while_it_is_sent_to(me: RpcEndpoint, nodes: Nodes, same_host: bool) -> None:
    """Messages of all sizes are on their way in both directions; every future ends, and its successor is called."""
    node = nodes.start("worker", 3)
    meet(me, node, same_host)
    futures = [me.call(node.peer, "echo", torch.ones(4**power)) for power in range(12) for _ in range(3)]
    node.kill()
    for future in futures:
        error = future.exception(PATIENCE_SECONDS)
        assert error is None or isinstance(error, PeerUnavailableError)
    assert isinstance(error_of(me.call(node.peer, "echo")), PeerUnavailableError)
    meet(me, again := nodes.start("worker", 3), same_host)
    assert me.call(again.peer, "who").result(PATIENCE_SECONDS) == me.peer
