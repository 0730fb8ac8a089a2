"""Update policies, for strategies of one's own. Provisional: names here may still change between minor versions.

A strategy says where variables live and what becomes of the steps that replicas make; all else (turns or processes,
gradients, random numbers, input, checkpoints) is the engine's, which `place` chooses and sets up::

    class LocalSGDStrategy(ts.Strategy):
        def __init__(self, devices=None, *, period=8):
            ts.policy.place(self, LocalSGD(period), devices)

    ts.registry.register("my_local_sgd", LocalSGDStrategy)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torchstrat.core import context
from torchstrat.core.context import engine_of
from torchstrat.core.errors import UnsupportedError, WrongTypeError
from torchstrat.core.reduction import ReduceOp
from torchstrat.distributed.launcher import join_job
from torchstrat.replicas.update_policies import (
    LocalUpdate,
    PrimaryUpdate,
    Replica,
    ReplicatedUpdate,
    ShardedUpdate,
    UpdatePolicy,
)
from torchstrat.strategies.placement import check_collectives, place_replicas
from torchstrat.strategies.strategy import DEFAULT_TIMEOUT, Strategy

__all__ = [
    "LocalUpdate",
    "PrimaryUpdate",
    "Replica",
    "ReplicatedUpdate",
    "ShardedUpdate",
    "UpdatePolicy",
    "end_round",
    "place",
]


def place(
    strategy: Strategy,
    policy: UpdatePolicy,
    devices: Sequence[object] | None = None,
    *,
    gradient_reduce_op: ReduceOp | str = "mean",
    timeout: timedelta = DEFAULT_TIMEOUT,
    collectives: str = "auto",
    independent: bool = False,
) -> None:
    """Set up the replicas of ``strategy``, at the end of its constructor: one in each process that a launcher started,
    on one host or many, else on ``devices`` in this process. Every process of a job calls it.

    Args:
        policy: what becomes of the steps that replicas make.
        devices: in one process, the replicas' devices; ``["cpu:0", "cpu:1"]`` are two virtual replicas of the CPU.
            None: every GPU of the machine, or one CPU replica. Under a launcher at most one: this process's device.
        gradient_reduce_op: "mean" (weighted by examples) or "sum", where gradients are combined.
        timeout, collectives, independent: as of `ts.MirroredStrategy`.

    Raises `WrongTypeError` for what is no policy, `DeviceError` for devices that are repeated, unparsable or absent.
    """
    if not isinstance(policy, ReplicatedUpdate | PrimaryUpdate | LocalUpdate):
        raise WrongTypeError(
            "place needs a ReplicatedUpdate, PrimaryUpdate, ShardedUpdate or LocalUpdate, or a class derived from one "
            f"of these; got {policy!r:.80}."
        )
    op = ReduceOp.parse(gradient_reduce_op)
    check_collectives(collectives)
    job = join_job(independent)
    place_replicas(strategy, policy, None if job is None else job.plan, devices, op, timeout, collectives)


def end_round(strategy: Strategy) -> None:
    """End the round of local steps now: bring the replicas of ``strategy`` together, before an evaluation or a plain
    ``torch.save`` that is to see their mean, say. In cross-replica context; every process calls it.

    Raises `UnsupportedError` where the strategy's replicas make no local steps.
    """
    context.require_cross(strategy, "end_round")
    rounds = engine_of(strategy).rounds
    if rounds is None:
        raise UnsupportedError(f"{type(strategy).__name__} has no rounds: its replicas are equal after every step.")
    rounds.end_round()
