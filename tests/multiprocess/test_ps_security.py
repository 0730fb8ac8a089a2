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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ps_nodes import PATIENCE_SECONDS, Node, Nodes, wait_until
from torchstrat.errors import AuthenticationError, PeerUnavailableError
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.parameter_server.transport import RpcEndpoint
from torchstrat.parameter_server.wire import sockets
from torchstrat.parameter_server.wire.sealing import Kind, Sealer
from torchstrat.parameter_server.wire.sockets import address_of
from torchstrat.testing._process import forking

MESSAGES = 10_000
REPLAYED = 1_000
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
    nodes = Nodes(same_host=False)  # what is said here is said of RPC
    yield nodes
    nodes.end()


@pytest.fixture
def server(nodes: Nodes) -> Node:
    return nodes.start("ps", 0)


@pytest.fixture
def worker(nodes: Nodes) -> Node:
    return nodes.start("worker", 0)


def as_a_stranger(act: Callable[..., Any], *args: Any) -> Any:
    """Run ``act(stock, *args)`` in a process with the RPC that PyTorch ships, and return its result."""
    context = forking()
    mine, theirs = context.Pipe()
    process = context.Process(target=_be_a_stranger, args=(theirs, act, args))
    process.start()
    theirs.close()
    try:
        assert mine.poll(2 * PATIENCE_SECONDS), "the stranger said nothing"
        return mine.recv()
    finally:
        process.kill()
        process.join()
        process.close()
        mine.close()


def _be_a_stranger(connection: Any, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    stock = StockAgent()
    connection.send(act(stock, *args))


class StockAgent:
    """torch.distributed.rpc as it comes, made to know one other process by nothing but its address."""

    def __init__(self) -> None:
        from torch.distributed import HashStore, rpc

        os.environ["TP_SOCKET_IFNAME"] = "lo"
        self._store = HashStore()
        torch.distributed.autograd._init(0)
        options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["cma", "basic"])
        self._agent = rpc.TensorPipeAgent(self._store, "stranger", 0, 0, options, {}, [])
        rpc.api._init_rpc_states(self._agent)
        self.rpc = rpc

    def meet(self, url: str) -> Any:
        self._store.set("addrs/victim", url)
        victim = self.rpc.WorkerInfo("victim", 1)
        self._agent._update_group_membership(victim, [], {}, True)
        return victim

    def send(self, victim: Any, message: bytes, tensors: list[torch.Tensor], is_async: bool = True) -> Any:
        return self.rpc._invoke_rpc_python_udf(victim, message, tensors, PATIENCE_SECONDS, is_async)


def test_no_message_of_a_stranger_is_unpickled(server: Node, worker: Node, tmp_path: Path) -> None:
    worker.run(_count, server.peer, 1)
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Canary(str(tmp_path / "control"))))
    assert (tmp_path / "control").exists(), "a canary that cannot fire shows nothing"

    answers = as_a_stranger(_send_all_sorts, server.peer, str(canary))
    assert not canary.exists()
    assert answers == {"refused": MESSAGES}
    assert server.run(_refused) >= MESSAGES - 10  # all but the empty ones, which count for nothing
    assert worker.run(_count, server.peer, 1) == 2, "the server serves as if nothing had been"


def _send_all_sorts(stock: StockAgent, peer: Peer, canary: str) -> dict[str, int]:
    from torch.distributed.rpc.internal import PythonUDF

    victim = stock.meet(peer.url)
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

    outcomes: dict[str, int] = {}
    for start in range(0, MESSAGES, AT_ONCE):
        futures = [
            stock.send(victim, message(number), [torch.ones(2)] * draw.randrange(3), draw.random() < 0.9)
            for number in range(start, start + AT_ONCE)
        ]
        for future in futures:
            outcome = _outcome(future)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def _outcome(future: Any) -> str:
    """The stock agent finds an answer of no bytes, which it cannot unpickle."""
    try:
        return f"answered: {future.wait()!r}"
    except EOFError:
        return "refused"
    except RuntimeError as error:
        return "refused" if "EOFError" in str(error) else f"failed: {error}"


def test_the_calls_that_the_stock_agent_offers_run_nothing(server: Node, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    as_a_stranger(_use_the_stock_calls, server.peer, str(canary))
    assert not canary.exists()
    assert server.run(_refused) == 20


def _use_the_stock_calls(stock: StockAgent, peer: Peer, canary: str) -> None:
    victim = stock.meet(peer.url)
    for _ in range(10):
        _outcome(stock.rpc.rpc_async(victim, Path.touch, args=(Path(canary),)))
    for _ in range(10):
        stock.rpc.remote(victim, Path.touch, args=(Path(canary),))
    # It goes the same way, behind the others, and tells when they have been received.
    _outcome(stock.send(victim, b"", []))


def test_recorded_messages_are_refused(server: Node, worker: Node, nodes: Nodes) -> None:
    server.run(_begin_to_record)
    worker.run(_begin_to_record)
    worker.run(_count, server.peer, REPLAYED)
    requests, replies = worker.run(_recorded), server.run(_recorded)
    assert len(requests) >= REPLAYED
    assert len(replies) >= REPLAYED
    draw = random.Random(6)
    recorded = [*requests, *draw.sample(replies, 100)]
    sent = [*recorded, *(_flip(message, draw) for message in recorded)]

    restarted = nodes.start("ps", 0)
    for victim in (server, restarted, worker):
        before = victim.run(_refused)
        assert as_a_stranger(_replay, victim.peer, sent) == {"refused": len(sent)}
        assert victim.run(_refused) - before == len(sent)
    assert worker.run(_count, server.peer, 1) == REPLAYED + 1, "each was counted once"
    assert worker.run(_count, restarted.peer, 1) == 1


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


def _flip(message: bytes, draw: random.Random) -> bytes:
    position = draw.randrange(8 * len(message))
    flipped = bytearray(message)
    flipped[position // 8] ^= 1 << position % 8
    return bytes(flipped)


def _replay(stock: StockAgent, peer: Peer, messages: list[bytes]) -> dict[str, int]:
    victim = stock.meet(peer.url)
    outcomes: dict[str, int] = {}
    for start in range(0, len(messages), AT_ONCE):
        for future in [stock.send(victim, message, []) for message in messages[start : start + AT_ONCE]]:
            outcome = _outcome(future)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def test_a_peer_with_another_secret_is_told_so(server: Node, nodes: Nodes) -> None:
    outsider = nodes.start("worker", 1, secret=b"another secret")
    with pytest.raises(AuthenticationError, match="Give all processes of the cluster the same secret"):
        outsider.run(_count, server.peer, 1)
    assert server.run(_refused) > 0


def test_who_takes_over_an_address_is_not_believed(server: Node, worker: Node) -> None:
    """A call to a process that is gone, whose port another one has by now."""
    taken_over = Peer(Task("ps", 1), "0" * 16, server.peer.url)
    with pytest.raises(AuthenticationError):
        worker.run(_count, taken_over, 1)


def test_garbage_on_the_port_ends_the_process_and_runs_nothing(server: Node, worker: Node) -> None:
    """The second limit that the documentation states: TensorPipe believes the lengths that it reads.

    If this test fails because PyTorch survives, the documentation may promise more.
    """
    worker.run(_count, server.peer, 1)
    host, port = server.peer.url.removeprefix("uv://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        server.process.join(PATIENCE_SECONDS)
    assert server.process.exitcode == -signal.SIGABRT
    with pytest.raises(PeerUnavailableError):
        worker.run(_count, server.peer, 1)


@pytest.mark.parametrize("same_host", [True, False], ids=["memory", "rpc"])
def test_who_hangs_up_without_a_word_keeps_nobody_out(nodes: Nodes, same_host: bool) -> None:
    """TensorPipe closes its listener for good at a connection that ends before its hello."""
    server = nodes.start("ps", 0, same_host=same_host)
    old, *later = (nodes.start("worker", index, same_host=same_host) for index in range(4))
    assert old.run(_watch_and_count, server.peer) == 1
    assert server.run(_ask_back, old.peer) == "asked"
    _hang_up_on(server)
    wait_until(lambda: not server.run(_agent_listens), "PyTorch has closed its listener: it")
    for number, node in enumerate(later):
        assert node.run(_watch_and_count, server.peer) == number + 2
        assert node.run(_is_echoed, server.peer)
        assert server.run(_ask_back, node.peer) == "asked"
        _hang_up_on(server)
    assert old.run(_count, server.peer, 1) == len(later) + 2
    assert server.run(_ask_back, old.peer) == "asked"
    assert server.run(_listening_sockets) == 2, "there was no need of another agent"
    server.run(_watch, later[0].peer)
    later[0].kill()
    assert server.run(_wait_for_loss).startswith("its connection broke")
    assert not old.run(_has_lost_somebody)
    server.kill()
    for node in (old, later[1]):
        assert node.run(_wait_for_loss).startswith("its connection broke")


def test_agents_are_started_as_often_as_they_are_made_deaf(server: Node, nodes: Nodes) -> None:
    for index in range(3):
        for address in server.run(_addresses_of_agents):
            socket.create_connection(address, timeout=PATIENCE_SECONDS).close()
        wait_until(lambda: not server.run(_agent_listens), "PyTorch has closed its listener: it")
        assert nodes.start("worker", index).run(_count, server.peer, 1) == index + 1


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
        assert nodes.start("worker", index).run(_count, server.peer, 1) == index
    assert server.run(_ended_by_the_other_side) == 1


def _ended_by_the_other_side(_endpoint: RpcEndpoint) -> int:
    states = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for _, each in sockets._sockets()]
    return states.count(TCP_CLOSE_WAIT)


def _hang_up_on(node: Node) -> None:
    host, port = node.peer.url.removeprefix("uv://").split(":")
    socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS).close()


def _agent_listens(endpoint: RpcEndpoint) -> bool:
    return endpoint._agent._listener.is_open


def _addresses_of_agents(_endpoint: RpcEndpoint) -> list[tuple[str, int]]:
    return [each.getsockname() for _, each in sockets._sockets() if _listens(each)]


def _listening_sockets(_endpoint: RpcEndpoint) -> int:
    return len({os.fstat(descriptor).st_ino for descriptor, each in sockets._sockets() if _listens(each)})


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_echoed(endpoint: RpcEndpoint, peer: Peer) -> bool:
    tensor = torch.arange(2.0**20)
    return torch.equal(endpoint.call(peer, "echo", tensor).result(PATIENCE_SECONDS), tensor)


def _ask_back(endpoint: RpcEndpoint, peer: Peer) -> str:
    endpoint.add_peer(peer)
    return endpoint.call(peer, "echo", "asked").result(PATIENCE_SECONDS)


_lost: queue.SimpleQueue[str] = queue.SimpleQueue()


def _watch(endpoint: RpcEndpoint, peer: Peer) -> None:
    endpoint.watch(peer, lambda _peer, reason: _lost.put(reason))


def _watch_and_count(endpoint: RpcEndpoint, peer: Peer) -> int:
    endpoint.add_peer(peer)
    _watch(endpoint, peer)
    return _count(endpoint, peer, 1)


def _wait_for_loss(_endpoint: RpcEndpoint) -> str:
    return _lost.get(timeout=PATIENCE_SECONDS)


def _has_lost_somebody(_endpoint: RpcEndpoint) -> bool:
    return not _lost.empty()


def test_builtin_operators_do_run_for_strangers(server: Node, tmp_path: Path) -> None:
    """The limit that the documentation states: these calls never reach Python, so nothing here can refuse them.

    If this test fails because PyTorch refuses them, the documentation may promise more.
    """
    created = tmp_path / "created by an operator"
    total, exists = as_a_stranger(_run_operators, server.peer, str(created))
    assert total == [2.0, 2.0]
    assert exists
    assert created.exists()


def _run_operators(stock: StockAgent, peer: Peer, path: str) -> tuple[list[float], bool]:
    victim = stock.meet(peer.url)
    total = stock.rpc.rpc_sync(victim, torch.add, args=(torch.ones(2), torch.ones(2)), timeout=PATIENCE_SECONDS)
    stock.rpc.rpc_sync(victim, torch.from_file, args=(path, True, 4), timeout=PATIENCE_SECONDS)
    return total.tolist(), os.path.exists(path)


def _count(endpoint: RpcEndpoint, peer: Peer, times: int) -> int:
    endpoint.add_peer(peer)
    return max(endpoint.call(peer, "count").result(PATIENCE_SECONDS) for _ in range(times))


def _refused(endpoint: RpcEndpoint) -> int:
    return endpoint.refused_messages
