"""The processes of a cluster talk through torch.distributed.rpc, which `rpc_agent` alone imports.

What RPC offers as documented cannot survive a killed process: in a static group nobody reconnects, and in a dynamic one
a single dead member makes every later join fail. So every process here starts a TensorPipe agent that knows only
itself, with a store that nobody else sees, and is told its peers by hand when it first needs them. The numbers by which
an agent knows its peers mean nothing outside its process; each process counts for itself.

Who must not reach the port, and why, the README says under "Ports and trust": the agent answers calls of PyTorch's own
operators, such as ``aten::from_file``, without asking Python.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from torchstrat.core.errors import CommunicationError, InvalidArgumentError, PeerUnavailableError, TorchstratError
from torchstrat.distributed.collectives.shared_memory.common_memory import NoRoomError
from torchstrat.parameter_server.interface import Handler, Peer, Task
from torchstrat.parameter_server.same_host.connection import timed_out
from torchstrat.parameter_server.same_host.peers import Neighbours, why_not
from torchstrat.parameter_server.transport.failure_detector import Watching
from torchstrat.parameter_server.transport.requests import (
    REFUSAL,
    Answerer,
    Envelopes,
    Incoming,
    Packed,
    Received,
    Request,
    Waiting,
    pack_request,
    pack_result,
    result_of,
)
from torchstrat.parameter_server.transport.rpc_agent import NEVER, Agent, WorkerInfo, shut_down_connections

__all__ = ["RpcEndpoint"]

_PING = ".ping"
_LIFELINE = ".lifeline"
_LEAVE = ".leave"
"""Methods of the transport's own. A lifeline is a call that is answered when either process ends in order, of which
`_LEAVE` tells, and fails when the connection breaks, which is how the death of a process is seen at once. It also keeps
a read open, without which a broken connection would keep its file descriptors for ever."""

_LEAVE_SECONDS = 0.5
"""For peers to hear that this process ends; one that has been stopped does not."""
_LOOK_AGAIN_SECONDS, _LOOK_SELDOM_SECONDS = 0.05, 1.0


class RpcEndpoint:
    """This process's end of the cluster's messages: an `Endpoint` over torch.distributed.rpc, one per process.

    ``task`` is what this process is; each endpoint is a fresh incarnation of it. ``secret`` is the cluster's. ``host``
    is the address of this machine to listen on; it cannot change between two endpoints of one process, for PyTorch
    looks it up once. A call waits ``timeout_seconds`` unless it says otherwise. Watched peers are asked for a sign of
    life every ``heartbeat_seconds``, on this process's own heartbeat thread, and are lost after ``deadline_seconds``
    without one; a process that holds Python's interpreter lock for that long looks exactly like a stopped one.

    Values travel as `envelopes` says: tensors in a payload, and in what a handler returns, are read while they are
    sent, so they must not change before the call is answered; a handler that returns a live parameter clones it first.

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
        self._lifelines: dict[str, tuple[torch.futures.Future[object], Request]] = {}  # of others, to this process
        self._closing, self._replying = threading.Lock(), threading.Lock()
        self._replies = 0
        self._departures = threading.Condition()
        self._departed: set[str] = set()  # incarnations that have sent their last message
        self._closed = False
        hooks: dict[str, Callable[..., object]] = {
            "serialize": self._seal_reply,
            "deserialize": self._unseal,
            "_run_function": self._run,
            "_handle_exception": _nothing,
        }
        peer = Peer(task, secrets.token_hex(8), "", socket.gethostname(), os.getpid())
        self._envelopes = Envelopes(secret, peer)  # until the address is known, to refuse with
        self._agent = Agent(peer.name, host, timeout_seconds, hooks)
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
        payload: object = None,
        *,
        timeout_seconds: float | None = None,
        into: Sequence[torch.Tensor] | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> Future[object]:
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

        def arrived(answer: Callable[[], object]) -> None:
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

    def _settle(self, peer: Peer, future: Future[object], error: BaseException) -> None:
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

    def _answer_in(self, value: Callable[[], Any], peer: Peer, counter: int, method: str, seconds: float) -> object:
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

        def ended(answer: Callable[[], object]) -> None:
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

        self._send(link, _LIFELINE, Packed(b""), NEVER, ended)

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

        def answered(answer: Callable[[], object]) -> None:
            link.is_asked = False
            try:
                answer()
            except PeerUnavailableError:
                pass  # the lifeline tells
            except CommunicationError as error:  # it refuses this process
                self._watching.lost(peer.incarnation, str(error))

        self._send(link, _PING, Packed(b""), NEVER, answered)

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

    def _run(self, received: Received | None) -> torch.futures.Future[object]:
        """In the place of calling an unpickled function. The future's value is handed to `_seal_reply`."""
        future: torch.futures.Future[object] = torch.futures.Future()
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

    def _reply(self, future: torch.futures.Future[object], request: Request, answer: Packed) -> None:
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

        def arrived(_: Callable[[], object]) -> None:
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

    def _seal_reply(self, reply: object) -> tuple[bytes, list[torch.Tensor]]:
        """In the place of pickling a result."""
        if not isinstance(reply, _Reply):
            return REFUSAL, []
        return self._envelopes.reply(reply.request, reply.answer), reply.answer.tensors


_Arrived = Callable[[Callable[[], object]], None]

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


def _raise(error: Exception) -> object:
    raise error


def _nothing(_reply: object) -> None:
    """In the place of raising what a remote function raised: replies carry that themselves."""
