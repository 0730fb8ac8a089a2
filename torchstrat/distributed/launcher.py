"""Which job this process belongs to, as its launcher's environment says: the one place where strategies ask.

Known are torchrun, ``TF_CONFIG``, a step of Slurm (``srun``), the pods of Kubeflow's training operator, and MPI
(``mpirun``). Who is started by torchrun within a pod or a step of Slurm belongs to torchrun's job. An allocation of
Slurm is no job of ours: ``SLURM_NTASKS`` is there in a batch script that runs once, too.

Strategies that span processes call `join_job`, and strategies of one process `require_one_process`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torchstrat.core.errors import ClusterConfigError, UnsupportedError
from torchstrat.distributed.cluster import (
    PARAMETER_SERVER,
    Environment,
    ProcessPlan,
    host_and_port,
    process_plan_from_torchrun,
    read_tf_config,
)
from torchstrat.distributed.cluster_resolver import (
    ClusterResolver,
    KubernetesClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
)
from torchstrat.distributed.launcher_resolvers import Variables

INDEPENDENT_VARIABLE = "TORCHSTRAT_INDEPENDENT"

# Ports below those that Linux hands out by itself. Two steps on one host that draw the same one get an error that says
# that it is in use; `SlurmClusterResolver(port_base=…)` chooses another.
_FIRST_PORT, _PORTS = 12_000, 18_000


class LaunchedJob(NamedTuple):
    """A job of processes that train together, and this process's place in it."""

    launcher: str
    """As an error message calls it."""
    plan: ProcessPlan
    resolver: ClusterResolver | None
    """What describes the job; None for MPI, which knows ranks and no addresses."""


def launched_job(environ: Environment | None = None) -> LaunchedJob | None:
    """The job that a launcher started and this process is of; None where nothing in the environment describes one.

    A cluster with parameter servers is none: its tasks do not train together, and `ParameterServerStrategy` is told
    by its resolver.

    Args:
        environ: Read in place of `os.environ`.

    Raises:
        ClusterConfigError: variables of the launcher are missing or contradict each other; the message lists them.
    """
    environ = os.environ if environ is None else environ
    for find in (_training_operator, _torchrun, _tf_config, _slurm, _mpi):
        job = find(environ)
        if job is not None:
            return job
    return None


def join_job(independent: bool) -> LaunchedJob | None:
    """The job that a strategy of several processes takes part in; None where this process is alone, or says so."""
    return None if _is_independent(independent) else launched_job()


def launched_plan() -> ProcessPlan | None:
    """This process's place in the job that strategies without arguments join, or None."""
    job = join_job(independent=False)
    return job.plan if job is not None else None


def require_one_process(strategy: str, independent: bool, instead: str) -> None:
    """Raise unless this process is alone, or says that it is meant to be.

    Args:
        strategy: The class that is being made.
        independent: Its argument of that name.
        instead: The strategies that span processes, for the message.

    Raises:
        UnsupportedError: a launcher started several processes, each of which would train by itself on all data.
    """
    job = join_job(independent)
    if job is None or job.plan.size == 1:
        return
    raise UnsupportedError(
        f"{strategy} is for one process and {job.launcher} started {job.plan.size}, of which this is {job.plan.name}: "
        f"each would train by itself on all of the data. Use {instead}, or start the program once with plain python. "
        f"If the processes are meant to be jobs of their own, pass independent=True or set {INDEPENDENT_VARIABLE}=1."
    )


def _is_independent(argument: bool) -> bool:
    return argument or os.environ.get(INDEPENDENT_VARIABLE, "") not in ("", "0")


def _torchrun(environ: Environment) -> LaunchedJob | None:
    plan = process_plan_from_torchrun(environ)
    return None if plan is None else LaunchedJob("torchrun", plan, TorchrunClusterResolver(environ=environ))


def _tf_config(environ: Environment) -> LaunchedJob | None:
    cluster = read_tf_config(environ).cluster
    if not cluster or PARAMETER_SERVER in cluster.jobs:
        return None
    return _described("TF_CONFIG", lambda: TFConfigClusterResolver(environ=environ))


def _slurm(environ: Environment) -> LaunchedJob | None:
    if not environ.get("SLURM_STEP_NUM_TASKS") or not environ.get("SLURM_PROCID"):
        return None
    numbers = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(number) if number.isdecimal() else 0 for number in numbers)
    port = _FIRST_PORT + (job * 7 + step * 131) % _PORTS
    found = _described("Slurm (srun)", lambda: SlurmClusterResolver(port_base=port, environ=environ))
    return found and found._replace(plan=replace(found.plan, started_at_once=True))


def _training_operator(environ: Environment) -> LaunchedJob | None:
    """A pod of a PyTorchJob or TrainJob, unless torchrun runs in it, whose ranks count for more."""
    if "LOCAL_RANK" in environ or not environ.get("PET_NNODES"):
        return None
    return _described("Kubernetes (the training operator)", lambda: KubernetesClusterResolver(environ=environ))


def _described(launcher: str, make: Callable[[], ClusterResolver]) -> LaunchedJob | None:
    resolver = make()
    plan = resolver.process_plan()
    return None if plan is None else LaunchedJob(launcher, plan, resolver)


_MPI = (
    # ranks and numbers of processes, of the whole job and of this host
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _mpi(environ: Environment) -> LaunchedJob | None:
    names = next((names for names in _MPI if environ.get(names[1])), None)
    if names is None:
        return None
    variables = Variables(environ)
    size = variables.number(names[1], least=1)
    rank = variables.number(names[0], least=0, below=size)
    local_size = variables.number(names[3], least=1, below=size + 1) if size > 1 else 1
    local_rank = variables.number(names[2], least=0, below=local_size) if size > 1 else 0
    variables.check(f"{names[1]}={environ[names[1]]} says that mpirun started this process", "Start it with mpirun.")
    if size == 1:
        return None
    host, port = (environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port:
        raise ClusterConfigError(
            f"mpirun started {size} processes, and nothing says where they meet: pass MASTER_ADDR (rank 0's host) and "
            "MASTER_PORT (a free port there) to all of them (mpirun -x MASTER_ADDR=… -x MASTER_PORT=…), start them "
            f"with torchrun, or set {INDEPENDENT_VARIABLE}=1 if each is a job of its own."
        )
    variables.number("MASTER_PORT", least=1, below=65536)
    variables.check(f"MASTER_ADDR={host!r} says where the processes of mpirun meet", "Name a free port there.")
    where = f"tcp://{host_and_port(host, port)}"
    plan = ProcessPlan(rank, size, local_rank, local_size, where, local_size < size, f"rank {rank} of {size}", True)
    return LaunchedJob("mpirun", plan, None)
