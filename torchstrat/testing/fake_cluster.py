"""A parameter-server cluster of threads: the real coordinator, workers and servers over `FakeNetwork`.

::

    with FakeCluster(workers=2, ps=2) as cluster:
        strategy = cluster.strategy(variable_partitioner=...)
        ...
        cluster.kill_worker(1)
        cluster.start_worker(1)

For unit tests of programs that use `ClusterCoordinator`: no sockets, no processes, faults on command. Everything that a
process has of its own is shared here: the global random state, the default dtype, module globals of functions that
travel by reference.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

from torchstrat.core.context import home_of
from torchstrat.core.errors import CommunicationTimeoutError
from torchstrat.distributed.cluster import CHIEF, PARAMETER_SERVER, WORKER, ClusterSpec
from torchstrat.distributed.cluster_resolver import SimpleClusterResolver
from torchstrat.parameter_server.coordinator import take_in_losses
from torchstrat.parameter_server.interface import Endpoint, Peer, Service, Task
from torchstrat.parameter_server.membership.membership import OnJoined, OnLost
from torchstrat.parameter_server.server.service import VariableServer
from torchstrat.parameter_server.variable_home import CoordinatorHome
from torchstrat.parameter_server.worker.worker import FunctionWorker
from torchstrat.strategies.parameter_server import ParameterServerStrategy
from torchstrat.testing.fake_network import FakeNetwork


class FakeCluster:
    """Workers and servers as threads. A context manager that ends them.

    Args:
        workers, ps: how many of each are there from the start.
        restarts_servers: one that was killed is started again as soon as a coordinator waits for it.
    """

    def __init__(self, workers: int = 2, ps: int = 2, *, restarts_servers: bool = False) -> None:
        self.network = FakeNetwork()
        self._restarts_servers = restarts_servers
        self._killed_servers: set[int] = set()
        self._lock = threading.Lock()
        self._services: dict[Task, tuple[Endpoint, Service]] = {}
        self._dead: list[Service] = []
        self._memberships: list[FakeMembership] = []
        self._strategies: list[ParameterServerStrategy] = []
        self.spec = ClusterSpec(
            {
                WORKER: [f"worker{index}:1" for index in range(workers)],
                PARAMETER_SERVER: [f"ps{index}:1" for index in range(ps)],
            }
        )
        for index in range(ps):
            self.start_server(index)
        for index in range(workers):
            self.start_worker(index)

    def strategy(self, variable_partitioner: Any = None, **options: Any) -> ParameterServerStrategy:
        """A new strategy on this cluster, as a coordinator's program would make it."""
        membership = FakeMembership(self)
        options.setdefault("timeout", timedelta(seconds=60))
        made = ParameterServerStrategy(
            SimpleClusterResolver(self.spec), variable_partitioner, _membership=membership, **options
        )
        self._strategies.append(made)
        return made

    def start_worker(self, index: int) -> Peer:
        """A worker joins: the first of its index, or one that was started again."""
        return self._start(Task(WORKER, index), FunctionWorker(index, owns_process=False))

    def start_server(self, index: int) -> Peer:
        """A server joins. One that was started again holds nothing."""
        self._killed_servers.discard(index)
        return self._start(Task(PARAMETER_SERVER, index), VariableServer(owns_process=False))

    def kill_worker(self, index: int) -> Peer:
        return self._kill(Task(WORKER, index))

    def kill_server(self, index: int) -> Peer:
        killed = self._kill(Task(PARAMETER_SERVER, index))
        self._killed_servers.add(index)
        return killed

    def wait_until_lost(self, peer: Peer, timeout_seconds: float = 60.0) -> None:
        """Until every coordinator has taken in that this process is gone, or has given it up."""
        for membership in list(self._memberships):
            membership.wait_until_lost(peer, timeout_seconds)
        for strategy in self._strategies:
            home = home_of(strategy)
            if isinstance(home, CoordinatorHome) and home.coordinator is not None:
                take_in_losses(home.coordinator)

    def cut_off(self, worker: int, server: int) -> None:
        """From now on the worker that is there cannot reach that server, which lives and answers everybody else."""
        self._services[Task(WORKER, worker)][0].remove_peer(self.peer(PARAMETER_SERVER, server))

    def peer(self, job: str, index: int) -> Peer:
        """The process that is this task at the moment."""
        return self._services[Task(job, index)][0].peer

    def service(self, job: str, index: int) -> Any:
        """The role object of a task, to look at."""
        return self._services[Task(job, index)][1]

    def close(self) -> None:
        for strategy in self._strategies:
            strategy.close()
        services = [*self._dead, *(service for _, service in self._services.values())]
        for service in services:
            service.close()
        self.network.close()
        for service in services:
            if isinstance(service, FunctionWorker):
                service.join()

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, task: Task, service: Service) -> Peer:
        endpoint = self.network.endpoint(task)
        service.attach(endpoint)
        endpoint.serve(service.handlers())
        with self._lock:
            self._services[task] = (endpoint, service)
            memberships = list(self._memberships)
        for membership in memberships:
            membership.welcome(endpoint, service)
        return endpoint.peer

    def _kill(self, task: Task) -> Peer:
        with self._lock:
            endpoint, service = self._services.pop(task)
            self._dead.append(service)
        self.network.kill(endpoint.peer)
        service.close()
        return endpoint.peer

    def restart_servers(self) -> None:
        for index in sorted(self._killed_servers) if self._restarts_servers else ():
            self.start_server(index)

    def enter(self, membership: FakeMembership) -> list[tuple[Endpoint, Service]]:
        with self._lock:
            self._memberships.append(membership)
            return list(self._services.values())

    def leave(self, membership: FakeMembership, *, finished: bool) -> None:
        with self._lock:
            if membership not in self._memberships:
                return
            self._memberships.remove(membership)
            services = [service for _, service in self._services.values()]
        for service in services:
            service.coordinator_left(finished=finished)


class FakeMembership:
    """One coordinator's view of a `FakeCluster`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._changed = threading.Condition()
        self._joined: set[Task] = set()
        self._gone: set[str] = set()
        self._told: set[str] = set()
        self.endpoint: Endpoint = cluster.network.endpoint(Task(CHIEF, 0))

    def start(self, on_joined: OnJoined, on_lost: OnLost) -> None:
        self._on_joined, self._on_lost = on_joined, on_lost
        for endpoint, service in self._cluster.enter(self):
            self.welcome(endpoint, service)

    def welcome(self, endpoint: Endpoint, service: Service) -> None:
        status: Mapping[str, object] = service.status()
        endpoint.add_peer(self.endpoint.peer)
        service.coordinator_arrived(self.endpoint.peer)
        self.endpoint.add_peer(endpoint.peer)
        self._on_joined(endpoint.peer, status)
        self.endpoint.watch(endpoint.peer, self._lost)
        with self._changed:
            self._joined.add(endpoint.peer.task)
            self._changed.notify_all()

    def _lost(self, peer: Peer, reason: str) -> None:
        with self._changed:
            if peer.incarnation in self._gone:
                return
            self._gone.add(peer.incarnation)
            self._joined.discard(peer.task)
        self._on_lost(peer, reason)
        self.endpoint.remove_peer(peer)
        with self._changed:
            self._told.add(peer.incarnation)
            self._changed.notify_all()

    def wait_until_lost(self, peer: Peer, timeout_seconds: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: peer.incarnation in self._told, timeout_seconds):
                raise CommunicationTimeoutError(f"{peer} was not lost within {timeout_seconds} s.")

    def wait_for(self, tasks: Iterable[Task], timeout_seconds: float) -> None:
        self._cluster.restart_servers()
        wanted = set(tasks)
        with self._changed:
            if not self._changed.wait_for(lambda: wanted <= self._joined, timeout_seconds):
                missing = ", ".join(map(str, sorted(wanted - self._joined)))
                raise CommunicationTimeoutError(
                    f"{missing} did not join within {timeout_seconds} s. Start them: cluster.start_server(index)."
                )

    def give_up(self, peer: Peer, reason: str) -> None:
        self._lost(peer, reason)

    def add_task(self, task: Task, address: str) -> None: ...

    def remove_task(self, task: Task) -> None: ...

    def close(self, *, finished: bool) -> None:
        self._cluster.leave(self, finished=finished)
        self.endpoint.close()
