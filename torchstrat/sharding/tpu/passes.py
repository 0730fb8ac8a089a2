"""Several passes of one run, for replicas whose batches have different shapes: in turns, as if they were one.

The lanes of a pass need equal shapes, and the last batch of an epoch seldom divides. Replicas with as many rows share a
pass; the passes run the step one after the other and meet where replicas do: at the end of a backward pass, after an
optimizer's step, in collectives. All of them are recorded into one program.

The first pass works on the variables; the others on values that are put back when their turn is over, so that what a
step does to variables and gradients by hand is done once. Optimizers step in the first pass; the others evaluate a
closure whenever that step does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchstrat.core._torch_private import (
    hooks_after_accumulation,
    hooks_on_gradient,
    own_parameters,
    set_version_counters,
    untouched_by_surroundings,
    version_of,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.optimizers import be_idle, make_stand_in, stepped_by
from torchstrat.core.reachable import MembersWatch, Watcher
from torchstrat.core.variables import VariableRegistry
from torchstrat.replicas.in_process.baton import Baton, WorkerThreads
from torchstrat.replicas.in_process.component_attributes import ComponentAttributes, ComponentHelpers
from torchstrat.replicas.optimizer_step import StepInProgress, closure_of, with_closure
from torchstrat.replicas.state import OwnCopies, leave_graph
from torchstrat.replicas.thread_state import ProcessSettings, ThreadState
from torchstrat.sharding.tpu.backward import Combine, Payload, Result
from torchstrat.sharding.tpu.edits import MadeInRun
from torchstrat.sharding.tpu.lanes import steps_own_tensors
from torchstrat.sharding.tpu.limits import current_place, explaining

FIRST = 0
HOST = torch.device("cpu")


class Alone:
    """In the place of `Passes`, for a run with one."""

    def __init__(self) -> None:
        self.made = MadeInRun()

    @staticmethod
    def meet(call: str, payload: Payload, combine: Combine[Payload, Result]) -> Result:
        return combine({FIRST: payload})[FIRST]

    @staticmethod
    def expose(tensor: torch.Tensor) -> None:
        pass


@dataclass
class _Held:
    """One variable or buffer. ``agreed…``: as of the last meeting; ``first…``: as the first pass left it;
    ``first_memory``: the first pass's, while another one has memory of its own."""

    tensor: torch.Tensor
    agreed: torch.Tensor
    agreed_version: int
    agreed_grad: torch.Tensor | None
    first: torch.Tensor | None = None
    first_version: int = 0
    first_grad: torch.Tensor | None = None
    first_memory: torch.Tensor | None = None
    first_hooks: tuple[dict[int, object], ...] = ()
    entered_version: int = 0

    def give_back(self) -> None:
        """The memory that passes share has again what the first one left there."""
        if self.first is not None or version_of(self.tensor) != self.entered_version:
            _overwrite(self.tensor, self.agreed if self.first is None else self.first, self.first_version)
        self.first = None

    def lend(self, own: torch.Tensor, version: int) -> None:
        """``own``: memory that has the other pass's values; no longer the first one's."""
        self.first_memory = self.tensor.data
        self.tensor.data = own
        set_version_counters([self.tensor], [version])


class _Values:
    """The variables of a run with several passes.

    Edits in place are told by versions. Where a pass has asked for a variable's ``data``, which tells nobody of edits
    and can be replaced, every pass has memory of its own.
    """

    def __init__(self, registry: VariableRegistry) -> None:
        self._registry = registry
        self._held: dict[int, _Held] = {}  # by id
        self._turn = FIRST
        self._exposed: set[int] = set()
        self._own: dict[tuple[int, int], torch.Tensor] = {}  # memory, by pass and id

    def agree(self) -> None:
        """All passes stand still: what is there now is what each of them goes on with."""
        buffers = [slot.tensor for slot in self._registry.buffer_slots()]
        tensors = [one for one in (*self._registry.tensors(), *buffers) if one is not None and not is_lazy(one)]
        with untouched_by_surroundings():
            leave_graph(tensors)
            self._held = {
                id(one): _Held(
                    one, one.detach().clone(), version_of(one), None if one.grad is None else _copy(one.grad)
                )
                for one in tensors
            }

    def forget(self) -> None:
        """The run is over."""
        self._held, self._exposed, self._own = {}, set(), {}

    def expose(self, tensor: torch.Tensor) -> None:
        """The pass whose turn it is asks for ``tensor.data``, or replaces it."""
        held = self._held.get(id(tensor))
        if held is None:
            return
        self._exposed.add(id(tensor))
        if self._turn != FIRST and held.first_memory is None:
            with untouched_by_surroundings():
                own, version = tensor.detach().clone(), version_of(tensor)
                held.give_back()
                held.lend(own, version)

    def enter_other(self, turn: int) -> None:
        """A pass that is not the first begins its turn."""
        self._turn = turn
        with untouched_by_surroundings():
            leave_graph(held.tensor for held in self._held.values())
            for held in self._held.values():
                tensor = held.tensor
                held.first_version, held.first_grad = version_of(tensor), tensor.grad
                held.first_hooks = tuple({} if hooks is None else dict(hooks) for hooks in _hooks_of(tensor))
                if id(tensor) in self._exposed:
                    held.lend(self._memory_of(held), held.agreed_version)
                elif held.first_version != held.agreed_version:
                    held.first = tensor.detach().clone()
                    _overwrite(tensor, held.agreed, held.agreed_version)
                held.entered_version = version_of(tensor)
                tensor.grad = None if held.agreed_grad is None else _copy(held.agreed_grad)

    def _memory_of(self, held: _Held) -> torch.Tensor:
        """The pass's own, which it may have aliases of, with the values that were agreed upon."""
        own = self._own.get((self._turn, id(held.tensor)))
        if own is None or (own.shape, own.dtype) != (held.agreed.shape, held.agreed.dtype):
            return held.agreed.clone()
        return own.copy_(held.agreed)

    def leave_other(self) -> None:
        """Its turn is over: everything is as the first pass left it."""
        turn, self._turn = self._turn, FIRST
        if turn == FIRST:
            return
        with untouched_by_surroundings():
            leave_graph(held.tensor for held in self._held.values())
            for held in self._held.values():
                tensor = held.tensor
                if held.first_memory is None:
                    held.give_back()
                else:
                    self._own[turn, id(tensor)] = tensor.data
                    tensor.data, held.first_memory = held.first_memory, None
                    set_version_counters([tensor], [held.first_version])
                tensor.grad = held.first_grad
                for hooks, first in zip(_hooks_of(tensor), held.first_hooks, strict=True):
                    if hooks is not None and hooks.keys() != first.keys():
                        hooks.clear()
                        hooks.update(first)


def _hooks_of(tensor: torch.Tensor) -> tuple[dict[int, object] | None, ...]:
    """Of backward passes, which are made as one: they call the first pass's."""
    return hooks_on_gradient(tensor), hooks_after_accumulation(tensor)


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    """With its graph, if it has one: the step may differentiate it."""
    with torch.enable_grad():
        return gradient.clone() if gradient.requires_grad else gradient.detach().clone()


def _overwrite(tensor: torch.Tensor, value: torch.Tensor, version: int) -> None:
    tensor.copy_(value)
    set_version_counters([tensor], [version])


def _parameters(member: object) -> list[nn.Parameter]:
    if isinstance(member, nn.Module):
        return list(member.parameters())
    return [member] if isinstance(member, nn.Parameter) else []


def _refuse_new(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the step {what} in a run whose replicas have different numbers of rows, on TPUStrategy. Do so outside of "
        "run, in strategy.scope(), or give every replica as many rows (leave out the last batch, or have others of "
        "another size)."
    )


class Passes:
    """The passes of one run. ``index``: of the pass whose turn it is, on its thread."""

    def __init__(self, registry: VariableRegistry, count: int, threads: WorkerThreads) -> None:
        self._registry, self._count = registry, count
        self._values = _Values(registry)
        self._helpers, self._attributes = ComponentHelpers(), ComponentAttributes()
        self._settings = ProcessSettings()
        ignore = lambda *_: None  # noqa: E731
        self._members = MembersWatch(Watcher(lambda: self.index is not None, self._on_member, ignore, ignore))
        self._in_progress = StepInProgress()  # the first pass's
        self._installed = FIRST
        self._baton = Baton(range(count), threads, self._switch)
        self._local = threading.local()
        self.made = MadeInRun()

    def _on_member(self, module: nn.Module, name: str, member: object) -> None:
        before = {**own_parameters(module), **dict(module.named_children())}.get(name)
        is_replaced = before is not None and before is not member and module in self._registry
        if is_replaced and _parameters(before) and any(one not in self._registry for one in _parameters(member)):
            # Each pass would train one of its own, and an optimizer that is given them the last one.
            raise _refuse_new(f"replaces {name} of {type(module).__name__} by new parameters")
        self._attributes.expect_member(module, name, member, self._installed)

    @property
    def index(self) -> int | None:
        """Of the pass that the calling thread records; None on other threads."""
        found: int | None = getattr(self._local, "index", None)
        return found

    def run(self, body: Callable[[int], object]) -> list[object]:
        """``body(index)`` for each pass; what they returned, in order."""
        state = ThreadState(self._registry.thread_locals())

        def main(index: int) -> object:
            self._local.index = index
            try:
                return state.call(HOST, lambda: body(index), lasts=index == FIRST)
            finally:
                self._local.index = None

        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._members.begin()
        try:
            returned = self._baton.run(main, begin=self._begin, end=self._end)
        finally:
            self._members.end()
            for handle in handles:
                handle.remove()
            self._values.forget()  # what is alive when the program runs would be a result of it
        state.hand_back()
        return [returned[index] for index in range(self._count)]

    def _begin(self) -> None:
        replicas, made = list(range(self._count)), OwnCopies()
        self._helpers.begin(self._registry.helpers(), replicas, made)
        self._attributes.begin(self._registry.modules(), replicas, made)
        self._settings.begin(range(self._count))
        with explaining():
            self._values.agree()

    def _end(self, error: BaseException | None) -> None:
        self._switch(None)
        self._helpers.end()
        self._settings.end()
        if error is None:
            self._attributes.refuse_other_numbers()
            if (container := self._attributes.grown()) is not None:
                raise _refuse_new(f"adds members to a {type(container).__name__}")

    def meet(self, call: str, payload: Payload, combine: Combine[Payload, Result]) -> Result:
        """See `Baton.meet`."""

        def then_agree(payloads: dict[int, Payload]) -> dict[int, Result]:
            with explaining(current_place):
                results = dict(combine(payloads))
                self._values.agree()
            return results

        own: Result = self._baton.meet(call, payload, then_agree)
        return own

    def expose(self, tensor: torch.Tensor) -> None:
        """A step asks for ``tensor.data``, or replaces it."""
        self._values.expose(tensor)

    def _switch(self, index: int | None) -> None:
        self._values.leave_other()
        if index is not None:  # what is done while all stand still sets nothing
            self._settings.activate(index)
        wanted = FIRST if index is None else index
        if wanted != self._installed:
            self._helpers.park(self._installed)
            self._attributes.park(self._installed)
            self._helpers.install(wanted)
            self._attributes.install(wanted)
            self._installed = wanted
        if wanted != FIRST:
            self._values.enter_other(wanted)

    # -- steps of optimizers ----------------------------------------------------------------------------------------

    def _is_everyones(self, optimizer: Optimizer) -> bool:
        """Whether the step is one that every pass makes, and not a part of another step."""
        return self.index is not None and not self._in_progress.is_around() and not steps_own_tensors(optimizer)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if self._baton.holder is None or not self._is_everyones(optimizer):
            return None  # without a holder all stand still, and what is done, as in a hook of backward, is done once
        closure, name = closure_of(args, kwargs), _name_of(optimizer)
        if self.index == FIRST:
            self._helpers.enter_step(optimizer)
            self._in_progress.begin()
            return closure and with_closure(optimizer, partial(self._lead, optimizer, closure), args, kwargs)
        if closure is None:
            return (be_idle(make_stand_in(optimizer)), *args[1:]), kwargs
        losses = []
        with torch.enable_grad():
            while self._is_evaluated(name, None):
                losses.append(closure())
        loss = losses[0] if losses else None
        return with_closure(be_idle(make_stand_in(optimizer), loss), lambda: loss, args, kwargs)

    def _lead(self, optimizer: Optimizer, closure: Callable[[], object]) -> object:
        """An evaluation that the first pass's step asks for: every pass makes it."""
        frame, self._in_progress.frame = self._in_progress.frame, None
        self._helpers.leave_step(optimizer)
        self._is_evaluated(_name_of(optimizer), True)
        loss = closure()
        self._helpers.enter_step(optimizer)
        self._in_progress.frame = frame
        return loss

    def _is_evaluated(self, name: str, is_wanted: bool | None) -> bool:
        """Whether the first pass, which says so, wants the closure evaluated."""
        return bool(
            self.meet(f"{name} with a closure", is_wanted, lambda payloads: dict.fromkeys(payloads, payloads[FIRST]))
        )

    def _after_step(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._baton.holder is None:
            self._helpers.leave_step(optimizer)
            return
        if not self._is_everyones(optimizer):
            return
        if self.index == FIRST:
            self._in_progress.end()
            self._helpers.leave_step(optimizer)
            if closure_of(args, kwargs) is not None:
                self._is_evaluated(_name_of(optimizer), False)
        else:
            self._helpers.forget_state(optimizer)
        self.meet(_name_of(optimizer), optimizer, _require_one)


def _require_one(optimizers: dict[int, Optimizer]) -> dict[int, None]:
    """Raises `UnsupportedError` where passes have stepped other variables than the first, which alone has stepped."""
    first, *others = ({id(tensor) for tensor in stepped_by(optimizer)} for optimizer in optimizers.values())
    if any(other != first for other in others):
        raise UnsupportedError(
            f"the step has made parameters and steps them ({type(optimizers[FIRST]).__name__}), in a run in which "
            "replicas have different numbers of rows: on this strategy there would be others for each number of rows. "
            "Make modules that a step trains within `with strategy.scope():`, or leave partial batches out "
            "(drop_last=True)."
        )
    return dict.fromkeys(optimizers)


def _name_of(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__}.step()"
