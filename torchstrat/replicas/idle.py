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
        self, world: Communicator, active: list[int], registry: VariableRegistry, *, central: bool, apart: bool
    ) -> None:
        self._world = world
        self._some_idle = len(active) < world.size
        self._active = active
        self._first = active[0]
        self._registry = registry
        self._central = central
        self._apart = apart and self._some_idle  # ranks hold gradients that are not combined yet
        self._lends = central and self._some_idle and self._first != 0  # the owner of the optimizer's state is idle

    def before_run(self) -> None:
        if self._lends:
            self._hand_over_helpers(0, to=self._first)
        if self._apart:
            self._move_gradients_to_first()

    def _move_gradients_to_first(self) -> None:
        """What idle ranks have accumulated waits with the first rank that runs: their sum is all that counts, and if
        the step now zeroes gradients it must zero those too."""
        me = self._world.rank
        is_idle = me not in self._active
        for tensor in _materialised(self._registry):
            mine = tensor.grad if is_idle else None
            shares = self._world.all_gather_object(mine, CALL)
            if is_idle:
                tensor.grad = None
            elif me == self._first:
                for share in shares:
                    if share is not None:
                        tensor.grad = share.clone() if tensor.grad is None else tensor.grad + share

    def after_run(self, *, with_gradients: bool) -> None:
        if not self._some_idle:
            return
        self._hand_over_helpers(self._first, to=None)
        tensors = _materialised(self._registry)
        values = [tensor.data for tensor in tensors]
        values += [slot.tensor.data for slot in self._registry.buffer_slots() if slot.tensor is not None]
        broadcast_tensors(self._world, values, self._first, CALL)
        if with_gradients:
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


def _materialised(registry: VariableRegistry) -> list[torch.Tensor]:
    return [tensor for tensor in registry.tensors() if not is_lazy(tensor)]
