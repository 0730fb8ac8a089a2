"""Who is there: the coordinator's view of the cluster's processes, as they come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torchstrat.cluster_spec import CHIEF, PARAMETER_SERVER, ClusterSpec
from torchstrat.parameter_server.endpoint import Endpoint
from torchstrat.parameter_server.meeting.rendezvous import Rendezvous
from torchstrat.parameter_server.tasks import Peer, Task

OnJoined = Callable[[Peer, Mapping[str, Any]], None]
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
        from torchstrat.parameter_server.transport import RpcEndpoint

        self._lock = threading.Lock()
        self._present: set[str] = set()
        self._gone: set[str] = set()
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
        self._rendezvous.remove_task(task)

    def give_up(self, peer: Peer, reason: str) -> None:
        self._lost(peer, reason)

    def close(self, *, finished: bool) -> None:
        self._rendezvous.close(finished)
        self.endpoint.close()

    def _joined(self, peer: Peer, status: Mapping[str, Any]) -> None:
        with self._lock:
            returned = peer.incarnation in self._gone
            self._present.add(peer.incarnation)
        if returned:  # its connection broke, not the process; its functions run elsewhere by now
            self._rendezvous.give_up(peer, "its connection to the coordinator was lost")
            return
        self._tell_joined(peer, status)
        deadline = SERVER_DEADLINE_SECONDS if peer.task.job == PARAMETER_SERVER else None
        self.endpoint.watch(peer, self._lost, deadline_seconds=deadline)

    def _lost(self, peer: Peer, reason: str) -> None:
        with self._lock:
            if peer.incarnation not in self._present:
                return
            self._present.discard(peer.incarnation)
            self._gone.add(peer.incarnation)
        self._rendezvous.give_up(peer, reason)
        self._tell_lost(peer, reason)
        self.endpoint.remove_peer(peer, reason)
