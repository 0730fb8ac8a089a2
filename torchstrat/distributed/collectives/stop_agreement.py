"""Stopping after the same step in every process, without waiting for anybody."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from torchstrat.core.communicator import Communicator, Work
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.distributed.collectives.process_group import ProcessGroupCommunicator

_WHAT = "the agreement to stop (PreemptionHandler.should_stop)"


class StopAgreement:
    """One question per step: has anybody been told to stop?

    Each question's sum over the processes is started and left to itself while the next step runs; `next` answers with
    the sum of the question before. So the answer comes one step late and nobody waits for it: what is left of the cost
    is that of starting a sum of one number. Asking for the answer at once would put a round trip into every step.

    Args:
        communicator: Nobody else uses it; `close` closes it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._told = torch.zeros(1, dtype=torch.int32)
        self._work: Work | None = None

    @classmethod
    def of_default_group(cls, timeout: timedelta) -> StopAgreement:
        """Between the processes of torch.distributed's default group. Each of them calls it."""
        rank, size = dist.get_rank(), dist.get_world_size()
        plan = ProcessPlan(rank, size, rank, size, None, False, f"rank {rank} of {size}")
        return cls(ProcessGroupCommunicator(plan, "cpu", timeout))

    def next(self, told: bool) -> bool:
        """Whether anybody said ``told`` in the call before this one; the same answer in all processes.

        Collective: every process makes its n-th call after the same step.
        """
        if self._answer():
            return True
        self._told.fill_(int(told))
        self._work = self._communicator.all_reduce(self._told, _WHAT)
        return False

    def close(self, *, wait: bool) -> None:
        """Nothing is under way after it. ``wait``: for the last answer, which all processes have asked for."""
        try:
            if wait:
                self._answer()
        finally:
            self._communicator.close()

    def _answer(self) -> bool:
        if self._work is None:
            return False
        work, self._work = self._work, None
        work.wait()
        return bool(self._told.item())
