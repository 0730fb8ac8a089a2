"""One copy of every variable and of the optimizer's state, computed on by several devices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.distributed.launcher import join_job
from torchstrat.replicas.update_policies import ShardedUpdate
from torchstrat.strategies.placement import check_collectives, place_replicas
from torchstrat.strategies.strategy import DEFAULT_TIMEOUT, Strategy

_GRADIENTS = ("everywhere", "owner")


@final
@short_tracebacks
class CentralStorageStrategy(Strategy):
    """Variables once, on ``parameter_device``; a replica on each compute device.

    Under torchrun on one host, parameters and optimizer state lie in memory that the processes share: each steps a part
    of them, and sees all. ``state_dict()`` of model and optimizer are whole in every process. Views of a parameter's
    elements (``.data``, ``.detach()``) that were made before its scope closed do not see later steps.

    A process on a GPU computes with parameters of its own there. Its gradients go to the host, where all ranks step,
    and the new values come back; the optimizer's state stays in host memory. This path is tested with other host memory
    in the device's place, and not yet on a GPU.

    Where they share no memory (several hosts), and for optimizers whose parts cannot be stepped alone (LBFGS, and
    classes that are not torch's), rank 0 steps and alone has the optimizer's state; the others get the new values.

    Args:
        compute_devices: in one process, the replicas' devices. None: every GPU, or one CPU replica. Under torchrun at
            most one: this process's device.
        parameter_device: where the variables live. None: the only compute device, else ``"cpu:0"``. Under torchrun a
            GPU that is given here keeps steps there: rank 0 makes them, and the others get the new values.
        gradient_reduce_op: "mean" (default; weighted by examples) or "sum".
        timeout: how long to wait for other processes before an error names them.
        collectives: how processes talk. "auto": in shared memory if all of them are on this host, else by gloo or NCCL;
            "process_group": never in shared memory; "shared_memory": raise where it cannot be had. `extended.describe`
            says which one is in use, and why.
        gradients: "everywhere": every process sees the combined gradients when ``backward`` returns, as under the other
            strategies. "owner": each sees the combined values only of what it steps, which is quicker; ``.grad`` means
            nothing elsewhere, and a step that clips, unscales or otherwise changes gradients raises. It matters only
            where processes share memory.
        independent: do not join the processes that a launcher started: each is a job of its own.
            ``TORCHSTRAT_INDEPENDENT=1`` in the environment says the same for every strategy.

    Raises `DeviceError` for devices that are repeated, unparsable or absent, when the strategy is built.
    """

    def __init__(
        self,
        compute_devices: Sequence[object] | None = None,
        parameter_device: Any = None,
        *,
        gradient_reduce_op: ReduceOp | str = "mean",
        timeout: timedelta = DEFAULT_TIMEOUT,
        collectives: str = "auto",
        gradients: str = "everywhere",
        independent: bool = False,
    ) -> None:
        op = ReduceOp.parse(gradient_reduce_op)
        check_collectives(collectives)
        if gradients not in _GRADIENTS:
            raise InvalidArgumentError(
                f"gradients={gradients!r} is not known; choose one of {', '.join(map(repr, _GRADIENTS))}."
            )
        policy = ShardedUpdate(parameter_device, keeps_gradients=gradients == "owner")
        job = join_job(independent)
        plan = None if job is None else job.plan
        place_replicas(self, policy, plan, compute_devices, op, timeout, collectives, argument="compute_devices")
