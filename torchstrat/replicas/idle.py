"""Replicas without a row in a step, with one replica per process.

Their step is not called, and plain code is all that could tell them what it does. So the others run the step among
themselves, and afterwards the first of them hands over everything that the step changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.collectives.communicator import Communicator
from torchstrat.replicas.transfer import broadcast_tensors
from torchstrat.variables import VariableRegistry

CALL = "the end of a run (handing its results to replicas without rows)"


class IdleReplicas:
    """What happens around a run in which not all ranks take part. All ranks know from the batch who does."""

    def __init__(
        self, world: Communicator, active: list[int], registry: VariableRegistry, *, central: bool
    ) -> None:
        self._world = world
        self._some_idle = len(active) < world.size
        self._first = active[0]
        self._registry = registry
        self._central = central
        self._lends = central and self._some_idle and self._first != 0  # the owner of the optimizer's state is idle

    def before_run(self) -> None:
        if self._lends:
            self._hand_over_helpers(0, to=self._first)

    def after_run(self) -> None:
        if not self._some_idle:
            return
        self._hand_over_helpers(self._first, to=None)
        tensors = [tensor for tensor in self._registry.tensors() if not is_lazy(tensor)]
        values = [tensor.data for tensor in tensors]
        values += [slot.tensor.data for slot in self._registry.buffer_slots() if slot.tensor is not None]
        broadcast_tensors(self._world, values, self._first, CALL)
        self._hand_over_gradients(tensors)
        if self._central and self._world.rank != 0:
            for optimizer in self._registry.optimizers():
                optimizer.state.clear()

    def _hand_over_gradients(self, tensors: list[torch.Tensor]) -> None:
        present = [tensor.grad is not None for tensor in tensors]
        present = self._world.broadcast_object(present, self._first, CALL)
        for tensor, is_there in zip(tensors, present, strict=True):
            if not is_there:
                tensor.grad = None
            elif tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
        broadcast_tensors(self._world, grads, self._first, CALL)

    def _hand_over_helpers(self, source: int, to: int | None) -> None:
        """The state of optimizers, schedulers and scalers; every rank has made them in the same order."""
        helpers = self._registry.helpers()
        states = [_state_of(helper) for helper in helpers] if self._world.rank == source else None
        states = self._world.broadcast_object(states, source, CALL)
        if self._world.rank == source or (to is not None and self._world.rank != to):
            return
        for helper, state in zip(helpers, states, strict=True):
            if state is not None:
                helper.load_state_dict(state)


def _state_of(helper: Any) -> Any:
    return helper.state_dict() if isinstance(helper, Optimizer) or hasattr(helper, "load_state_dict") else None
