"""Local SGD: every replica steps alone, and parameters are averaged every few steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import final

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.strategies import policy
from torchstrat.strategies.strategy import DEFAULT_TIMEOUT, Strategy


class LocalSGD(policy.LocalUpdate):
    """The mean of the replicas' parameters every ``period`` steps."""

    def __init__(self, period: int) -> None:
        self._period = period

    def ends_round(self, steps: int) -> bool:
        return steps >= self._period

    def end_round(self, replica: policy.Replica) -> None:
        replica.average(replica.parameters)


@final
@short_tracebacks
class LocalSGDStrategy(Strategy):
    """A model on each device, or in each process on one machine or many, that is trained on its share of the batches
    alone; after every ``period`` steps all replicas go on from the mean of their parameters.

    Processes talk once in ``period`` steps instead of in each: for slow networks, and machines that are not equally
    fast (Stich, "Local SGD Converges Fast and Communicates Little", 2019). In between replicas differ by design, and
    numbers are not those of one device. Optimizer state is never averaged; buffers, modes and hyperparameters become
    alike when parameters do. Outside of `run` each process sees its first replica, and what the program changes there
    is everyone's. `end_round` makes replicas equal before an evaluation, or a file of plain weights. `Checkpoint` keeps
    each replica's own values, in the midst of a round too; on another number of replicas these go on from the mean.

    Args:
        devices: in one process, the replicas' devices; ``["cpu:0", "cpu:1"]`` are two virtual replicas of the CPU.
            None: every GPU of the machine, or one CPU replica. Under a launcher at most one: this process's device.
        period: steps from one averaging to the next: runs in which an optimizer steps.
        timeout: how long to wait for other processes before an error names them.
        collectives: how processes talk, as of `ts.MirroredStrategy`.
        independent: do not join the processes that a launcher started: each is a job of its own.

    Raises `InvalidArgumentError` for a period below 1; `run` raises it for a batch without rows for some replica.
    """

    def __init__(
        self,
        devices: Sequence[object] | None = None,
        *,
        period: int = 8,
        timeout: timedelta = DEFAULT_TIMEOUT,
        collectives: str = "auto",
        independent: bool = False,
    ) -> None:
        if isinstance(period, bool) or not isinstance(period, int):
            raise WrongTypeError(f"period must be an integer; got {period!r:.80}.")
        if period < 1:
            raise InvalidArgumentError(f"period={period}; the least is 1, an averaging after every step.")
        policy.place(self, LocalSGD(period), devices, timeout=timeout, collectives=collectives, independent=independent)

    def end_round(self) -> None:
        """Average now, and begin a new round. In cross-replica context; every process calls it."""
        policy.end_round(self)
