"""Who is there: how the coordinator finds the tasks of its cluster, and learns when one comes back, leaves or dies.

A task's address in the cluster's description is the port where it waits for a coordinator. The coordinator dials every
task that it has no connection to, again and again, so the two may be started in any order, and a task that is started
again is found within a fraction of a second. Tasks that the description does not know dial the coordinator instead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torchstrat.core.errors import (
    AuthenticationError,
    ClusterConfigError,
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    PeerUnavailableError,
    TorchstratError,
    VersionMismatchError,
)
from torchstrat.distributed.cluster import CHIEF, PARAMETER_SERVER, WORKER, ClusterSpec
from torchstrat.parameter_server.interface import Endpoint, Peer, Task
from torchstrat.parameter_server.membership.cluster_checks import Complaints, split_address
from torchstrat.parameter_server.membership.control_channel import ControlChannel, connect, shut_down
from torchstrat.parameter_server.membership.handshake import (
    BUSY,
    MESSAGE_FENCED,
    MESSAGE_GOODBYE,
    MESSAGE_PING,
    MESSAGE_PONG,
    MISTAKEN,
    REMOVED,
    ControlListener,
    Introduction,
    RefusedError,
    Side,
    Versions,
    greet_task,
    local_versions,
    refuse,
    say_goodbye,
    shake_hands,
)
from torchstrat.parameter_server.transport.auth import derive_key

_About = TypeVar("_About")

logger = logging.getLogger("torchstrat.parameter_server")

DIAL_INTERVAL_SECONDS = 0.15
SLOWER_WHEN_REFUSED = 3
"""Times that: somebody is there, says no, and may be writing that down."""

BUSY_SECONDS = 1.0
"""A task may refuse for that long before `wait_for` gives up: its former coordinator may just be going."""


@dataclass
class _Place:
    """A task as the coordinator sees it, whether or not a process is there. Guarded by the rendezvous's lock."""

    task: Task
    address: str | None
    """None: the task dials the coordinator."""
    stop: threading.Event = field(default_factory=threading.Event)
    removed: bool = False
    hang_up: Callable[[], None] | None = None
    """Ends the connection there is, proved or not."""
    channel: ControlChannel | None = None
    peer: Peer | None = None
    joined: bool = False
    let_go: bool = False
    """The coordinator itself ends the connection: nobody has to be told."""
    problem: Exception | None = None
    """Why the last attempt to connect failed; that was ``problem_at``."""
    problem_at: float = 0.0
    busy_since: float | None = None
    """Since then, every attempt was refused because another coordinator has the task."""

    def __str__(self) -> str:
        return f"{self.task} at {self.address}" if self.address else str(self.task)


class Rendezvous:
    """The coordinator's connections to the tasks of its cluster, from `start` to `close`. Thread-safe.

    Args:
        spec: The cluster. Its workers and servers are dialed, except those with port 0, whose addresses come with
            `add_task`.
        coordinator: This process.
        secret: The cluster's.
        on_joined: Called with a process that has become a task, and the status of its service. It can be called by
            then. The same process may join twice, when its connection broke and it did not: then its calls are gone
            too; who has let go of it answers with `give_up`.
        on_left: Called with a process that joined and is gone, and why; not for what `give_up`, `remove_task` and
            `close` end. A death that the transport sees too may be reported by both.
        listen: Where tasks without a known address dial; None: the coordinator's own address in the cluster, or
            nowhere if it has none.
        add_peer: Makes a process callable here. Called before the process learns that it may call the coordinator,
            hence before ``on_joined``; an endpoint's ``add_peer`` fits.
        versions: In place of this process's.

    The callbacks run one at a time, on threads of the rendezvous, in order for each task. They should be short; all
    methods but `wait_for` may be called from them.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        coordinator: Peer,
        secret: bytes,
        *,
        on_joined: Callable[[Peer, Mapping[str, object]], None],
        on_left: Callable[[Peer, str], None],
        listen: str | None = None,
        add_peer: Callable[[Peer], None] | None = None,
        versions: Versions | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._key = derive_key(secret, "control")
        self._me = Introduction(coordinator.task, versions or local_versions())
        self._on_joined, self._on_left, self._add_peer = on_joined, on_left, add_peer
        self._changed = threading.Condition()
        self._callbacks = threading.Lock()
        self._calling_back: int | None = None
        self._places: dict[Task, _Place] = {}
        self._given_up: dict[str, str] = {}  # incarnation → why
        self._threads: list[threading.Thread] = []
        self._started = self._closed = False
        self._complaints = Complaints(logger.warning)
        self._last_refusal: TorchstratError | None = None
        for job in (PARAMETER_SERVER, WORKER):
            for index in spec.task_indices(job) if job in spec.jobs else ():
                task, address = Task(job, index), spec.task_address(job, index)
                if split_address(address, task)[1] != 0:
                    self._places[task] = _Place(task, address)
        self._listen = listen or _own_address(spec, coordinator.task)
        self._listener: ControlListener | None = None

    @property
    def address(self) -> str | None:
        """Where tasks can dial the coordinator; None before `start`, or if it does not listen."""
        return self._listener.address if self._listener else None

    @property
    def peers(self) -> dict[Task, Peer]:
        """The processes that have joined and not left."""
        with self._changed:
            return {place.task: place.peer for place in self._places.values() if place.joined and place.peer}

    def start(self) -> None:
        """Dial everybody from now on. Raises `ClusterConfigError` when its own address cannot be bound."""
        if self._listen is not None:
            self._listener = ControlListener(
                self._listen, self._key, self._me, on_channel=self._welcome_dialer, on_refused=self._refused
            )
            self._listener.start()
        with self._changed:
            self._started = True
            for place in self._places.values():
                self._begin(place)

    def close(self, finished: bool) -> None:
        """End all connections. May be called twice, and from a callback.

        Args:
            finished: Say good-bye: the job is done and the tasks may forget it. Otherwise they wait for a coordinator
                that takes over.
        """
        with self._changed:
            self._closed = True
            places = list(self._places.values())
            for place in places:
                place.stop.set()
                place.let_go = True
            self._changed.notify_all()
        for place in places:
            self._end(place, "the coordinator has finished" if finished else None)
        waits = self._calling_back != threading.get_ident()
        if self._listener is not None:
            self._listener.close(wait=waits)
        for thread in self._threads if waits else ():
            thread.join()  # at most as long as connecting takes, which nothing interrupts

    def wait_for(self, tasks: Iterable[Task], timeout_seconds: float) -> None:
        """Wait until all of ``tasks`` have joined.

        Raises:
            CommunicationTimeoutError: some have not in that time; the message names each, its address, and what came
                of the last attempt.
            AuthenticationError, VersionMismatchError, ClusterConfigError: one of them never will; at once.
            CommunicationError: one of them serves another coordinator, or the rendezvous was closed.
        """
        wanted = list(tasks)
        began = time.monotonic()
        until = began + timeout_seconds
        with self._changed:
            while missing := [task for task in wanted if not self._has_joined(task)]:
                for task in missing:
                    _raise_what_will_not_pass(self._places.get(task), began)
                if self._closed:
                    raise CommunicationError(f"the rendezvous was closed while waiting for {_listed(missing)}.")
                left = until - time.monotonic()
                if left <= 0:
                    absent = "; ".join(self._why_absent(task) for task in missing)
                    raise CommunicationTimeoutError(
                        f"{len(missing)} of {len(wanted)} tasks did not join within {timeout_seconds:g} s: {absent}. "
                        "Start them (`python -m torchstrat.server`), or look at why they ended."
                    )
                self._changed.wait(min(left, BUSY_SECONDS))

    def add_task(self, task: Task, address: str) -> None:
        """Dial this task too from now on, as the cluster's description would have it.

        Raises:
            InvalidArgumentError: the task is there already, under another address.
            ClusterConfigError: the address is malformed.
        """
        split_address(address, task)
        with self._changed:
            place = self._places.get(task)
            if place is not None and not place.removed:
                if place.address == address:
                    return
                raise InvalidArgumentError(
                    f"{place} is part of the cluster; it cannot have address {address} too. Call remove_task first."
                )
            self._places[task] = place = _Place(task, address)
            if self._started and not self._closed:
                self._begin(place)

    def remove_task(self, task: Task) -> None:
        """Say good-bye to a task and never dial it again; processes of it that dial in are refused."""
        with self._changed:
            place = self._places.get(task)
            if place is None:
                return
            place.removed = place.let_go = True
            place.stop.set()
        self._end(place, "the coordinator has let this task go")

    def give_up(self, peer: Peer, reason: str) -> None:
        """Fence a process: tell it, now and whenever it is heard of again, to end and start afresh.

        For a process that was silent for too long: whatever it still does for this cluster no longer counts.
        """
        with self._changed:
            self._given_up[peer.incarnation] = reason
            place = self._places.get(peer.task)
            if place is None or place.peer != peer or place.channel is None:
                return
            place.let_go, channel = True, place.channel
        with contextlib.suppress(CommunicationError):
            channel.send({"type": MESSAGE_FENCED, "reason": reason})
        channel.hang_up()

    def _begin(self, place: _Place) -> None:
        thread = threading.Thread(target=self._dial_forever, args=(place,), name=f"dials {place.task}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _end(self, place: _Place, goodbye: str | None) -> None:
        with self._changed:
            channel, hang_up = place.channel, place.hang_up
        if channel is not None and goodbye is not None:
            with contextlib.suppress(CommunicationError):
                say_goodbye(channel, goodbye)
        if hang_up is not None:
            hang_up()

    def _dial_forever(self, place: _Place) -> None:
        assert place.address is not None
        while not place.stop.is_set():
            seconds = DIAL_INTERVAL_SECONDS
            try:
                self._dial(place, place.address)
            except PeerUnavailableError as error:
                self._note(place, error)
            except Exception as error:
                self._note(place, error)
                seconds *= SLOWER_WHEN_REFUSED
            place.stop.wait(seconds)

    def _dial(self, place: _Place, address: str) -> None:
        with contextlib.closing(connect(address, place.task)) as sock:
            with self._changed:
                if place.stop.is_set():
                    return
                place.hang_up = lambda: shut_down(sock)
            try:
                channel, task = shake_hands(sock, Side.DIALER, self._key, self._me, other=str(place))
                if task != place.task:
                    refuse(channel, MISTAKEN, f"it looked for {place.task} at {address}")
                    raise ClusterConfigError(
                        f"at {address}, where this cluster's description has {place.task}, answers {task}. The two "
                        "processes were started with different descriptions, or one with the wrong index."
                    )
                self._converse(place, channel)
            finally:
                with self._changed:
                    place.hang_up = None

    def _welcome_dialer(self, channel: ControlChannel, task: Task) -> None:
        """A task that has dialed in; on its own thread."""
        with self._changed:
            place = self._places.get(task)
            objection = self._objection(task, place)
            if objection is None:
                if place is None:
                    place = self._places[task] = _Place(task, None)
                place.hang_up = channel.hang_up
        if objection is not None:
            with contextlib.suppress(CommunicationError):
                refuse(channel, *objection)
            return
        assert place is not None
        try:
            self._converse(place, channel)
        except Exception as error:
            self._note(place, error)
        finally:
            with self._changed:
                place.hang_up = None
            channel.close()

    def _objection(self, task: Task, place: _Place | None) -> tuple[str, str] | None:
        if self._closed:
            return BUSY, "it is about to end"
        if task.job != WORKER and place is None:
            return MISTAKEN, f"{task} is not in its cluster; only workers may join without being in it"
        if place is not None and place.removed:
            return REMOVED, f"{task} was taken out of its cluster"
        if place is not None and place.hang_up is not None:
            return BUSY, f"it is connected to {place.peer or place.task} already"
        return None

    def _converse(self, place: _Place, channel: ControlChannel) -> None:
        """From the greeting to the end of the connection; returns when the task has left."""
        with self._changed:
            if place.stop.is_set():
                return
            place.channel = channel  # for a good-bye, which may come while they greet each other
        try:
            greeted = greet_task(
                channel,
                self._coordinator,
                given_up=lambda peer: self._given_up.get(peer.incarnation),
                add_peer=self._add_peer,
            )
            peer = greeted.peer
            with self._changed:
                if place.stop.is_set():
                    return
                place.peer, place.let_go = peer, False
                place.problem = place.busy_since = None
                given_up = self._given_up.get(peer.incarnation)
            if given_up is not None:  # while they greeted each other
                self.give_up(peer, given_up)
                return
            self._call_back(self._on_joined, peer, greeted.status)
            with self._changed:
                if place.stop.is_set() or place.let_go:  # by what was called
                    return
                place.joined = True
                self._changed.notify_all()
            reason = _heard_until_the_end(channel)
        finally:
            with self._changed:
                tells = place.joined and not place.let_go
                place.joined, place.peer, place.channel = False, None, None
                self._changed.notify_all()
        if tells:
            self._call_back(self._on_left, peer, reason)

    def _call_back(self, callback: Callable[[Peer, _About], None], peer: Peer, about: _About) -> None:
        with self._callbacks:
            self._calling_back = threading.get_ident()
            try:
                callback(peer, about)
            except Exception:
                logger.exception("the coordinator could not take in what became of %s", peer)
                raise
            finally:
                self._calling_back = None

    def _note(self, place: _Place, problem: Exception) -> None:
        busy = isinstance(problem, RefusedError) and problem.why == BUSY
        with self._changed:
            place.problem, place.problem_at = problem, time.monotonic()
            place.busy_since = (place.busy_since or time.monotonic()) if busy else None
            self._changed.notify_all()

    def _refused(self, error: TorchstratError) -> None:
        with self._changed:
            self._last_refusal = error
        if isinstance(error, AuthenticationError | VersionMismatchError):
            self._complaints.add(str(error))

    def _has_joined(self, task: Task) -> bool:
        place = self._places.get(task)
        return place is not None and place.joined

    def _why_absent(self, task: Task) -> str:
        place = self._places.get(task)
        if place is not None and place.address is not None:
            why = str(place.problem).rstrip(".") if place.problem else "not reached yet"
            return why if str(place) in why else f"{place}: {why}"
        if place is not None and place.problem is not None:
            return f"{task}: {str(place.problem).rstrip('.')}"
        where = f"has to dial the coordinator at {self.address}" if self.address else "cannot be dialed"
        last = f" (last refused there: {str(self._last_refusal).rstrip('.')})" if self._last_refusal else ""
        return f"{task}, which has no address in the cluster, {where}{last}"


def _raise_what_will_not_pass(place: _Place | None, since: float) -> None:
    """Raise why an attempt failed, if it did after ``since`` and trying again is no use."""
    if place is None or place.problem is None or place.problem_at < since:
        return
    problem = place.problem
    if isinstance(problem, RefusedError):
        busy = place.busy_since is not None and time.monotonic() - max(since, place.busy_since) >= BUSY_SECONDS
        passes = problem.why != MISTAKEN and not busy
    else:
        passes = isinstance(problem, CommunicationError) and not isinstance(
            problem, AuthenticationError | VersionMismatchError
        )
    if not passes:
        raise problem.with_traceback(None)


def _heard_until_the_end(channel: ControlChannel) -> str:
    """Answer what the task asks until the connection ends; why it did."""
    while True:
        try:
            message = channel.receive()
            if message["type"] == MESSAGE_PING:
                channel.send({"type": MESSAGE_PONG})
        except CommunicationError as error:
            return str(error).rstrip(".")
        if message["type"] == MESSAGE_GOODBYE:
            return f"it said good-bye: {message['reason']}"


def _own_address(spec: ClusterSpec, task: Task) -> str | None:
    if task.job in spec.jobs and task.index in spec.task_indices(task.job):
        return spec.task_address(task.job, task.index)
    return None


def _listed(tasks: Iterable[Task]) -> str:
    return ", ".join(str(task) for task in tasks)


OnJoined = Callable[[Peer, Mapping[str, object]], None]
OnLost = Callable[[Peer, str], None]

SERVER_DEADLINE_SECONDS = 15.0
"""How long a parameter server may be silent. Longer than a worker, whose function merely runs elsewhere: a server that
is given up takes the training since the last checkpoint with it, so a machine that is slow for a moment must not look
like one that is gone. A process that died is noticed at once, not by its silence."""


class Membership(Protocol):
    """Finds the tasks of a cluster, tells of every process that joins or is lost. Tests have one made of threads."""

    endpoint: Endpoint

    def start(self, on_joined: OnJoined, on_lost: OnLost) -> None:
        """Begin to look for tasks. The callbacks come from any thread, each process is told of once in each."""

    def wait_for(self, tasks: Iterable[Task], timeout_seconds: float) -> None:
        """Raises `CommunicationTimeoutError` naming the tasks that have not joined by then."""

    def add_task(self, task: Task, address: str) -> None: ...
    def remove_task(self, task: Task) -> None: ...

    def give_up(self, peer: Peer, reason: str) -> None:
        """Count a process as lost, whether or not it lives. Nothing for one that is lost already."""

    def close(self, *, finished: bool) -> None:
        """``finished``: tell everybody that the job is over, so that they let go of its state."""


class ClusterMembership:
    """Processes found by `Rendezvous`, watched by the transport."""

    def __init__(self, spec: ClusterSpec, secret: bytes, *, timeout_seconds: float) -> None:
        from torchstrat.parameter_server.transport.rpc import RpcEndpoint

        self._lock = threading.Lock()
        self._present: set[str] = set()
        self._gone: dict[str, str] = {}  # and why
        self._tell_joined: OnJoined = lambda peer, status: None
        self._tell_lost: OnLost = lambda peer, reason: None
        address = spec.task_address(CHIEF, 0) if CHIEF in spec.jobs else None
        host = address.rpartition(":")[0] if address else "127.0.0.1"
        self.endpoint: Endpoint = RpcEndpoint(Task(CHIEF, 0), secret=secret, host=host, timeout_seconds=timeout_seconds)
        self._rendezvous = Rendezvous(
            spec,
            self.endpoint.peer,
            secret,
            on_joined=self._joined,
            on_left=self._lost,
            add_peer=self.endpoint.add_peer,
        )

    def start(self, on_joined: OnJoined, on_lost: OnLost) -> None:
        self._tell_joined, self._tell_lost = on_joined, on_lost
        self._rendezvous.start()

    def wait_for(self, tasks: Iterable[Task], timeout_seconds: float) -> None:
        self._rendezvous.wait_for(tasks, timeout_seconds)

    def add_task(self, task: Task, address: str) -> None:
        self._rendezvous.add_task(task, address)

    def remove_task(self, task: Task) -> None:
        if (peer := self._rendezvous.peers.get(task)) is not None:
            with self._lock:  # if the task is added again, its process is to be another one
                self._present.discard(peer.incarnation)
                self._gone[peer.incarnation] = "it was removed from the cluster"
        self._rendezvous.remove_task(task)

    def give_up(self, peer: Peer, reason: str) -> None:
        self._lost(peer, reason)

    def close(self, *, finished: bool) -> None:
        self._rendezvous.close(finished)
        self.endpoint.close()

    def _joined(self, peer: Peer, status: Mapping[str, object]) -> None:
        with self._lock:
            gone = self._gone.get(peer.incarnation)
            if gone is None:
                self._present.add(peer.incarnation)
        if gone is not None:  # its functions run elsewhere by now
            self._rendezvous.give_up(peer, gone)
            return
        self._tell_joined(peer, status)
        deadline = SERVER_DEADLINE_SECONDS if peer.task.job == PARAMETER_SERVER else None
        self.endpoint.watch(peer, self._lost, deadline_seconds=deadline)

    def _lost(self, peer: Peer, reason: str) -> None:
        with self._lock:
            if peer.incarnation not in self._present:
                return
            self._present.discard(peer.incarnation)
            self._gone[peer.incarnation] = "its connection to the coordinator was lost"
        self._rendezvous.give_up(peer, reason)
        self._tell_lost(peer, reason)
        self.endpoint.remove_peer(peer, reason)
