"""The resolvers of jobs that Slurm or Kubernetes started; public in ``ts.cluster_resolver``.

Both read what the launcher tells a process in its environment: of a step of Slurm (``scontrol`` is not called), of a
pod's job (no API server is asked). That tells of equal, numbered processes: `Members` says where they are,
`assign_roles` makes some of them servers and some of them workers. `Variables` reads an environment and collects
everything that is wrong with it, so that one error says it all.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torchstrat.core.devices import local_devices
from torchstrat.core.errors import ClusterConfigError, WrongTypeError
from torchstrat.distributed.cluster import (
    WORKER,
    ClusterResolver,
    ClusterSpec,
    Environment,
    address_of,
    host_and_port,
    read_tf_config,
)


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


def require_number(name: str, value: object, least: int) -> None:
    """Raises `ClusterConfigError` unless argument ``name`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ClusterConfigError(f"{name}={value!r} must be a whole number of at least {least}.")


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


@dataclass(frozen=True)
class SlurmStep:
    """The tasks of a Slurm step. ``hosts[i]`` runs ``tasks[i]`` of them; ``places[rank]`` is (index of its host, number
    among the tasks of that host). ``gpus_on_node`` is None where Slurm does not say."""

    hosts: tuple[str, ...]
    tasks: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    rank: int
    gpus_on_node: int | None

    def members(self, port_base: int) -> Members:
        """Task ``k`` of a host listens on ``port_base + k``."""
        addresses = (f"{self.hosts[host]}:{port_base + local}" for host, local in self.places)
        return Members(tuple(addresses), self.rank)


def read_slurm(environ: Environment, tasks_per_node: int | Mapping[str, int] | None = None) -> SlurmStep:
    """What ``srun`` set. Ranks are placed as ``--distribution`` says: block by block, or in turn over the hosts.

    Args:
        tasks_per_node: In place of ``SLURM_STEP_TASKS_PER_NODE``: the same number for every host, or host → number.

    Raises:
        ClusterConfigError: variables are missing, malformed or contradict each other; the message lists all of them.
    """
    variables = Variables(environ)
    hosts = _slurm_hosts(variables)
    tasks = _slurm_tasks(variables, hosts, tasks_per_node)
    if hosts and tasks and not sum(tasks):
        variables.problems.append(f"no task is said to run on any of the hosts {hosts}")
    rank = variables.number("SLURM_PROCID", least=0, below=sum(tasks) or None)
    cyclic = re.split(r"[:,]", environ.get("SLURM_DISTRIBUTION", ""))[0] == "cyclic"
    places = tuple(_in_turn(tasks) if cyclic else _in_blocks(tasks))
    said = environ.get("SLURM_NODEID"), environ.get("SLURM_LOCALID")
    if not variables.problems and None not in said and tuple(map(str, places[rank])) != said:
        variables.problems.append(
            f"SLURM_NODEID={said[0]!r} and SLURM_LOCALID={said[1]!r} put rank {rank} elsewhere than on node "
            f"{places[rank][0]} as its task {places[rank][1]} (start the step with --distribution=block)"
        )
    gpus = variables.number("SLURM_GPUS_ON_NODE", least=0) if environ.get("SLURM_GPUS_ON_NODE") else None
    variables.check("a Slurm step was to be described", "Start the process with srun, which sets these variables.")
    return SlurmStep(tuple(hosts), tuple(tasks), places, rank, gpus)


def _slurm_hosts(variables: Variables) -> list[str]:
    name, text = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    try:
        return expand_node_list(text) if text else []
    except ClusterConfigError as error:
        variables.problems.append(f"{name}={text!r} is no list of nodes ({str(error).rstrip('.')})")
        return []


def _slurm_tasks(
    variables: Variables, hosts: Sequence[str], tasks_per_node: int | Mapping[str, int] | None
) -> list[int]:
    """The number of tasks of each host, checked against the number of hosts and of tasks."""
    if isinstance(tasks_per_node, Mapping):
        for host, number in tasks_per_node.items():
            require_number(f"tasks_per_node[{host!r}]", number, 0)
        missing = [host for host in hosts if host not in tasks_per_node]
        if missing:
            variables.problems.append(f"tasks_per_node={dict(tasks_per_node)} does not name the hosts {missing}")
        return [tasks_per_node.get(host, 0) for host in hosts]
    if tasks_per_node is not None:
        require_number("tasks_per_node", tasks_per_node, 1)
        return [tasks_per_node] * len(hosts)
    name, text = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if not text:
        return []
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if None in parts:
        variables.problems.append(f"{name}={text!r} must be a list such as '2(x3),1'")
        return []
    tasks = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if hosts and len(tasks) != len(hosts):
        variables.problems.append(f"{name}={text!r} is about {len(tasks)} nodes, and there are {len(hosts)}: {hosts}")
    total = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", least=1)
    if sum(tasks) != total and not variables.problems:
        variables.problems.append(f"{name}={text!r} adds up to {sum(tasks)} tasks, and the step has {total}")
    return tasks


def _in_blocks(tasks: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((host, local) for host, count in enumerate(tasks) for local in range(count))


def _in_turn(tasks: Sequence[int]) -> Iterator[tuple[int, int]]:
    return (
        (host, local) for local in range(max(tasks, default=0)) for host in range(len(tasks)) if local < tasks[host]
    )


_NODE_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")


def expand_node_list(text: str) -> list[str]:
    """``"n[001-003,007],m5"`` → ``["n001", "n002", "n003", "n007", "m5"]``. Brackets may stand anywhere, repeatedly.

    Raises:
        ClusterConfigError: unbalanced or empty brackets, an empty name, a range that runs backwards.
    """
    hosts: list[str] = []
    position = 0
    while True:
        alternatives: list[list[str]] = []
        while position < len(text) and text[position] != ",":
            part = _NODE_PART.match(text, position)
            if part is None:
                raise ClusterConfigError(f"a bracket is not closed or not opened at {text[position:]!r}.")
            alternatives.append([part[2]] if part[1] is None else _bracket(part[1]))
            position = part.end()
        if not alternatives:
            raise ClusterConfigError("a name between commas is empty.")
        hosts += ("".join(parts) for parts in itertools.product(*alternatives))
        if position == len(text):
            return hosts
        position += 1


def _bracket(content: str) -> list[str]:
    """``"001-003,007"`` → the numbers, as wide as the first of their range is written."""
    numbers: list[str] = []
    for part in content.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ClusterConfigError(f"[{content}] must hold numbers and ascending ranges, such as [1-3,7].")
        numbers += (
            str(number).zfill(len(bounds[1])) for number in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
        )
    return numbers


def read_indexed_job(
    environ: Environment, jobs: Mapping[str, int] | None, job_name: str | None, subdomain: str, port: int
) -> AssignedTask:
    """The pods of a Job with ``completionMode: Indexed`` behind a headless service: ``JOB-INDEX.SUBDOMAIN:port``.

    Args:
        jobs: Role → number of pods, in the order of their indices; needed, as no variable says how many there are.
        job_name: The Job's name; None takes it from ``HOSTNAME``, which is ``JOB-INDEX`` in such a pod.
        subdomain: The pods' ``subdomain``, the name of the service.

    Raises:
        ClusterConfigError: variables are missing or malformed, or the index is beyond the roles.
    """
    variables = Variables(environ)
    counts = role_counts(jobs) if jobs is not None else {}
    if not sum(counts.values()):
        variables.problems.append(f"jobs={jobs!r} does not say how many pods there are; write {{'ps': 2, 'worker': 4}}")
    index = variables.number("JOB_COMPLETION_INDEX", least=0, below=sum(counts.values()) or None)
    if job_name is None:
        _, host = variables.text("HOSTNAME")
        job_name, _, last = host.partition(".")[0].rpartition("-")
        if host and (not job_name or last != environ.get("JOB_COMPLETION_INDEX")):
            variables.problems.append(
                f"HOSTNAME={host!r} is not the Job's name, a dash and JOB_COMPLETION_INDEX (give job_name=)"
            )
    variables.check(
        f"subdomain={subdomain!r} says that this is a pod of an indexed Job",
        "Set completionMode: Indexed and subdomain in the Job, and describe all of its pods in jobs.",
    )
    addresses = tuple(f"{job_name}-{pod}.{subdomain}:{port}" for pod in range(sum(counts.values())))
    return assign_roles(Members(addresses, index), counts)


def read_training_operator(environ: Environment, jobs: Mapping[str, int] | None) -> AssignedTask:
    """What Kubeflow's training operator set in this pod: ``TF_CONFIG`` (TFJob), or ``PET_…`` and ``MASTER_ADDR``
    (PyTorchJob, TrainJob), where each pod is one process of the cluster.

    Args:
        jobs: Role → number of pods, in the order of their ranks; only where ``TF_CONFIG`` does not say it.

    Raises:
        ClusterConfigError: neither is there, or variables are missing or malformed.
    """
    if environ.get("TF_CONFIG"):
        return _from_tf_job(environ, jobs)
    if not any(environ.get(name) for name in ("PET_MASTER_ADDR", "MASTER_ADDR", "PET_RDZV_ENDPOINT")):
        raise ClusterConfigError(
            "nothing in the environment describes a Kubernetes job: TF_CONFIG (TFJob), PET_MASTER_ADDR and MASTER_ADDR "
            "(PyTorchJob) are not set. For a Job with completionMode: Indexed give subdomain= and jobs=."
        )
    return assign_roles(_read_pytorch_job(environ), jobs)


def _from_tf_job(environ: Environment, jobs: Mapping[str, int] | None) -> AssignedTask:
    config = read_tf_config(environ)
    parts = {"cluster": config.cluster or None, "task.type": config.task_type, "task.index": config.task_id}
    problems = [f"{key} is missing" for key, value in parts.items() if value is None]
    if jobs is not None:
        problems.append(f"jobs={dict(jobs)} is given too, and the roles are already known")
    if problems or config.task_type is None or config.task_id is None:
        raise ClusterConfigError(
            f"TF_CONFIG says that this is a pod of a TFJob, but {'; '.join(problems)}. Give a whole TF_CONFIG and no "
            "jobs, or unset it."
        )
    return AssignedTask(config.cluster, config.task_type, config.task_id)


def _read_pytorch_job(environ: Environment) -> Members:
    variables = Variables(environ)
    host, port = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR"), 0
    if host:
        port = variables.number("PET_MASTER_PORT", "MASTER_PORT", least=1, below=65536)
    else:
        name, endpoint = variables.text("PET_RDZV_ENDPOINT")
        host, _, text = endpoint.rpartition(":")
        port = int(text) if text.isdecimal() else 0
        if not host or not 0 < port < 65536:
            variables.problems.append(f"{name}={endpoint!r} must be 'host:port'")
    if ":" in environ.get("PET_NNODES", ""):
        variables.problems.append(
            f"PET_NNODES={environ['PET_NNODES']!r} is a range: an elastic job does not say how many pods there are"
        )
    size = 0 if variables.problems else variables.number("PET_NNODES", "WORLD_SIZE", least=1)
    rank = variables.number("PET_NODE_RANK", "RANK", least=0, below=size or None)
    if host in ("localhost", "127.0.0.1"):  # so the first pod of older operators is told its own address
        _, host = variables.text("HOSTNAME")
    hosts = _pods_after(host, size)
    if hosts is None:
        variables.problems.append(
            f"the first pod is called {host!r}, which does not tell the names of the other {size - 1}: it should end "
            "in '-master-0' or '-0'"
        )
    variables.check(
        "PET_… and MASTER_ADDR say that this is a pod of a PyTorchJob",
        "Start it through the training operator, or describe the cluster with SimpleClusterResolver.",
    )
    return Members(tuple(host_and_port(host, port) for host in hosts or ()), rank)


def _pods_after(first: str, count: int) -> list[str] | None:
    """The host names of all pods from the first one's, by the operator's rule; None where it does not apply."""
    if count <= 1:
        return [first] * count
    name, dot, domain = first.partition(".")
    if name.endswith("-master-0"):
        job = name.removesuffix("-master-0")
        return [first, *(f"{job}-worker-{worker}{dot}{domain}" for worker in range(count - 1))]
    if name.endswith("-0"):
        return [f"{name.removesuffix('0')}{pod}{dot}{domain}" for pod in range(count)]
    return None


class _LauncherResolver(ClusterResolver):
    _cluster: ClusterSpec

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task; of this one where the arguments do not say another.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        return address_of(self, task_type, task_id, rpc_layer)


class SlurmClusterResolver(_LauncherResolver):
    """What ``srun`` set for this step: its tasks, in order of their ranks, take the roles of ``jobs``.

    The variables are read once. Ranks are placed on hosts as ``SLURM_DISTRIBUTION`` says (block or cyclic), which
    ``SLURM_NODEID`` and ``SLURM_LOCALID`` have to confirm. The ``k``-th task of a host listens on ``port_base + k``.

    Args:
        jobs: Role → number of tasks, in the order in which ranks take them; None: every task is a worker.
        port_base: The first port on each host.
        gpus_per_node: None: ``SLURM_GPUS_ON_NODE``, or what this machine has.
        gpus_per_task: None: the node's, divided evenly over the tasks of the fullest host.
        tasks_per_node: In place of ``SLURM_STEP_TASKS_PER_NODE``: a number for every host, or host → number.
        auto_set_gpu: Set ``CUDA_VISIBLE_DEVICES`` of this process to its share of the node's GPUs.
        rpc_layer: The scheme before addresses.
        environ: Read, and written by ``auto_set_gpu``, in place of `os.environ`.

    Raises:
        ClusterConfigError: variables are missing, malformed or contradictory (the message lists all of them), the
            roles do not take exactly the tasks there are, or there are too few GPUs.
    """

    task_type: str
    task_id: int

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = False,
        rpc_layer: str | None = None,
        *,
        environ: Environment | None = None,
    ) -> None:
        require_number("port_base", port_base, 1)
        for name, given in (("gpus_per_node", gpus_per_node), ("gpus_per_task", gpus_per_task)):
            if given is not None:
                require_number(name, given, 0)
        environ = os.environ if environ is None else environ
        step = read_slurm(environ, tasks_per_node)
        task = assign_roles(step.members(port_base), jobs)
        self._cluster, self.task_type, self.task_id = task.cluster, task.task_type, task.task_id
        self.rpc_layer = rpc_layer
        if gpus_per_node is None:
            gpus_per_node = len(local_devices()) if step.gpus_on_node is None else step.gpus_on_node
        self._gpus_per_task = gpus_per_node // max(step.tasks) if gpus_per_task is None else gpus_per_task
        if self._gpus_per_task * max(step.tasks) > gpus_per_node:
            raise ClusterConfigError(
                f"gpus_per_task={self._gpus_per_task} for {max(step.tasks)} tasks on one host needs "
                f"{self._gpus_per_task * max(step.tasks)} GPUs; gpus_per_node is {gpus_per_node}."
            )
        if auto_set_gpu:
            _show_own_gpus(environ, step, self._gpus_per_task)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """``gpus_per_task``, the same for every task."""
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}


def _show_own_gpus(environ: Environment, step: SlurmStep, gpus_per_task: int) -> None:
    if not isinstance(environ, MutableMapping):
        raise WrongTypeError(f"auto_set_gpu writes to environ; {type(environ).__name__} is read-only. Pass a dict.")
    _, local = step.places[step.rank]
    first, stop = local * gpus_per_task, (local + 1) * gpus_per_task
    # Slurm may have shown the step only some of the node's GPUs; the share is then one of these.
    shown = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    mine = shown[first:stop] if len(shown) >= stop else [str(gpu) for gpu in range(first, stop)]
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


class KubernetesClusterResolver(_LauncherResolver):
    """A pod's place in its job, from its environment alone: no permission to ask the API server is needed.

    Three kinds of jobs are known. With ``subdomain``, a Job with ``completionMode: Indexed`` behind the headless
    service of that name: pods are ``JOB-INDEX.SUBDOMAIN`` and take the roles of ``jobs`` in order of their index. Else
    a pod of the training operator: of a TFJob, whose ``TF_CONFIG`` has it all, or of a PyTorchJob or TrainJob
    (``PET_…``, ``MASTER_ADDR``), whose pods take the roles of ``jobs`` in order of their rank. Read once.

    Args:
        jobs: Role → number of pods. Needed for indexed jobs; for PyTorchJobs None makes every pod a worker.
        subdomain: The headless service of an indexed Job.
        job_name: The name of an indexed Job; None takes it from ``HOSTNAME``.
        port: Where the pods of an indexed Job listen.
        rpc_layer: The scheme before addresses.
        environ: Read in place of `os.environ`.

    Raises:
        ClusterConfigError: nothing describes a job, variables are missing or malformed (the message lists all of
            them), or the roles do not take exactly the pods there are.
    """

    task_type: str
    task_id: int
    environment: str | None = "kubernetes"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        *,
        subdomain: str | None = None,
        job_name: str | None = None,
        port: int = 2222,
        rpc_layer: str | None = None,
        environ: Environment | None = None,
    ) -> None:
        require_number("port", port, 1)
        environ = os.environ if environ is None else environ
        if subdomain is not None:
            task = read_indexed_job(environ, jobs, job_name, subdomain, port)
        else:
            task = read_training_operator(environ, jobs)
        self._cluster, self.task_type, self.task_id = task.cluster, task.task_type, task.task_id
        self.rpc_layer = rpc_layer
