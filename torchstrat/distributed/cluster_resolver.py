"""How a process finds out which job it belongs to and which task of it it is; public as ``ts.cluster_resolver``.

A resolver describes; it contacts nobody. `SimpleClusterResolver` says what it is given, `TFConfigClusterResolver` what
``TF_CONFIG`` holds at that moment, `TorchrunClusterResolver`, `SlurmClusterResolver` and `KubernetesClusterResolver`
what their launcher had set when they were built; `TPUClusterResolver` which hosts a TPU has; `UnionResolver` puts
several together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchstrat.core.devices import local_devices
from torchstrat.core.errors import ClusterConfigError, ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.distributed.cluster import (
    WORKER,
    ClusterResolver,
    ClusterSpec,
    Environment,
    ProcessPlan,
    TFConfig,
    address_of,
    id_in_cluster,
    index_or_none,
    is_chief,
    process_plan_from_torchrun,
    read_tf_config,
    text_or_none,
    torchrun_address,
    with_layer,
    worker_count,
)
from torchstrat.distributed.launcher_resolvers import KubernetesClusterResolver, SlurmClusterResolver
from torchstrat.distributed.tpu_topology import Topology

LOCAL = "local"
VARIABLES = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME")
SCHEME = "grpc"


class TPUClusterResolver(ClusterResolver):
    """Names the hosts of a TPU, and this process as task 0 of them. It contacts nobody, and looks no names up.

    Args:
        tpu: ``"local"``: the TPU of this machine, or virtual devices; the cluster is then empty. Else the hosts'
            addresses, ``"grpc://host:port"``, several separated by commas or in a list; the ``grpc://`` may be left
            out. None: what ``KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`` or else ``TPU_NAME`` says. ``""``: the same, and
            ``"local"`` where neither is set.
        job_name: The name of the hosts' job.
        coordinator_name, coordinator_address: A further job of one task; both or neither.
        environ: Read in place of `os.environ`, once.

    Raises:
        WrongTypeError: ``tpu`` is neither a string nor a list of strings.
        ClusterConfigError: nothing says where the TPU is; an address is not ``host:port``; a coordinator has only one
            of name and address, or the name of the hosts' job.
    """

    task_type: str
    task_id: int

    def __init__(
        self,
        tpu: str | Sequence[str] | None = None,
        *,
        job_name: str = WORKER,
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        environ: Environment | None = None,
    ) -> None:
        self._tpu = _named(tpu, os.environ if environ is None else environ)
        self._cluster = ClusterSpec({})
        if self._tpu != LOCAL:
            jobs = {job_name: [_address(host) for host in self._tpu.split(",")]}
            self._cluster = ClusterSpec(jobs | _coordinator(job_name, coordinator_name, coordinator_address))
        self._topology: Topology | None = None
        self.task_type, self.task_id = job_name, 0
        self.rpc_layer = SCHEME
        self.environment = ""

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """``grpc://host:port`` of a task, by default of the first host; "" for the TPU of this machine.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        return address_of(self, task_type, task_id, rpc_layer) if self._tpu != LOCAL else ""

    def get_master(self) -> str:
        """TensorFlow's name for `master` without arguments."""
        return self.master()

    def get_job_name(self) -> str:
        """The name of the hosts' job."""
        return self.task_type

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Remember what initialising the TPU found; `num_accelerators` answers from it.

        Raises:
            InvalidArgumentError: these are not the bytes of a topology.
        """
        self._topology = Topology(serialized=serialized_tpu_topology)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """How many TPU cores each host drives.

        Raises:
            ContextError: the TPU was not initialised with this resolver, so nobody has asked it.
        """
        if self._topology is None:
            raise ContextError(
                f"how many cores the TPU {self._tpu!r} has is known once it is initialised; call "
                "ts.tpu.initialize_tpu_system(resolver) first."
            )
        return {"TPU": self._topology.num_tpus_per_task}


def _named(tpu: str | Sequence[str] | None, environ: Environment) -> str:
    if isinstance(tpu, list | tuple) and all(isinstance(host, str) for host in tpu):
        tpu = ",".join(tpu)
    if tpu is not None and not isinstance(tpu, str):
        raise WrongTypeError(
            f"tpu must be 'local', 'grpc://host:port' or a list of addresses; got {type(tpu).__name__} {tpu!r:.100}."
        )
    found = tpu or next((environ[name] for name in VARIABLES if environ.get(name)), LOCAL if tpu == "" else None)
    if found is None:
        raise ClusterConfigError(
            f"nothing says where the TPU is: tpu was not given, and neither {' nor '.join(VARIABLES)} is set. "
            "Write TPUClusterResolver(tpu='local') for the devices of this machine, or give 'grpc://host:port'."
        )
    return found


def _address(host: str) -> str:
    address = re.fullmatch(rf"(?:{SCHEME}://)?([^/:\s]+|\[[^\]\s]+\]):(\d+)", host.strip())
    if address is None:
        raise ClusterConfigError(
            f"the TPU host {host!r} is not an address 'grpc://host:port'. Names are not looked up; give the addresses "
            "of the hosts, or 'local' on the TPU's own machine."
        )
    return f"{address[1]}:{address[2]}"


def _coordinator(job_name: str, name: str | None, address: str | None) -> dict[str, list[str]]:
    if (name is None) != (address is None) or (name is not None and name == job_name):
        raise ClusterConfigError(
            f"a coordinator needs a name other than {job_name!r} and an address; got coordinator_name={name!r} and "
            f"coordinator_address={address!r}."
        )
    return {} if name is None or address is None else {name: [address]}


__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
    "id_in_cluster",
    "is_chief",
    "worker_count",
]


class SimpleClusterResolver(ClusterResolver):
    """Says what it was given.

    Args:
        cluster_spec: The cluster; a `ClusterSpec`, not a dict.
        master: What `master` answers when it is not asked for a task.
        task_type, task_id: This process's task.
        environment: A free text.
        num_accelerators: Kind → number, the same for every task.
        rpc_layer: The scheme before addresses, such as ``grpc``.

    Raises:
        WrongTypeError: ``cluster_spec`` is no `ClusterSpec`, or ``master`` is no string.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise WrongTypeError(
                f"cluster_spec must be a ClusterSpec; got {type(cluster_spec).__name__} {cluster_spec!r}. "
                "Write ClusterSpec({'worker': ['host0:2222', …]})."
            )
        if not isinstance(master, str):
            raise WrongTypeError(
                f"master must be a string such as 'host:2222'; got {type(master).__name__} {master!r}."
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._num_accelerators = dict(num_accelerators or {})
        self.task_type = task_type
        self.task_id = task_id
        self.environment = environment
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the task asked for; without both its type and its index, the master that was given.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        else:
            address = self._master
        return with_layer(address, rpc_layer or self.rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        return dict(self._num_accelerators)


class TFConfigClusterResolver(ClusterResolver):
    """Reads ``TF_CONFIG``, and checks it, when it is built and again at each access.

    What the arguments or the setters say goes before what the variable says, and is checked by the same rules.

    Args:
        task_type, task_id, rpc_layer: In place of the variable's. An index may be in words, as the environment has it.
        environment: A free text.
        environ: Read in place of `os.environ`.

    Raises:
        ClusterConfigError: the variable or an argument is malformed; the message has the key and its value.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | str | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Environment | None = None,
    ) -> None:
        self._environ = environ
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer
        self.environment = environment
        self._read()

    def _read(self) -> TFConfig:
        return read_tf_config(self._environ)

    @property
    def task_type(self) -> str | None:
        from_variable = self._read().task_type
        return from_variable if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = text_or_none("task_type", task_type)

    @property
    def task_id(self) -> int | None:
        from_variable = self._read().task_id
        return from_variable if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._task_id = index_or_none("task_id", task_id)

    @property
    def rpc_layer(self) -> str | None:
        from_variable = self._read().rpc_layer
        return from_variable if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = text_or_none("rpc_layer", rpc_layer)

    def cluster_spec(self) -> ClusterSpec:
        return self._read().cluster

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The variable's ``session_master``; or "" for a cluster of at most one task; or the address of a task.

        The task is this process's own where the arguments do not say another.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        config = self._read()
        if config.session_master is not None:
            return config.session_master
        if sum(config.cluster.num_tasks(job) for job in config.cluster.jobs) <= 1:
            return ""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            raise ClusterConfigError(
                f"master() needs a task: TF_CONFIG has task.type={job!r} and task.index={index!r}; give both, there or "
                "as arguments."
            )
        return with_layer(config.cluster.task_address(job, index), rpc_layer or self.rpc_layer)


class TorchrunClusterResolver(ClusterResolver):
    """What ``torchrun`` set: every rank is a worker, ``task_id`` is its global rank. Alone, the cluster is empty.

    Torchrun gives no rank an address of its own: all tasks are listed under the address where they meet.

    Args:
        environ: Read in place of `os.environ`, once.

    Raises:
        ClusterConfigError: variables are missing or malformed.
    """

    def __init__(self, *, environ: Environment | None = None) -> None:
        self._plan = process_plan_from_torchrun(environ)
        self._address = torchrun_address(environ) if self._plan else ""
        self.task_type = WORKER if self._plan else None
        self.task_id = self._plan.rank if self._plan else None

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec({WORKER: [self._address] * self._plan.size} if self._plan else {})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address where the ranks meet, whichever task is asked for; "" when this process is alone."""
        return with_layer(self._address, rpc_layer or self.rpc_layer) if self._address else ""

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """One GPU for each rank of a machine that has them: torchrun starts one process per device."""
        return {"GPU": 1} if local_devices() else {}

    def process_plan(self) -> ProcessPlan | None:
        return self._plan


class TaskOverlapError(ClusterConfigError, KeyError):
    """Two parts of a cluster have different addresses for one task."""

    def __str__(self) -> str:  # a KeyError shows the repr of its message
        return str(self.args[0])


def _own_or_first(name: str) -> Any:
    def read(self: UnionResolver) -> Any:
        own = self._own.get(name)
        return getattr(self._resolvers[0], name) if own is None else own

    def write(self: UnionResolver, value: Any) -> None:
        self._own[name] = value

    return property(read, write)


class UnionResolver(ClusterResolver):
    """One cluster of the clusters of several resolvers; the first one says who this process is.

    Where all of them list the tasks of a job from 0 on, the lists are joined in order. Where one
    numbers them otherwise, tasks keep their numbers.

    Args:
        resolvers: At least one. They are asked again at each access.
        task_type, task_id, rpc_layer: In place of the first resolver's; can be set later, too.

    Raises:
        InvalidArgumentError: no resolver, or an unknown keyword.
        WrongTypeError: an argument is no resolver.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise InvalidArgumentError(
                f"UnionResolver got {sorted(unknown)}; its keywords are task_type, task_id and rpc_layer."
            )
        if not resolvers:
            raise InvalidArgumentError("UnionResolver needs at least one resolver; got none.")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise WrongTypeError(
                    f"UnionResolver needs ClusterResolvers; got {type(resolver).__name__} {resolver!r:.80}."
                )
        self._resolvers = resolvers
        self._own: dict[str, Any] = {"task_type": task_type, "task_id": task_id, "rpc_layer": rpc_layer}

    task_type = _own_or_first("task_type")
    task_id = _own_or_first("task_id")
    rpc_layer = _own_or_first("rpc_layer")
    environment = _own_or_first("environment")

    def cluster_spec(self) -> ClusterSpec:
        """All tasks of all resolvers.

        Raises:
            TaskOverlapError: two of them have a task of one job and number (a KeyError, and a ValueError).
        """
        parts = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for part in parts for job in part)
        return ClusterSpec({job: _merged(job, [part[job] for part in parts if job in part]) for job in jobs})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the task asked for; without both its type and its number, the first resolver's master.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer or self._own["rpc_layer"])
        return with_layer(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """What the first resolver says."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


def _merged(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part]  # type: ignore[misc]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise TaskOverlapError(
                f"job {job!r} has tasks {twice} in more than one of the resolvers of a UnionResolver; number each once."
            )
        merged |= tasks
    return merged
