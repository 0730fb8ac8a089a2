"""Several passes of one run, for replicas whose batches have different shapes: in turns, as if they were one.

The lanes of a pass need equal shapes, and the last batch of an epoch seldom divides. Replicas with as many rows share a
pass; the passes run the step one after the other and meet where replicas do: at the end of a backward pass, after an
optimizer's step, in collectives. All of them are recorded into one program.

The first pass works on the variables; the others on values that are put back when their turn is over, so that what a
step does to variables and gradients by hand is done once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchstrat.core._torch_private import set_version_counters
from torchstrat.core.optimizers import be_idle, make_stand_in
from torchstrat.core.variables import VariableRegistry
from torchstrat.replicas.in_process.baton import Baton, WorkerThreads
from torchstrat.replicas.in_process.component_attributes import ComponentHelpers
from torchstrat.replicas.thread_state import ThreadState
from torchstrat.sharding.tpu.lanes import steps_own_tensors

FIRST = 0
HOST = torch.device("cpu")


@dataclass
class _Held:
    """One variable or buffer. ``agreed…``: as of the last meeting; ``first…``: as the first pass left it."""

    tensor: torch.Tensor
    agreed: torch.Tensor
    agreed_version: int
    agreed_grad: torch.Tensor | None
    first: torch.Tensor | None = None
    first_version: int = 0
    first_grad: torch.Tensor | None = None
    entered_version: int = 0


class _Values:
    """The variables of a run with several passes."""

    def __init__(self, registry: VariableRegistry) -> None:
        self._registry = registry
        self._held: list[_Held] = []
        self._is_first = True

    def agree(self) -> None:
        """All passes stand still: what is there now is what each of them goes on with."""
        buffers = [slot.tensor for slot in self._registry.buffer_slots()]
        tensors = [*self._registry.tensors(), *(buffer for buffer in buffers if buffer is not None)]
        self._held = [
            _Held(one, one.detach().clone(), one._version, None if one.grad is None else one.grad.detach().clone())
            for one in tensors
        ]

    def forget(self) -> None:
        """The run is over."""
        self._held = []

    def enter_other(self) -> None:
        """A pass that is not the first begins its turn."""
        self._is_first = False
        for held in self._held:
            tensor = held.tensor
            held.first_version, held.first_grad = tensor._version, tensor.grad
            held.first = None
            if held.first_version != held.agreed_version:
                held.first = tensor.detach().clone()
                _overwrite(tensor, held.agreed, held.agreed_version)
            held.entered_version = tensor._version
            tensor.grad = None if held.agreed_grad is None else held.agreed_grad.clone()

    def leave_other(self) -> None:
        """Its turn is over: everything is as the first pass left it."""
        if self._is_first:
            return
        self._is_first = True
        for held in self._held:
            tensor = held.tensor
            if held.first is not None or tensor._version != held.entered_version:
                _overwrite(tensor, held.agreed if held.first is None else held.first, held.first_version)
            tensor.grad = held.first_grad


def _overwrite(tensor: torch.Tensor, value: torch.Tensor, version: int) -> None:
    with torch.no_grad():
        tensor.copy_(value)
    set_version_counters([tensor], [version])


class Passes:
    """The passes of one run. ``index``: of the pass whose turn it is, on its thread."""

    def __init__(self, registry: VariableRegistry, count: int, threads: WorkerThreads) -> None:
        self._registry, self._count = registry, count
        self._values = _Values(registry)
        self._helpers = ComponentHelpers()
        self._installed = FIRST
        self._baton = Baton(range(count), threads, self._switch)
        self._local = threading.local()

    @property
    def index(self) -> int | None:
        """Of the pass that the calling thread records; None on other threads."""
        found: int | None = getattr(self._local, "index", None)
        return found

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """``body(index)`` for each pass; what they returned, in order."""
        state = ThreadState()

        def main(index: int) -> Any:
            self._local.index = index
            try:
                return state.call(HOST, lambda: body(index))
            finally:
                self._local.index = None

        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            returned = self._baton.run(main, begin=self._begin, end=lambda _: self._end())
        finally:
            for handle in handles:
                handle.remove()
            self._values.forget()  # what is alive when the program runs would be a result of it
        return [returned[index] for index in range(self._count)]

    def _begin(self) -> None:
        self._helpers.begin(self._registry.helpers(), list(range(self._count)))
        self._values.agree()

    def _end(self) -> None:
        self._switch(None)
        self._helpers.end()

    def meet(self, call: str, payload: object, combine: Callable[[dict[int, Any]], dict[int, Any]]) -> Any:
        """See `Baton.meet`."""

        def then_agree(payloads: dict[int, Any]) -> dict[int, Any]:
            results = combine(payloads)
            self._values.agree()
            return results

        return self._baton.meet(call, payload, then_agree)

    def _switch(self, index: int | None) -> None:
        self._values.leave_other()
        wanted = FIRST if index is None else index
        if wanted != self._installed:
            self._helpers.park(self._installed)
            self._helpers.install(wanted)
            self._installed = wanted
        if wanted != FIRST:
            self._values.enter_other()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.index in (None, FIRST) or steps_own_tensors(optimizer):
            return None
        return (be_idle(make_stand_in(optimizer)), *args[1:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self.index is not None and not steps_own_tensors(optimizer):
            self._helpers.leave_step(optimizer) if self.index == FIRST else self._helpers.forget_state(optimizer)
            self.meet(f"{type(optimizer).__name__}.step()", None, dict.fromkeys)
