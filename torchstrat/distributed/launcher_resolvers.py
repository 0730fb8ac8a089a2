"""The resolvers of jobs that Slurm or Kubernetes started; public in ``ts.cluster_resolver``."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from torchstrat.core.devices import local_devices
from torchstrat.core.errors import ClusterConfigError, WrongTypeError
from torchstrat.distributed.cluster import Environment
from torchstrat.distributed.cluster_environments import assign_roles
from torchstrat.distributed.cluster_spec import ClusterSpec
from torchstrat.distributed.kubernetes import read_indexed_job, read_training_operator
from torchstrat.distributed.resolver_interface import ClusterResolver, address_of
from torchstrat.distributed.slurm import SlurmStep, read_slurm


class SlurmClusterResolver(ClusterResolver):
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

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task; of this one where the arguments do not say another.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        return address_of(self, task_type, task_id, rpc_layer)

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


class KubernetesClusterResolver(ClusterResolver):
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
        environ = os.environ if environ is None else environ
        if subdomain is not None:
            task = read_indexed_job(environ, jobs, job_name, subdomain, port)
        else:
            task = read_training_operator(environ, jobs)
        self._cluster, self.task_type, self.task_id = task.cluster, task.task_type, task.task_id
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task; of this one where the arguments do not say another.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        return address_of(self, task_type, task_id, rpc_layer)
