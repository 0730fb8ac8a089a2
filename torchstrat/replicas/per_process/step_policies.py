"""Who steps the variables of replicas in several processes: all of them, the first one, or each a part; and what these
make equal before a step, which reads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from torchstrat.core.engine import Communicator
from torchstrat.core.errors import InvalidArgumentError, ReplicaDivergenceError, UnsupportedError
from torchstrat.core.optimizers import (
    bare_step,
    be_idle,
    is_listed,
    is_seen_to_step,
    make_stand_in,
    step_in_blocks,
    stepped_by,
    wrapped_by,
)
from torchstrat.distributed.collectives.agreement import agree, all_equal, fingerprint
from torchstrat.replicas import optimizer_state
from torchstrat.replicas.central.storage import CentralStorage
from torchstrat.replicas.exchange import broadcast_gradients, broadcast_tensors
from torchstrat.replicas.gradient_records import GradientRecords, GradientStatus, NotedGradients
from torchstrat.replicas.gradient_synchronizer import GradientSynchronizer
from torchstrat.replicas.optimizer_step import StepCall, step_led
from torchstrat.replicas.per_process.edits import ParameterEdits
from torchstrat.replicas.roster import Roster
from torchstrat.replicas.state import DifferingEdits


class StepLevels:
    """What ranks make equal before a step. ``storage``: central storage in memory that they share."""

    steps_alone: bool
    """Whether steps are the first rank's, but for those that are shared out."""

    def __init__(
        self,
        gradients: GradientSynchronizer,
        edits: ParameterEdits,
        differing: DifferingEdits,
        storage: CentralStorage | None = None,
    ) -> None:
        self._gradients = gradients
        self._edits = edits
        self._differing = differing
        self._storage = storage

    def begin(self, communicator: Communicator) -> None:
        """A run of these ranks begins."""
        self._communicator = communicator

    def make_equal(self, call: StepCall, elsewhere: list[torch.Tensor], *, is_shared: bool = False) -> None:
        """Combine what no backward pass has, and undo what edits made different. All ranks call it.

        Clipping edits every rank's gradient alike, random noise does not: where fingerprints of edited gradients and
        parameters differ, the first rank's count, as they would in one process. In central storage its edits of
        parameters always do, because there is one copy to take them; and what it put into the state of an optimizer
        whose steps are shared out (``is_shared``). Hyperparameters and state are the first one's everywhere.

        ``elsewhere``: the variables that each rank has a copy of.
        """
        optimizer, tensors, name, storage = call.optimizer, call.tensors, call.name, self._storage
        shared = optimizer if is_shared else None
        edited = self._edits.since_noted(elsewhere)
        alone = self.steps_alone and not is_shared
        state = self.state_digest(optimizer)
        self._edits.state.pause(optimizer)
        left_over: set[int] = set()
        as_combined = self._gradients.records.are_as_combined(tensors)
        if not as_combined:
            left_over = {id(tensor) for tensor in self._gradients.records.left_over(tensors)}
            edited += self._gradients.records.edited(t for t in tensors if id(t) not in left_over)
        missing = zlib.crc32(bytes([tensor.grad is None for tensor in tensors]))
        numbers: tuple[float, ...] = (float(bool(left_over)), float(len(edited)), float(missing), *fingerprint(edited))
        if storage is not None:
            is_foreign = shared is not None and storage.is_foreign(shared)
            is_torn = not as_combined and self._gradients.records.torn(tensors)
            has_edits = storage.look_for_edits(rows=True)
            edits = fingerprint([tensor.detach() for tensor in tensors])[0] if has_edits else 0.0
            numbers = (*numbers, float(has_edits), float(is_foreign), float(is_torn), edits)
        everyone = agree(self._communicator, name, (*numbers, state, optimizer_state.digest(optimizer)))
        if all_equal(everyone) and not (left_over or any(numbers[5:8])):
            return
        if not all_equal([row[-1:] for row in everyone]):
            self._differing.report_settings(optimizer, optimizer_state.level(self._communicator, optimizer, name))
        if alone and not all_equal([[*row[8:9], row[-2]] for row in everyone]):
            self.refuse_moves_by_state([optimizer], name)
        elif not all_equal([row[-2:-1] for row in everyone]):
            self._level_state(optimizer, name, is_shared=is_shared)
        if storage is not None and any(row[7] for row in everyone):
            raise InvalidArgumentError(
                f"gradients have been changed between backward() and {name}, and with gradients='owner' no rank has "
                "all of any of them: clipping, GradScaler.unscale_ and noise would act on parts. Leave the argument "
                "out (gradients='everywhere') for steps that read or change gradients."
            )
        if any(row[0] for row in everyone):
            self._gradients.catch_up(tensors)
        if not all_equal([row[1:5] for row in everyone]):
            differing = self._find_differing(tensors, elsewhere, name)
            scaled = {id(tensor) for tensor in self._edits.level(self._communicator, elsewhere, name)}
            self._report(differing, scaled)
            grads = broadcast_gradients(self._communicator, [t.grad for t in tensors], tensors, 0, name)
            for tensor, grad in zip(tensors, grads, strict=True):
                if tensor.grad is not grad:
                    self._gradients.records.take_over(tensor, grad, GradientStatus.COMBINED)
        if storage is not None and any(row[5] for row in everyone):
            has_rows = any(row[5] > 1 for row in everyone)
            if not has_rows and any(row[8] != everyone[0][8] for row in everyone):
                self._report(self._find_differing(tensors, tensors, name))
            storage.publish_edits(self._communicator, name, rows=has_rows)
        if storage is not None and shared is not None and any(row[6] for row in everyone):
            storage.take_state(self._communicator, shared, name)

    def state_digest(self, optimizer: Optimizer) -> float:
        """A number that is equal on ranks that have made the same edits of its state; or, where the first rank alone
        has that, that have moved parameters alike, which the step's code may do by it."""
        return self._edits.state.digest(optimizer)

    def refuse_moves_by_state(self, optimizers: Iterable[Optimizer], call: str) -> None:
        """Ranks have changed parameters differently. An optimizer of a class of the program's own may have done so by
        its state, which the first rank alone has. All ranks call it."""
        for optimizer in optimizers:
            if is_listed(type(optimizer)) or not is_seen_to_step(optimizer):
                continue
            looked = float(self._edits.state.is_looked_at(optimizer))
            if any(row[0] for row in agree(self._communicator, call, (looked,))):
                raise UnsupportedError(
                    f"the step has changed parameters by what optimizer.state holds{_methods_of(optimizer)}, and that "
                    "rank 0 alone has, as central storage steps an optimizer of a class of one's own there: the others "
                    "have trained with other parameters. Call it between runs, where rank 0's parameters become "
                    "everyone's, or use MirroredStrategy, under which every rank has the state."
                )

    def level_edits(self, elsewhere: list[torch.Tensor], call: str) -> None:
        """Undo what edits of parameters in place made different, in the midst of a step. All ranks call it."""
        numbers: tuple[float, ...] = fingerprint(self._edits.since_noted(elsewhere))
        if self._storage is not None:
            numbers = (*numbers, float(self._storage.look_for_edits(rows=True)))
        everyone = agree(self._communicator, call, numbers)
        if not all_equal([row[:2] for row in everyone]):
            self._edits.level(self._communicator, elsewhere, call)
        if self._storage is not None and any(row[-1] for row in everyone):
            self._storage.publish_edits(self._communicator, call, rows=any(row[-1] > 1 for row in everyone))

    def _level_state(self, optimizer: Optimizer, call: str, *, is_shared: bool) -> None:
        """``is_shared``: what the first rank has put there is everyone's anyhow, once edits are published."""
        places = self._edits.state.differing(self._communicator, optimizer, call)
        tensors = stepped_by(optimizer)
        self._differing.report([], state=[tensors[place] for place in places])
        if not is_shared:
            self._edits.state.level(self._communicator, optimizer, places, call)

    def level_state(self, optimizer: Optimizer, call: str) -> None:
        """The end of a run in which ranks have changed the optimizer's state differently. All ranks call it."""
        storage = self._storage
        self._level_state(optimizer, call, is_shared=storage is not None)
        if storage is None:
            return
        own = (float(storage.look_for_edits()), float(storage.is_foreign(optimizer)))
        rows = agree(self._communicator, call, own)
        if any(row[0] for row in rows):
            storage.publish_edits(self._communicator, call)
        if any(row[1] for row in rows):
            storage.take_state(self._communicator, optimizer, call)

    def _find_differing(
        self, tensors: list[torch.Tensor], elsewhere: list[torch.Tensor], call: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parameters, and those whose gradients, ranks have edited each in another way; none once that has been told.
        All ranks call it."""
        if self._differing.is_told:
            return [], []
        prints = (
            [fingerprint([tensor]) for tensor in elsewhere],
            {place: fingerprint([tensor.grad]) for place, tensor in enumerate(tensors) if tensor.grad is not None},
        )
        everyone = self._communicator.all_gather_object(prints, call)
        first = everyone[0]
        if any(len(one[0]) != len(first[0]) for one in everyone):
            counts = ", ".join(str(len(one[0])) for one in everyone)
            raise ReplicaDivergenceError(
                f"in {call} the replicas' optimizers have different numbers of parameters ({counts}): some have added "
                "groups that others have not. Do it on every replica, or outside of Strategy.run; and not by what "
                "optimizer.state holds, where rank 0 alone has it."
            )

        def differs(which: int, place: int) -> bool:
            return any(one[which][place] != first[which][place] for one in everyone)

        return (
            [tensor for place, tensor in enumerate(elsewhere) if differs(0, place)],
            [t for place, t in enumerate(tensors) if all(place in one[1] for one in everyone) and differs(1, place)],
        )

    def _report(
        self, differing: tuple[list[torch.Tensor], list[torch.Tensor]], scaled: Container[int] = frozenset()
    ) -> None:
        """``scaled``: ``id`` of tables of which all ranks' rows have come to count."""
        parameters, gradients = differing
        self._differing.report([tensor for tensor in parameters if id(tensor) not in scaled], gradients)


def _methods_of(optimizer: Optimizer) -> str:
    """What the step may have called, in words."""
    cls = type(optimizer)
    own = [name for name, one in vars(cls).items() if callable(one) and not name.startswith("_")]
    names = [f"optimizer.{name}()" for name in own if not hasattr(Optimizer, name) and name != "step"]
    return f", as {cls.__name__}'s {' or '.join(names)} does" if names else ""


BEFORE = "the beginning of a run (what an optimizer has done to parameters since the one before)"
OWNER = 0
"""The rank that holds the central variables and the optimizer's state under central storage."""


class ReplicatedSteps(StepLevels):
    """Every rank steps its own copies."""

    steps_alone = False

    def before_run(self, world: Communicator, optimizers: Sequence[Optimizer], roster: Roster) -> None:
        """All ranks of the job are about to begin a run, whether or not they have rows."""

    def watched(self, helpers: Sequence[object]) -> Sequence[object]:
        """Those of which it is noted what the step's code looks at of their state."""
        return helpers

    def end(self) -> None:
        """The run is over, or has failed."""

    def variables_of(self, optimizer: Optimizer) -> list[torch.Tensor]:
        return self._gradients.known(stepped_by(optimizer))

    def comes_last(self, optimizer: Optimizer) -> bool:
        return False

    def level(self, call: StepCall) -> bool:
        self.make_equal(call, call.tensors)
        return True

    def begin_step(self, call: StepCall) -> Optimizer | None:
        return None

    def end_step(self, call: StepCall) -> None:
        self._finish(call.tensors)
        self._edits.state.resume(call.optimizer)

    def _finish(self, tensors: list[torch.Tensor]) -> None:
        self._edits.note(tensors)
        self._gradients.records.after_step(tensors)

    def begin_evaluation(self, call: StepCall) -> None:
        self._edits.note(self._elsewhere(call.tensors))

    def end_evaluation(self, call: StepCall) -> None:
        self.level_edits(self._elsewhere(call.tensors), call.name)

    def step_with_closure(self, call: StepCall, evaluate: Callable[[], object]) -> object:
        raise NotImplementedError("everyone steps with a closure of its own")

    def _elsewhere(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those that each rank has a copy of, which nobody but this class makes equal."""
        return tensors


class PrimarySteps(ReplicatedSteps):
    """The owner, which is the first rank, steps, and hands out the new values; the others' optimizers stay without
    state."""

    steps_alone = True
    _settings: list[list[dict[str, Any]]]

    @property
    def _owns(self) -> bool:
        return self._communicator.rank == OWNER

    def before_run(self, world: Communicator, optimizers: Sequence[Optimizer], roster: Roster) -> None:
        """What the program had an optimizer do between runs with its state (averages in the place of weights for an
        evaluation) the owner alone could do, who alone has that state. torch's own have no such methods."""
        if all(is_listed(type(optimizer)) for optimizer in optimizers):
            return
        if not all_equal(agree(world, BEFORE, self._edits.summary(roster))):
            self._edits.make_equal(world, roster, BEFORE)

    def state_digest(self, optimizer: Optimizer) -> float:
        return self._edits.moved_by(optimizer)

    def watched(self, helpers: Sequence[object]) -> Sequence[object]:
        return helpers if any(isinstance(one, Optimizer) and not is_listed(type(one)) for one in helpers) else ()

    def level(self, call: StepCall) -> bool:
        self.make_equal(call, self._elsewhere(call.tensors))
        return True

    def begin_step(self, call: StepCall) -> Optimizer | None:
        self._settings = self._settings_of(call.optimizer)
        return None if self._owns else be_idle(make_stand_in(call.optimizer))

    def end_step(self, call: StepCall) -> None:
        self._tell_settings(call)
        self._hand_out(self._elsewhere(call.tensors), f"{call.name}: the owner's new parameters")
        super().end_step(call)

    def _hand_out(self, tensors: list[torch.Tensor], what: str) -> None:
        """The owner's values are everyone's, and count as written, as the owner's step has counted: backward has to
        notice where it needs what was there before."""
        broadcast_tensors(self._communicator, [tensor.data for tensor in tensors], OWNER, what)
        if not self._owns:
            increment_version(tensors)

    def _settings_of(self, optimizer: Optimizer) -> list[list[dict[str, object]]]:
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

    def step_with_closure(self, call: StepCall, evaluate: Callable[[], object]) -> object:
        """The owner leads: the others evaluate the closure whenever its step does."""
        self._settings = self._settings_of(call.optimizer)
        elsewhere = self._elsewhere(call.tensors)
        gradients = _LeadersGradients(self._communicator, self._gradients.records, call.tensors, call.name)

        def evaluate_together() -> object:
            self._hand_out(elsewhere, call.name)
            loss = evaluate()
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


class ShardedSteps(PrimarySteps):
    """Central storage in memory that the ranks share: steps that can be are shared out among them, and what the owner
    does alone all ranks see without being told."""

    _storage: CentralStorage

    def __init__(
        self, gradients: GradientSynchronizer, edits: ParameterEdits, differing: DifferingEdits, storage: CentralStorage
    ) -> None:
        super().__init__(gradients, edits, differing, storage)
        self._shared: set[int] = set()  # optimizers of which the step that goes on is shared out

    def before_run(self, world: Communicator, optimizers: Sequence[Optimizer], roster: Roster) -> None:
        self._storage.begin_run()
        if not all(is_listed(type(optimizer)) for optimizer in optimizers):
            self._storage.level((), OWNER, BEFORE)
        super().before_run(world, optimizers, roster)

    def state_digest(self, optimizer: Optimizer) -> float:
        if not is_listed(type(optimizer)):
            return super().state_digest(optimizer)
        found = self._edits.state.digest(optimizer)
        return found if found and self._storage.shares(optimizer) else 0.0

    def watched(self, helpers: Sequence[object]) -> Sequence[object]:
        return helpers

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
        self.make_equal(call, self._elsewhere(call.tensors, alone=False), is_shared=True)
        return True

    def begin_step(self, call: StepCall) -> Optimizer | None:
        if id(call.optimizer) in self._shared:
            self._step_parts(call)
            return make_stand_in(call.optimizer)
        stepped = super().begin_step(call)
        if stepped is None:
            self._storage.lead(call.optimizer)
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
        elsewhere = self._elsewhere(call.tensors, alone=False)
        self._hand_out(elsewhere, f"{call.name}: the owner's new parameters")
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

    def step_with_closure(self, call: StepCall, evaluate: Callable[[], object]) -> object:
        """Optimizers whose steps are shared out evaluate a closure once, at the start."""
        if not self._storage.shares(call.optimizer):
            return super().step_with_closure(call, evaluate)
        value = evaluate()
        self.level(call)
        self._step_parts(call)
        return value

    def _begin_leading(self, call: StepCall) -> None:
        self._storage.lead(call.optimizer)

    def begin_evaluation(self, call: StepCall) -> None:
        if not self._storage.shares(call.optimizer):
            self._storage.follow()
            self._storage.parameters.stepped(call.tensors)
        super().begin_evaluation(call)

    def end_evaluation(self, call: StepCall) -> None:
        if self._storage.shares(call.optimizer):
            return  # `level` comes before the step
        super().end_evaluation(call)
        if self._owns:
            self._storage.lead(call.optimizer)


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

    def tell(self, order: tuple[str, object]) -> None:
        """On the owner: send ``order``, and what has become of gradients since they were noted."""
        changed = [place for place, tensor in enumerate(self._tensors) if self._noted.has_changed(tensor)]
        self._communicator.broadcast_object((order, changed), OWNER, self._what)
        self._level(changed)

    def hear(self) -> tuple[str, Any]:
        """On the others."""
        order: tuple[str, object]
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
