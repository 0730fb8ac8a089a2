"""Which cluster a run with ``strategy=parameter_server`` uses, and which part of it this process is.

A cluster that the environment describes (``TF_CONFIG``; ``torchstrat launch`` sets it too) is used as it is: the
process that is its chief, or no task of it, coordinates, and the same command in a worker's or a server's place serves.
Without one, the run starts a cluster on this machine and ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchstrat.app.build import create, ignore_replicas
from torchstrat.app.config import ClusterConfig, ExperimentConfig, require, require_positive
from torchstrat.distributed.cluster import PARAMETER_SERVER, WORKER, ClusterSpec, ProcessPlan
from torchstrat.distributed.cluster_resolver import ClusterResolver, TFConfigClusterResolver


@dataclass(frozen=True)
class ParameterServers:
    """Asynchronous training: every worker takes its own steps, on variables that the servers hold.

    ``workers`` and ``servers`` are for a run that finds no cluster in the environment and starts one on this machine;
    a cluster that is described there (``torchstrat launch``, ``TF_CONFIG``) has as many of each as it says.
    """

    config: ExperimentConfig
    plan: ProcessPlan | None
    workers: int = 2
    servers: int = 2
    max_shards: int | None = None
    """A variable is cut into at most this many pieces by rows. None: as many as there are servers."""
    min_shard_bytes: int = 256 << 10
    """No piece needs to be smaller than this: what is smaller as a whole stays on one server."""
    rows_only: bool = True
    """Rows of an embedding table that no gradient touches stay as they are, whatever the optimizer does to them on one
    device by momentum, running averages or weight decay. False: the numbers of one device, stepping whole tables."""
    keep_pages: bool = True
    """The processes of a cluster that the run starts keep the pages of memory that they have freed: steps are faster,
    their resident size stays at its peak. In a cluster that is there already, each task's ``TORCHSTRAT_KEEP_PAGES``
    decides."""
    on_server_loss: str = "auto"
    """When a server dies: ``restore`` takes all servers back to the newest checkpoint, and the run goes on from there;
    ``raise`` ends it. ``auto`` restores in a run that keeps checkpoints."""
    replicas: int | None = None

    def __post_init__(self) -> None:
        for key in ("workers", "servers", "max_shards", "min_shard_bytes"):
            require_positive(f"strategy.{key}", getattr(self, key))
        ignore_replicas(self.config, self.plan, self.replicas, "workers take steps of their own: set strategy.workers")

    def strategy(self, resolver: ClusterResolver, servers: int) -> Any:
        """For the cluster that ``resolver`` describes, connected to its ``servers`` servers."""
        from torchstrat.parameter_server.partitioners import MinSizePartitioner

        return create(
            "parameter_server",
            self.config,
            cluster_resolver=resolver,
            variable_partitioner=MinSizePartitioner(self.min_shard_bytes, self.max_shards or servers),
            rows_only=self.rows_only,
            on_server_loss="restore" if self.config.restores_servers else "raise",
        )


class ClusterSize(NamedTuple):
    """Processes beside the coordinator."""

    workers: int
    servers: int

    @classmethod
    def of(cls, spec: ClusterSpec) -> ClusterSize:
        return cls(*(spec.num_tasks(job) if job in spec.jobs else 0 for job in (WORKER, PARAMETER_SERVER)))

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' * (self.workers != 1)}, {self.servers} server{'s' * (self.servers != 1)}"


def given_resolver(cluster: ClusterConfig, plan: ProcessPlan | None) -> ClusterResolver | None:
    """The cluster that the environment describes; None where it describes none, and the run is to start one.

    Raises:
        InvalidArgumentError: the settings do not fit how this process was started.
        ClusterConfigError: ``TF_CONFIG`` is malformed.
    """
    given, processes = TFConfigClusterResolver(), 1 if plan is None else plan.size
    is_given = bool(given.cluster_spec())
    require(
        processes == 1,
        f"strategy=parameter_server has one coordinator, and torchrun started {processes} equal processes; run "
        "torchstrat launch --ps 2 --workers 4 scripts/train.py …, or plain python scripts/train.py ….",
    )
    require(
        cluster.name != ("local" if is_given else "torchrun"),
        f"cluster={cluster.name}, but strategy=parameter_server uses the cluster that TF_CONFIG describes, or starts "
        f"one, and TF_CONFIG describes {'one' if is_given else 'none'}; use cluster=auto.",
    )
    return given if is_given else None


@contextmanager
def cluster_of(given: ClusterResolver | None, size: ClusterSize, *, keep_pages: bool) -> Iterator[ClusterResolver]:
    """The one given, or one of processes on this machine, as long as the context lasts. Says so on stderr."""
    if given is not None:
        yield given
        return
    from torchstrat.launch import Cluster  # nothing that synchronous runs need

    print(f"no cluster in the environment: starting {size} on this machine", file=sys.stderr, flush=True)
    with Cluster(workers=size.workers, ps=size.servers, keep_pages=keep_pages) as cluster:
        yield cluster.resolver


def serve(resolver: ClusterResolver) -> bool:
    """Be the worker or the server that ``resolver`` says this process is, until the coordinator has finished; False at
    once if it is the coordinator."""
    if resolver.task_type not in (WORKER, PARAMETER_SERVER):
        return False
    from torchstrat.server import Server

    Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, exit_when_finished=True).join()
    return True
