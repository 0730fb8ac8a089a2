"""What a process of a job needs to make any call that involves the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import nn

import torchstrat as ts
import torchstrat.checkpoint.job_state
import torchstrat.checkpoint.preemption
import torchstrat.checkpoint.writing
import torchstrat.sharding.dtensor.engine  # what cells would import in their forks, each for itself
from tests.matrix.forked_cells import folder
from tests.matrix.places import LOGICAL_DEVICES, LOGICAL_ON_SOCKETS, REPLICAS

RULES = {"0.weight": ("d0", None), "0.bias": ("d0",), "2.weight": (None, "d0")}


class Job:
    """This process's part of a job: a strategy with a model, variables and data; used up by one cell."""

    def __init__(self, place: str, timeout_seconds: float) -> None:
        self._leaving = ExitStack()
        self.rank = int(os.environ["RANK"])
        self.timeout = timedelta(seconds=timeout_seconds)
        if place in (LOGICAL_DEVICES, LOGICAL_ON_SOCKETS):
            self.strategy: Any = ts.MirroredStrategy(
                logical_devices_per_replica=2,
                sharding_rules=RULES,
                timeout=self.timeout,
                collectives="auto" if place == LOGICAL_DEVICES else "process_group",
            )
        else:
            self.strategy = REPLICAS[place].make(timeout=self.timeout)
        self._leaving.callback(self.strategy.close)
        torch.manual_seed(0)
        with self.strategy.scope():
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            zeros = torch.zeros(2)
            self.total = ts.Variable(zeros, name="total", aggregation=ts.VariableAggregation.SUM)
            self.mean = ts.Variable(zeros, name="mean", aggregation=ts.VariableAggregation.MEAN)
            self.counted = ts.Variable(
                zeros,
                name="counted",
                aggregation=ts.VariableAggregation.SUM,
                synchronization=ts.VariableSynchronization.ON_READ,
            )

    def close(self) -> None:
        self._leaving.close()

    # -- what all processes make before ----------------------------------------------------------------------------

    @cached_property
    def stream(self) -> Any:
        """A data set whose processes agree on each step, and an iterator over it."""
        made = self.strategy.distribute_datasets_from_function(lambda _: [torch.ones(2, 4)] * 3)
        return made, iter(made)

    @cached_property
    def batches(self) -> Any:
        """An iterator over global batches, each of which every process reads."""
        return iter(self.strategy.distribute_dataset([torch.ones(4, 4)] * 2))

    @cached_property
    def started(self) -> Any:
        """The same after its first batch."""
        next(self.batches)
        return self.batches

    @cached_property
    def losses(self) -> Any:
        """What a run on rows returned, with how much each replica counts."""
        return self.strategy.run(lambda x: x.sum(), args=(next(self.batches),))

    @cached_property
    def checkpoint(self) -> ts.Checkpoint:
        return ts.Checkpoint(model=self.model, optimizer=self.optimizer)

    @cached_property
    def manager(self) -> ts.CheckpointManager:
        made = ts.CheckpointManager(folder() / "managed")
        self._leaving.callback(made.close)
        return made

    @cached_property
    def saved(self) -> Any:
        """The folder of a checkpoint."""
        return self.checkpoint.save(folder() / "saved").path

    @cached_property
    def managed(self) -> int:
        self.manager.save(self.checkpoint, 1)
        return 1

    @cached_property
    def handler(self) -> ts.PreemptionHandler:
        return self._leaving.enter_context(ts.PreemptionHandler(timeout=self.timeout))

    def value(self, numbers: int = 2) -> Any:
        return self.strategy.distribute_values_from_function(lambda _: torch.ones(numbers))

    # -- steps ------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[[], Any]) -> Any:
        return self.strategy.run(fn)

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(4, 4)).square().mean()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()
