"""Mirrored variables over the processes of a cluster."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch

from torchstrat.core.devices import resolve_compute_devices
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.distributed.cluster_resolver import ClusterResolver, TFConfigClusterResolver
from torchstrat.distributed.launcher import join_job
from torchstrat.replicas.update_policies import ReplicatedUpdate
from torchstrat.strategies.placement import LogicalLayout, check_collectives, place_replicas
from torchstrat.strategies.strategy import DEFAULT_TIMEOUT, Strategy


class CommunicationImplementation(enum.Enum):
    """By what processes talk. ``CollectiveCommunication`` is its older name."""

    AUTO = "AUTO"
    """In shared memory on one host, else by gloo or NCCL: ``collectives="auto"``."""
    RING = "RING"
    """Never in shared memory: ``collectives="process_group"``."""
    NCCL = "NCCL"
    """As RING, and an error without a GPU."""


@dataclass(frozen=True)
class CommunicationOptions:
    """``MultiWorkerMirroredStrategy(communication_options=…)``. ``CollectiveHints`` is its older name.

    Args:
        bytes_per_pack: accepted and checked; how many gradients travel together is decided here by itself.
        timeout_seconds: how long to wait for other processes; None: as long as the strategy's ``timeout`` says.
        implementation: by what they talk.

    Raises `InvalidArgumentError` for negative numbers, `WrongTypeError` for an implementation that is no member.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise InvalidArgumentError(f"bytes_per_pack={self.bytes_per_pack} must not be negative; leave it out.")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise InvalidArgumentError(
                f"timeout_seconds={self.timeout_seconds} must be more than 0; give None for the strategy's timeout."
            )
        if not isinstance(self.implementation, CommunicationImplementation):
            raise WrongTypeError(
                f"implementation must be a CommunicationImplementation; got {self.implementation!r:.80}. Write "
                "ts.experimental.CommunicationImplementation.AUTO."
            )


def in_own_words(options: CommunicationOptions | None, timeout: timedelta, collectives: str) -> tuple[timedelta, str]:
    """``timeout`` and ``collectives``, unless the options say something about them."""
    if options is None:
        return timeout, collectives
    if not isinstance(options, CommunicationOptions):
        raise WrongTypeError(
            f"communication_options must be a ts.experimental.CommunicationOptions; got {type(options).__name__} "
            f"{options!r:.80}. Write CommunicationOptions(timeout_seconds=60), or give collectives and timeout instead."
        )
    if options.implementation is CommunicationImplementation.NCCL and not torch.cuda.is_available():
        raise UnsupportedError(
            "CommunicationImplementation.NCCL needs a GPU, and this machine has none that PyTorch sees; use AUTO."
        )
    if options.timeout_seconds is not None:
        timeout = timedelta(seconds=options.timeout_seconds)
    if options.implementation is not CommunicationImplementation.AUTO:
        collectives = "process_group"
    return timeout, collectives


@final
@short_tracebacks
class MultiWorkerMirroredStrategy(Strategy):
    """One replica in each process of a cluster, on one machine or many.

    Args:
        cluster_resolver: who takes part. None: the processes that the launcher started (torchrun, ``TF_CONFIG``,
            ``srun``, ``mpirun``, Kubeflow's training operator); a cluster of one where there is none.
        communication_options: TensorFlow's `ts.experimental.CommunicationOptions`: how long to wait and how to talk,
            before ``timeout`` and ``collectives``.
        gradient_reduce_op: "mean" (default; weighted by examples) or "sum".
        timeout: how long to wait for other processes before an error names them. At the start the default is two
            minutes where ``srun`` or ``mpirun`` started them, all at once.
        collectives: how processes talk. "auto": in shared memory if all of them are on this host and compute on CPUs,
            else by gloo or NCCL; "process_group": never in shared memory; "shared_memory": raise where it cannot be
            had. `extended.describe` says which one is in use, and why.
        logical_devices_per_replica: the processes that compute one replica together: torchrun then starts replicas x so
            many. `split_to_logical_devices` cuts tensors of a step over them, see `torchstrat.sharding.dtensor`.
        sharding_rules: parameters to be cut over logical devices, by name, for models that are not to be edited:
            ``{"*.linear1.weight": ("d0", None)}``. See `torchstrat.sharding.annotations`.
        logical_mesh_shape: how the rules see a replica's logical devices: the sizes of ``d0``, ``d1``, …; None: as one
            axis ``d0``.
        independent: do not join the processes that a launcher started: each is a job of its own.
            ``TORCHSTRAT_INDEPENDENT=1`` in the environment says the same for every strategy.

    Raises `ClusterConfigError` for a malformed cluster description, before any communication.
    """

    def __init__(
        self,
        cluster_resolver: object = None,
        communication_options: CommunicationOptions | None = None,
        *,
        gradient_reduce_op: ReduceOp | str = "mean",
        timeout: timedelta = DEFAULT_TIMEOUT,
        collectives: str = "auto",
        logical_devices_per_replica: int = 1,
        sharding_rules: Mapping[str, Sequence[object]] | None = None,
        logical_mesh_shape: Sequence[int] | None = None,
        independent: bool = False,
    ) -> None:
        timeout, collectives = in_own_words(communication_options, timeout, collectives)
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise WrongTypeError(
                "MultiWorkerMirroredStrategy needs a cluster resolver, such as "
                "ts.cluster_resolver.TFConfigClusterResolver(), or None; got "
                f"{type(cluster_resolver).__name__} {cluster_resolver!r:.80}. How processes talk is "
                "communication_options, or collectives."
            )
        op = ReduceOp.parse(gradient_reduce_op)
        check_collectives(collectives)
        logical = LogicalLayout.checked(logical_devices_per_replica, sharding_rules, logical_mesh_shape)
        if cluster_resolver is not None:
            plan = cluster_resolver.process_plan()
        else:
            job = join_job(independent)
            plan, cluster_resolver = (job.plan, job.resolver) if job is not None else (None, TFConfigClusterResolver())
        logical.require_processes(plan)
        own = resolve_compute_devices(None)[:1] if plan is None or plan.size == 1 else None
        place_replicas(
            self,
            ReplicatedUpdate(),
            plan,
            own,
            op,
            timeout,
            collectives,
            logical=logical,
            resolver=cluster_resolver,
        )
