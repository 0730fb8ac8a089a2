"""Processes of a cluster are killed, stopped and started again while others call them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.ps_nodes import PATIENCE_SECONDS, SECRET, Node, Nodes, wait_until
from torchstrat.errors import PeerTimeoutError, PeerUnavailableError
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.parameter_server.transport import RpcEndpoint

ELEMENTS = 2**20
"""Of a gradient: 4 MiB in float32, what `Handlers` sums."""

NOTICE_SECONDS = 2.0
"""A death takes 20 to 80 ms to be seen; the rest is for a busy machine."""


@pytest.fixture(params=[False, True], ids=["rpc", "memory"])
def same_host(request: pytest.FixtureRequest) -> bool:
    """How calls travel."""
    return bool(request.param)


@pytest.fixture
def nodes(same_host: bool) -> Iterator[Nodes]:
    nodes = Nodes(same_host=same_host)
    yield nodes
    nodes.end()


@pytest.fixture
def me(request: pytest.FixtureRequest, same_host: bool) -> Iterator[RpcEndpoint]:
    endpoint = RpcEndpoint(Task("chief", 0), secret=SECRET, same_host=same_host, **getattr(request, "param", {}))
    yield endpoint
    endpoint.close()


def meet(me: RpcEndpoint, node: Node) -> None:
    me.add_peer(node.peer)
    wanted = "shared memory" if node.run(_shares_memory) else "torch.distributed.rpc"
    assert me.describe_way(node.peer).startswith(wanted)


def _shares_memory(endpoint: RpcEndpoint) -> bool:
    return endpoint._neighbours is not None


class Load:
    """Pushes 4 MiB to a server and takes 4 MiB back, over and over, from a thread of this process.

    Each push adds 1 to every element; a torn or lost answer shows as elements that differ, or a sum that is too small.
    """

    def __init__(self, me: RpcEndpoint, peer: Peer) -> None:
        self._me, self._peer = me, peer
        self.rounds = 0
        self.ended: BaseException | None = None
        self.progress = threading.Condition()
        self._leaving = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_rounds(self, more: int) -> None:
        with self.progress:
            goal = self.rounds + more
            assert self.progress.wait_for(lambda: self.rounds >= goal or self.ended is not None, PATIENCE_SECONDS)
            assert self.rounds >= goal, f"the load ended: {self.ended!r}"

    def wait_for_end(self) -> BaseException | None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        return self.ended

    def leave(self) -> None:
        self._leaving = True
        assert self.wait_for_end() is None

    def _run(self) -> None:
        gradient, into = torch.ones(ELEMENTS), self._me.empty((ELEMENTS,), torch.float32)
        try:
            while not self._leaving:
                values = self._me.call(self._peer, "push_in_place", gradient, into=[into]).result(PATIENCE_SECONDS)
                first = float(values[0])
                assert first >= self.rounds + 1, "an update was lost"
                assert bool((values == first).all()), "torn"
                with self.progress:
                    self.rounds += 1
                    self.progress.notify_all()
        except BaseException as error:
            with self.progress:
                self.ended = error
                self.progress.notify_all()


class Lost:
    def __init__(self) -> None:
        self.told: list[tuple[Peer, str]] = []
        self.at = 0.0
        self._event = threading.Event()

    def __call__(self, peer: Peer, reason: str) -> None:
        self.at = time.monotonic()
        self.told.append((peer, reason))
        self._event.set()

    def wait(self) -> str:
        assert self._event.wait(PATIENCE_SECONDS), "nobody was told"
        return self.told[0][1]


def error_of(future: Future[Any]) -> BaseException:
    error = future.exception(PATIENCE_SECONDS)
    assert error is not None
    return error


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


MORE_MEMORY = 4


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


LISTENING = "0A"


def wait_for_no_more_than(before: Resources) -> None:
    wait_until(lambda: no_more_than(resources(), before), lambda: f"{resources()}, at most {before},")


def no_more_than(now: Resources, before: Resources) -> bool:
    allowed = before._replace(memory=before.memory + MORE_MEMORY)
    return all(there <= here for there, here in zip(now, allowed, strict=True))


def test_a_kill_under_load_is_noticed_and_disturbs_nobody_else(me: RpcEndpoint, nodes: Nodes) -> None:
    victim, other = nodes.start("ps", 0), nodes.start("ps", 1)
    lost = Lost()
    loads = []
    for node in (victim, other):
        meet(me, node)
        me.watch(node.peer, lost)
        loads.append(Load(me, node.peer))
    for load in loads:
        load.wait_for_rounds(5)

    killed_at = time.monotonic()
    victim.kill()
    assert "connection broke" in lost.wait()
    assert lost.at - killed_at < NOTICE_SECONDS
    assert [peer for peer, _ in lost.told] == [victim.peer]
    assert isinstance(loads[0].wait_for_end(), PeerUnavailableError)
    loads[1].wait_for_rounds(20)
    loads[1].leave()
    assert len(lost.told) == 1


def test_ten_kills_and_restarts_under_load_leave_nothing_behind(me: RpcEndpoint, nodes: Nodes) -> None:
    steady = nodes.start("ps", 1)
    meet(me, steady)
    load_beside = Load(me, steady.peer)
    at_rest = resources()
    for round_number in range(12):
        victim = nodes.start("ps", 0)
        lost = Lost()
        meet(me, victim)
        me.watch(victim.peer, lost)
        load = Load(me, victim.peer)
        load.wait_for_rounds(2)
        killed_at = time.monotonic()
        victim.kill()
        lost.wait()
        assert lost.at - killed_at < NOTICE_SECONDS
        assert isinstance(load.wait_for_end(), PeerUnavailableError)
        if round_number % 2:
            me.remove_peer(victim.peer)
        victim.end()
        load_beside.wait_for_rounds(1)
        if round_number < 2:
            at_rest = resources()  # torch starts some of its own threads in the first rounds
        else:
            wait_for_no_more_than(at_rest)
    load_beside.leave()


@pytest.mark.parametrize("me", [{"heartbeat_seconds": 0.5, "deadline_seconds": 4.0}], indirect=True)
def test_a_stopped_process_is_noticed_removed_and_its_late_answers_are_harmless(me: RpcEndpoint, nodes: Nodes) -> None:
    stopped, other = nodes.start("worker", 0), nodes.start("worker", 1)
    lost = Lost()
    for node in (stopped, other):
        meet(me, node)
        me.watch(node.peer, lost)
        me.call(node.peer, "echo").result(PATIENCE_SECONDS)
    before = resources().connections
    stopped.signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    waiting = [me.call(stopped.peer, "echo", torch.ones(ELEMENTS)) for _ in range(3)]
    assert isinstance(error_of(me.call(stopped.peer, "echo", timeout_seconds=0.1)), PeerTimeoutError)

    assert "gave no sign of life" in lost.wait()
    assert lost.at - stopped_at >= 3.0, "the deadline had not passed"
    assert [peer for peer, _ in lost.told] == [stopped.peer]
    me.remove_peer(stopped.peer)
    assert all(isinstance(error_of(future), PeerUnavailableError) for future in waiting)
    wait_until(lambda: resources().connections < before, "the connection to the stopped process is closed")

    stopped.signal(signal.SIGCONT)
    assert stopped.run(_echo_of_itself) == 1  # alive, and has worked through what it got
    assert me.call(other.peer, "echo", 1).result(PATIENCE_SECONDS) == 1
    assert len(lost.told) == 1


def _echo_of_itself(endpoint: RpcEndpoint) -> Any:
    endpoint.add_peer(endpoint.peer)
    return endpoint.call(endpoint.peer, "echo", 1).result(PATIENCE_SECONDS)


def test_a_process_that_was_stopped_itself_declares_nobody_dead(nodes: Nodes) -> None:
    watcher = nodes.start("chief", 0, heartbeat_seconds=0.25, deadline_seconds=2.0)
    watched = nodes.start("ps", 0)
    watcher.run(_begin_to_watch, watched.peer)
    watcher.signal(signal.SIGSTOP)
    time.sleep(5.0)  # several deadlines; there is nothing to wait for in a process that is stopped
    watcher.signal(signal.SIGCONT)
    assert watcher.run(_told_after, 3.0) == []  # longer than a deadline
    watched.kill()
    assert watcher.run(_told_after, NOTICE_SECONDS) != []


_told: list[str] = []


def _begin_to_watch(endpoint: RpcEndpoint, peer: Peer) -> None:
    endpoint.add_peer(peer)
    endpoint.watch(peer, lambda _peer, reason: _told.append(reason))
    endpoint.call(peer, "echo").result(PATIENCE_SECONDS)
    endpoint._ping(peer)  # by RPC, whichever way calls go: who dies in the midst of its handshake is another test's
    wait_until(lambda: not endpoint._links[peer.incarnation].is_asked, "an answer by RPC")


def _told_after(_endpoint: RpcEndpoint, seconds: float) -> list[str]:
    time.sleep(seconds)
    return _told


def test_removing_a_living_peer_closes_the_connection(me: RpcEndpoint, nodes: Nodes) -> None:
    before = resources().connections
    for index in range(5):
        node = nodes.start("worker", index)
        meet(me, node)
        me.watch(node.peer, print)
        me.call(node.peer, "echo", torch.ones(ELEMENTS)).result(PATIENCE_SECONDS)
        me.remove_peer(node.peer)
        assert node.run(_echo_of_itself) == 1
    wait_until(lambda: resources().connections == before, "the connections to removed peers are closed")


def test_who_is_removed_while_he_is_connected_to_is_let_go_as_well(me: RpcEndpoint, nodes: Nodes) -> None:
    before = resources().connections
    links = []
    for index in range(5):
        node = nodes.start("worker", index)
        meet(me, node)
        links.append(me._links[node.peer.incarnation])
        me.watch(node.peer, print)
        me.remove_peer(node.peer)
    wait_until(lambda: not any(link.is_held for link in links), "the connections to removed peers were closed")
    wait_until(lambda: resources().connections == before, "the connections to removed peers are closed")


def test_those_who_watch_cost_the_watched_nothing_once_they_are_gone(nodes: Nodes) -> None:
    watched = nodes.start("ps", 0)
    for index in range(7):
        if index <= 2:
            before = watched.run(resources)  # torch starts some of its own threads in the first rounds
        watcher = nodes.start("worker", index)
        watcher.run(_begin_to_watch, watched.peer)
        watcher.kill()
    wait_until(
        lambda: no_more_than(watched.run(resources), before), lambda: f"{watched.run(resources)}, at most {before},"
    )


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_closing_does_not_wait_for_the_dead_or_the_stopped(nodes: Nodes, fate: signal.Signals) -> None:
    me = RpcEndpoint(Task("chief", 0), secret=SECRET)
    node = nodes.start()
    meet(me, node)
    me.watch(node.peer, print)
    me.call(node.peer, "echo").result(PATIENCE_SECONDS)
    waiting = me.call(node.peer, "wait")
    node.signal(fate)
    began = time.monotonic()
    me.close()
    assert time.monotonic() - began < 5
    assert waiting.exception(0) is not None


def test_a_process_that_is_killed_while_it_is_sent_to(me: RpcEndpoint, nodes: Nodes) -> None:
    """Messages of all sizes are on their way in both directions; every future ends."""
    node = nodes.start()
    meet(me, node)
    me.call(node.peer, "echo").result(PATIENCE_SECONDS)
    futures = [me.call(node.peer, "echo", torch.ones(4**power)) for power in range(12) for _ in range(3)]
    node.kill()
    for future in futures:
        error = future.exception(PATIENCE_SECONDS)
        assert error is None or isinstance(error, PeerUnavailableError)
    assert isinstance(error_of(me.call(node.peer, "echo")), PeerUnavailableError)


def restarted(nodes: Nodes, node: Node) -> Node:
    return nodes.start(node.peer.task.job, node.peer.task.index)


def test_a_restarted_process_is_called_again_at_once(me: RpcEndpoint, nodes: Nodes) -> None:
    node = nodes.start("worker", 3)
    meet(me, node)
    me.call(node.peer, "echo").result(PATIENCE_SECONDS)
    for _ in range(3):
        node.kill()
        node = restarted(nodes, node)
        meet(me, node)
        assert me.call(node.peer, "who").result(PATIENCE_SECONDS) == me.peer
