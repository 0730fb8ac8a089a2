"""The optimizer's step when several replicas in one process call it: made once, by the first, on the central variables.

Its values are written to the others' copies while these stand still. Every other replica's call gets a stand-in of the
same class that has no parameters and a state of its own, so whatever its ``step`` does has no effect.

Where replicas step variables of their own (`LocalComponents`), each finds again in the next run what it has. Outside of
runs the user's objects are the first replica's. What the program does to them it does to everyone's, which become
copies of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core._torch_private import after_step, before_step, version_of
from torchstrat.core.errors import ReplicaDivergenceError, UnsupportedError
from torchstrat.core.optimizers import be_idle, make_stand_in, stepped_by
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.variables import VariableRegistry
from torchstrat.replicas.engine import StepWeights
from torchstrat.replicas.in_process.baton import Baton
from torchstrat.replicas.in_process.component_attributes import ComponentHelpers
from torchstrat.replicas.in_process.component_buffers import copy_to
from torchstrat.replicas.in_process.components import Components
from torchstrat.replicas.in_process.gradients import InProcessGradients
from torchstrat.replicas.in_process.members import what_is_replaced
from torchstrat.replicas.optimizer_state import real_state
from torchstrat.replicas.optimizer_step import OptimizerStep, StepCall, closure_of, put_hooks, remove_hooks, step_led
from torchstrat.replicas.roster import Roster
from torchstrat.replicas.scaling_lookups import ScalingLookups
from torchstrat.replicas.state import (
    DifferingEdits,
    TensorSlot,
    edited_differently,
    gradients_edited_differently,
    settle,
    state_edited_differently,
)
from torchstrat.replicas.thread_state import OwnSettings
from torchstrat.replicas.update_policies import LocalRounds, OwnValues, put_values


class InProcessSteps:
    """The steps of all replicas of one process, and the policy that makes them one. PyTorch's hooks, under
    ``hook_key``, see every optimizer of the process and go to the replica whose turn it is; ``is_replica_thread()``:
    whether the calling thread runs one."""

    steps_alone = True

    def __init__(
        self,
        components: Components,
        gradients: InProcessGradients,
        differing: DifferingEdits,
        lookups: ScalingLookups,
        is_replica_thread: Callable[[], bool],
        op: ReduceOp,
        hook_key: int,
    ) -> None:
        self._components = components
        self._gradients = gradients
        self._differing = differing
        self._is_replica_thread = is_replica_thread
        self._steps = [OptimizerStep(self, own, lookups, op) for own in gradients.of_replicas]
        self._hook_key, self._hooks = hook_key, (before_step(self._before), after_step(self._after))
        self._baton: Baton | None = None
        self._own: dict[int, tuple[Optimizer, int]] = {}  # optimizers that one replica made for itself, and which

    def begin(self, baton: Baton, weights: StepWeights) -> None:
        """A run begins."""
        self._baton = baton
        for replica in weights.active:
            self._steps[replica].begin(self._gradients.communicator, weights, replica)
        put_hooks(self._hook_key, self._hooks, self._gradients.before_clipping)

    def end(self) -> None:
        remove_hooks(self._hook_key)
        for step in self._steps:
            step.end()
        self._baton, self._own = None, {}

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> object:
        replica = None if self._baton is None else self._baton.holder
        return None if replica is None else self._steps[replica].before(optimizer, args, kwargs)

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        replica = None if self._baton is None else self._baton.holder
        if replica is not None:
            self._steps[replica].after(optimizer, args, kwargs)

    @property
    def _replica(self) -> int:
        assert self._baton is not None
        assert self._baton.holder is not None
        return self._baton.holder

    @property
    def _leads(self) -> bool:
        assert self._baton is not None
        return self._baton.holder == self._baton.first

    def variables_of(self, optimizer: Optimizer) -> list[torch.Tensor]:
        tensors = stepped_by(optimizer)
        known = self._slots_of(tensors)
        if all(slot.is_copy and not slot.is_shared for slot in known):
            if tensors and self._is_replica_thread():
                self._note_own(optimizer)
            return []
        if len(known) < len(tensors) and self._is_replica_thread():
            assert self._baton is not None
            self._baton.shield()
            with OwnSettings():
                self._components.register_newborn(tensors)
            self._baton.unshield()
        return tensors

    def _slots_of(self, tensors: list[torch.Tensor]) -> list[TensorSlot]:
        return [slot for slot in map(self._components.slot_of, tensors) if slot is not None]

    def comes_last(self, optimizer: Optimizer) -> bool:
        return False

    # -- before the step --------------------------------------------------------------------------------------------

    def level(self, call: StepCall) -> bool:
        """The first replica's step is everyone's, but where every replica has an optimizer of its own over variables of
        its own, all made in this run."""

        def combine(brought: dict[int, tuple[Optimizer, bool, bool]]) -> dict[int, tuple[bool, bool]]:
            optimizers = {replica: one for replica, (one, _, _) in brought.items()}
            first, *others = optimizers.values()
            if any(other is not first for other in others):
                if all(self._is_over_own_variables(one, replica) for replica, one in optimizers.items()):
                    are_twins = all(self._gradients.twins.are_of_first(stepped_by(one)) for one in others)
                    is_left = are_twins and any(left for _, _, left in brought.values())
                    return dict.fromkeys(optimizers, (False, is_left))
                _let_be_one(optimizers)
            with OwnSettings():
                self._components.refuse_changes_of_made(at_end=False)
                slots = self._slots_of(call.tensors)
                self._components.share(slots)
                are_as_combined = all(is_as_combined for _, is_as_combined, _ in brought.values())
                has_looked = any(state.is_looked_at for state in self._components.helpers.states())
                if self._components.has_edits or not are_as_combined or has_looked:
                    self._report_differing(slots, list(optimizers))
                self._components.merge_rows()
            return dict.fromkeys(optimizers, (True, any(left for _, _, left in brought.values())))

        assert self._baton is not None
        brought = call.optimizer, *self._gradients.look_at(call.tensors)
        is_everyones, is_left_over = self._baton.meet(call.name, brought, combine)
        if is_left_over:
            self._gradients.catch_up(call.tensors)
        if not is_everyones:
            self._note_own(call.optimizer)
            self._gradients.after_step(call.tensors)
        return bool(is_everyones)

    def _report_differing(self, slots: list[TensorSlot], replicas: list[int]) -> None:
        if self._differing.is_told or len(replicas) < 2:
            return
        edited = edited_differently(self._components.unmerged(slots), replicas) if self._components.has_edits else []
        gradients = gradients_edited_differently(slots, replicas, self._gradients.combined_of)
        self._differing.report(edited, gradients, state_edited_differently(self._components.helpers.states()))

    def _is_over_own_variables(self, optimizer: Optimizer, replica: int) -> bool:
        slots = [self._components.slot_of(tensor) for tensor in stepped_by(optimizer)]
        return all(slot is not None and slot.made_by == replica and not slot.is_shared for slot in slots)

    def _note_own(self, optimizer: Optimizer) -> None:
        """An optimizer over tensors of this replica alone, made in the step: its own affair."""
        known, first = self._own.setdefault(id(optimizer), (optimizer, self._replica))
        if first != self._replica:
            raise ReplicaDivergenceError(
                f"replicas {first} and {self._replica} step one {type(known).__name__} over tensors that are no "
                "variables of the strategy: made during this run in no module, or hidden from it. Make variables that "
                "replicas share, and their optimizer, within `with strategy.scope():`."
            )

    # -- the step ---------------------------------------------------------------------------------------------------

    def begin_evaluation(self, call: StepCall) -> None:
        """All have the same values."""

    def end_evaluation(self, call: StepCall) -> None:
        if self._leads:
            with OwnSettings():
                self._components.merge_rows_in_turn()

    def begin_step(self, call: StepCall) -> Optimizer | None:
        if not self._leads:
            return be_idle(make_stand_in(call.optimizer))
        self._enter(call)
        return None

    def end_step(self, call: StepCall) -> None:
        if not self._leads:
            with OwnSettings():
                self._components.undo_edits(call.optimizer, call.tensors)
                self._gradients.after_step(call.tensors)
        elif call.closure is None:
            self._leave(call)

    def _enter(self, call: StepCall) -> None:
        """Until `_leave` no Ctrl-C: an interrupted step would leave the variables half-stepped."""
        assert self._baton is not None
        self._baton.shield()
        with OwnSettings():
            self._components.enter_step(call.optimizer)

    def _leave(self, call: StepCall) -> None:
        assert self._baton is not None
        with OwnSettings():
            self._components.leave_step(call.optimizer, call.tensors)
            self._gradients.after_step(call.tensors)
        self._baton.unshield()

    def step_with_closure(self, call: StepCall, evaluate: Callable[[], object]) -> Any:
        """The first replica leads: the others evaluate the closure whenever its step does."""
        communicator = self._gradients.communicator
        noted = self._gradients.central()

        def enter() -> None:
            nonlocal noted
            self._enter(call)
            noted = self._gradients.central()

        def leave() -> None:
            with OwnSettings():
                self._gradients.spread_central(noted)
            self._leave(call)

        def pause() -> None:
            leave()
            communicator.broadcast_object(("evaluate", None), 0, call.name)

        if self._leads:
            enter()
            value = step_led(call, pause, evaluate, enter)
            leave()
            communicator.broadcast_object(("done", value), 0, call.name)
            return value
        while True:
            order, value = communicator.broadcast_object(None, 0, call.name)
            if order == "done":
                return value
            evaluate()


class LocalSteps:
    """Instead of `InProcessSteps` where each replica steps its own: tells its rounds that there was a step, and holds a
    Ctrl-C back meanwhile, which would leave variables half-stepped."""

    def __init__(self, rounds: Sequence[LocalRounds], components: Components, hook_key: int) -> None:
        self._rounds = rounds
        self._components = components
        self._hooks = before_step(self._before), after_step(self._after)
        self._hook_key = hook_key
        self._baton: Baton | None = None

    def begin(self, baton: Baton, weights: StepWeights) -> None:
        self._baton = baton
        put_hooks(self._hook_key, self._hooks, lambda _: None)

    def end(self) -> None:
        remove_hooks(self._hook_key)
        self._baton = None

    def _before(self, optimizer: Optimizer, args: Sequence[object], kwargs: dict[str, object]) -> None:
        """What has come up in this run is known from here on: the others get its value from before the step."""
        if self._baton is not None and self._baton.holder is not None:
            with OwnSettings():
                self._components.register_newborn()
            if closure_of(args, kwargs) is None:
                self._baton.shield()

    def _after(self, optimizer: Optimizer, args: Sequence[object], kwargs: dict[str, object]) -> None:
        replica = None if self._baton is None else self._baton.holder
        if self._baton is not None and replica is not None:
            self._rounds[replica].note_step(optimizer)
            if closure_of(args, kwargs) is None:
                self._baton.unshield()


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


def _refuse_own_member(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"a step {what}. With local steps in one process each replica would have its own, and only the first one's "
        "would last. Do it between runs, within `with strategy.scope():`, or write to values that are there "
        "(weight.data.copy_(…)); with one process for each replica (torchrun) a step may do it."
    )


class LocalComponents(Components):
    """All replicas take part in every run, and the first one leads."""

    _undoes = False

    def __init__(self, registry: VariableRegistry, devices: tuple[torch.device, ...]) -> None:
        super().__init__(registry, devices, None, ComponentHelpers(apart=True))

    def _level(self) -> None:
        self.refresh(self._touched())

    def expect_member(self, module: nn.Module, name: str, value: torch.Tensor | nn.Module) -> None:
        if len(self._replicas) > 1 and what_is_replaced(module, name, value) is not None:
            raise _refuse_own_member(f"puts another member in the place of {type(module).__name__}.{name}")
        super().expect_member(module, name, value)

    def refuse_changes_of_made(self, *, at_end: bool) -> None:
        super().refuse_changes_of_made(at_end=at_end)
        if not (at_end and self._made):
            return
        if (container := self._attributes.grown()) is not None:
            raise _refuse_own_member(f"adds members to a {type(container).__name__}")
        for helper, (first, *others) in self.helpers.settings():
            stepped = [[id(one) for group in groups for one in group.get("params", ())] for groups in (first, *others)]
            if isinstance(helper, Optimizer) and any(one != stepped[0] for one in stepped):
                raise _refuse_own_member(f"gives one replica's {type(helper).__name__} other parameters than another's")

    def _touched(self) -> list[torch.Tensor]:
        """What the program has changed since the last run. Of all else replicas find what they have left."""
        touched = []
        for slot in self._slots.values():
            if slot.is_untouched(slot.tensor) and all(replica in slot.data for replica in self._replicas):
                slot.data[self._home], slot.versions[self._home] = slot.tensor.data, version_of(slot.tensor)
                slot.agreed = slot.unedited = None
            else:
                touched.append(slot.tensor)
        return touched

    def end_apart(self, *, is_end: bool) -> None:
        """`end` where replicas stay apart; but buffers become alike at the end of a round (``is_end``)."""
        self.park()
        try:
            if is_end:
                self.buffers.merge([1.0] * len(self._replicas), ())
        except BaseException:  # a warning, where the program has these as errors
            is_end = False
            raise
        finally:
            if not is_end:
                self.buffers.keep_apart()
            settle(self._made, self._replicas, self._home)
            self._leave()
            for slot in self._slots.values():
                slot.keep_apart(slot.tensor)
            self._let_go(failed=False, is_round=is_end)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def own_values(self, replica: int, roster: Roster) -> OwnValues:
        """Between runs, where replicas stay apart: what that one will find in the next."""
        parameters = {}
        for name, tensor in roster.items():
            slot = self._slots.get(id(tensor))
            is_own = slot is not None and replica in slot.data and replica != self._home and slot.is_untouched(tensor)
            parameters[name] = slot.data[replica] if slot is not None and is_own else tensor
        states = [dict(one.state) for one in self._registry.optimizers()]
        if replica != self._home:
            states = [self.helpers.state_of(one, replica, self._home) for one in self._registry.optimizers()]
        return OwnValues(parameters, self.buffers.own_of(replica, self._registry.named_buffer_slots()), states)

    def put_own_values(self, own: Mapping[int, OwnValues], roster: Roster) -> None:
        """Every replica finds these in the next run."""
        put_values(self._registry, roster, own[0])
        for name, tensor in roster.items():
            slot = self._slots.get(id(tensor)) or self._new_slot(tensor)
            for replica, values in own.items():
                value = values.parameters.get(name, tensor)
                value = value if value.shape == tensor.shape else tensor
                slot.data[replica] = copy_to(value.detach(), self._devices[replica])
                slot.versions[replica] = version_of(tensor)
            slot.keep_apart(tensor)
        self.buffers.put_own(own, self._registry.named_buffer_slots())
        for number, optimizer in enumerate(self._registry.optimizers()):
            states = {r: values.optimizers[number] for r, values in own.items() if r and values.optimizers}
            self.helpers.put_states(optimizer, states)
