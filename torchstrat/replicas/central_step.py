"""The optimizer's step when several replicas in one process call it: made once, on the central variables.

PyTorch's global step hooks see every optimizer. The leader's call goes through; every other replica's call gets a
stand-in of the same class that has no parameters and a state of its own, so whatever its ``step`` does has no effect.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchstrat.replicas.baton import ReplicaAborted
from torchstrat.replicas.components import CENTRAL, Components
from torchstrat.replicas.gradient_exchange import GradientExchange, Meet


def make_stand_in(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and hyperparameters whose groups hold no parameters and whose state is its own."""
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    lists: dict[int, list[Any]] = {id(group["params"]): [] for group in optimizer.param_groups}
    attributes = {name: lists.get(id(value), value) for name, value in vars(optimizer).items()}
    stand_in: Optimizer = object.__new__(type(optimizer))
    vars(stand_in).update(attributes, param_groups=groups, state=collections.defaultdict(dict))
    return stand_in


def make_inert_stand_in(optimizer: Optimizer) -> Optimizer:
    """A stand-in for ``step(closure)``: one parameter with a zero gradient in each group, because optimizers that
    evaluate a closure (LBFGS) concatenate gradients, and stop at once where these are zero."""
    stand_in = make_stand_in(optimizer)
    for group in stand_in.param_groups:
        still = torch.zeros(1)
        still.grad = torch.zeros(1)
        group["params"].append(still)
    for name, value in vars(stand_in).items():
        if isinstance(value, list) and value == [] and name.startswith("_params"):
            vars(stand_in)[name] = stand_in.param_groups[0]["params"]
    return stand_in


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure in a ``step`` call's arguments (``args[0]`` is the optimizer itself)."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def with_closure(optimizer: Optimizer, closure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The same call on another optimizer with another closure."""
    if "closure" in kwargs:
        return (optimizer, *args[1:]), {**kwargs, "closure": closure}
    return (optimizer, closure, *args[2:]), kwargs


class CentralStep:
    """The step hooks of one run."""

    def __init__(
        self,
        components: Components,
        gradients: GradientExchange,
        meet: Meet,
        holder: Callable[[], int | None],
        leader: int,
        combine_losses: Callable[[dict[int, Any]], Any],
        stepped: Callable[[], None],
    ) -> None:
        self._components = components
        self._gradients = gradients
        self._meet = meet
        self._holder = holder
        self._leader = leader
        self._combine_losses = combine_losses
        self._stepped = stepped
        self._order: dict[int, int] = {}
        self._drivers: list[ClosureDriver] = []
        self._driver_threads: set[int] = set()
        self._handles: list[Any] = []
        self._depth = 0

    def __enter__(self) -> CentralStep:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        for driver in self._drivers:
            driver.abandon()

    def _call_name(self, optimizer: Optimizer) -> str:
        number = self._order.setdefault(id(optimizer), len(self._order))
        return f"{type(optimizer).__name__}.step() (optimizer {number})"

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        replica = self._holder()
        if replica is None or threading.get_ident() in self._driver_threads:
            return None
        tensors = _tensors(optimizer)
        self._components.register_newborn()
        if not any(self._components.slot_of(tensor) is not None for tensor in tensors):
            return None  # an optimizer over tensors of this replica alone, made in the step: its own affair
        closure = closure_of(args, kwargs)
        if closure is not None:
            return self._step_with_closure(optimizer, closure, args, kwargs)

        def combine(payloads: dict[int, Any]) -> dict[int, Any]:
            self._gradients.catch_up(tensors)
            return dict.fromkeys(payloads)

        self._meet(self._call_name(optimizer), None, combine)
        if replica != self._leader:
            return (make_stand_in(optimizer), *args[1:]), kwargs
        self._components.enter_central()
        return None

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._holder() != self._leader or threading.get_ident() in self._driver_threads:
            return
        if args and args[0] is not optimizer:
            return
        tensors = _tensors(optimizer)
        if not any(self._components.slot_of(tensor) is not None for tensor in tensors):
            return
        self._components.leave_central()
        self._components.refresh(tensors)
        self._gradients.after_step(tensors)
        self._stepped()

    # -- step(closure) ----------------------------------------------------------------------------------------------

    def _step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """One central step, on a thread of its own, asks all replicas to evaluate their closures together."""
        call = f"{self._call_name(optimizer)} with a closure"
        driver: list[ClosureDriver] = []

        def combine(losses: dict[int, Any]) -> dict[int, Any]:
            if not driver:
                driver.append(ClosureDriver(optimizer, args, kwargs, self._driver_threads))
                self._drivers.append(driver[0])
            loss = None if any(loss is _NOTHING for loss in losses.values()) else self._combine_losses(losses)
            evaluate = driver[0].resume(loss)
            self._components.park()
            self._components.refresh(_tensors(optimizer))
            self._stepped()
            return dict.fromkeys(losses, (evaluate, driver[0].value))

        loss: Any = _NOTHING
        while True:
            evaluate, value = self._meet(call, loss, combine)
            if not evaluate:
                break
            with torch.enable_grad():
                loss = closure()
        return with_closure(make_inert_stand_in(optimizer), lambda: value, args, kwargs)


_NOTHING = object()


class ClosureDriver:
    """Runs ``optimizer.step(closure)`` on its own thread and stops it whenever it wants the closure evaluated."""

    def __init__(self, optimizer: Optimizer, args: Any, kwargs: Any, threads: set[int]) -> None:
        self.value: Any = None
        self._error: BaseException | None = None
        self._loss: Any = None
        self._finished = False
        self._abandoned = False
        self._to_driver, self._to_caller = threading.Lock(), threading.Lock()
        self._to_driver.acquire()
        self._to_caller.acquire()
        grad_enabled = torch.is_grad_enabled()

        def main() -> None:
            threads.add(threading.get_ident())
            self._to_driver.acquire()
            try:
                if not self._abandoned:
                    with torch.set_grad_enabled(grad_enabled):
                        call_args, call_kwargs = with_closure(optimizer, self._evaluate, args, kwargs)
                        self.value = type(optimizer).step(*call_args, **call_kwargs)
            except ReplicaAborted:
                pass
            except BaseException as error:
                self._error = error
            threads.discard(threading.get_ident())
            self._finished = True
            self._to_caller.release()

        self._thread = threading.Thread(target=main, name="torchstrat-step-with-closure", daemon=True)
        self._thread.start()

    def resume(self, loss: Any) -> bool:
        """Go on with the loss that was asked for; whether another evaluation is wanted. Raises what the step raised."""
        self._loss = loss
        self._to_driver.release()
        self._to_caller.acquire()
        if self._error is not None:
            raise self._error
        return not self._finished

    def _evaluate(self) -> Any:
        self._to_caller.release()
        self._to_driver.acquire()
        if self._abandoned:
            raise ReplicaAborted
        return self._loss

    def abandon(self) -> None:
        """End the thread if the run failed before the step was over."""
        if not self._finished:
            self._abandoned = True
            self._to_driver.release()
        self._thread.join(timeout=5.0)


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


__all__ = ["CENTRAL", "CentralStep", "closure_of", "make_inert_stand_in", "make_stand_in", "with_closure"]
