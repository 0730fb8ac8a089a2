"""The tasks of a job and their addresses, and what a task's role says about its place in the group.

A *job* is a role (``chief``, ``worker``, ``ps``, ``evaluator``); a *task* is one process of it, numbered within its
job. Pure data: no process is contacted and no environment is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchstrat.core.errors import ClusterConfigError, WrongTypeError

CHIEF, WORKER, PARAMETER_SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
ROLES = (CHIEF, WORKER, PARAMETER_SERVER, EVALUATOR)


class ClusterSpec:
    """Which tasks there are: job name → task index → address.

    Args:
        cluster: ``{"worker": ["host0:2222", "host1:2222"], "ps": {0: "host2:2222", 3: "host3:2222"}}``: a list or tuple
            of addresses, or a dict from task index to address; or another `ClusterSpec`, whose jobs are then sorted.

    Raises:
        WrongTypeError: a job's name or an address is not a string, or the tasks come in another container.
        ClusterConfigError: a task index is not a number.
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, object]) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = dict(sorted(cluster.as_dict().items()))
        if isinstance(cluster, Mapping):
            self._jobs = {_job_name(job): _tasks(job, tasks) for job, tasks in cluster.items()}
        else:
            raise WrongTypeError(
                "a cluster is described by a dict from job names to addresses, or by a ClusterSpec; got "
                f"{type(cluster).__name__} {cluster!r}."
            )

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Job → list of addresses where the task indices are 0, 1, 2, …, and otherwise dict from index to address."""
        return {job: list(tasks.values()) if _dense(tasks) else dict(tasks) for job, tasks in self._jobs.items()}

    def num_tasks(self, job_name: str) -> int:
        """The number of tasks of a job. Raises `ClusterConfigError` for an unknown job, as all methods below do."""
        return len(self._tasks_of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of a job's tasks, ascending."""
        return list(self._tasks_of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of one task. Raises `ClusterConfigError` when the job has no task of that index."""
        tasks = self._tasks_of(job_name)
        if task_index not in tasks:
            raise ClusterConfigError(f"job {job_name!r} has no task {task_index!r}; it has tasks {list(tasks)}.")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job's tasks at their indices, None where an index is not taken."""
        tasks = self._tasks_of(job_name)
        if not tasks:
            raise ClusterConfigError(f"job {job_name!r} has no tasks; give it at least one address.")
        return [tasks.get(index) for index in range(max(tasks) + 1)]

    def _tasks_of(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ClusterConfigError(f"the cluster has no job {job_name!r}; its jobs are {sorted(self._jobs)}.")
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]  # equality is by content, as for the dicts it is made of

    def __repr__(self) -> str:
        jobs = dict(sorted(self.as_dict().items()))
        return f"ClusterSpec({jobs!r})"


def _job_name(job: object) -> str:
    if not isinstance(job, str):
        raise WrongTypeError(f"a job's name must be a string; got {type(job).__name__} {job!r}.")
    return job


def _tasks(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise WrongTypeError(
            f"the tasks of job {job!r} must be a list of addresses or a dict from index to address; got "
            f"{type(tasks).__name__} {tasks!r}. Write ['host:port', …]."
        )
    return dict(sorted((_task_index(job, index), _address(job, index, tasks[index])) for index in tasks))


def _task_index(job: str, index: Any) -> int:
    try:
        return int(index)
    except (TypeError, ValueError):
        raise ClusterConfigError(f"job {job!r} has a task {index!r}; task indices are whole numbers.") from None


def _address(job: str, index: object, address: object) -> str:
    if not isinstance(address, str):
        raise WrongTypeError(
            f"the address of task {index} of job {job!r} must be a string such as 'host:2222'; got "
            f"{type(address).__name__} {address!r}."
        )
    return address


def _dense(tasks: Mapping[int, str]) -> bool:
    """Whether a list says it all. An empty job is shown as a dict, as TensorFlow shows it."""
    return bool(tasks) and list(tasks) == list(range(len(tasks)))


def is_chief(
    cluster_spec: ClusterSpec | Mapping[str, object], task_type: str | None = None, task_id: int | None = None
) -> bool:
    """Whether this task saves checkpoints and prints: the chief, an evaluator, or worker 0 where there is no chief.

    Raises:
        ClusterConfigError: the cluster has jobs that are no roles, or this task is not in it.
    """
    spec = _validated(cluster_spec, task_type, task_id)
    if task_type in (CHIEF, EVALUATOR):
        return True
    return task_type == WORKER and task_id == 0 and CHIEF not in spec.jobs


def id_in_cluster(cluster_spec: ClusterSpec | Mapping[str, object], task_type: str | None, task_id: int | None) -> int:
    """This task's place among those that compute together: the chief is 0, workers follow; evaluators count apart.

    Raises:
        ClusterConfigError: a parameter server, which has no such place, or a task that is not in the cluster.
    """
    spec = _validated(cluster_spec, task_type, task_id)
    if task_id is not None:
        if task_type == CHIEF:
            return 0
        if task_type == WORKER:
            return task_id + (spec.num_tasks(CHIEF) if CHIEF in spec.jobs else 0)
        if task_type == EVALUATOR:
            return task_id
    raise ClusterConfigError(f"{_called(task_type, task_id)} has no place among the tasks that compute together.")


def worker_count(cluster_spec: ClusterSpec | Mapping[str, object], task_type: str | None) -> int:
    """How many tasks compute together with this one: chief and workers, or, for an evaluator, the evaluators.

    Raises:
        ClusterConfigError: a parameter server computes with nobody; or the role is not in the cluster.
        KeyError: an evaluator's is not.
    """
    spec = _validated(cluster_spec, task_type, None)
    counts = {job: spec.num_tasks(job) for job in spec.jobs}
    if task_type in (CHIEF, WORKER):
        return counts.get(CHIEF, 0) + counts.get(WORKER, 0)
    if task_type == EVALUATOR:
        if EVALUATOR not in counts:
            raise KeyError(  # as TensorFlow, and as a dict without that job
                f"the cluster has no 'evaluator'; its jobs are {', '.join(counts) or 'none'}. List its address there."
            )
        return counts[EVALUATOR]
    raise ClusterConfigError(f"{_called(task_type, None)} computes together with no other task.")


def _called(task_type: str | None, task_id: int | None) -> str:
    if task_type is None:
        return "a task without a type"
    return f"a task of type {task_type!r}" if task_id is None else f"task {task_id} of type {task_type!r}"


def _validated(
    cluster_spec: ClusterSpec | Mapping[str, object], task_type: str | None, task_id: int | None
) -> ClusterSpec:
    spec = ClusterSpec(cluster_spec)
    foreign = [job for job in (*spec.jobs, task_type) if job is not None and job not in ROLES]
    if foreign:
        raise ClusterConfigError(f"{foreign[0]!r} is no role of a cluster; the roles are {', '.join(ROLES)}.")
    for single in (CHIEF, EVALUATOR):
        if single in spec.jobs and spec.num_tasks(single) > 1:
            raise ClusterConfigError(f"the cluster has {spec.num_tasks(single)} tasks of type {single!r}; at most 1.")
    if task_type is None or (task_type == EVALUATOR and EVALUATOR not in spec.jobs):
        return spec  # an evaluator only watches checkpoints: nobody needs its address
    indices = spec.task_indices(task_type)
    if task_id is not None and task_id not in indices:
        raise ClusterConfigError(f"{_called(task_type, task_id)} is not in the cluster, which has tasks {indices}.")
    return spec
