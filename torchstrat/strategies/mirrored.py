"""A copy of every variable on each device of this machine, kept equal by combining gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, final

from torchstrat.core.errors import UnsupportedError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.distributed.launcher import join_job
from torchstrat.replicas.update_policies import ReplicatedUpdate
from torchstrat.strategies.placement import LogicalLayout, check_collectives, place_replicas
from torchstrat.strategies.strategy import DEFAULT_TIMEOUT, Strategy


@final
@short_tracebacks
class MirroredStrategy(Strategy):
    """Several replicas on one machine: in this process, or one in each process that a launcher started.

    Launchers are torchrun, ``srun``, ``mpirun``, Kubeflow's training operator, and what sets ``TF_CONFIG``.

    Args:
        devices: in one process, the replicas' devices; ``["cpu:0", "cpu:1"]`` are two virtual replicas of the CPU.
            None: every GPU of the machine, or one CPU replica. Under a launcher at most one: this process's device.
        cross_device_ops: TensorFlow's argument; only None, since torchstrat chooses how devices exchange tensors.
        gradient_reduce_op: "mean" (default; weighted by examples) or "sum".
        timeout: how long to wait for other processes before an error names them.
        collectives: how processes talk. "auto": in shared memory if all of them are on this host and compute on CPUs,
            else by gloo or NCCL; "process_group": never in shared memory; "shared_memory": raise where it cannot be
            had. `extended.describe` says which one is in use, and why.
        allow_several_hosts: `MirroredStrategy` refuses processes on several machines unless told otherwise; there
            `MultiWorkerMirroredStrategy` says what is meant.
        logical_devices_per_replica: the processes that compute one replica together: torchrun then starts replicas x so
            many. `split_to_logical_devices` cuts tensors of a step over them, see `torchstrat.sharding.dtensor`.
        sharding_rules: parameters to be cut over logical devices, by name, for models that are not to be edited:
            ``{"*.linear1.weight": ("d0", None)}``. See `torchstrat.sharding.annotations`.
        logical_mesh_shape: how the rules see a replica's logical devices: the sizes of ``d0``, ``d1``, …; None: as one
            axis ``d0``.
        independent: do not join the processes that a launcher started: each is a job of its own.
            ``TORCHSTRAT_INDEPENDENT=1`` in the environment says the same for every strategy.

    Raises `DeviceError` for devices that are repeated, unparsable or absent, `InvalidArgumentError` where the processes
    do not make whole replicas.
    """

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        cross_device_ops: None = None,
        *,
        gradient_reduce_op: ReduceOp | str = "mean",
        timeout: timedelta = DEFAULT_TIMEOUT,
        collectives: str = "auto",
        allow_several_hosts: bool = False,
        logical_devices_per_replica: int = 1,
        sharding_rules: Mapping[str, Sequence[object]] | None = None,
        logical_mesh_shape: Sequence[int] | None = None,
        independent: bool = False,
    ) -> None:
        if cross_device_ops is not None:
            raise UnsupportedError(
                f"MirroredStrategy was given cross_device_ops={cross_device_ops!r:.80}, and takes None: torchstrat "
                "chooses how devices exchange tensors. Leave it out; collectives='process_group' keeps processes off "
                "shared memory."
            )
        op = ReduceOp.parse(gradient_reduce_op)
        check_collectives(collectives)
        logical = LogicalLayout.checked(logical_devices_per_replica, sharding_rules, logical_mesh_shape)
        job = join_job(independent)
        plan = job.plan if job is not None else None
        logical.require_processes(plan)
        if job is not None and job.plan.size > 1 and job.plan.spans_hosts and not allow_several_hosts:
            raise UnsupportedError(
                f"MirroredStrategy is for one machine and {job.launcher} started {job.plan.size} processes, "
                f"{job.plan.local_size} of them on this one. Use MultiWorkerMirroredStrategy (otherwise the same), or "
                "pass allow_several_hosts=True, or independent=True if each process is a job of its own."
            )
        place_replicas(self, ReplicatedUpdate(), plan, devices, op, timeout, collectives, logical=logical)
