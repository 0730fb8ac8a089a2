"""What a process can do to an endpoint that knows its address but not the cluster's secret."""

from __future__ import annotations

import dataclasses
import os
import pickle
import queue
import random
import select
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.counting import wait_until
from tests.faults.forked import Forked
from tests.support.ps_meeting import flipped
from tests.support.ps_nodes import PATIENCE_SECONDS, Node, Nodes, endpoint_with
from torchstrat.errors import AuthenticationError, PeerUnavailableError
from torchstrat.parameter_server.interface import Handler, Peer
from torchstrat.parameter_server.transport import rpc_agent
from torchstrat.parameter_server.transport.auth import Kind, Sealer
from torchstrat.parameter_server.transport.rpc import RpcEndpoint
from torchstrat.parameter_server.transport.rpc_agent import address_of

AT_ONCE = 200
TCP_CLOSE_WAIT = 8  # <netinet/tcp.h>


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self._path),)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes(same_host=False) as nodes:  # what is said here is said of RPC
        yield nodes


@pytest.fixture
def server(nodes: Nodes) -> Node:
    return nodes.start("ps", 0)


@pytest.fixture
def worker(nodes: Nodes) -> Node:
    return nodes.start("worker", 0)


@pytest.fixture
def stranger() -> Iterator[Forked]:
    """A process with the RPC that PyTorch ships."""
    with Forked(StockAgent) as process:
        yield process


class StockAgent:
    """torch.distributed.rpc as it comes, made to know one other process by nothing but its address."""

    def __init__(self) -> None:
        from torch.distributed import HashStore, rpc

        os.environ["TP_SOCKET_IFNAME"] = "lo"
        self._store, self._met = HashStore(), 0
        torch.distributed.autograd._init(0)
        options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["cma", "basic"])
        self._agent = rpc.TensorPipeAgent(self._store, "stranger", 0, 0, options, {}, [])
        rpc.api._init_rpc_states(self._agent)
        self.rpc = rpc

    def meet(self, url: str) -> Any:
        self._met += 1
        victim = self.rpc.WorkerInfo(f"victim-{self._met}", self._met)
        self._store.set(f"addrs/{victim.name}", url)
        self._agent._update_group_membership(victim, [], {}, True)
        return victim

    def send(self, victim: Any, message: bytes, tensors: list[torch.Tensor], is_async: bool = True) -> Any:
        return self.rpc._invoke_rpc_python_udf(victim, message, tensors, PATIENCE_SECONDS, is_async)

    def outcomes(self, victim: Any, messages: list[tuple[Any, ...]]) -> dict[str, int]:
        """Of all that is sent, some at once."""
        outcomes: Counter[str] = Counter()
        for start in range(0, len(messages), AT_ONCE):
            futures = [self.send(victim, *message) for message in messages[start : start + AT_ONCE]]
            outcomes.update(map(_outcome, futures))
        return dict(outcomes)


def _outcome(future: Any) -> str:
    """The stock agent finds an answer of no bytes, which it cannot unpickle."""
    try:
        return f"answered: {future.wait()!r}"
    except EOFError:
        return "refused"
    except RuntimeError as error:
        return "refused" if "EOFError" in str(error) else f"failed: {error}"


@pytest.mark.parametrize("messages", [2_000, pytest.param(10_000, marks=pytest.mark.soak)])  # the more, the rarer
def test_no_message_of_a_stranger_is_unpickled(
    server: Node, worker: Node, stranger: Forked, tmp_path: Path, messages: int
) -> None:
    worker.call(server.peer, "count")
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Canary(str(tmp_path / "control"))))
    assert (tmp_path / "control").exists(), "a canary that cannot fire shows nothing"

    assert stranger.run(_send_all_sorts, server.peer, str(canary), messages) == {"refused": messages}
    assert not canary.exists()
    refused = server.run(_refused)
    assert refused >= messages - 10  # all but the empty ones, which count for nothing
    stranger.run(_use_the_stock_calls, server.peer, str(canary))
    # One of its threads may answer the last message while another still refuses one that came before.
    wait_until(lambda: server.run(_refused) == refused + 20, lambda: f"{server.run(_refused)} == {refused} + 20")
    assert not canary.exists()
    assert worker.call(server.peer, "count") == 2, "the server serves as if nothing had been"


def _send_all_sorts(stock: StockAgent, peer: Peer, canary: str, messages: int) -> dict[str, int]:
    from torch.distributed.rpc.internal import PythonUDF

    draw = random.Random(5)
    bomb = Canary(canary)
    udf = PythonUDF(Path.touch, (Path(canary),), {})
    pickles = [pickle.dumps(value, protocol) for value in (bomb, [1, bomb], udf) for protocol in range(6)]
    guess = Sealer(b"a guess", "5" * 16)

    def message(number: int) -> bytes:
        body = draw.choice(pickles)
        return [
            lambda: body,
            lambda: draw.randbytes(draw.randrange(1, 500)),
            lambda: body[: draw.randrange(1, len(body))],
            lambda: guess.seal(draw.choice(list(Kind)), peer.incarnation, body)[1],
            lambda: draw.randbytes(32) + guess.seal(Kind.REQUEST, peer.incarnation, body)[1][32:],
            lambda: b"",
        ][number % 5 if number >= 10 else 5]()

    return stock.outcomes(
        stock.meet(peer.url),
        [(message(number), [torch.ones(2)] * draw.randrange(3), draw.random() < 0.9) for number in range(messages)],
    )


def _use_the_stock_calls(stock: StockAgent, peer: Peer, canary: str) -> None:
    victim = stock.meet(peer.url)
    for _ in range(10):
        _outcome(stock.rpc.rpc_async(victim, Path.touch, args=(Path(canary),)))
    for _ in range(10):
        stock.rpc.remote(victim, Path.touch, args=(Path(canary),))
    # It goes the same way, behind the others, and tells when they have arrived.
    _outcome(stock.send(victim, b"", []))


@pytest.mark.parametrize("replayed", [100, pytest.param(1_000, marks=pytest.mark.soak)])  # the more, the rarer
def test_recorded_messages_are_refused(
    server: Node, worker: Node, nodes: Nodes, stranger: Forked, replayed: int
) -> None:
    server.run(_begin_to_record)
    worker.run(_begin_to_record)
    worker.run(_count, server.peer, replayed)
    requests, replies = worker.run(_recorded), server.run(_recorded)
    assert min(len(requests), len(replies)) >= replayed
    draw = random.Random(6)
    recorded = [*requests, *draw.sample(replies, 100)]
    sent = [*recorded, *(flipped(message, draw) for message in recorded)]

    restarted = nodes.start("ps", 0)
    for victim in (server, restarted, worker):
        before = victim.run(_refused)
        assert stranger.run(_replay, victim.peer, sent) == {"refused": len(sent)}
        assert victim.run(_refused) - before == len(sent)
    assert worker.call(server.peer, "count") == replayed + 1, "each was counted once"
    assert worker.call(restarted.peer, "count") == 1


_messages: list[bytes] = []


def _begin_to_record(endpoint: RpcEndpoint) -> None:
    """From now on, keep what this process sends."""
    seal = endpoint._envelopes._sealer.seal

    def record(*args: Any, **options: Any) -> tuple[int, bytes]:
        counter, sealed = seal(*args, **options)
        _messages.append(sealed)
        return counter, sealed

    endpoint._envelopes._sealer.seal = record  # type: ignore[method-assign]


def _recorded(_endpoint: RpcEndpoint) -> list[bytes]:
    return _messages


def _count(endpoint: RpcEndpoint, peer: Peer, times: int) -> None:
    endpoint.add_peer(peer)
    for _ in range(times):
        endpoint.call(peer, "count").result(PATIENCE_SECONDS)


def _replay(stock: StockAgent, peer: Peer, messages: list[bytes]) -> dict[str, int]:
    return stock.outcomes(stock.meet(peer.url), [(message, []) for message in messages])


def test_a_peer_with_another_secret_is_told_so_and_who_takes_over_an_address_is_not_believed(
    server: Node, worker: Node, nodes: Nodes
) -> None:
    outsider = nodes.start("worker", 1, secret=b"another secret")
    with pytest.raises(AuthenticationError, match="Give all processes of the cluster the same secret"):
        outsider.call(server.peer, "count")
    assert server.run(_refused) > 0
    # A process that is gone, whose port another one has by now.
    taken_over = dataclasses.replace(server.peer, incarnation="0" * 16)
    with pytest.raises(AuthenticationError):
        worker.call(taken_over, "count")


def test_garbage_on_the_port_ends_the_process_and_runs_nothing(server: Node, worker: Node) -> None:
    """The second limit that the documentation states: TensorPipe believes the lengths that it reads.

    If this test fails because PyTorch survives, the documentation may promise more.
    """
    worker.call(server.peer, "count")
    with socket.create_connection(address_of(server.peer.url), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        server.process.join(PATIENCE_SECONDS)
    assert server.process.exitcode == -signal.SIGABRT
    with pytest.raises(PeerUnavailableError):
        worker.call(server.peer, "count")


@pytest.mark.parametrize("same_host", [True, False], ids=["memory", "rpc"])
def test_who_hangs_up_without_a_word_keeps_nobody_out(nodes: Nodes, same_host: bool) -> None:
    """TensorPipe closes its listener for good at a connection that ends before its hello."""
    server = nodes.start("ps", 0, same_host=same_host)
    old, *later = (nodes.start("worker", index, same_host=same_host) for index in range(4))
    assert old.run(_watch_and_count, server.peer) == 1
    assert server.call(old.peer, "echo", "asked") == "asked"
    socket.create_connection(address_of(server.peer.url), timeout=PATIENCE_SECONDS).close()
    wait_until(lambda: not server.run(_agent_listens), "PyTorch has closed its listener: it")
    for number, node in enumerate(later):
        assert node.run(_watch_and_count, server.peer) == number + 2
        assert node.run(_is_echoed, server.peer)
        assert server.call(node.peer, "echo", "asked") == "asked"
        socket.create_connection(address_of(server.peer.url), timeout=PATIENCE_SECONDS).close()
    assert old.call(server.peer, "count") == len(later) + 2
    assert server.call(old.peer, "echo", "asked") == "asked"
    assert server.run(_listening_sockets) == 2, "there was no need of another agent"
    server.run(_watch, later[0].peer)
    later[0].kill()
    assert server.run(_wait_for_loss).startswith("its connection broke")
    assert not old.run(_has_lost_somebody)
    server.kill()
    for node in (old, later[1]):
        assert node.run(_wait_for_loss).startswith("its connection broke")


def test_agents_are_started_as_often_as_they_are_made_deaf(nodes: Nodes) -> None:
    with endpoint_with(same_host=False) as server:
        server.serve({"echo": Handler(lambda _sender, payload: payload)})
        known: list[Peer] = []
        for index in range(3):
            for address in _addresses_of_agents(server):
                socket.create_connection(address, timeout=PATIENCE_SECONDS).close()
            wait_until(lambda: not _agent_listens(server), "PyTorch has closed its listener: it")
            node = nodes.start("worker", index)
            assert node.call(server.peer, "echo", index) == index
            server.add_peer(node.peer)
            known.append(node.peer)
            assert [server.call(peer, "count").result(PATIENCE_SECONDS) for peer in known] == [*range(index + 1, 0, -1)]


def test_who_dies_in_the_midst_of_its_handshake_costs_a_descriptor_and_nothing_else(server: Node, nodes: Nodes) -> None:
    """The third limit that the documentation states: TensorPipe waits for the rest without looking at the connection.

    If this test fails because PyTorch closes the connection, the documentation may promise more.
    """
    victim = nodes.start("worker", 0)
    with socket.create_server(("127.0.0.1", 0)) as relay:
        relay.settimeout(PATIENCE_SECONDS)
        _, port = relay.getsockname()
        victim.start(_watch_and_count, dataclasses.replace(server.peer, url=f"uv://127.0.0.1:{port}"))
        to_victim, _ = relay.accept()
        with to_victim, socket.create_connection(address_of(server.peer.url), timeout=PATIENCE_SECONDS) as to_server:
            while to_server not in (ready := select.select([to_victim, to_server], [], [], PATIENCE_SECONDS)[0]):
                assert ready, "the server says nothing"
                to_server.sendall(to_victim.recv(1 << 16))
            assert to_server.recv(1 << 16)  # and now it waits for further connections
            victim.kill()
    wait_until(lambda: server.run(_ended_by_the_other_side) == 1, "the end of the connection")
    assert server.run(_agent_listens)
    for index in (1, 2):
        assert nodes.start("worker", index).call(server.peer, "count") == index
    assert server.run(_ended_by_the_other_side) == 1


def _ended_by_the_other_side(_endpoint: RpcEndpoint) -> int:
    states = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for _, each in rpc_agent._sockets()]
    return states.count(TCP_CLOSE_WAIT)


def _agent_listens(endpoint: RpcEndpoint) -> bool:
    return endpoint._agent._listener.is_open


def _addresses_of_agents(_endpoint: RpcEndpoint) -> list[tuple[str, int]]:
    return [each.getsockname() for _, each in rpc_agent._sockets() if _listens(each)]


def _listening_sockets(_endpoint: RpcEndpoint) -> int:
    return len({os.fstat(descriptor).st_ino for descriptor, each in rpc_agent._sockets() if _listens(each)})


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_echoed(endpoint: RpcEndpoint, peer: Peer) -> bool:
    tensor = torch.arange(2.0**20)
    return torch.equal(endpoint.call(peer, "echo", tensor).result(PATIENCE_SECONDS), tensor)


_lost: queue.SimpleQueue[str] = queue.SimpleQueue()


def _watch(endpoint: RpcEndpoint, peer: Peer) -> None:
    endpoint.watch(peer, lambda _peer, reason: _lost.put(reason))


def _watch_and_count(endpoint: RpcEndpoint, peer: Peer) -> int:
    endpoint.add_peer(peer)
    _watch(endpoint, peer)
    return int(endpoint.call(peer, "count").result(PATIENCE_SECONDS))


def _wait_for_loss(_endpoint: RpcEndpoint) -> str:
    return _lost.get(timeout=PATIENCE_SECONDS)


def _has_lost_somebody(_endpoint: RpcEndpoint) -> bool:
    return not _lost.empty()


def test_builtin_operators_do_run_for_strangers(server: Node, stranger: Forked, tmp_path: Path) -> None:
    """The limit that the documentation states: these calls never reach Python, so nothing here can refuse them.

    If this test fails because PyTorch refuses them, the documentation may promise more.
    """
    created = tmp_path / "created by an operator"
    assert stranger.run(_run_operators, server.peer, str(created)) == [2.0, 2.0]
    assert created.exists()


def _run_operators(stock: StockAgent, peer: Peer, path: str) -> list[float]:
    victim = stock.meet(peer.url)
    total = stock.rpc.rpc_sync(victim, torch.add, args=(torch.ones(2), torch.ones(2)), timeout=PATIENCE_SECONDS)
    stock.rpc.rpc_sync(victim, torch.from_file, args=(path, True, 4), timeout=PATIENCE_SECONDS)
    return list(total.tolist())


def _refused(endpoint: RpcEndpoint) -> int:
    return endpoint.refused_messages
