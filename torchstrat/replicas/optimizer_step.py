"""An optimizer's step as one replica sees it: PyTorch's global step hooks, which see every optimizer, become calls of a
step policy, which says who steps what.

A step within a step, of the optimizer that another one wraps or of the class that a subclass extends, is part of it.

A step outside of a run is of gradients that runs have left uncombined, or under central storage with one replica per
process: there the owner steps or all do their parts, and what the owner steps alone it alone has state of.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchstrat.core._torch_private import (
    after_step,
    before_step,
    optimizer_post_hooks,
    optimizer_pre_hooks,
    put_clipping_hook,
    remove_clipping_hook,
)
from torchstrat.core.engine import Communicator
from torchstrat.core.gradients import shares
from torchstrat.core.optimizers import be_idle, is_worth_blocks, make_stand_in, step_in_blocks
from torchstrat.core.reduction import ReduceOp
from torchstrat.distributed.collectives.agreement import agree
from torchstrat.replicas.engine import StepWeights
from torchstrat.replicas.gradient_synchronizer import GradientSynchronizer
from torchstrat.replicas.roster import Rosters
from torchstrat.replicas.scaling_lookups import ScalingLookups

Hook = Callable[[Optimizer, Any, Any], Any]


class LastHooks:
    """Pre-hooks of one step each, registered while torch's global ones run: so they come last, after the user's own,
    which may change gradients and parameters."""

    def __init__(self) -> None:
        self._handles: dict[int, RemovableHandle] = {}

    def put(self, optimizer: Optimizer, hook: Hook) -> None:
        """``hook``: made by `before_step`."""
        self.remove(optimizer)
        self._handles[id(optimizer)] = optimizer.register_step_pre_hook(hook)

    def remove(self, optimizer: Optimizer) -> None:
        handle = self._handles.pop(id(optimizer), None)
        if handle is not None:
            handle.remove()

    def clear(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def step_in_blocks(self, optimizer: Optimizer) -> None:
        """Have the step that has begun made in blocks, where that is quicker. What is then stepped is a stand-in, which
        has nothing to step; so hooks that follow find all of it done."""

        def last(stepped: Optimizer, args: Any, kwargs: object) -> object:
            if args[0] is not stepped or not step_in_blocks(stepped):  # a hook of the user's own steps another one
                return None
            return (make_stand_in(stepped), *args[1:]), kwargs

        if is_worth_blocks(optimizer):
            self.put(optimizer, before_step(last))


_TORCHS = torch.optim.Optimizer.__module__


class StepInProgress:
    """The step that this thread makes for everyone. What is stepped within it is part of it."""

    def __init__(self) -> None:
        self.frame: FrameType | None = None

    def begin(self) -> None:
        """Called by a hook of that step."""
        self.frame = _innermost_step()

    def end(self) -> None:
        self.frame = None

    def is_around(self) -> bool:
        """Whether the step whose hook calls this is another one, within that step. A step that has raised is over,
        though nobody has said so."""
        if self.frame is None:
            return False
        return _innermost_step() is not self.frame and is_running(self.frame)


def is_running(called: FrameType) -> bool:
    """Whether a call is one of those that have led here. One that has raised is over."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not called:
        frame = frame.f_back
    return frame is not None


def _innermost_step() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != _TORCHS:
        frame = frame.f_back
    return frame


class StepCall(NamedTuple):
    """A call of ``optimizer.step``."""

    optimizer: Optimizer
    tensors: list[torch.Tensor]
    """The variables that it may change."""
    name: str
    """The same on every replica."""
    closure: Callable[[], object] | None
    args: Any
    """With the optimizer first."""
    kwargs: Any


class StepPolicy(Protocol):
    """How a step on every replica becomes one step. All replicas make the same calls."""

    steps_alone: bool
    """Whether one replica makes steps for all."""

    def variables_of(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """What a step of it may change that all replicas have; empty where it is nobody else's business."""

    def comes_last(self, optimizer: Optimizer) -> bool:
        """Whether `level` and `begin_step` wait until hooks of the user's own, before the step, have been called."""

    def level(self, call: StepCall) -> bool:
        """Gradients, parameters and settings become what one device would have. Whether the step is everyone's."""

    def begin_step(self, call: StepCall) -> Optimizer | None:
        """What this replica steps in the optimizer's place; None: the optimizer itself."""

    def end_step(self, call: StepCall) -> None:
        """It has been stepped."""

    def begin_evaluation(self, call: StepCall) -> None:
        """All replicas are about to evaluate the closure."""

    def end_evaluation(self, call: StepCall) -> None:
        """They have: what they have done to parameters in place becomes what one device would have."""

    def step_with_closure(self, call: StepCall, evaluate: Callable[[], object]) -> object:
        """Make the step, where one replica does for all. ``evaluate``: the closure on all replicas; its value, and
        gradients, are those of all."""


HookPair = tuple[Hook, Callable[[Optimizer, Any, Any], None]]
"""What is called before a step of any optimizer, and after it."""


class OptimizerStep:
    """The steps of one replica in one run after the other. ``weights``: of the run.

    ``note``: told of each step of an optimizer that the thread makes which has begun the run.
    """

    def __init__(
        self,
        policy: StepPolicy,
        gradients: GradientSynchronizer,
        lookups: ScalingLookups,
        op: ReduceOp,
        note: Callable[[Optimizer], None] = lambda _: None,
    ) -> None:
        self._note = note
        self._thread = 0
        self._policy = policy
        self._gradients = gradients
        self._lookups = lookups
        self._op = op
        self._last_hooks = LastHooks()
        self._in_progress = StepInProgress()  # which this replica makes for all
        self._is_led = False  # a step with a closure, which this replica makes for all
        self._numbers: dict[int, int] = {}
        self._begun: dict[int, list[StepCall]] = {}
        self.hooks: HookPair = before_step(self.before), after_step(self.after)
        """Of PyTorch's, for `put_hooks`; made once, and not in every run."""
        self._last_hook = before_step(self.before_last)

    def begin(self, communicator: Communicator, weights: StepWeights, replica: int) -> None:
        """A run begins: that of ``communicator``, in which this is the ``replica``."""
        self._communicator, self._weights, self._replica = communicator, weights, replica
        self._numbers, self._begun, self._is_led = {}, {}, False
        self._thread = threading.get_ident()

    def end(self) -> None:
        """The run has ended, or failed in the midst of a step."""
        self._last_hooks.clear()
        self._in_progress.end()
        self._begun = {}

    def is_part_of_another(self) -> bool:
        """Whether the step that the calling hook is of is a part of one that this replica makes for all."""
        return self._is_led or (self._in_progress.frame is not None and self._in_progress.is_around())

    # -- the hooks --------------------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: object, kwargs: object) -> Any:
        if threading.get_ident() == self._thread:  # PyTorch's hook sees all optimizers of the process
            self._note(optimizer)
        if self.is_part_of_another():
            return None
        if self._policy.comes_last(optimizer):
            if self._policy.variables_of(optimizer):
                self._last_hooks.put(optimizer, self._last_hook)
            return None
        changed = self._begin(optimizer, args, kwargs)
        if changed is None and (begun := self._begun.get(id(optimizer))) and begun[-1].closure is None:
            self._last_hooks.step_in_blocks(optimizer)
        return changed

    def before_last(self, optimizer: Optimizer, args: object, kwargs: object) -> object:
        """The same as the hook of one optimizer, and the last one."""
        return None if self.is_part_of_another() else self._begin(optimizer, args, kwargs)

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: object) -> Any:
        tensors = self._policy.variables_of(optimizer)
        if not tensors:
            return None
        self._lookups.begin_step(self._replica, tensors)
        call = self._call_of(optimizer, tensors, args, kwargs)
        if not self._policy.level(call):
            self._lookups.end_step(self._replica)
            return None
        self._begun.setdefault(id(optimizer), []).append(call)
        if call.closure is not None:
            return self._step_with_closure(call)
        stepped = self._policy.begin_step(call)
        if stepped is not None:
            return (stepped, *args[1:]), kwargs
        if self._policy.steps_alone:
            self._in_progress.begin()
        return None

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self.is_part_of_another():
            return
        if self._in_progress.frame is not None:
            self._in_progress.end()
        self._last_hooks.remove(optimizer)
        if begun := self._begun.get(id(optimizer)):
            call = begun.pop()
            self._policy.end_step(call)
            self._lookups.end_step(self._replica)

    def _call_of(self, optimizer: Optimizer, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> StepCall:
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        closure = closure_of(args, kwargs)
        name = f"{type(optimizer).__name__}.step() (optimizer {number})" + (" with a closure" if closure else "")
        return StepCall(optimizer, tensors, name, closure, args, kwargs)

    # -- step(closure) ----------------------------------------------------------------------------------------------

    def _step_with_closure(self, call: StepCall) -> object:
        def evaluate() -> object:
            is_led, self._is_led = self._is_led, False
            try:
                with torch.enable_grad():
                    return self._evaluate(call)
            finally:
                self._is_led = is_led

        if not self._policy.steps_alone:  # all decide alike, by the loss of all
            return with_closure(call.optimizer, evaluate, call.args, call.kwargs)
        self._is_led = True
        try:
            value = self._policy.step_with_closure(call, evaluate)
        finally:
            self._is_led = False
        return with_closure(be_idle(make_stand_in(call.optimizer), value), lambda: value, call.args, call.kwargs)

    def _evaluate(self, call: StepCall) -> object:
        """The loss over all replicas. Gradients that a closure assigns by hand are combined as those of a step are."""
        assert call.closure is not None
        records = self._gradients.records
        self._policy.begin_evaluation(call)
        self._lookups.end_step(self._replica)
        records.after_step(call.tensors)  # what is assigned from now on is new, and not made of what is there
        loss = call.closure()
        has_left_over = not records.are_as_combined(call.tensors) and bool(records.left_over(call.tensors))
        loss, is_left_over = self._mean_loss(loss, has_left_over)
        if is_left_over:
            self._gradients.catch_up(call.tensors)
        self._lookups.begin_step(self._replica, call.tensors)
        self._policy.end_evaluation(call)
        return loss

    def _mean_loss(self, loss: Any, flag: bool) -> tuple[Any, bool]:
        """The weighted mean (or sum) of the replicas' losses: a closure's value, on which all act alike. And whether
        any of them has set the ``flag``."""
        value = 0.0 if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        own = (value, self._weights.of(self._replica), float(flag))
        rows = agree(self._communicator, "the loss of a closure", own)
        is_flagged = any(row[2] for row in rows)
        if loss is None:
            return None, is_flagged
        weights = [row[1] for row in rows]
        factors = shares(self._op, weights if any(weights) else [1.0] * len(weights))
        mean = sum(row[0] * factor for row, factor in zip(rows, factors, strict=True))
        return (loss.detach().new_tensor(mean) if isinstance(loss, torch.Tensor) else mean), is_flagged


def put_hooks(key: int, hooks: HookPair, before_clipping: Callable[[list[torch.Tensor]], None]) -> None:
    """Among PyTorch's hooks of all optimizers, and of the functions that clip, under this ``key``. ``hooks``: made by
    `before_step` and `after_step`."""
    optimizer_pre_hooks[key], optimizer_post_hooks[key] = hooks
    put_clipping_hook(key, before_clipping)


def remove_hooks(key: int) -> None:
    optimizer_pre_hooks.pop(key, None)
    optimizer_post_hooks.pop(key, None)
    remove_clipping_hook(key)


def step_led(
    call: StepCall, pause: Callable[[], None], evaluate: Callable[[], object], go_on: Callable[[], None]
) -> object:
    """On the replica that steps for all: what ``step`` returns. ``pause`` and ``go_on`` come before and after each
    evaluation of the closure."""

    def lead() -> object:
        pause()
        loss = evaluate()
        go_on()
        return loss

    args, kwargs = with_closure(call.optimizer, lead, call.args, call.kwargs)
    return type(call.optimizer).step(*args, **kwargs)


def closure_of(args: Sequence[object], kwargs: dict[str, object]) -> Callable[[], object] | None:
    """The closure in a ``step`` call's arguments (``args[0]`` is the optimizer itself)."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def with_closure(optimizer: Optimizer, closure: object, args: Any, kwargs: dict[str, object]) -> tuple[Any, Any]:
    """The same call on another optimizer with another closure."""
    if "closure" in kwargs:
        return (optimizer, *args[1:]), {**kwargs, "closure": closure}
    return (optimizer, closure, *args[2:]), kwargs


class Step(Protocol):
    """An `OptimizerStep`, or what stands for one."""

    def is_part_of_another(self) -> bool: ...
    def before_last(self, optimizer: Optimizer, args: object, kwargs: object) -> object: ...
    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None: ...


class LeftGradients(NamedTuple):
    """Gradients that runs under `no_sync` have left, a part on every replica, for the next run or step to combine."""

    tensors: Callable[[], Sequence[torch.Tensor]]
    """The variables; none where nothing is left."""
    combine: Callable[[], None]
    """All of them, on all replicas."""


def left_gradients(gradients: GradientSynchronizer, rosters: Rosters, world: Communicator) -> LeftGradients:
    """Those of a replica in a process of its own."""
    return LeftGradients(
        lambda: rosters.now().tensors if gradients.pending else (),
        lambda: gradients.combine_parts(rosters.now(), world, is_all=True),
    )


class StepsOutside:
    """Watches optimizers, and functions that clip, until `stop`. ``begin`` and ``end`` surround a step: the variables
    are known only in between. ``begin`` returns whether there is anything to do.

    An optimizer that a later strategy watches is that one's.
    """

    _watchers: ClassVar[weakref.WeakKeyDictionary[Optimizer, weakref.ref[StepsOutside]]] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        step: Step,
        begin: Callable[[], bool],
        end: Callable[[], None],
        has_own_state: Callable[[Optimizer], bool],
        left: LeftGradients,
        *,
        owns: bool,
    ) -> None:
        """``has_own_state``: whether an optimizer's state is the owner's alone."""
        self._step = step
        self._left = left
        self._has_own_state = has_own_state
        self._begin, self._end = begin, end
        self._owns = owns
        self._watched = weakref.WeakSet[Optimizer]()
        self._handles: weakref.WeakKeyDictionary[Optimizer, list[RemovableHandle]] = weakref.WeakKeyDictionary()
        self._paused = 0
        self._is_begun = False
        self._keeps_state = owns
        self._watches_clipping = False
        weakref.finalize(self, remove_clipping_hook, id(self)).atexit = False

    def watch(self, optimizers: list[Optimizer]) -> None:
        if not self._watches_clipping:
            self._watches_clipping = True
            method = weakref.WeakMethod(self._before_clipping)
            put_clipping_hook(id(self), lambda gradients: (hook := method()) and hook(gradients))
        for optimizer in optimizers:
            if optimizer not in self._watched:
                self._watched.add(optimizer)
                if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                    continue  # a wrapper that does without torch's constructor: what it wraps is watched
                earlier = self._watchers.get(optimizer)
                if earlier is not None and (other := earlier()) is not None:
                    other.let_go(optimizer)  # its hooks would keep a strategy that the program has dropped
                self._watchers[optimizer] = weakref.ref(self)
                self._handles[optimizer] = handles = [
                    optimizer.register_step_pre_hook(before_step(self._before)),
                    optimizer.register_step_post_hook(after_step(self._after)),
                ]
                if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
                    handles.append(optimizer.register_load_state_dict_post_hook(self._after_loading))

    def pause(self) -> None:
        """In a run its own hooks are at work."""
        self._paused += 1

    def resume(self) -> None:
        self._paused -= 1

    @contextmanager
    def keeping_state(self) -> Iterator[None]:
        """What is loaded in this block stays, whoever owns it: the owner has lent it."""
        self._keeps_state = True
        try:
            yield
        finally:
            self._keeps_state = self._owns

    def stop(self) -> None:
        """The strategy is closed: optimizers are ordinary ones again, until it runs anew."""
        remove_clipping_hook(id(self))
        for optimizer in list(self._handles):
            self.let_go(optimizer)
        self._watched.clear()
        self._watches_clipping = False

    def let_go(self, optimizer: Optimizer) -> None:
        for handle in self._handles.pop(optimizer, ()):
            handle.remove()

    def combine(self) -> Sequence[torch.Tensor]:
        """The program is about to add to gradients, or to clip them: it is to find what one device would have. Returns
        the variables of which something may have been combined now."""
        if self._paused or self._step.is_part_of_another() or not (tensors := self._left.tensors()):
            return []
        self._left.combine()
        return tensors

    def _before_clipping(self, gradients: list[torch.Tensor]) -> None:
        before = [tensor.grad for tensor in self._left.tensors()]
        places = {id(gradient): place for place, gradient in enumerate(gradients)}
        for gradient, tensor in zip(before, self.combine(), strict=False):
            if id(gradient) in places and tensor.grad is not None:
                gradients[places[id(gradient)]] = tensor.grad

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> object:
        if self._paused or self._step.is_part_of_another():
            return None
        self._is_begun = self._begin()
        return self._step.before_last(optimizer, args, kwargs) if self._is_begun else None

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._is_begun and not self._paused and not self._step.is_part_of_another():
            self._is_begun = False
            self._step.after(optimizer, args, kwargs)
            self._end()

    def _after_loading(self, optimizer: Optimizer) -> None:
        if not self._keeps_state and self._has_own_state(optimizer):
            optimizer.state.clear()
