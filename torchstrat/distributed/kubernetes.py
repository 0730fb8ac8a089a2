"""What Kubernetes tells a pod about its job, read from its environment. No API server is asked."""

from __future__ import annotations

from collections.abc import Mapping

from torchstrat.core.errors import ClusterConfigError
from torchstrat.distributed.cluster import Environment, read_tf_config
from torchstrat.distributed.cluster_environments import AssignedTask, Members, Variables, assign_roles, role_counts


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
    return Members(tuple(f"{host}:{port}" for host in hosts or ()), rank)


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
