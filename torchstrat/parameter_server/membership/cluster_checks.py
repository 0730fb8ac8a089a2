"""What a cluster must look like for parameter servers: pure checks, before anything connects.

Every process of the job runs them on the same description, so that a malformed one is the same error everywhere and
not a hang of the rest.

Complaints are lines for people that anybody on the network can cause, and that must therefore not fill a disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torchstrat.core.errors import ClusterConfigError
from torchstrat.distributed.cluster import CHIEF, EVALUATOR, PARAMETER_SERVER, ROLES, WORKER, ClusterSpec
from torchstrat.parameter_server.interface import Task

MAXIMAL_PORT = 65535


def check_parameter_server_cluster(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Check that ``spec`` can train with parameter servers, and that this process's task is in it.

    Args:
        spec: The cluster. The coordinator need not be in it, since it dials everybody; an evaluator, which only watches
            checkpoints, need not either.
        task_type: This process's job; None where nothing says it (the coordinator's program, run by hand).
        task_id: This process's index in its job; None likewise.

    Raises:
        ClusterConfigError: the cluster is empty; has a job that is no role, more than one chief or evaluator, no
            server or no worker, an address that is malformed or given to two tasks; or lacks this process's task.
    """
    if not spec:
        raise ClusterConfigError(
            "the cluster is empty: nothing says where its workers and parameter servers are. To start them on this "
            "machine, run the program as `torchstrat launch --ps 2 --workers 2 SCRIPT`, or in a notebook make the "
            "strategy with ts.launch.Cluster(ps=2, workers=2).strategy(). For workers and servers that run elsewhere, "
            "give a resolver a ClusterSpec({'worker': ['host:port', …], 'ps': ['host:port', …]}), or set TF_CONFIG."
        )
    for job in spec.jobs:
        if job not in ROLES:
            raise ClusterConfigError(
                f"the cluster has a job {job!r}, which is no role; the roles are {', '.join(ROLES)} "
                "(the coordinator is the chief)."
            )
    for single in (CHIEF, EVALUATOR):
        if single in spec.jobs and spec.num_tasks(single) > 1:
            raise ClusterConfigError(
                f"the cluster has {spec.num_tasks(single)} tasks of type {single!r}; give it at most 1."
            )
    for job, purpose in ((PARAMETER_SERVER, "hold the variables"), (WORKER, "run the functions")):
        if job not in spec.jobs or spec.num_tasks(job) == 0:
            raise ClusterConfigError(
                f"the cluster has no task of type {job!r} to {purpose}; its jobs are {sorted(spec.jobs)}. Add at least "
                "one address."
            )
    _check_own_task(spec, task_type, task_id)
    _check_addresses(spec)


def _check_own_task(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    if task_type is None:
        return
    if task_type not in ROLES:
        raise ClusterConfigError(
            f"this process's task_type is {task_type!r}, which is no role; the roles are {', '.join(ROLES)}."
        )
    if task_type not in spec.jobs:
        if task_type == EVALUATOR:
            return
        raise ClusterConfigError(
            f"this process's task_type is {task_type!r}, but the cluster's jobs are {sorted(spec.jobs)}. Add the job"
            + (", or leave task_type out: a coordinator need not be in the cluster." if task_type == CHIEF else ".")
        )
    if task_id is not None and task_id not in spec.task_indices(task_type):
        raise ClusterConfigError(
            f"this process is task {task_id!r} of type {task_type!r}, which the cluster lacks; "
            f"it has {spec.task_indices(task_type)}."
        )


def _check_addresses(spec: ClusterSpec) -> None:
    owners: dict[tuple[str, int], Task] = {}
    for job in spec.jobs:
        for index in spec.task_indices(job):
            task, address = Task(job, index), spec.task_address(job, index)
            where = split_address(address, task)
            if where in owners and where[1] != 0:
                raise ClusterConfigError(
                    f"{owners[where]} and {task} have the same address {address!r}; each task needs its own."
                )
            owners[where] = task


def split_address(address: str, whose: Task | str) -> tuple[str, int]:
    """``"host:port"``, or ``"[::1]:port"``, as (host, port). Port 0 means a free one, chosen by the system.

    Raises:
        ClusterConfigError: it is something else; the message names ``whose`` address it is.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets does not say where its port begins
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not colon or not host or host != host.strip() or "/" in host or not 0 <= number <= MAXIMAL_PORT:
        raise ClusterConfigError(
            f"{whose} has address {address!r}; write 'host:port' with a port of 0 to {MAXIMAL_PORT}, such as "
            "'10.0.0.7:2222' or '[::1]:2222'."
        )
    return host, number


INTERVAL_SECONDS = 30.0
LINES_PER_INTERVAL = 5


class Complaints:
    """Passes on a few lines per interval and counts the others. Thread-safe.

    Args:
        say: Takes the lines.
        clock: In seconds; replaced by tests.
    """

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._lock = threading.Lock()
        self._began = clock()
        self._count = 0

    def add(self, line: str) -> None:
        """Say it, unless too much was said of late."""
        with self._lock:
            if self._clock() - self._began > INTERVAL_SECONDS:
                self._began, self._count = self._clock(), 0
            self._count += 1
            count = self._count
        if count <= LINES_PER_INTERVAL:
            self._say(line)
        elif count == LINES_PER_INTERVAL + 1:
            self._say(f"more of the like is not reported for up to {INTERVAL_SECONDS:g} s.")
