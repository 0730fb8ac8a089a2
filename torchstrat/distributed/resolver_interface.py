"""The interface of the cluster resolvers; public as `ts.cluster_resolver.ClusterResolver`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torchstrat.core.devices import local_devices
from torchstrat.core.errors import ClusterConfigError
from torchstrat.distributed.cluster import ProcessPlan, process_plan_from_cluster
from torchstrat.distributed.cluster_spec import ClusterSpec


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
