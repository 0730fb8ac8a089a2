"""Optimizers on the coordinator. Reading ``optimizer.state`` asks the servers, changing it is a load; a step takes the
gradients that the program has here, and is refused where functions have left theirs on workers."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchstrat.errors import ContextError, InvalidArgumentError
from torchstrat.parameter_server.messages import StateOfShard
from torchstrat.parameter_server.variables.cache_interfaces import Moment
from torchstrat.parameter_server.variables.optimizer_state import RemoteOptimizerState

if TYPE_CHECKING:
    from torchstrat.parameter_server.job import Job

_Result = TypeVar("_Result")


class CoordinatorState:
    """Keeps the `RemoteOptimizerState` of one optimizer. Tensors that were read from it are of that moment."""

    def __init__(self, job: Job, optimizer: Optimizer, *, is_current: bool) -> None:
        self._job: Job = weakref.proxy(job)
        self._reference = weakref.ref(optimizer)
        self._read_at: Moment | None = job.cache.now() if is_current else None

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._reference()
        assert optimizer is not None  # it is being asked for its state
        return optimizer

    @classmethod
    def attach(cls, job: Job, optimizer: Optimizer, *, is_current: bool) -> None:
        state: Any = optimizer.state
        if isinstance(state, RemoteOptimizerState):
            cls.of(optimizer)._read_at = job.cache.now() if is_current else None
            state.note()
        else:
            keeper = cls(job, optimizer, is_current=is_current)
            optimizer.state = RemoteOptimizerState(keeper, dict(dict.items(state)))

    @staticmethod
    def expire(optimizer: Optimizer) -> None:
        """The servers have another state than what was read, though no function has run since."""
        state: Any = optimizer.state
        if isinstance(state, RemoteOptimizerState):
            CoordinatorState.of(optimizer)._read_at = None
            state.note()

    @staticmethod
    def detach(optimizer: Any) -> None:
        """It is an ordinary optimizer again, with the state that it holds."""
        if isinstance(getattr(optimizer, "state", None), RemoteOptimizerState):
            optimizer.state = defaultdict(dict, dict.items(optimizer.state))

    @staticmethod
    def of(optimizer: Optimizer) -> CoordinatorState:
        state: Any = optimizer.state
        keeper: CoordinatorState = state._keeper
        return keeper

    # -- StateKeeper ------------------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Also while functions run, until one of them has ended."""
        return self._read_at == self._job.cache.now()

    def read(self) -> dict[torch.Tensor, StateOfShard]:
        found: dict[torch.Tensor, StateOfShard] = self._job.attempt(self._read_now, self.read)
        return found

    def _read_now(self) -> dict[torch.Tensor, StateOfShard]:
        self.push_changed()
        read_at = self._job.cache.now()
        found = self._job.state_of(self._optimizer)
        self._read_at = read_at
        return found

    def change(self, state: RemoteOptimizerState, make: Callable[[], _Result]) -> _Result:
        """Waits until no function is half-way, and sends what there is after it."""
        result: _Result = self._job.attempt(lambda: self._change_now(state, make), make)
        return result

    def _change_now(self, state: RemoteOptimizerState, make: Callable[[], _Result]) -> _Result:
        with self._job.cache.paused("changing the state of an optimizer on the coordinator"):
            if not self.is_current():
                state.refresh()
            result = make()
            self._job.push_optimizer(self._optimizer)
            return result

    def push_changed(self) -> None:
        """Send what was changed in place, in tensors or entries that were read. Raises `InvalidArgumentError` where
        functions have run since."""
        state: Any = self._optimizer.state
        if not state.is_changed():
            return
        if self.is_current() and not self._job.cache.now()[1]:
            self._job.push_optimizer(self._optimizer)
            return
        self._read_at = None
        state.note()
        raise InvalidArgumentError(
            f"the state of {type(self._optimizer).__name__} was changed on the coordinator, in tensors that had been "
            "read before functions ran which may have changed it since. What was written is given up. Call "
            "coordinator.join(), take optimizer.state[parameter] anew, and change that."
        )


class CoordinatorSteps:
    """Looks at steps that the program makes on the coordinator, until the job is closed."""

    def __init__(self, job: Job) -> None:
        self._job: Job = weakref.proxy(job)
        check = weakref.WeakMethod(self._check)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (method := check()) is not None:
                method(optimizer)

        self.close = weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def _check(self, optimizer: Optimizer) -> None:
        """Without any gradient here a step does nothing. In a plain program it would take what the last backward passes
        have left, and these were made by functions."""
        specs = self._job.parameters_of(optimizer)
        if not specs or any(parameter.grad is not None for parameter in specs):
            return
        numbers = [spec.number for spec in specs.values()]
        left = self._job.left_gradients(numbers)
        for found in self._job.servers.ask_all("ps.left_gradients", numbers).values():
            left |= found
        if left:
            name = next(spec.name for spec in specs.values() if spec.number in left)
            raise ContextError(
                f"{type(optimizer).__name__}.step() was called on the coordinator, where no parameter has a gradient; "
                f"scheduled functions have left that of {name} on a worker, or under no_sync on the servers. Call step "
                "in the function that computes the gradients; or clear them there (optimizer.zero_grad()), and return "
                "what the coordinator shall step with, to be set as parameter.grad."
            )
