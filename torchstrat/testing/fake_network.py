"""A cluster's messages without processes: the `Endpoint` of every task in one process, with faults on command.

::

    network = FakeNetwork()
    worker, server = network.endpoint(Task("worker", 0)), network.endpoint(Task("ps", 0))
    server.serve({"push": Handler(apply)})
    worker.add_peer(server.peer)
    with network.hold(server.peer, "push", "after") as held:  # applied, but not answered yet
        answer = worker.call(server.peer, "push", gradients)
        held.wait_until_reached()
        network.kill(server.peer)
    answer.result()                                            # raises PeerUnavailableError

Values are pickled and their tensors copied, as between processes. Every call is delivered by a thread of its own, so
handlers may call and block; nothing polls or sleeps. Time stands still until `FakeNetwork.advance` moves it: calls then
time out, and stopped tasks are found to be silent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from torchstrat.core.errors import (
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    PeerTimeoutError,
    PeerUnavailableError,
    TorchstratError,
)
from torchstrat.parameter_server.interface import Handler, Peer, Task
from torchstrat.parameter_server.transport.requests import (
    Answerer,
    Incoming,
    Packed,
    Waiting,
    pack_request,
    result_of,
    unpack,
)

__all__ = ["FakeEndpoint", "FakeNetwork", "Handler", "Hold", "Message", "Peer", "Task"]

OnLost = Callable[[Peer, str], None]
When = Literal["before", "after"]


class Message(NamedTuple):
    """What travelled: a call's payload, or its result, to or from the process that was called."""

    peer: Peer
    kind: Literal["call", "result"]
    value: object


class FakeNetwork(contextlib.AbstractContextManager["FakeNetwork"]):
    """Where the endpoints meet. Thread-safe; a context manager that closes everything.

    ``timeout_seconds``, ``heartbeat_seconds`` and ``deadline_seconds`` hold for every endpoint, in this network's time.
    """

    def __init__(
        self, *, timeout_seconds: float = 60.0, heartbeat_seconds: float = 1.0, deadline_seconds: float = 3.0
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.heartbeat_seconds = heartbeat_seconds
        self.deadline_seconds = deadline_seconds
        self.changed = threading.Condition()  # guards all state of the network and of its endpoints
        self._now = 0.0
        self.endpoints: dict[str, FakeEndpoint] = {}
        self._calls: set[_Call] = set()
        self.holds: list[Hold] = []
        self._records: list[tuple[str, list[Message]]] = []

    def endpoint(self, task: Task) -> FakeEndpoint:
        """A process that starts as ``task``: a fresh incarnation at each call."""
        endpoint = FakeEndpoint(self, task)
        with self.changed:
            self.endpoints[endpoint.peer.incarnation] = endpoint
        return endpoint

    def kill(self, peer: Peer) -> None:
        """End this process as SIGKILL does. Calls to and from it fail, what it still answers is lost, and those who
        watch it have been told when this returns."""
        self.end(self._endpoint(peer), "the process has ended")

    def stop(self, peer: Peer) -> None:
        """Stop this process as SIGSTOP does: nothing reaches it or leaves it any more, and nobody is told yet."""
        endpoint = self._endpoint(peer)
        with self.changed:
            if endpoint.stopped_at is None:
                endpoint.stopped_at = self._now

    def resume(self, peer: Peer) -> None:
        """Let a stopped process go on: what waited is delivered."""
        endpoint = self._endpoint(peer)
        with self.changed:
            endpoint.stopped_at = None
            self.changed.notify_all()

    def hold(self, peer: Peer, method: str, when: When = "before") -> Hold:
        """Keep every call of ``method`` at ``peer`` from its handler (``before``), or its answer from the caller
        (``after``), until the hold is released."""
        hold = Hold(self, self._endpoint(peer).peer, method, when)
        with self.changed:
            self.holds.append(hold)
        return hold

    def record(self, method: str) -> list[Message]:
        """Copies of all calls of ``method`` from now on, as they are made, and of their results, as they leave: of a
        call that fails there is none."""
        messages: list[Message] = []
        with self.changed:
            self._records.append((method, messages))
        return messages

    def advance(self, seconds: float) -> None:
        """Let time pass. When this returns, calls that are over their time have failed, and those have been told who
        watch a process that was stopped for longer than the deadline, or that has removed them."""
        if not seconds >= 0:
            raise InvalidArgumentError(f"advance({seconds}): time only goes forward; give 0 or more seconds.")
        with self.changed:
            self._now += seconds
            late = [call for call in self._calls if call.due <= self._now]
            news = [(endpoint, reason) for endpoint in self.endpoints.values() if (reason := self._silence(endpoint))]
        for call in late:
            call.fail(
                PeerTimeoutError(
                    f"{call.to} did not answer {call.method!r} within {call.seconds:g} s. It may be busy, stopped, or "
                    "cut off; allow more time if the call is a long one."
                )
            )
        for endpoint, reason in news:
            self._tell_watchers(endpoint.peer, reason)
        if seconds >= self.heartbeat_seconds:
            self._tell_the_removed()

    def close(self) -> None:
        """Close all endpoints and release all holds."""
        with self.changed:
            endpoints = list(self.endpoints.values())
            self.holds.clear()
            self.changed.notify_all()
        for endpoint in endpoints:
            endpoint.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _endpoint(self, peer: Peer) -> FakeEndpoint:
        endpoint = self.endpoints.get(peer.incarnation)
        if endpoint is None:
            known = ", ".join(str(other.peer) for other in self.endpoints.values()) or "none"
            raise InvalidArgumentError(f"{peer} is no endpoint of this network; it has {known}.")
        return endpoint

    # The way of a call

    def begin(self, call: _Call) -> None:
        with self.changed:
            call.due = self._now + call.seconds
            self._calls.add(call)
        call.future.add_done_callback(lambda _: self._forget(call))
        self._note(call, "call", call.payload)
        _in_thread(f"fake-{call.method}", self._deliver, call)

    def _deliver(self, call: _Call) -> None:
        if self._pass(call, "before"):
            copy = _copied(call.payload)
            call.receiver.answerer.answer(
                Incoming(call.sender.peer, call.method, copy), lambda answer: self._return(call, answer)
            )

    def _return(self, call: _Call, answer: Packed) -> None:
        self._note(call, "result", answer)
        # The thread of the handler is free as soon as it has answered, whatever becomes of the answer.
        with self.changed:
            is_open = self._is_open(call, "after")
        if is_open:
            self._arrive(call, answer)
        else:
            _in_thread(f"fake-answer-{call.method}", self._arrive, call, answer)

    def _arrive(self, call: _Call, answer: Packed) -> None:
        if self._pass(call, "after"):
            call.settle(_copied(answer))

    def _note(self, call: _Call, kind: Literal["call", "result"], packed: Packed) -> None:
        for method, messages in list(self._records):
            if method == call.method:
                with contextlib.suppress(Exception):  # what the handler raised
                    read = unpack if kind == "call" else result_of
                    messages.append(Message(call.to, kind, read(_copied(packed))))

    def _pass(self, call: _Call, when: When) -> bool:
        """Wait while somebody is stopped or something is held. False if one of the two processes has ended."""
        with self.changed:
            for hold in self.holds:
                if hold.matches(call, when):
                    hold.reach(call.sender.peer)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._is_open(call, when))
            return not self._is_over(call)

    def _is_open(self, call: _Call, when: When) -> bool:
        is_stopped = call.receiver.stopped_at is not None or call.sender.stopped_at is not None
        is_held = any(hold.matches(call, when) for hold in self.holds)
        return self._is_over(call) or not (is_stopped or is_held)

    @staticmethod
    def _is_over(call: _Call) -> bool:
        return call.receiver.ended is not None or call.sender.ended is not None

    def _forget(self, call: _Call) -> None:
        with self.changed:
            self._calls.discard(call)

    # Who is told what

    def end(self, endpoint: FakeEndpoint, why: str) -> None:
        with self.changed:
            if endpoint.ended is not None:
                return
            endpoint.ended = why
            endpoint.watchers.clear()
            others = [other for other in self.endpoints.values() if other is not endpoint]
            self.changed.notify_all()
        peer = endpoint.peer
        endpoint.waiting.close(CommunicationError(f"{peer}, the process that asked, is no more: {why}."))
        for other in others:
            other.waiting.fail(peer.incarnation, _gone(peer, why))
        self._tell_watchers(peer, f"its connection broke: {why}")

    def _silence(self, endpoint: FakeEndpoint) -> str | None:
        seconds = 0.0 if endpoint.stopped_at is None else self._now - endpoint.stopped_at
        if seconds <= self.deadline_seconds:
            return None
        return (
            f"gave no sign of life for {seconds:.1f} s (deadline {self.deadline_seconds:g} s): stopped, hung or cut off"
        )

    def _tell_watchers(self, peer: Peer, reason: str) -> None:
        with self.changed:
            watchers = [
                on_lost for other in self.endpoints.values() for on_lost in other.watchers.pop(peer.incarnation, ())
            ]
        for on_lost in watchers:
            on_lost(peer, reason)

    def _tell_the_removed(self) -> None:
        with self.changed:
            told = []
            for endpoint in self.endpoints.values():
                for watched in [self.endpoints[incarnation] for incarnation in endpoint.watchers]:
                    refusal = watched.answerer.refusal(endpoint.peer, "a heartbeat")
                    if refusal is not None:
                        watchers = endpoint.watchers.pop(watched.peer.incarnation)
                        told += [(on_lost, watched.peer) for on_lost in watchers]
        for on_lost, peer in told:
            on_lost(peer, f"{peer} has given this process up")


class FakeEndpoint:
    """One process's end; made by `FakeNetwork.endpoint`. An `Endpoint`."""

    def __init__(self, network: FakeNetwork, task: Task) -> None:
        self._network = network
        incarnation = secrets.token_hex(8)
        self._peer = Peer(task, incarnation, f"fake://{task.job}/{task.index}/{incarnation}", "here", os.getpid())
        self.answerer = Answerer(self._peer)
        self.waiting = Waiting()
        self._peers: set[str] = set()
        self.watchers: dict[str, list[OnLost]] = {}
        self.stopped_at: float | None = None
        self.ended: str | None = None

    @property
    def peer(self) -> Peer:
        """This process."""
        return self._peer

    def serve(self, handlers: Mapping[str, Handler]) -> None:
        self.answerer.serve(handlers)

    def add_peer(self, peer: Peer) -> None:
        with self._network.changed:
            self._peers.add(peer.incarnation)

    def remove_peer(self, peer: Peer, reason: str | None = None) -> None:
        self.answerer.fence(peer.incarnation)
        with self._network.changed:
            self.watchers.pop(peer.incarnation, None)
        self.waiting.fail_removed(peer, reason)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def give_back_memory(self) -> None: ...

    def describe_way(self, to: Peer) -> str:
        return "a fake network"

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
        seconds = self._network.timeout_seconds if timeout_seconds is None else timeout_seconds
        if not seconds > 0:
            raise InvalidArgumentError(
                f"timeout_seconds={seconds} is no time to wait; use a positive number of seconds."
            )
        future = self.waiting.add(to.incarnation)
        if future.done():
            return future
        try:
            packed = pack_request(payload, method)
            receiver = self._reach(to)
        except TorchstratError as error:
            if self.waiting.claim(to.incarnation, future):  # else the peer's end has settled it in the meantime
                future.set_exception(error)
        else:
            self._network.begin(_Call(self, receiver, to, method, packed, seconds, future))
        return future

    def watch(self, peer: Peer, on_lost: OnLost, *, deadline_seconds: float | None = None) -> None:
        """As `Endpoint.watch`; ``on_lost`` runs on the thread that kills the peer, or lets the network's deadline pass,
        which is that of all."""
        if self.answerer.is_fenced(peer.incarnation):
            return
        try:
            self._reach(peer)
        except PeerUnavailableError as error:
            if peer.incarnation not in self._peers:
                raise
            _in_thread("fake-lost", on_lost, peer, str(error))
            return
        with self._network.changed:
            self.watchers.setdefault(peer.incarnation, []).append(on_lost)

    def close(self) -> None:
        self._network.end(self, "it has closed its endpoint")

    def _reach(self, peer: Peer) -> FakeEndpoint:
        with self._network.changed:
            if peer.incarnation not in self._peers:
                raise PeerUnavailableError(f"{peer} is not known to {self._peer}; add_peer() it first.", peer)
            receiver = self._network.endpoints.get(peer.incarnation)
        if receiver is None:
            raise _gone(peer, "no such process was ever started")
        if receiver.ended is not None:
            raise _gone(peer, receiver.ended)
        return receiver


class Hold(contextlib.AbstractContextManager["Hold"]):
    """Calls that are held; made by `FakeNetwork.hold`. A context manager that releases them."""

    def __init__(self, network: FakeNetwork, peer: Peer, method: str, when: When) -> None:
        self._network, self._peer = network, peer
        self._method, self._when = method, when
        self._reached = 0
        self._caller: Peer | None = None

    def wait_until_reached(self, count: int = 1, *, timeout_seconds: float = 30.0) -> None:
        """Block until ``count`` calls are held, or have been. Raises `CommunicationTimeoutError` (real time)."""
        with self._network.changed:
            if not self._network.changed.wait_for(lambda: self._reached >= count, timeout_seconds):
                raise CommunicationTimeoutError(
                    f"waited {timeout_seconds:g} s for {count} calls of {self._method!r} to reach {self._peer}; "
                    f"{self._reached} did."
                )

    @property
    def caller(self) -> Peer:
        """Who made the call that was held last."""
        with self._network.changed:
            if self._caller is None:
                raise InvalidArgumentError(f"no call of {self._method!r} has reached {self._peer} yet.")
            return self._caller

    def release(self) -> None:
        """Let them go on. May be called twice."""
        with self._network.changed:
            if self in self._network.holds:
                self._network.holds.remove(self)
            self._network.changed.notify_all()

    def __exit__(self, *_: object) -> None:
        self.release()

    def reach(self, caller: Peer) -> None:
        self._reached, self._caller = self._reached + 1, caller

    def matches(self, call: _Call, when: When) -> bool:
        return (self._peer.incarnation, self._method, self._when) == (call.to.incarnation, call.method, when)


@dataclass(eq=False)
class _Call:
    sender: FakeEndpoint
    receiver: FakeEndpoint
    to: Peer
    method: str
    payload: Packed
    seconds: float
    future: Future[object]
    due: float = 0.0

    def settle(self, answer: Packed) -> None:
        try:
            result = result_of(answer)
        except BaseException as error:
            self.fail(error)
        else:
            if self.sender.waiting.claim(self.to.incarnation, self.future):
                self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self.sender.waiting.claim(self.to.incarnation, self.future):
            self.future.set_exception(error)


def _gone(peer: Peer, why: str) -> PeerUnavailableError:
    return PeerUnavailableError(f"{peer} is gone: {why}.", peer)


def _copied(packed: Packed) -> Packed:
    return Packed(packed.data, [torch.clone(tensor) for tensor in packed.tensors])


def _in_thread(name: str, function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, name=name, daemon=True).start()
