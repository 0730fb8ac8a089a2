"""Who steps the variables of replicas in several processes: all of them, the first one, or each a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.collectives.agreement import agree
from torchstrat.collectives.communicator import Communicator
from torchstrat.optimizers import bare_step, be_idle, is_listed, make_stand_in, step_in_blocks, stepped_by, wrapped_by
from torchstrat.replicas import optimizer_state
from torchstrat.replicas.central.storage import CentralStorage
from torchstrat.replicas.gradient_records import GradientRecords, GradientStatus, NotedGradients
from torchstrat.replicas.gradient_synchronizer import GradientSynchronizer
from torchstrat.replicas.optimizer_step import StepCall, step_led
from torchstrat.replicas.per_process.edits import ParameterEdits
from torchstrat.replicas.per_process.step_levels import StepLevels
from torchstrat.replicas.state import DifferingEdits
from torchstrat.replicas.transfer import broadcast_gradients, broadcast_tensors

OWNER = 0
"""The rank that holds the central variables and the optimizer's state under central storage."""


class ReplicatedSteps:
    """Every rank steps its own copies."""

    steps_alone = False

    def __init__(
        self,
        gradients: GradientSynchronizer,
        edits: ParameterEdits,
        differing: DifferingEdits,
        storage: CentralStorage | None = None,
    ) -> None:
        self._gradients = gradients
        self._edits = edits
        self._levels = StepLevels(gradients, edits, differing, storage)

    def begin(self, communicator: Communicator) -> None:
        """A run of these ranks begins."""
        self._communicator = communicator
        self._levels.begin(communicator)

    def end(self) -> None:
        """The run is over, or has failed."""

    def variables_of(self, optimizer: Optimizer) -> list[torch.Tensor]:
        return self._gradients.known(stepped_by(optimizer))

    def comes_last(self, optimizer: Optimizer) -> bool:
        return False

    def level(self, call: StepCall) -> bool:
        self._levels.make_equal(call, call.tensors)
        return True

    def begin_step(self, call: StepCall) -> Optimizer | None:
        return None

    def end_step(self, call: StepCall) -> None:
        self._finish(call.tensors)
        self._edits.state.resume(call.optimizer)

    def level_state(self, optimizer: Optimizer, call: str) -> None:
        """A run has ended in which ranks have changed the optimizer's state differently."""
        self._levels.level_state(optimizer, call)

    def _finish(self, tensors: list[torch.Tensor]) -> None:
        self._edits.note(tensors)
        self._gradients.records.after_step(tensors)

    def step_with_closure(self, call: StepCall, evaluate: Callable[[], Any]) -> Any:
        raise NotImplementedError("everyone steps with a closure of its own")


class PrimarySteps(ReplicatedSteps):
    """The owner, which is the first rank, steps, and hands out the new values; the others' optimizers stay without
    state."""

    steps_alone = True
    _settings: list[list[dict[str, Any]]]

    @property
    def _owns(self) -> bool:
        return self._communicator.rank == OWNER

    def _elsewhere(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those that each rank has a copy of, which nobody but this class makes equal."""
        return tensors

    def level(self, call: StepCall) -> bool:
        self._levels.make_equal(call, self._elsewhere(call.tensors))
        return True

    def begin_step(self, call: StepCall) -> Optimizer | None:
        self._settings = self._settings_of(call.optimizer)
        return None if self._owns else be_idle(make_stand_in(call.optimizer))

    def end_step(self, call: StepCall) -> None:
        self._tell_settings(call)
        values = [tensor.data for tensor in self._elsewhere(call.tensors)]
        broadcast_tensors(self._communicator, values, OWNER, f"{call.name}: the owner's new parameters")
        super().end_step(call)

    def _settings_of(self, optimizer: Optimizer) -> list[list[dict[str, Any]]]:
        """Of what the owner is about to step, where steps may set something."""
        if is_listed(type(optimizer)):
            return []
        return [optimizer_state.settings(one) for one in (optimizer, *wrapped_by(optimizer))]

    def _tell_settings(self, call: StepCall) -> None:
        """What the owner's step has set in its groups and attributes (a count, the next rate) is every rank's."""
        before, self._settings = self._settings, []
        if not before:
            return
        stepped = (call.optimizer, *wrapped_by(call.optimizer))
        own = [optimizer_state.changes(one, earlier) for one, earlier in zip(stepped, before, strict=False)]
        told = self._communicator.broadcast_object(own, OWNER, f"{call.name}: what the owner's step has set")
        if not self._owns:
            for one, changed in zip(stepped, told, strict=False):
                optimizer_state.put(vars(one), changed)

    def step_with_closure(self, call: StepCall, evaluate: Callable[[], Any]) -> Any:
        """The owner leads: the others evaluate the closure whenever its step does."""
        self._settings = self._settings_of(call.optimizer)
        values = [tensor.data for tensor in self._elsewhere(call.tensors)]
        gradients = _LeadersGradients(self._communicator, self._gradients.records, call.tensors, call.name)

        def evaluate_together() -> Any:
            broadcast_tensors(self._communicator, values, OWNER, call.name)
            self._begin_evaluation(call)
            loss = evaluate()
            self._end_evaluation(call)
            gradients.note()
            return loss

        if self._owns:
            self._begin_leading(call)
            value = step_led(call, lambda: gradients.tell(("evaluate", None)), evaluate_together, lambda: None)
            gradients.tell(("done", value))
            return value
        while True:
            order, value = gradients.hear()
            if order == "done":
                return value
            evaluate_together()

    def _begin_leading(self, call: StepCall) -> None:
        """On the owner."""

    def _begin_evaluation(self, call: StepCall) -> None:
        """On all ranks."""

    def _end_evaluation(self, call: StepCall) -> None:
        """On all ranks."""


class ShardedSteps(PrimarySteps):
    """Central storage in memory that the ranks share: steps that can be are shared out among them, and what the owner
    does alone all ranks see without being told."""

    def __init__(
        self, gradients: GradientSynchronizer, edits: ParameterEdits, differing: DifferingEdits, storage: CentralStorage
    ) -> None:
        super().__init__(gradients, edits, differing, storage)
        self._storage = storage
        self._shared: set[int] = set()  # optimizers of which the step that goes on is shared out

    def end(self) -> None:
        self._shared.clear()
        self._storage.follow()  # a step that raised

    def comes_last(self, optimizer: Optimizer) -> bool:
        return self._storage.shares(optimizer)

    def _elsewhere(self, tensors: list[torch.Tensor], *, alone: bool = True) -> list[torch.Tensor]:
        """``alone``: in a step that the owner makes alone, where its parameters are: on its device, perhaps."""
        parameters = self._storage.parameters
        if alone and parameters.staged is not None:
            return [t for t in tensors if t not in parameters or t in parameters.staged]
        return [t for t in tensors if t not in parameters]

    def level(self, call: StepCall) -> bool:
        if not self._storage.shares(call.optimizer):
            self._shared.discard(id(call.optimizer))
            return super().level(call)
        self._shared.add(id(call.optimizer))
        self._levels.make_equal(call, self._elsewhere(call.tensors, alone=False), is_shared=True)
        return True

    def begin_step(self, call: StepCall) -> Optimizer | None:
        if id(call.optimizer) in self._shared:
            self._step_parts(call)
            return make_stand_in(call.optimizer)
        stepped = super().begin_step(call)
        if stepped is None:
            self._storage.lead(call.tensors)
        return stepped

    def _step_parts(self, call: StepCall) -> None:
        """Each rank its part; what is stepped afterwards has nothing to step. So hooks that follow find all of it
        done."""
        own = self._storage.begin_step(self._communicator, call.optimizer, self._gradients.records.owned, call.name)
        if not step_in_blocks(own):
            bare_step(own)
        self._storage.end_step(self._communicator, call.optimizer, f"{call.name}: the end of the step")
        level = self._storage.level_after(call.tensors)
        self._storage.parameters.stepped(level)
        values = [tensor.data for tensor in self._elsewhere(call.tensors, alone=False)]
        broadcast_tensors(self._communicator, values, OWNER, f"{call.name}: the owner's new parameters")
        self._edits.note(level)
        self._gradients.records.after_step(call.tensors)

    def end_step(self, call: StepCall) -> None:
        if id(call.optimizer) in self._shared:
            self._edits.state.resume(call.optimizer)
            return
        self._storage.follow()
        agree(self._communicator, f"{call.name}: the end of the step")
        self._storage.drop_edits()  # of hooks of the user's own, made on what was about to be stepped
        super().end_step(call)

    def _finish(self, tensors: list[torch.Tensor]) -> None:
        self._storage.parameters.stepped(tensors)
        super()._finish(tensors)

    # -- step(closure) ----------------------------------------------------------------------------------------------

    def step_with_closure(self, call: StepCall, evaluate: Callable[[], Any]) -> Any:
        """Optimizers whose steps are shared out evaluate a closure once, at the start."""
        if not self._storage.shares(call.optimizer):
            return super().step_with_closure(call, evaluate)
        value = evaluate()
        self.level(call)
        self._step_parts(call)
        return value

    def _begin_leading(self, call: StepCall) -> None:
        self._storage.lead(call.tensors)

    def _begin_evaluation(self, call: StepCall) -> None:
        self._storage.follow()
        self._storage.parameters.stepped(call.tensors)

    def _end_evaluation(self, call: StepCall) -> None:
        """What a closure has done to parameters in place: the owner's counts."""
        edited = float(self._storage.look_for_edits())
        if any(row[0] for row in agree(self._communicator, call.name, (edited,))):
            self._storage.publish_edits(self._communicator, call.name)
        if self._owns:
            self._storage.lead(call.tensors)


class _LeadersGradients:
    """Gradients that the owner's ``step(closure)`` zeroes, removes or replaces are so on every rank."""

    def __init__(
        self, communicator: Communicator, records: GradientRecords, tensors: list[torch.Tensor], what: str
    ) -> None:
        self._communicator, self._records, self._tensors, self._what = communicator, records, tensors, what
        self.note()

    def note(self) -> None:
        """They are alike on all ranks now."""
        self._noted = NotedGradients(self._tensors)

    def tell(self, order: tuple[str, Any]) -> None:
        """On the owner: send ``order``, and what has become of gradients since they were noted."""
        changed = [place for place, tensor in enumerate(self._tensors) if self._noted.has_changed(tensor)]
        self._communicator.broadcast_object((order, changed), OWNER, self._what)
        self._level(changed)

    def hear(self) -> tuple[str, Any]:
        """On the others."""
        order: tuple[str, Any]
        order, changed = self._communicator.broadcast_object(None, OWNER, self._what)
        self._level(changed)
        return order

    def _level(self, changed: list[int]) -> None:
        if not changed:
            return
        tensors = [self._tensors[place] for place in changed]
        received = broadcast_gradients(self._communicator, [t.grad for t in tensors], tensors, OWNER, self._what)
        for tensor, gradient in zip(tensors, received, strict=True):
            self._records.take_over(tensor, gradient, GradientStatus.COMBINED)
        self.note()
