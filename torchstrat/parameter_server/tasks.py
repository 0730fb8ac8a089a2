"""Who takes part: tasks by role and index, and the processes that are them at the moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Task:
    """A place in the cluster: ``job`` is ``chief``, ``worker``, ``ps`` or ``evaluator``."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


@dataclass(frozen=True)
class Peer:
    """One process that is, or was, a task. A task that is started again is another peer.

    ``incarnation`` is a random hexadecimal string, fresh at each start; ``url`` is where its messages go; ``pid`` and
    ``host`` are for error messages.
    """

    task: Task
    incarnation: str
    url: str
    host: str = ""
    pid: int = 0

    @property
    def name(self) -> str:
        """Unique in the job, made of letters, digits and underscores."""
        return f"{self.task.job}_{self.task.index}_{self.incarnation}"

    def __str__(self) -> str:
        return f"{self.task} (pid {self.pid} on {self.host})" if self.host else str(self.task)
