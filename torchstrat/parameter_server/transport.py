"""The processes of a cluster talk through torch.distributed.rpc; this is the only file that imports it.

What RPC offers as documented cannot survive a killed process: in a static group nobody reconnects, and in a dynamic one
a single dead member makes every later join fail. So every process here starts a TensorPipe agent that knows only
itself, with a store that nobody else sees, and is told its peers by hand when it first needs them. The numbers by which
an agent knows its peers mean nothing outside its process; each process counts for itself.

**What the port must not be reachable by.** Every message that Python unpickles is authenticated first (`sealing`): a
process that does not know the cluster's secret cannot run Python code here, nor repeat what it has recorded. But the
agent itself, in C++, also answers calls of PyTorch's *builtin operators and TorchScript functions*, which never reach
Python and cannot be refused here: whoever can open a connection to the port can run ``aten`` operators in this process,
allocate memory, and read or create files through operators such as ``aten::from_file``. It is also easily broken: a few
bytes that are not its protocol, such as an HTTP request, end the process. (A connection that ends without a word does
no harm, be it a port scanner's, a health check's or that of a peer that is killed; see `door`. One whose peer is killed
in the millisecond between its first word and its last of the handshake costs a file descriptor for as long as this
process lives, for the agent waits for the rest and does not look whether it can still come.) And nothing on the wire is
encrypted.

Agents therefore listen on loopback unless the cluster's description gives another address, and then the port (an
ephemeral one, so the whole range ``net.ipv4.ip_local_port_range``) must be reachable by the machines of the cluster
only: a private network or a firewall rule, never the internet, never a network shared with people who may not run code
as this user. On loopback the same holds for every user of this machine.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from torchstrat.collectives.shared_memory.segment import NoRoomError
from torchstrat.errors import (
    CommunicationError,
    InvalidArgumentError,
    PeerUnavailableError,
    TorchstratError,
)
from torchstrat.parameter_server.endpoint import Handler
from torchstrat.parameter_server.same_host.caller import timed_out
from torchstrat.parameter_server.same_host.neighbours import Neighbours, why_not
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.parameter_server.wire.answers import (
    Answerer,
    Incoming,
    pack_request,
    pack_result,
    result_of,
)
from torchstrat.parameter_server.wire.door import Door
from torchstrat.parameter_server.wire.envelopes import REFUSAL, SELF_TEST, Envelopes, Received, Request
from torchstrat.parameter_server.wire.interfaces import interface_of
from torchstrat.parameter_server.wire.payloads import Packed
from torchstrat.parameter_server.wire.sockets import Listener, address_of, shut_down_connections
from torchstrat.parameter_server.wire.waiting import Waiting
from torchstrat.parameter_server.wire.watching import Watching

try:
    import torch.distributed.autograd as dist_autograd
    from torch._C._distributed_rpc import (
        TensorPipeAgent,
        WorkerInfo,
        _cleanup_python_rpc_handler,
        _invoke_rpc_python_udf,
        _is_current_rpc_agent_set,
        _reset_current_rpc_agent,
        _set_and_start_rpc_agent,
    )
    from torch.distributed import HashStore
    from torch.distributed.rpc import TensorPipeRpcBackendOptions, internal

    _init_autograd = dist_autograd._init
    _update_group_membership = TensorPipeAgent._update_group_membership
    # The functions that the C++ side of RPC looks up, once, to turn what arrives into Python objects and back.
    _HOOKS = {
        name: getattr(internal, name) for name in ("serialize", "deserialize", "_run_function", "_handle_exception")
    }
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"torchstrat's parameter servers need a part of torch.distributed.rpc that torch {torch.__version__} does not "
        f"have: {error}. They support torch 2.9 and later, on Linux and macOS, built with distributed support."
    ) from error

__all__ = ["RpcEndpoint"]

_RPC_THREADS = 8
"""Threads on which messages are unsealed, short handlers run and answers arrive. They cost nothing while they wait."""

_PING = ".ping"
_LIFELINE = ".lifeline"
_LEAVE = ".leave"
"""Methods of the transport's own. A lifeline is a call that is answered when either process ends in order, of which
`_LEAVE` tells, and fails when the connection breaks, which is how the death of a process is seen at once. It also keeps
a read open, without which a broken connection would keep its file descriptors for ever."""

_NEVER = 0.0
_LONGEST = 1e6  # RPC counts milliseconds in 32 bits; who waits longer than 11 days means for ever
_SELF_TEST_SECONDS = 30.0
_INTERFACE_VARIABLE = "TP_SOCKET_IFNAME"
_LARGEST_ID = 2**15 - 1
_FLUSH_SECONDS, _SHUTDOWN_SECONDS = 1.0, 2.0
_LEAVE_SECONDS = 0.5
"""For peers to hear that this process ends; one that has been stopped does not."""
_LOOK_AGAIN_SECONDS, _LOOK_SELDOM_SECONDS = 0.05, 1.0

_log = logging.getLogger(__name__)

_retired: list[TensorPipeAgent] = []
"""Agents that were shut down while handlers were at work, which would answer through memory that is no longer there."""


class RpcEndpoint:
    """This process's end of the cluster's messages: an `Endpoint` over torch.distributed.rpc, one per process.

    ``task`` is what this process is; each endpoint is a fresh incarnation of it. ``secret`` is the cluster's. ``host``
    is the address of this machine to listen on; it cannot change between two endpoints of one process, for PyTorch
    looks it up once. A call waits ``timeout_seconds`` unless it says otherwise. Watched peers are asked for a sign of
    life every ``heartbeat_seconds``, on this process's own heartbeat thread, and are lost after ``deadline_seconds``
    without one; a process that holds Python's interpreter lock for that long looks exactly like a stopped one.

    Values travel as `payloads` says: tensors in a payload, and in what a handler returns, are read while they are sent,
    so they must not change before the call is answered; a handler that returns a live parameter clones it first.

    A connection that broke is never made again: its peer is gone, and comes back as another incarnation if at all.

    Peers on the same host are called through memory (see `torchstrat.parameter_server.same_host`) as soon as a way to
    them was found, unless ``same_host`` is False; RPC still tells who is alive, and carries everything else.

    Raises `InvalidArgumentError` for a host that is not this machine's, `CommunicationError` if the process uses RPC
    already.
    """

    def __init__(
        self,
        task: Task,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        timeout_seconds: float = 60.0,
        heartbeat_seconds: float = 1.0,
        deadline_seconds: float = 3.0,
        same_host: bool = True,
    ) -> None:
        self._timeout_seconds = _positive("timeout_seconds", timeout_seconds)
        self._waiting = Waiting()
        self._watching = Watching(
            self._ping,
            heartbeat_seconds=_positive("heartbeat_seconds", heartbeat_seconds),
            deadline_seconds=_positive("deadline_seconds", deadline_seconds),
        )
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._lifelines: dict[str, tuple[torch.futures.Future[Any], Request]] = {}  # of others, to this process
        self._closing, self._replying = threading.Lock(), threading.Lock()
        self._replies = 0
        self._departures = threading.Condition()
        self._departed: set[str] = set()  # incarnations that have sent their last message
        self._closed = False
        hooks: dict[str, Callable[..., Any]] = {
            "serialize": self._seal_reply,
            "deserialize": self._unseal,
            "_run_function": self._run,
            "_handle_exception": _nothing,
        }
        peer = Peer(task, secrets.token_hex(8), "", socket.gethostname(), os.getpid())
        self._envelopes = Envelopes(secret, peer)  # until the address is known, to refuse with
        self._agent = _Agent(peer.name, host, timeout_seconds, hooks)
        self._peer = dataclasses.replace(peer, url=self._agent.url)
        self._envelopes = Envelopes(secret, self._peer)
        self._answerer = Answerer(self._peer)
        self._apart = why_not() if same_host else "same_host=False"
        self._neighbours: Neighbours | None = None
        if self._apart is None:
            try:
                self._neighbours = Neighbours(
                    self._peer, self._envelopes, self._answerer.answer, on_sign=self._watching.heard, on_gone=self._gone
                )
            except OSError as error:
                self._apart = f"a socket of this host could not be opened: {error}"
        atexit.register(self.close)  # RPC's threads must not reach for an interpreter that is gone

    @property
    def peer(self) -> Peer:
        """This process."""
        return self._peer

    @property
    def refused_messages(self) -> int:
        """How many messages were refused because they were not authentic, or not new."""
        return self._envelopes.refused

    def serve(self, handlers: Mapping[str, Handler]) -> None:
        self._answerer.serve(handlers)

    def add_peer(self, peer: Peer) -> None:
        with self._lock:
            known = peer.incarnation in self._links or self._answerer.is_fenced(peer.incarnation)
            if not known and not self._closed:
                self._links[peer.incarnation] = _Link(peer, self._agent.add(peer, is_self=peer == self._peer))
        if not known and self._neighbours is not None and peer != self._peer:
            self._neighbours.add(peer)

    def remove_peer(self, peer: Peer, reason: str | None = None) -> None:
        self._answerer.fence(peer.incarnation)
        self._watching.forget(peer.incarnation)
        self._waiting.fail_removed(peer, reason)
        with self._lock:
            link = self._links.pop(peer.incarnation, None)
            self._lifelines.pop(peer.incarnation, None)
            self._departed.discard(peer.incarnation)
        if link is not None:
            link.removed = True
            self._agent.forget(peer)
            self._disconnect(link)
        if self._neighbours is not None:
            self._neighbours.remove(peer)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Endpoint.empty`. Where there is no more memory to be shared, it is this process's own."""
        if self._neighbours is not None:
            with contextlib.suppress(NoRoomError):
                return self._neighbours.pool.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def give_back_memory(self) -> None:
        if self._neighbours is not None:
            self._neighbours.pool.give_back()

    def describe_way(self, to: Peer) -> str:
        reason = self._apart if self._neighbours is None else self._neighbours.wait_for_way(to)
        return "shared memory" if reason is None else f"torch.distributed.rpc ({reason})"

    def call(
        self,
        to: Peer,
        method: str,
        payload: Any = None,
        *,
        timeout_seconds: float | None = None,
        into: Sequence[torch.Tensor] | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> Future[Any]:
        seconds = self._timeout_seconds if timeout_seconds is None else _positive("timeout_seconds", timeout_seconds)
        future = self._waiting.add(to.incarnation)
        if future.done():
            return future
        try:
            packed = pack_request(payload, method)
            link = self._link(to)
        except TorchstratError as error:
            self._settle(to, future, error)
            return future

        def arrived(answer: Callable[[], Any]) -> None:
            try:
                result = answer()
            except BaseException as error:
                self._settle(to, future, error)
            else:
                if self._waiting.claim(to.incarnation, future):
                    future.set_result(result)

        if not self._send_on_this_host(link, method, packed, seconds, arrived, into, on_written):
            self._send(link, method, packed, seconds, arrived)
        return future

    def watch(self, peer: Peer, on_lost: Callable[[Peer, str], None], *, deadline_seconds: float | None = None) -> None:
        """As `Endpoint.watch`. ``on_lost`` runs on the heartbeat thread and must be short. Raises
        `PeerUnavailableError` for a peer that was never added."""
        if self._answerer.is_fenced(peer.incarnation):
            return
        link = self._link(peer)
        self._watching.watch(peer, on_lost, deadline_seconds)
        self._hold_on(link)
        if link.broken is not None:
            self._watching.lost(peer.incarnation, link.broken)

    def close(self) -> None:
        if os.getpid() != self._peer.pid:
            return  # a fork, which has inherited this object but none of its threads
        with self._closing:
            if self._closed:
                return
            self._watching.close()
            self._end_calls()
            with self._replying:
                self._closed = True
        atexit.unregister(self.close)
        self._waiting.close(CommunicationError(f"{self._peer}, this process, has closed its end of the cluster."))
        if self._neighbours is not None:
            self._neighbours.close()
        self._agent.close(lambda: not self._replies)

    # Sending

    def _link(self, peer: Peer) -> _Link:
        link = self._links.get(peer.incarnation)
        if link is None:
            raise PeerUnavailableError(f"{peer} is not known to {self._peer}; add_peer() it first.", peer)
        return link

    def _settle(self, peer: Peer, future: Future[Any], error: BaseException) -> None:
        if self._waiting.claim(peer.incarnation, future):
            future.set_exception(error)

    def _send_on_this_host(
        self,
        link: _Link,
        method: str,
        packed: Packed,
        seconds: float,
        arrived: _Arrived,
        into: Sequence[torch.Tensor] | None,
        on_written: Callable[[int], None] | None,
    ) -> bool:
        """Send one request through memory; False if it has to go another way."""
        if self._neighbours is None:
            return False
        caller = self._neighbours.caller(link.peer.incarnation)
        if caller is None:
            return False
        if not link.has_lifeline:
            self._hold_on(link)

        def answered(answer: Callable[[], Packed]) -> None:
            arrived(lambda: result_of(answer()))

        if not caller.call(method, packed, seconds, answered, into, on_written):
            return False
        self._neighbours.will_wait(seconds)
        return True

    def _gone(self, peer: Peer) -> None:
        """A process of this host has hung up."""
        link = self._links.get(peer.incarnation)
        if link is not None and not self._closed:
            self._broke(link)

    def _send(self, link: _Link, method: str, packed: Packed, seconds: float, arrived: _Arrived) -> None:
        """Send one request. ``arrived`` is called once, with a function that returns or raises what came back."""
        if method not in (_LIFELINE, _LEAVE):
            self._hold_on(link)
        counter, sealed = self._envelopes.request(link.peer, method, packed)

        def done(reply: Any) -> None:
            arrived(lambda: self._answer_in(reply.value, link.peer, counter, method, seconds))

        try:
            self._agent.send(link.worker, sealed, packed.tensors, seconds).add_done_callback(done)
        except RuntimeError as error:
            failure = _classified(error, link.peer, method, seconds)
            arrived(functools.partial(_raise, failure))
        if link.removed:
            self._disconnect(link)

    def _answer_in(self, value: Callable[[], Any], peer: Peer, counter: int, method: str, seconds: float) -> Any:
        try:
            received = value()
        except RuntimeError as error:
            raise _classified(error, peer, method, seconds) from None
        answer = self._envelopes.answer_in(received, peer, counter, method)
        self._watching.heard(peer.incarnation)
        return result_of(answer)

    def _hold_on(self, link: _Link) -> None:
        """Have a lifeline to this peer."""
        with self._lock:
            if link.has_lifeline:
                return
            link.has_lifeline = link.is_held = True

        def ended(answer: Callable[[], Any]) -> None:
            try:
                answer()
            except PeerUnavailableError:
                self._let_go(link)
                self._broke(link)
            except Exception as error:  # it refuses this process
                self._let_go(link)
                self._watching.lost(link.peer.incarnation, str(error))
            else:
                self._leave(link)
                self._let_go(link)
                self._broke(link)

        self._send(link, _LIFELINE, Packed(b""), _NEVER, ended)

    def _let_go(self, link: _Link) -> None:
        with self._departures:
            link.is_held = False
            self._departures.notify_all()

    def _broke(self, link: _Link) -> None:
        link.broken = "its connection broke: the process has ended, or the way to it"
        gone = PeerUnavailableError(f"{link.peer} is gone: {link.broken}.", link.peer)
        self._waiting.fail(link.peer.incarnation, gone)
        self._watching.lost(link.peer.incarnation, link.broken)

    def _ping(self, peer: Peer) -> None:
        with self._lock:
            link = self._links.get(peer.incarnation)
            if link is None or link.is_asked:
                return
            link.is_asked = True

        def answered(answer: Callable[[], Any]) -> None:
            link.is_asked = False
            try:
                answer()
            except PeerUnavailableError:
                pass  # the lifeline tells
            except CommunicationError as error:  # it refuses this process
                self._watching.lost(peer.incarnation, str(error))

        self._send(link, _PING, Packed(b""), _NEVER, answered)

    def _disconnect(self, link: _Link, again_after: float = _LOOK_AGAIN_SECONDS) -> None:
        # Nothing in RPC closes a connection to a peer that lives. One that broke is closed already, and another process
        # may have its address by now. One that RPC is about to make cannot be seen yet: hence again, until its end.
        if not link.has_lifeline or link.broken is not None or self._closed:
            return
        shut_down_connections(link.peer.url)
        if link.is_held:
            again = threading.Timer(again_after, self._disconnect, (link, min(2 * again_after, _LOOK_SELDOM_SECONDS)))
            again.daemon = True
            again.start()

    # Receiving. RPC's threads call these, and none of them raises: what they raise would be told to the sender.

    def _unseal(self, data: bytes, tensors: list[torch.Tensor]) -> Received | None:
        """In the place of unpickling, for requests and replies."""
        return self._envelopes.unseal(data, tensors)

    def _run(self, received: Received | None) -> torch.futures.Future[Any]:
        """In the place of calling an unpickled function. The future's value is handed to `_seal_reply`."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        request = self._envelopes.request_in(received)
        if request is None:
            future.set_result(None)
            return future
        self._watching.heard(request.sender.incarnation)
        if request.method not in (_PING, _LIFELINE, _LEAVE):
            incoming = Incoming(request.sender, request.method, request.payload)
            self._answerer.answer(incoming, functools.partial(self._reply, future, request))
        elif (refusal := self._answerer.refusal(request.sender, request.method)) is not None:
            self._reply(future, request, refusal)
        elif request.method == _PING:
            self._reply(future, request, _PONG)
        elif request.method == _LEAVE:
            self._departs(request.sender)
            self._reply(future, request, _PONG)
        else:
            with self._lock:
                self._lifelines[request.sender.incarnation] = future, request
        return future

    def _reply(self, future: torch.futures.Future[Any], request: Request, answer: Packed) -> None:
        with self._replying:
            if self._closed:
                return
            self._replies += 1
        try:
            with contextlib.suppress(RuntimeError):  # closed in between
                future.set_result(_Reply(request, answer))
        finally:
            with self._replying:
                self._replies -= 1

    # Ending in order. RPC warns of every call that its other side cuts off, lifelines above all.

    def _end_calls(self) -> None:
        """Have no call open, here or at a peer, when this returns; but for those of peers that do not answer."""
        with self._lock:
            lifelines, self._lifelines = dict(self._lifelines), {}
            held = [link for link in self._links.values() if link.is_held or link.is_leaving]
        for future, request in lifelines.values():
            self._reply(future, request, _PONG)
        for link in held:
            self._leave(link)
        with self._departures:
            self._departures.wait_for(
                lambda: (
                    self._departed.issuperset(lifelines) and not any(link.is_held or link.is_leaving for link in held)
                ),
                _LEAVE_SECONDS,
            )
        self._agent.flush()

    def _leave(self, link: _Link) -> None:
        """Tell a peer that nothing more is sent to it."""
        with self._lock:
            if link.has_left:
                return
            link.has_left = link.is_leaving = True

        def arrived(_: Callable[[], Any]) -> None:
            with self._departures:
                link.is_leaving = False
                self._departures.notify_all()

        self._send(link, _LEAVE, Packed(b""), _LEAVE_SECONDS, arrived)

    def _departs(self, peer: Peer) -> None:
        """A peer sends nothing more."""
        with self._lock:
            lifeline = self._lifelines.pop(peer.incarnation, None)
            link = self._links.get(peer.incarnation)
        if lifeline is not None:
            self._reply(*lifeline, _PONG)
        if link is not None and link.is_held:
            self._leave(link)
        with self._departures:
            self._departed.add(peer.incarnation)
            self._departures.notify_all()

    def _seal_reply(self, reply: Any) -> tuple[bytes, list[torch.Tensor]]:
        """In the place of pickling a result."""
        if not isinstance(reply, _Reply):
            return REFUSAL, []
        return self._envelopes.reply(reply.request, reply.answer), reply.answer.tensors


_Arrived = Callable[[Callable[[], Any]], None]

_PONG = pack_result(None)


@dataclass
class _Link:
    """A peer that can be called. ``broken``: why it cannot be any more; ``is_held``: its lifeline has not ended."""

    peer: Peer
    worker: WorkerInfo
    has_lifeline: bool = False
    is_held: bool = False
    is_asked: bool = False
    has_left: bool = False
    is_leaving: bool = False
    removed: bool = False
    broken: str | None = None


@dataclass(frozen=True)
class _Reply:
    request: Request
    answer: Packed


class _Agent:
    """TensorPipe agents that know nobody but themselves, listening on ``host``: one, and another for newcomers as soon
    as something has made that one deaf (see `door`).

    ``hooks`` take the place of the functions by which RPC unpickles, runs and pickles, from before it listens.
    """

    def __init__(self, name: str, host: str, timeout_seconds: float, hooks: Mapping[str, Callable[..., Any]]) -> None:
        interface, address = interface_of(host)
        if _is_current_rpc_agent_set():
            raise CommunicationError(
                "this process uses torch.distributed.rpc already; a process is one task of a cluster, and torchstrat "
                "needs RPC for itself. Close the other endpoint, or shut RPC down, first."
            )
        self._name, self._timeout_seconds = name, timeout_seconds
        self._ids = iter(range(1, _LARGEST_ID + 1))
        self._peers: dict[str, tuple[WorkerInfo, str]] = {}
        self._lock = threading.Lock()
        """For who adds a peer, and who puts another agent in the place of the one by which peers are called."""
        self._earlier: list[TensorPipeAgent] = []
        self._closed = False
        _init_autograd(0)
        self._agent: TensorPipeAgent | None
        self._agent, self._store = self._made()
        self._door: Door | None = None
        try:
            with _hooked(hooks):
                with _listening_on(interface):
                    _set_and_start_rpc_agent(self._current())
                self._check_hooks()
                self._expect_ends(self._current())
            self.url = self._url_of(self._store)
            self._listener = Listener(address_of(self.url))
            if self._listener.address[0] != address:
                raise InvalidArgumentError(
                    f"asked to listen on {host} ({address}), PyTorch listens on {self.url}: it chooses an address once "
                    "per process, or the interface has several. Use its main address, from the start of the process."
                )
            self._door = Door(self._listener, self._that_listens)
        except BaseException:
            self.close()
            raise

    def add(self, peer: Peer, *, is_self: bool) -> WorkerInfo:
        if is_self:
            return self._current().get_worker_info()
        number = next(self._ids, None)
        if number is None:
            raise CommunicationError(
                f"this process has known {_LARGEST_ID} peers, which is all RPC can count; restart it."
            )
        worker = WorkerInfo(peer.name, number)
        with self._lock:
            self._peers[peer.name] = worker, peer.url
            _introduce(worker, peer.url, self._current(), self._store)
        return worker

    def forget(self, peer: Peer) -> None:
        """Another agent need not know it."""
        with self._lock:
            self._peers.pop(peer.name, None)

    def send(self, to: WorkerInfo, sealed: bytes, tensors: list[torch.Tensor], seconds: float) -> Any:
        """A torch future; 0 seconds: it may take for ever."""
        if seconds > _LONGEST:
            seconds = _NEVER
        if seconds != _NEVER:
            seconds = max(seconds, 0.001)  # RPC counts in milliseconds, and takes 0 for no limit
        while True:
            agent = self._agent
            try:
                return _invoke_rpc_python_udf(to, sealed, tensors, seconds, True)  # type: ignore[arg-type]
            except RuntimeError:
                with self._lock:
                    if agent is self._agent:
                        raise  # else it came between two agents

    def flush(self) -> None:
        """What was answered is on its way when this returns: the agent writes in the order in which it was told to."""
        with contextlib.suppress(RuntimeError):
            self.send(self._current().get_worker_info(), SELF_TEST, [], _FLUSH_SECONDS).wait()

    def close(self, is_idle: Callable[[], bool] = lambda: True) -> None:
        """Shut down without asking anybody. A handler that blocks one of RPC's threads is left to itself.

        ``is_idle``: whether nothing is being answered any more, asked when the agents have been shut down.
        """
        if self._door is not None:
            self._door.close()
        with self._lock:
            self._closed = True
            agents = [*self._earlier, self._current()]
            self._earlier, self._agent = [], None
        shutdowns = [
            threading.Thread(target=agent.shutdown, name="torchstrat-rpc-shutdown", daemon=True) for agent in agents
        ]
        for shutdown in shutdowns:
            shutdown.start()
        for shutdown in shutdowns:
            shutdown.join(_SHUTDOWN_SECONDS)
        has_ended = not any(shutdown.is_alive() for shutdown in shutdowns)
        if has_ended and _is_current_rpc_agent_set():
            _cleanup_python_rpc_handler()  # so that the next agent, ours or not, looks its functions up again
            _reset_current_rpc_agent()
        if not has_ended or not is_idle():
            _retired.extend(agents)

    def _made(self) -> tuple[TensorPipeAgent, HashStore]:
        """An agent, not started, and the store in which it looks for addresses."""
        store = HashStore()
        options = TensorPipeRpcBackendOptions(
            num_worker_threads=_RPC_THREADS,
            rpc_timeout=self._timeout_seconds,
            # Shared memory would be faster, but polls: half a core per idle process. Reading from another process's
            # memory (cma) is chosen by itself where both ends are on one host.
            _transports=["uv"],
            _channels=["cma", "basic"] if sys.platform == "linux" else ["basic"],
        )
        # world_size=None makes a group that may grow, and waits for nobody.
        return TensorPipeAgent(store, self._name, 0, None, options, {}, []), store

    def _current(self) -> TensorPipeAgent:
        assert self._agent is not None
        return self._agent

    def _expect_ends(self, agent: TensorPipeAgent) -> None:
        """Have it know that connections may end, of which it would warn in a group that has not ended itself.

        It leaves the group, which is that of itself alone, and goes on as before.
        """
        agent.join()

    def _url_of(self, store: HashStore) -> str:
        return store.get(f"addrs/{self._name}").decode()

    def _that_listens(self) -> tuple[str, int]:
        """The address of an agent that is not deaf; starts one if there is none.

        The one before goes on for those that are connected to it, and with what it has been asked to send. Whoever is
        called from now on is called by the new one, for RPC knows one agent at a time.
        """
        with self._lock:
            if self._closed:
                raise CommunicationError(f"{self._name} is closed.")
            if not self._listener.is_open:
                agent, store = self._made()
                for worker, url in self._peers.values():
                    _introduce(worker, url, agent, store)
                _reset_current_rpc_agent()
                _set_and_start_rpc_agent(agent)
                self._expect_ends(agent)
                self._earlier.append(self._current())
                self._agent, self._store = agent, store
                self._listener = Listener(address_of(self._url_of(store)))
                _log.warning("a connection to %s ended before it had begun; it listens anew", self._name)
            return self._listener.address

    def _check_hooks(self) -> None:
        """Send a message that is not sealed to this very process: were the hooks not in force, anybody's would run."""
        reply = self.send(self._current().get_worker_info(), SELF_TEST, [], _SELF_TEST_SECONDS).wait()
        if reply is not None:
            raise CommunicationError(
                f"torch {torch.__version__} does not let messages be authenticated before they are unpickled; the "
                "process would run what anybody sends to it. Please report this version."
            )


def _introduce(worker: WorkerInfo, url: str, to: TensorPipeAgent, store: HashStore) -> None:
    store.set(f"addrs/{worker.name}", url)
    _update_group_membership(to, worker, [], {}, True)


@contextlib.contextmanager
def _hooked(hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let RPC find these functions in the place of its own; it looks for them once, at an agent's first message."""
    for name, hook in hooks.items():
        setattr(internal, name, hook)
    try:
        yield
    finally:
        for name, original in _HOOKS.items():
            setattr(internal, name, original)


@contextlib.contextmanager
def _listening_on(interface: str) -> Iterator[None]:
    before = os.environ.get(_INTERFACE_VARIABLE)
    os.environ[_INTERFACE_VARIABLE] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE_VARIABLE]
        else:
            os.environ[_INTERFACE_VARIABLE] = before


def _classified(error: RuntimeError, peer: Peer, method: str, seconds: float) -> CommunicationError:
    """What RPC means: it raises nothing but RuntimeError. The only place that looks at the text.

    Functions that we call never raise, so what is no timeout comes from the connection.
    """
    text = str(error).splitlines()[0] if str(error) else "no reason given"
    if text.startswith("RPCErr:1:"):  # the number of RPCErrorType::TIMEOUT
        return timed_out(peer, method, seconds)
    return PeerUnavailableError(f"{peer} is gone; {method!r} was not answered ({text}).", peer)


def _positive(name: str, seconds: float) -> float:
    if not seconds > 0:
        raise InvalidArgumentError(f"{name}={seconds} is no time to wait; use a positive number of seconds.")
    return seconds


def _raise(error: Exception) -> Any:
    raise error


def _nothing(_reply: Any) -> None:
    """In the place of raising what a remote function raised: replies carry that themselves."""
