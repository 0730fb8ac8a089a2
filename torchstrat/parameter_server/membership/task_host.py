"""The process of one task: it waits for coordinators, one at a time, and runs a service for them.

Threads: the *host's own*, on which the service's methods run one at a time; one per connection at the control port.
What a connection wants of the service is an event for the host's thread. A process that its
cluster gave up comes back as a fresh one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torchstrat.core.errors import (
    AuthenticationError,
    ClusterConfigError,
    CommunicationError,
    FencedError,
    TorchstratError,
    VersionMismatchError,
)
from torchstrat.distributed.cluster import CHIEF, ClusterSpec
from torchstrat.parameter_server.interface import Endpoint, Peer, Service, Task
from torchstrat.parameter_server.membership.cluster_checks import Complaints, split_address
from torchstrat.parameter_server.membership.control_channel import (
    ControlChannel,
    EventThread,
    connect,
    local_host_towards,
    shut_down,
)
from torchstrat.parameter_server.membership.handshake import (
    BUSY,
    FAILED,
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
    answer_coordinator,
    hear_coordinator,
    local_versions,
    refuse,
    say_goodbye,
    say_ready,
    shake_hands,
)
from torchstrat.parameter_server.transport.auth import derive_key


def start_again() -> None:
    """Run this process's command line again, in its place: same process id, arguments and environment, no memory.

    Every thread ends at once, also one that is stuck in a user's function. Descriptors that Python and torch open are
    closed. Returns only in a process that `multiprocessing` started: its command line means something to its parent
    alone, which then has to start another.
    """
    if multiprocessing.parent_process() is not None:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


EXIT_DONE = 0
"""Told to end (SIGTERM, `TaskHost.stop`), or its coordinator has finished and it was to end then."""
EXIT_FAILED = 1
"""Something broke; there is a traceback."""
EXIT_ORPHANED = 69
"""The coordinator was lost and none came within the time. Starting the task again helps once a coordinator runs."""
EXIT_GIVEN_UP = 75
"""The cluster gave this process up and it could not start itself again: whoever supervises it should."""
EXIT_REFUSED = 77
"""The coordinator that it dials does not want it: another secret, other versions, or the task was removed."""

DEFAULT_ORPHAN_TIMEOUT_SECONDS = 600.0
DEFAULT_DRAIN_TIMEOUT_SECONDS = 30.0
ALIVE_SECONDS = 5.0
"""For a coordinator to answer when another one wants its task."""
DIAL_INTERVAL_SECONDS = 0.15


@dataclass
class _Session:
    """One connection to a coordinator, from its acceptance to its end."""

    channel: ControlChannel
    coordinator: Peer
    answered: threading.Event = field(default_factory=threading.Event)
    served: bool = False
    """The service knows this coordinator."""


@dataclass(frozen=True)
class _End:
    """How the process ends: with which code, and what it tells its coordinator."""

    code: int
    reason: str


class TaskHost:
    """Runs ``service`` as ``task`` of a cluster, from `start` until `join` returns.

    A task in the cluster's description listens on its own address there, and on nothing else. A task that is not in it,
    such as a worker that is added to a running job, dials the coordinator at the chief's address, and ends when that
    coordinator has finished.

    It serves one coordinator at a time. A second one is refused, as long as the first answers. When the connection to
    the coordinator ends without a good-bye, the service keeps its state for a coordinator that takes over, for
    ``orphan_timeout_seconds``; after a good-bye it waits for the next job, without limit.

    Args: as of `Server`, and

        make_endpoint: Called as ``make_endpoint(task, secret=secret, host=host)``.
        orphan_timeout_seconds: None: it waits for ever.
        restart: Called when the cluster has given this process up, after everything is closed. Replaces the process
            by a fresh one; when it returns, the exit code is `EXIT_GIVEN_UP`.
        say: Takes each line that people should see.
        versions: In place of this process's.

    Raises:
        ClusterConfigError: the task has no address and there is no chief to dial.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        task: Task,
        secret: bytes,
        service: Service,
        *,
        make_endpoint: Callable[..., Endpoint],
        listen: str | None = None,
        orphan_timeout_seconds: float | None = DEFAULT_ORPHAN_TIMEOUT_SECONDS,
        drain_timeout_seconds: float = DEFAULT_DRAIN_TIMEOUT_SECONDS,
        exit_when_finished: bool = False,
        restart: Callable[[], None] = start_again,
        say: Callable[[str], None] | None = None,
        versions: Versions | None = None,
    ) -> None:
        self._task, self._secret, self._service = task, secret, service
        self._own_address, self._chief_address = _addresses(spec, task)
        self._listen = listen or self._own_address
        self._dials = self._listen is None
        self._key = derive_key(secret, "control")
        self._me = Introduction(task, versions or local_versions())
        self._make_endpoint, self._restart = make_endpoint, restart
        self._orphan_timeout_seconds = orphan_timeout_seconds
        self._drain_timeout_seconds = drain_timeout_seconds
        self._exit_when_finished = exit_when_finished or self._dials
        self._say = say or _say_on_stderr
        self._complaints = Complaints(self._say)
        self._thread: EventThread[_End] = EventThread(str(task), on_end=self._end)
        self._changed = threading.Condition()  # guards the four below
        self._session: _Session | None = None
        self._last_coordinator: Peer | None = None
        self._ending = False
        self._dialing: socket.socket | None = None
        self._stop_dialing = threading.Event()
        self._code = EXIT_FAILED
        self._dialer = threading.Thread(target=self._dial_forever, name=f"{task} dials", daemon=True)
        self._listener: ControlListener | None = None
        self._endpoint: Endpoint

    @property
    def address(self) -> str | None:
        """Where it waits for coordinators, once started; None if it dials."""
        return self._listener.address if self._listener else None

    @property
    def peer(self) -> Peer:
        """This process, once started."""
        return self._endpoint.peer

    def start(self) -> None:
        """Bind the port, make the endpoint, wait for coordinators.

        Raises:
            ClusterConfigError: the address cannot be bound; the message names the task and the address.
        """
        if self._listen is not None:
            self._listener = ControlListener(
                self._listen, self._key, self._me, on_channel=self._serve_listening, on_refused=self._refused
            )
        try:
            self._endpoint = self._make_endpoint(self._task, secret=self._secret, host=self._host())
            self._service.attach(self._endpoint)
            self._endpoint.serve(self._service.handlers())
        except BaseException:
            if self._listener is not None:
                self._listener.close()
            raise
        if self._listener is not None:
            self._listener.start()
            self._say(f"{self._task} listens on {self.address} (pid {os.getpid()})")  # it is true now
        else:  # said before anybody can answer: the first line of a task tells where it is
            self._say(f"{self._task} dials the coordinator at {self._chief_address} (pid {os.getpid()})")
            self._dialer.start()
        self._thread.start()  # last: it may have been told to end already

    def join(self) -> int:
        """Wait until the task ends; its exit code, one of the constants above."""
        self._thread.join()
        return self._code

    def terminate(self) -> None:
        """Let the service finish or hand back what it does, then end. Safe in a signal handler."""
        self._thread.tell(self._drain)

    def stop(self) -> None:
        """End now. Does not wait; `join` does."""
        self._thread.tell(lambda: _End(EXIT_DONE, "it was stopped"))

    # On the host's thread

    def _drain(self) -> _End:
        self._service.drain(self._drain_timeout_seconds)
        return _End(EXIT_DONE, "it was told to end (SIGTERM)")

    def _arrive(self, session: _Session) -> None:
        self._service.coordinator_arrived(session.coordinator)
        session.served = True
        self._thread.set_alarm(None, self._orphaned)

    def _leave(self, session: _Session, goodbye: str | None, reason: str) -> _End | None:
        self._service.coordinator_left(finished=goodbye is not None)
        if goodbye is not None:
            if not self._exit_when_finished:
                return None
            self._say(f"{self._task} ends: {goodbye}.")
            return _End(EXIT_DONE, "its coordinator has finished")
        limit = self._orphan_timeout_seconds
        self._thread.set_alarm(limit, self._orphaned)
        waits = "without limit" if limit is None else f"{limit:g} s"
        self._say(f"{self._task} has lost {session.coordinator} ({reason}); it keeps its state and waits {waits}.")
        return None

    def _orphaned(self) -> _End:
        self._say(
            f"{self._task} ends (code {EXIT_ORPHANED}): {self._last_coordinator} was lost "
            f"{self._orphan_timeout_seconds:g} s ago, and neither it nor another coordinator has come."
        )
        return _End(EXIT_ORPHANED, "no coordinator came")

    def _end(self, outcome: _End | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._say(f"{self._task} failed:\n{''.join(traceback.format_exception(outcome))}")
            outcome = _End(EXIT_FAILED, "it failed")
        self._code = outcome.code
        try:
            self._shut_down(outcome.reason)
            if outcome.code == EXIT_GIVEN_UP:
                self._restart()
        except BaseException:
            self._say(f"{self._task} could not end in order:\n{traceback.format_exc()}")

    def _shut_down(self, reason: str) -> None:
        with self._changed:
            self._ending = True
            session, dialing = self._session, self._dialing
            self._changed.notify_all()
        if session is not None:
            with contextlib.suppress(TorchstratError):
                say_goodbye(session.channel, reason)
            session.channel.hang_up()
        self._stop_dialing.set()
        if dialing is not None:
            shut_down(dialing)
        if self._listener is not None:
            self._listener.close()
        if self._dialer.ident is not None:
            self._dialer.join()
        try:
            self._service.close()
        finally:
            self._endpoint.close()

    # On the threads of connections

    def _serve_listening(self, channel: ControlChannel, remote: Task) -> None:
        try:
            self._serve(channel, remote)
        except TorchstratError as error:
            self._refused(error)
        finally:
            channel.close()

    def _serve(self, channel: ControlChannel, remote: Task) -> None:
        """One connection, from the proof of its secret to its end."""
        if remote.job != CHIEF:
            refuse(channel, MISTAKEN, f"{self._task} is for a coordinator (job {CHIEF!r}), not for {remote}")
            return
        session = _Session(channel, hear_coordinator(channel))
        rival = self._claim(session)
        if rival is not None:
            refuse(channel, BUSY, f"it serves another coordinator, {rival}, which is alive; it serves one at a time")
            return
        goodbye: str | None = None
        reason = "its connection ended"
        try:
            self._greet(session)
            goodbye, reason = self._listen_to(session)
        except FencedError as error:
            self._give_in(str(error))
        finally:
            if session.served:  # the event comes before those of the next session
                self._thread.tell(partial(self._leave, session, goodbye, reason))
            with self._changed:
                self._session = None
                self._changed.notify_all()

    def _claim(self, session: _Session) -> str | None:
        """Make this session the one; or who has it."""
        while True:
            with self._changed:
                current = self._session
                if self._ending:
                    return "none, and it is about to end"
                if current is None:
                    self._session = session
                    return None
            # A coordinator that dials again has given up its former connection itself.
            if current.coordinator != session.coordinator and self._answers(current):
                return str(current.coordinator)
            current.channel.hang_up()
            with self._changed:
                while self._session is current and not self._ending:
                    self._changed.wait()

    def _answers(self, session: _Session) -> bool:
        if not session.served:
            return True  # being greeted this moment, which has a deadline of its own
        session.answered.clear()
        with contextlib.suppress(CommunicationError):
            session.channel.send({"type": MESSAGE_PING})
            return session.answered.wait(ALIVE_SECONDS)
        return False

    def _greet(self, session: _Session) -> None:
        with self._changed:
            last, self._last_coordinator = self._last_coordinator, session.coordinator
        if last is not None and last != session.coordinator:
            self._endpoint.remove_peer(last)
        self._endpoint.add_peer(session.coordinator)
        try:
            answer_coordinator(session.channel, self._endpoint.peer, self._thread.ask(self._service.status))
            self._thread.ask(partial(self._arrive, session))
        except TorchstratError:
            raise
        except Exception as error:
            self._say(f"the service of {self._task} failed:\n{traceback.format_exc()}")
            refuse(session.channel, FAILED, f"its service failed with {error!r}")
            raise CommunicationError(f"{self._task} could not greet {session.coordinator}: {error!r}") from error
        say_ready(session.channel)

    def _listen_to(self, session: _Session) -> tuple[str | None, str]:
        """Until the connection ends: the coordinator's good-bye, if it said one, and why the connection ended."""
        while True:
            try:
                message = session.channel.receive()
            except CommunicationError as error:
                return None, str(error).rstrip(".")
            kind = message["type"]
            if kind == MESSAGE_GOODBYE:
                return str(message["reason"]), "it said good-bye"
            if kind == MESSAGE_FENCED:
                raise FencedError(message["reason"])
            if kind == MESSAGE_PING:
                with contextlib.suppress(CommunicationError):
                    session.channel.send({"type": MESSAGE_PONG})
            if kind == MESSAGE_PONG:
                session.answered.set()

    def _dial_forever(self) -> None:
        assert self._chief_address is not None
        while not self._stop_dialing.is_set():
            try:
                self._dial(self._chief_address)
            except TorchstratError as error:
                removed = isinstance(error, RefusedError) and error.why in (REMOVED, MISTAKEN)
                if removed or isinstance(error, AuthenticationError | VersionMismatchError):
                    self._say(f"{self._task} ends (code {EXIT_REFUSED}): {error}")
                    self._thread.tell(lambda: _End(EXIT_REFUSED, "it was refused"))
                    return
                self._refused(error)
            self._stop_dialing.wait(DIAL_INTERVAL_SECONDS)

    def _dial(self, address: str) -> None:
        with contextlib.closing(connect(address, "the coordinator")) as sock:
            with self._changed:
                if self._ending:
                    return
                self._dialing = sock
            other = f"the coordinator at {address}"
            channel, remote = shake_hands(sock, Side.DIALER, self._key, self._me, other=other)
            self._serve(channel, remote)

    def _give_in(self, reason: str) -> None:
        self._say(f"{self._task} starts again: its cluster gave this process (pid {self.peer.pid}) up, {reason}.")
        self._thread.tell(lambda: _End(EXIT_GIVEN_UP, "it was given up"))

    def _refused(self, error: TorchstratError) -> None:
        if isinstance(error, AuthenticationError | VersionMismatchError | RefusedError):
            verb = "was refused" if isinstance(error, RefusedError) else "refused a connection"
            self._complaints.add(f"{self._task} {verb}: {error}")

    def _host(self) -> str:
        """Where the endpoint is reached: as the cluster's description says, or as the coordinator can."""
        if self._own_address is not None:
            return split_address(self._own_address, self._task)[0]
        assert self._chief_address is not None
        return local_host_towards(*split_address(self._chief_address, "the coordinator"))


def _addresses(spec: ClusterSpec, task: Task) -> tuple[str | None, str | None]:
    """The task's own address and the chief's, as far as the cluster has them."""
    own = chief = None
    if task.job in spec.jobs and task.index in spec.task_indices(task.job):
        own = spec.task_address(task.job, task.index)
    if CHIEF in spec.jobs and 0 in spec.task_indices(CHIEF):
        chief = spec.task_address(CHIEF, 0)
    if own is None and chief is None:
        known = {job: spec.task_indices(job) for job in spec.jobs}
        raise ClusterConfigError(
            f"{task} is not in the cluster, which has tasks {known}, and there is no chief that it could dial. Add the "
            "task's address, or the chief's."
        )
    return own, chief


def _say_on_stderr(line: str) -> None:
    sys.stderr.write(f"torchstrat: {line}\n")
    sys.stderr.flush()
