"""From equal, numbered processes to the roles of a cluster; for the environments that Slurm and Kubernetes set.

`Members` says where the processes are, `assign_roles` makes some of them servers and some of them workers. `Variables`
reads an environment and collects everything that is wrong with it, so that one error says it all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchstrat.core.errors import ClusterConfigError
from torchstrat.distributed.cluster import Environment
from torchstrat.distributed.cluster_spec import WORKER, ClusterSpec


@dataclass(frozen=True)
class Members:
    """``addresses``: ``host:port`` of every process of the job, by its number. ``own``: this process's number."""

    addresses: tuple[str, ...]
    own: int


@dataclass(frozen=True)
class AssignedTask:
    """A cluster, and the task of it that this process is."""

    cluster: ClusterSpec
    task_type: str
    task_id: int


def assign_roles(members: Members, jobs: Mapping[str, int] | None) -> AssignedTask:
    """Give the first processes the first role, the next ones the next: ``{"ps": 2, "worker": 4}`` takes six.

    Args:
        jobs: Role → number of tasks, in order; None makes every process a worker.

    Raises:
        ClusterConfigError: the numbers are none, or do not add up to the number of processes.
    """
    counts = role_counts(jobs) if jobs is not None else {WORKER: len(members.addresses)}
    if sum(counts.values()) != len(members.addresses):
        raise ClusterConfigError(
            f"jobs={dict(counts)} takes {sum(counts.values())} processes, and the job has {len(members.addresses)}; "
            "give each process exactly one role."
        )
    roles = [(role, index) for role, count in counts.items() for index in range(count)]
    cluster: dict[str, list[str]] = {role: [] for role in counts}
    for (role, _), address in zip(roles, members.addresses, strict=True):
        cluster[role].append(address)
    return AssignedTask(ClusterSpec(cluster), *roles[members.own])


def role_counts(jobs: Any) -> dict[str, int]:
    """``jobs``, checked. Raises `ClusterConfigError` unless it is a dict from role names to numbers of tasks."""
    good = isinstance(jobs, Mapping) and all(
        isinstance(role, str) and isinstance(count, int) and not isinstance(count, bool) and count >= 0
        for role, count in jobs.items()
    )
    if not good:
        raise ClusterConfigError(
            f"jobs={jobs!r} must be a dict from roles to numbers of tasks, such as {{'ps': 2, 'worker': 4}}."
        )
    return dict(jobs)


class Variables:
    """An environment, and everything that was found wrong with it."""

    def __init__(self, environ: Environment) -> None:
        self.environ = environ
        self.problems: list[str] = []

    def text(self, *names: str) -> tuple[str, str]:
        """The first of these variables that is set, and its value."""
        for name in names:
            if self.environ.get(name):
                return name, self.environ[name]
        self.problems.append(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set")
        return names[0], ""

    def number(self, *names: str, least: int, below: int | None = None) -> int:
        """The first of these variables that is set, as a number."""
        name, text = self.text(*names)
        if not text:
            return least
        number = int(text) if re.fullmatch(r"\d+", text) else -1
        if number < least or (below is not None and number >= max(below, least + 1)):
            wanted = f"a whole number of at least {least}" + ("" if below is None else f" and below {below}")
            self.problems.append(f"{name}={text!r} must be {wanted}")
            return least
        return number

    def check(self, said_by: str, remedy: str) -> None:
        if self.problems:
            raise ClusterConfigError(f"{said_by}, but {'; '.join(self.problems)}. {remedy}")
