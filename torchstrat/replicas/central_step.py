"""The optimizer's step when several replicas in one process call it: made once, on the central variables.

PyTorch's global step hooks see every optimizer. The leader's call goes through; every other replica's call gets a
stand-in of the same class that has no parameters and a state of its own, so whatever its ``step`` does has no effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat._torch_private import (
    after_step,
    before_step,
    optimizer_post_hooks,
    optimizer_pre_hooks,
    put_clipping_hook,
    remove_clipping_hook,
)
from torchstrat.errors import ReplicaDivergenceError
from torchstrat.replicas.baton import Baton, ReplicaAborted
from torchstrat.replicas.components import Components
from torchstrat.replicas.differing_edits import (
    DifferingEdits,
    edited_differently,
    gradients_edited_differently,
)
from torchstrat.replicas.in_process_gradients import InProcessGradients
from torchstrat.replicas.last_hooks import LastHooks
from torchstrat.replicas.nested_steps import StepInProgress
from torchstrat.replicas.optimizer_views import real_state
from torchstrat.replicas.tensor_slot import TensorSlot
from torchstrat.replicas.thread_state import OwnSettings
from torchstrat.stand_ins import be_idle, make_stand_in, stepped_by


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
    """The step hooks of one run, under ``hook_key`` among torch's.

    ``shield()`` and ``unshield()`` enclose what Ctrl-C must not leave half-done. ``is_replica_thread()``: whether the
    calling thread runs a replica of this run; the hooks see every optimizer of the process.
    """

    def __init__(
        self,
        components: Components,
        gradients: InProcessGradients,
        differing: DifferingEdits,
        baton: Baton,
        is_replica_thread: Callable[[], bool],
        combine_losses: Callable[[dict[int, Any]], Any],
        hook_key: int,
    ) -> None:
        self._components = components
        self._gradients = gradients
        self._differing = differing
        self._baton = baton
        self._is_replica_thread = is_replica_thread
        self._combine_losses = combine_losses
        self._numbers: dict[int, int] = {}
        self._own: dict[int, tuple[Optimizer, int]] = {}  # optimizers that one replica made for itself, and which
        self._drivers: list[ClosureDriver] = []
        self._driver_threads: set[int] = set()
        self._hook_key = hook_key
        self._last_hooks = LastHooks()
        self._in_progress = StepInProgress()  # the leader's

    def begin(self, helpers: list[Any]) -> None:
        """``helpers``: with the optimizers that there are before the run."""
        optimizers = [helper for helper in helpers if isinstance(helper, Optimizer)]
        self._numbers = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
        self._leader = self._baton.first
        optimizer_pre_hooks[self._hook_key] = before_step(self._before)
        optimizer_post_hooks[self._hook_key] = after_step(self._after)
        put_clipping_hook(self._hook_key, self._gradients.before_clipping)

    def end(self) -> None:
        optimizer_pre_hooks.pop(self._hook_key, None)
        optimizer_post_hooks.pop(self._hook_key, None)
        remove_clipping_hook(self._hook_key)
        self._last_hooks.clear()
        for driver in self._drivers:
            driver.abandon()

    def _call_name(self, optimizer: Optimizer) -> str:
        number = self._numbers.get(id(optimizer))
        which = "made in this run" if number is None else f"optimizer {number}"
        return f"{type(optimizer).__name__}.step() ({which})"

    def _is_driver(self) -> bool:
        return threading.get_ident() in self._driver_threads

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        replica = self._baton.holder
        if replica is None or self._is_driver():
            return None
        tensors = stepped_by(optimizer)
        if not tensors or (replica == self._leader and self._in_progress.is_around()):
            return None
        known = [slot for slot in map(self._components.slot_of, tensors) if slot is not None]
        is_ours = self._is_replica_thread()
        if all(slot.is_copy and not slot.is_shared for slot in known):
            if is_ours:
                self._note_own(optimizer, replica)
            return None
        if len(known) < len(tensors) and is_ours:
            self._baton.shield()
            with OwnSettings():
                self._components.register_newborn(tensors)
            self._baton.unshield()
        closure = closure_of(args, kwargs)
        if closure is not None:
            return self._step_with_closure(optimizer, closure, args, kwargs)
        is_central = self._meet_for_step(optimizer, tensors)
        if not is_central:
            self._note_own(optimizer, replica)
            return None
        if replica != self._leader:
            return (be_idle(make_stand_in(optimizer)), *args[1:]), kwargs
        self._in_progress.begin()
        self._baton.shield()  # until `_after`: an interrupted step would leave the variables half-stepped
        with OwnSettings():
            self._components.enter_step(optimizer)
        self._last_hooks.step_in_blocks(optimizer)
        return None

    def _meet_for_step(self, optimizer: Optimizer, tensors: list[torch.Tensor]) -> bool:
        """Whether the leader's step is everyone's. It is not where every replica has an optimizer of its own over
        variables of its own, all made in this run."""

        def combine(brought: dict[int, tuple[Optimizer, bool]]) -> dict[int, tuple[bool, bool]]:
            optimizers = {replica: one for replica, (one, _) in brought.items()}
            first, *others = optimizers.values()
            if any(other is not first for other in others):
                if all(self._is_over_own_variables(one, replica) for replica, one in optimizers.items()):
                    return dict.fromkeys(optimizers, (False, False))
                _let_be_one(optimizers)
            with OwnSettings():
                self._components.share(self._slots_of(tensors))
                self._report_differing(tensors, list(optimizers))
                self._components.merge_rows()
            return dict.fromkeys(optimizers, (True, any(left for _, left in brought.values())))

        brought = optimizer, self._gradients.has_left_over(tensors)
        is_central, is_left_over = self._baton.meet(self._call_name(optimizer), brought, combine)
        if is_left_over:
            self._gradients.catch_up(tensors)
        return bool(is_central)

    def _slots_of(self, tensors: list[torch.Tensor]) -> list[TensorSlot]:
        return [slot for slot in map(self._components.slot_of, tensors) if slot is not None]

    def _report_differing(self, tensors: list[torch.Tensor], replicas: list[int]) -> None:
        if self._differing.is_told or len(replicas) < 2:
            return
        slots = self._slots_of(tensors)
        edited = edited_differently(self._components.unmerged(slots), replicas) if self._components.has_edits else []
        self._differing.report(edited, gradients_edited_differently(slots, replicas, self._gradients.combined_of))

    def _is_over_own_variables(self, optimizer: Optimizer, replica: int) -> bool:
        slots = [self._components.slot_of(tensor) for tensor in stepped_by(optimizer)]
        return all(slot is not None and slot.made_by == replica and not slot.is_shared for slot in slots)

    def _note_own(self, optimizer: Optimizer, replica: int) -> None:
        """An optimizer over tensors of this replica alone, made in the step: its own affair."""
        known, first = self._own.setdefault(id(optimizer), (optimizer, replica))
        if first != replica:
            raise ReplicaDivergenceError(
                f"replicas {first} and {replica} step one {type(known).__name__} over tensors that are no variables of "
                "the strategy: made during this run in no module, or hidden from it. Make variables that replicas "
                "share, and their optimizer, within `with strategy.scope():`."
            )

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        replica = self._baton.holder
        if replica is None or self._is_driver() or id(optimizer) in self._own:
            return
        if replica == self._leader and self._in_progress.is_around():
            return
        tensors = stepped_by(optimizer)
        if not any(self._components.slot_of(tensor) is not None for tensor in tensors):
            return
        if replica != self._leader:
            with OwnSettings():
                self._components.undo_edits(optimizer, tensors)
            return
        if closure_of(args, kwargs) is not None:
            return
        self._in_progress.end()
        self._last_hooks.remove(optimizer)
        with OwnSettings():
            self._components.leave_step(optimizer, tensors)
            self._components.forget_unedited()
            self._gradients.after_step(tensors)
        self._baton.unshield()

    # -- step(closure) ----------------------------------------------------------------------------------------------

    def _step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """One central step, on a thread of its own, asks all replicas to evaluate their closures together."""
        call = f"{self._call_name(optimizer)} with a closure"
        tensors = stepped_by(optimizer)
        driver: list[ClosureDriver] = []

        def combine(losses: dict[int, Any]) -> dict[int, Any]:
            with OwnSettings():
                self._components.install_central()
                before = self._gradients.central()
            if not driver:
                self._components.begin_closure_step(optimizer)
                driver.append(ClosureDriver(optimizer, args, kwargs, self._driver_threads))
                self._drivers.append(driver[0])
            loss = None if any(loss is _NOTHING for loss in losses.values()) else self._combine_losses(losses)
            evaluate = driver[0].resume(loss)
            with OwnSettings():
                if not evaluate:
                    self._components.end_closure_step(optimizer)
                self._components.spread_central()
                self._gradients.spread_central(before)
                # What the closures assign from now on is new, and not made of what is there.
                self._gradients.after_step(tensors)
            return dict.fromkeys(losses, (evaluate, driver[0].value))

        loss: Any = _NOTHING
        while True:
            self._gradients.level(tensors, f"{call} (combining gradients that no backward pass has combined)")
            evaluate, value = self._baton.meet(call, loss, combine)
            if not evaluate:
                break
            with torch.enable_grad():
                loss = closure()
        return with_closure(be_idle(make_inert_stand_in(optimizer), value), lambda: value, args, kwargs)


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


def _let_be_one(optimizers: dict[int, Optimizer]) -> None:
    """Each replica's code has made an optimizer anew, over the same variables; whichever the user keeps is the one."""
    first_replica, first = next(iter(optimizers.items()))
    for replica, other in optimizers.items():
        if set(map(id, stepped_by(other))) != set(map(id, stepped_by(first))):
            raise ReplicaDivergenceError(
                f"replicas {first_replica} and {replica} step different optimizers: a {type(first).__name__} and a "
                f"{type(other).__name__} over other variables. Every replica has to make the same steps in the same "
                "order; look for a branch that depends on the replica's data or id."
            )
        other.state = real_state(first.state)


__all__ = ["CentralStep", "closure_of", "make_inert_stand_in", "with_closure"]
