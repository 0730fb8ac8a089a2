"""The processes of a job: their addresses and places, and what the launcher tells this process about them.

A *job* is a role (``chief``, ``worker``, ``ps``, ``evaluator``); a *task* is one process of it, numbered within its
job. `ClusterSpec` is pure data: no process is contacted.

This is the one place that reads the launcher's environment. ``torchrun`` says it with ``RANK``, ``WORLD_SIZE`` and
their kin, TensorFlow-style launchers with ``TF_CONFIG``. Both are read when a function here is called, never at import,
and checked whole before any communication starts. `ProcessPlan` is what the per-process engine needs of either.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import Any

from torchstrat.core.devices import local_devices
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
        ClusterConfigError: a task index is no whole number of at least 0, or there twice.
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
    found = {_index(f"job {job!r} has a task index", index): _address(job, index, tasks[index]) for index in tasks}
    if len(found) < len(tasks):
        raise ClusterConfigError(f"job {job!r} has a task twice: its indices are {list(tasks)}; number each task once.")
    return dict(sorted(found.items()))


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


Environment = Mapping[str, str]

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long strategies wait for other processes, where the user says nothing else."""
_ALL_STARTED = timedelta(minutes=2)
"""How long processes that were started at once may be apart: less than a job should wait for one that never comes."""


@dataclass(frozen=True)
class ProcessPlan:
    """This process's place in a group in which every process runs the same program.

    ``rank`` of ``size`` in the whole group, ``local_rank`` of ``local_size`` among those of this host.
    ``init_method`` is for `torch.distributed.init_process_group`; None where there is nobody to meet.
    ``spans_hosts`` is what the launcher says: two single-process launchers on one host look like two hosts.
    ``name`` says who this is in error messages.
    ``started_at_once``: the launcher starts all processes at the same time, or none (``srun``, ``mpirun``).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    init_method: str | None
    spans_hosts: bool
    name: str
    started_at_once: bool = False

    def joining_timeout(self, timeout: timedelta) -> timedelta:
        """How long to wait for the others to start, where ``timeout`` is how long to wait for them later."""
        return _ALL_STARTED if self.started_at_once and timeout == DEFAULT_TIMEOUT else timeout


def process_plan_from_torchrun(environ: Environment | None = None) -> ProcessPlan | None:
    """The plan that ``torchrun`` set up, or None when ``WORLD_SIZE`` is not set, so that this process is alone.

    Args:
        environ: Read in place of `os.environ`.

    Raises:
        ClusterConfigError: variables are missing or contradict each other; the message lists all of them.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" not in environ:
        return None
    problems: list[str] = []
    size = _variable(environ, "WORLD_SIZE", 1, None, problems)
    local_size = _variable(environ, "LOCAL_WORLD_SIZE", 1, size, problems)
    rank = _variable(environ, "RANK", 0, size - 1, problems)
    local_rank = _variable(environ, "LOCAL_RANK", 0, local_size - 1, problems)
    _variable(environ, "MASTER_PORT", 0, 65535, problems)
    if not environ.get("MASTER_ADDR"):
        problems.append("MASTER_ADDR is not set")
    if problems:
        raise ClusterConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']!r} says that a launcher started this process, but "
            f"{'; '.join(problems)}. Start it with torchrun, which sets them all, or unset WORLD_SIZE to run alone."
        )
    return ProcessPlan(rank, size, local_rank, local_size, "env://", local_size < size, f"rank {rank} of {size}")


def torchrun_address(environ: Environment | None = None) -> str:
    """``host:port`` where the processes that torchrun started meet; call it when there is a plan."""
    environ = os.environ if environ is None else environ
    return host_and_port(environ["MASTER_ADDR"], environ["MASTER_PORT"])


def host_and_port(host: str, port: int | str) -> str:
    """``host:port``, with an IPv6 address in brackets, which its colons need."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _variable(environ: Environment, name: str, least: int, most: int | None, problems: list[str]) -> int:
    """The number in a variable; what is wrong with it goes to ``problems``."""
    text = environ.get(name)
    if text is None:
        problems.append(f"{name} is not set")
        return least
    try:
        number = int(text)
    except ValueError:
        problems.append(f"{name}={text!r} is not a whole number")
        return least
    if number < least or (most is not None and number > max(most, least)):
        problems.append(f"{name}={text!r} must be at least {least}" + ("" if most is None else f" and at most {most}"))
        return least
    return number


def process_plan_from_cluster(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> ProcessPlan | None:
    """The plan of one task of a cluster: ranks count the chief first, then the workers; they meet at rank 0's address.

    Addresses say which tasks share a host. Returns None for an empty cluster. An evaluator computes alone.

    Raises:
        ClusterConfigError: a parameter server; a task whose type or index is missing, unknown or leaves a gap; an
            address without a port.
    """
    if not spec:
        return None
    if task_type is None or task_id is None:
        raise ClusterConfigError(
            f"the cluster has jobs {spec.jobs}, but nothing says which task this process is "
            f"(type {task_type!r}, index {task_id!r}); give both."
        )
    if task_type == PARAMETER_SERVER:
        raise ClusterConfigError(
            f"this process is parameter server {task_id}, which takes no part in synchronous training; start it with "
            "a Server for ParameterServerStrategy, or leave the job 'ps' out of the cluster."
        )
    if task_type == EVALUATOR:
        return ProcessPlan(0, 1, 0, 1, None, False, f"evaluator {task_id}")
    rank, size = id_in_cluster(spec, task_type, task_id), worker_count(spec, task_type)
    hosts = [_host(job, index, spec) for job in (CHIEF, WORKER) if job in spec.jobs for index in _indices(spec, job)]
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    meeting_point = spec.task_address(CHIEF if CHIEF in spec.jobs else WORKER, 0)
    return ProcessPlan(
        rank=rank,
        size=size,
        local_rank=neighbours.index(rank),
        local_size=len(neighbours),
        init_method=f"tcp://{meeting_point}",
        spans_hosts=len(set(hosts)) > 1,
        name=f"rank {rank} of {size} ({task_type} {task_id})",
    )


def _indices(spec: ClusterSpec, job: str) -> list[int]:
    indices = spec.task_indices(job)
    if indices != list(range(len(indices))):
        raise ClusterConfigError(f"job {job!r} has tasks {indices}; synchronous training needs 0, 1, 2, … with no gap.")
    return indices


def _host(job: str, index: int, spec: ClusterSpec) -> str:
    address = spec.task_address(job, index)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterConfigError(f"task {index} of job {job!r} has address {address!r}; write 'host:port'.")
    return host


@dataclass(frozen=True)
class TFConfig:
    """A checked ``TF_CONFIG``. What it does not say is None; ``cluster`` is then empty."""

    cluster: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    session_master: str | None = None


def read_tf_config(environ: Environment | None = None) -> TFConfig:
    """``TF_CONFIG`` as it is now; an unset variable describes no cluster.

    Args:
        environ: Read in place of `os.environ`.

    Raises:
        ClusterConfigError: it is no JSON object, or a part of it is malformed or names a task that its cluster lacks;
            the message has the key and its value.
    """
    environ = os.environ if environ is None else environ
    if "TF_CONFIG" not in environ:
        return TFConfig(ClusterSpec({}))
    text = environ["TF_CONFIG"]
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterConfigError(f"TF_CONFIG={text!r} is not JSON ({error}); write an object, or unset it.") from None
    content = _object("TF_CONFIG", document)
    task = _object("task", content.get("task", {}))
    return _with_known_task(
        TFConfig(
            cluster=_cluster(content.get("cluster", {})),
            task_type=_text("TF_CONFIG has task.type", task["type"]) if "type" in task else None,
            task_id=_index("TF_CONFIG has task.index", task["index"]) if "index" in task else None,
            rpc_layer=text_or_none("TF_CONFIG has rpc_layer", content.get("rpc_layer")),
            session_master=text_or_none("TF_CONFIG has session_master", content.get("session_master")),
        )
    )


def _with_known_task(config: TFConfig) -> TFConfig:
    """Check that the task is in the cluster. A coordinator and an evaluator need no address, hence no entry."""
    if not config.cluster or config.task_type is None:
        return config
    if config.task_type not in config.cluster.jobs:
        if config.task_type in (CHIEF, EVALUATOR):
            return config
        raise _malformed(
            "TF_CONFIG has task.type", config.task_type, f"one of the cluster's jobs, {sorted(config.cluster.jobs)}"
        )
    indices = config.cluster.task_indices(config.task_type)
    if config.task_id is not None and config.task_id not in indices:
        raise _malformed(
            "TF_CONFIG has task.index", config.task_id, f"one of the tasks of job {config.task_type!r}, {indices}"
        )
    return config


def _cluster(value: object) -> ClusterSpec:
    content = _object("cluster", value)
    try:
        return ClusterSpec(content)
    except (WrongTypeError, ClusterConfigError) as error:
        raise ClusterConfigError(f"TF_CONFIG has cluster={value!r}: {error}") from None


def _object(key: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        if key == "TF_CONFIG":
            raise ClusterConfigError(f"TF_CONFIG is {value!r}; it must be an object, {{…}}.")
        raise _malformed(f"TF_CONFIG has {key}", value, "an object, {…}")
    return value


def text_or_none(what: str, value: object) -> str | None:
    """``what``: how a message calls the value, up to the equals sign."""
    return None if value is None else _text(what, value)


def index_or_none(what: str, value: object) -> int | None:
    """A whole number, also one in words, as the environment has it (``"1"``); ``what`` as of `text_or_none`."""
    return None if value is None else _index(what, value)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise _malformed(what, value, "a string")
    return value


def _index(what: str, value: Any) -> int:
    whole = not isinstance(value, bool) and isinstance(value, Real | str)
    try:
        number = int(value) if whole else -1
    except (ValueError, OverflowError):  # of infinity
        number = -1
    if number < 0 or (not isinstance(value, str) and number != value):
        raise _malformed(what, value, "a whole number of at least 0")
    return number


def _malformed(what: str, value: object, wanted: str) -> ClusterConfigError:
    return ClusterConfigError(f"{what}={value!r}; it must be {wanted}.")


class ClusterResolver(ABC):
    """Describes a cluster and this process's task in it.

    ``task_type`` and ``task_id`` are None where nothing says them; ``rpc_layer`` is the scheme that `master` puts
    before an address; ``environment`` is a free text ("" or None: nothing special).
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The cluster as it is now; empty when this process is alone."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address to connect to, ``rpc_layer://host:port``; "" means this process."""

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """How many accelerators of each kind a task has. By default every task has as many GPUs as this machine."""
        gpus = len(local_devices())
        return {"GPU": gpus} if gpus else {}

    def process_plan(self) -> ProcessPlan | None:
        """This task's place in synchronous training; None when the cluster is empty.

        Raises:
            ClusterConfigError: this task cannot take part; see
            `torchstrat.distributed.cluster.process_plan_from_cluster`.
        """
        return process_plan_from_cluster(self.cluster_spec(), self.task_type, self.task_id)


def with_layer(address: str, rpc_layer: str | None) -> str:
    """``grpc://host:port`` of a layer and an address, or the address alone."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def address_of(resolver: ClusterResolver, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
    """What `ClusterResolver.master` says of a task, by default of the resolver's own."""
    job = resolver.task_type if task_type is None else task_type
    index = resolver.task_id if task_id is None else task_id
    if job is None or index is None:
        raise ClusterConfigError(f"master() needs a task; got task_type={job!r} and task_id={index!r}. Give both.")
    return with_layer(resolver.cluster_spec().task_address(job, index), rpc_layer or resolver.rpc_layer)
