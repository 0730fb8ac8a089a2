"""The optimizer's step with one replica per process: on every rank (mirrored), on the owner alone, or shared out
(central)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container
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
from torchstrat.collectives.communicator import Communicator
from torchstrat.errors import InvalidArgumentError, ReplicaDivergenceError
from torchstrat.optimizer_blocks import step_in_blocks
from torchstrat.optimizer_tiers import is_listed
from torchstrat.replicas import hyperparameters
from torchstrat.replicas.agreement import agree, all_equal, fingerprint
from torchstrat.replicas.bucketed_gradients import BucketedGradients
from torchstrat.replicas.central.storage import CentralStorage
from torchstrat.replicas.central_step import closure_of, make_inert_stand_in, with_closure
from torchstrat.replicas.differing_edits import DifferingEdits
from torchstrat.replicas.edits import ParameterEdits
from torchstrat.replicas.gradient_records import GradientRecords
from torchstrat.replicas.last_hooks import LastHooks
from torchstrat.replicas.nested_steps import StepInProgress
from torchstrat.replicas.transfer import broadcast_gradients, broadcast_tensors
from torchstrat.stand_ins import bare_step, be_idle, make_stand_in, stepped_by, wrapped_by

OWNER = 0
"""The rank that holds the central variables and the optimizer's state under central storage."""


class ProcessStep:
    """The step hooks of one run, under ``hook_key`` among torch's. ``central``: only the owner (the first rank of
    ``communicator``) steps, and then hands out the new values; the others' optimizers stay without state.

    ``storage``: central storage in memory that the ranks share. Steps that can be are shared out among them, and what
    the owner does alone all ranks see without being told.
    """

    def __init__(
        self,
        communicator: Communicator,
        gradients: BucketedGradients,
        edits: ParameterEdits,
        differing: DifferingEdits,
        mean_loss: Callable[[Any, bool], tuple[Any, bool]],
        hook_key: int,
        *,
        central: bool,
        storage: CentralStorage | None = None,
    ) -> None:
        self._communicator = communicator
        self._gradients = gradients
        self._edits = edits
        self._differing = differing
        self._mean_loss = mean_loss
        self._central = central
        self._storage = storage
        self._order: dict[int, int] = {}
        self._hook_key = hook_key
        self._in_closure_step = False
        self._settings: list[list[dict[str, Any]]] = []
        self._last_hooks = LastHooks()
        self._in_progress = StepInProgress()  # the owner's, which it makes alone

    def __enter__(self) -> ProcessStep:
        optimizer_pre_hooks[self._hook_key] = before_step(self.before)
        optimizer_post_hooks[self._hook_key] = after_step(self.after)
        put_clipping_hook(self._hook_key, self._gradients.before_clipping)
        return self

    def __exit__(self, *_: Any) -> None:
        optimizer_pre_hooks.pop(self._hook_key, None)
        optimizer_post_hooks.pop(self._hook_key, None)
        remove_clipping_hook(self._hook_key)
        self._last_hooks.clear()
        if self._storage is not None:
            self._storage.follow()  # a step that raised

    @property
    def _owns(self) -> bool:
        return not self._central or self._communicator.rank == OWNER

    def _call_name(self, optimizer: Optimizer) -> str:
        number = self._order.setdefault(id(optimizer), len(self._order))
        return f"{type(optimizer).__name__}.step() (optimizer {number})"

    def _variables_of(self, optimizer: Optimizer) -> list[torch.Tensor]:
        return self._gradients.known(stepped_by(optimizer))

    def _elsewhere(self, tensors: list[torch.Tensor], *, alone: bool) -> list[torch.Tensor]:
        """Those that each rank has a copy of, which nobody but this class makes equal.

        ``alone``: in a step that the owner makes alone, where its parameters are: on its device, perhaps.
        """
        if self._storage is None:
            return tensors
        parameters = self._storage.parameters
        if alone and parameters.staged is not None:
            return [t for t in tensors if t not in parameters or t in parameters.staged]
        return [t for t in tensors if t not in parameters]

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """A pre-hook of all optimizers: make gradients and parameters equal; a rank that does not own gets a stand-in
        to step. Where the step is shared out that is done later."""
        if self._in_progress.is_around():
            return None
        if self._storage is None or not self._storage.shares(optimizer):
            changed = self.before_alone(optimizer, args, kwargs)
            if changed is None and closure_of(args, kwargs) is None:
                self._last_hooks.step_in_blocks(optimizer)
            return changed
        if self._variables_of(optimizer):
            self._last_hooks.put(optimizer, self.before_alone)
        return None

    def before_alone(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The same as the hook of one optimizer, and the last one."""
        tensors = self._variables_of(optimizer)
        if not tensors or self._in_closure_step or self._in_progress.is_around():
            return None
        closure = closure_of(args, kwargs)
        call = self._call_name(optimizer) + (" with a closure" if closure is not None else "")
        if self._storage is not None and self._storage.shares(optimizer):
            return self._share_out(self._storage, optimizer, closure, args, kwargs, call)
        self._make_equal(call, optimizer, tensors)
        self._settings = self._settings_of(optimizer)
        if closure is not None:
            return self._step_with_closure(optimizer, closure, args, kwargs, tensors)
        if not self._owns:
            return (be_idle(make_stand_in(optimizer)), *args[1:]), kwargs
        if self._central:
            self._in_progress.begin()
        if self._storage is not None:
            self._storage.lead(tensors)
        return None

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A post-hook: the owner's new values become everyone's."""
        if self._in_progress.is_around():
            return
        tensors = self._variables_of(optimizer)
        if not tensors or self._in_closure_step:
            return
        self._in_progress.end()
        self._last_hooks.remove(optimizer)
        if self._storage is not None and self._storage.shares(optimizer):
            return
        if self._storage is not None:
            self._storage.follow()
            agree(self._communicator, f"{self._call_name(optimizer)}: the end of the step")
            self._storage.drop_edits()  # of hooks of the user's, made on what was about to be stepped
        self._tell_settings(optimizer)
        self._finish(optimizer, tensors, alone=True)

    def _settings_of(self, optimizer: Optimizer) -> list[list[dict[str, Any]]]:
        """Of what the owner is about to step alone, where steps may set something in their groups."""
        if not self._central or is_listed(type(optimizer)):
            return []
        return [hyperparameters.settings(one) for one in (optimizer, *wrapped_by(optimizer))]

    def _tell_settings(self, optimizer: Optimizer) -> None:
        """What the owner's step has set in its groups (a count, the next rate) is every rank's."""
        before, self._settings = self._settings, []
        if not before:
            return
        stepped = (optimizer, *wrapped_by(optimizer))
        call = f"{self._call_name(optimizer)}: what the owner's step has set"
        own = [hyperparameters.changes(one, earlier) for one, earlier in zip(stepped, before, strict=False)]
        told = self._communicator.broadcast_object(own, OWNER, call)
        if not self._owns:
            for one, changed in zip(stepped, told, strict=False):
                hyperparameters.put(one.param_groups, changed)

    def _finish(self, optimizer: Optimizer, tensors: list[torch.Tensor], *, alone: bool) -> None:
        level = tensors
        if self._storage is not None:
            level = tensors if alone else self._storage.level_after(tensors)
            self._storage.parameters.stepped(level)
        if self._central:
            call = f"{self._call_name(optimizer)}: the owner's new parameters"
            elsewhere = self._elsewhere(tensors, alone=alone)
            broadcast_tensors(self._communicator, [t.data for t in elsewhere], OWNER, call)
        self._edits.note(level)
        self._gradients.records.after_step(tensors)

    def _make_equal(
        self, call: str, optimizer: Optimizer, tensors: list[torch.Tensor], *, is_shared: bool = False
    ) -> None:
        """Before a step: combine what no backward pass has, and undo what edits made different.

        Clipping edits every rank's gradient alike, random noise does not: where fingerprints of edited gradients and
        parameters differ, the first rank's count, as they would in one process. In central storage its edits of
        parameters always do, because there is one copy to take them; and what it put into the state of an optimizer
        whose steps are shared out (``is_shared``). Hyperparameters are the first one's everywhere.
        """
        shared = optimizer if is_shared else None
        elsewhere = self._elsewhere(tensors, alone=shared is None)
        edited = self._edits.since_noted(elsewhere)
        left_over: set[int] = set()
        as_combined = self._gradients.records.are_as_combined(tensors)
        if not as_combined:
            left_over = {id(tensor) for tensor in self._gradients.records.left_over(tensors)}
            edited += self._gradients.records.edited(t for t in tensors if id(t) not in left_over)
        missing = zlib.crc32(bytes([tensor.grad is None for tensor in tensors]))
        numbers: tuple[float, ...] = (float(bool(left_over)), float(len(edited)), float(missing), *fingerprint(edited))
        storage = self._storage
        if storage is not None:
            is_foreign = shared is not None and storage.is_foreign(shared)
            is_torn = not as_combined and self._gradients.records.torn(tensors)
            has_edits = storage.look_for_edits(rows=True)
            edits = fingerprint([tensor.detach() for tensor in tensors])[0] if has_edits else 0.0
            numbers = (*numbers, float(has_edits), float(is_foreign), float(is_torn), edits)
        everyone = agree(self._communicator, call, (*numbers, hyperparameters.digest(optimizer)))
        if all_equal(everyone) and not (left_over or any(numbers[5:8])):
            return
        if not all_equal([row[-1:] for row in everyone]):
            self._differing.report_settings(optimizer, hyperparameters.level(self._communicator, optimizer, call))
        if storage is not None and any(row[7] for row in everyone):
            raise InvalidArgumentError(
                f"gradients have been changed between backward() and {call}, and with gradients='owner' no rank has "
                "all of any of them: clipping, GradScaler.unscale_ and noise would act on parts. Leave the argument "
                "out (gradients='everywhere') for steps that read or change gradients."
            )
        if any(row[0] for row in everyone):
            self._gradients.catch_up(tensors)
        if not all_equal([row[1:5] for row in everyone]):
            differing = self._find_differing(tensors, elsewhere, call)
            scaled = {id(tensor) for tensor in self._edits.level(self._communicator, elsewhere, call)}
            self._report(differing, scaled)
            grads = broadcast_gradients(self._communicator, [t.grad for t in tensors], tensors, 0, call)
            for tensor, grad in zip(tensors, grads, strict=True):
                if tensor.grad is not grad:
                    self._gradients.records.take_over(tensor, grad, used=False)
        if storage is not None and any(row[5] for row in everyone):
            has_rows = any(row[5] > 1 for row in everyone)
            if not has_rows and any(row[8] != everyone[0][8] for row in everyone):
                self._report(self._find_differing(tensors, tensors, call))
            storage.publish_edits(self._communicator, call, rows=has_rows)
        if storage is not None and shared is not None and any(row[6] for row in everyone):
            storage.take_state(self._communicator, shared, call)

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

    def _share_out(
        self,
        storage: CentralStorage,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None,
        args: Any,
        kwargs: Any,
        call: str,
    ) -> Any:
        """Make the step, each rank its part; what is stepped afterwards has nothing to step. So hooks that follow find
        all of it done.

        Optimizers whose steps are shared out evaluate a closure once, at the start.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value, _ = self._mean_loss(closure(), False)
        tensors = self._variables_of(optimizer)
        self._make_equal(call, optimizer, tensors, is_shared=True)
        own = storage.begin_step(self._communicator, optimizer, self._gradients.records.owned, call)
        if not step_in_blocks(own):
            bare_step(own)
        storage.end_step(self._communicator, optimizer, f"{self._call_name(optimizer)}: the end of the step")
        self._finish(optimizer, tensors, alone=False)
        stand_in = make_stand_in(optimizer)
        if closure is None:
            return (stand_in, *args[1:]), kwargs
        return with_closure(stand_in, lambda: value, args, kwargs)

    # -- step(closure) ----------------------------------------------------------------------------------------------

    def _step_with_closure(
        self, optimizer: Optimizer, closure: Callable[[], Any], args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> Any:
        """The closure's loss is averaged, so every rank decides alike; under central storage the owner leads."""
        if not self._central:
            return with_closure(optimizer, lambda: self._evaluate(closure, tensors), args, kwargs)
        what = f"{self._call_name(optimizer)} with a closure"

        elsewhere = self._elsewhere(tensors, alone=True)
        gradients = _LeadersGradients(self._communicator, self._gradients.records, tensors, what)

        def evaluate() -> Any:
            if self._storage is not None:
                self._storage.follow()
                self._storage.parameters.stepped(tensors)
            with torch.enable_grad():
                loss = self._evaluate(closure, tensors)
            if self._storage is not None:
                self._level_edits(self._storage, what)
                if self._owns:
                    self._storage.lead(tensors)
            gradients.note()
            return loss

        if self._owns:
            if self._storage is not None:
                self._storage.lead(tensors)

            def lead() -> Any:
                gradients.tell(("evaluate", None))
                broadcast_tensors(self._communicator, [t.data for t in elsewhere], OWNER, what)
                return evaluate()

            self._in_closure_step = True
            try:
                call_args, call_kwargs = with_closure(optimizer, lead, args, kwargs)
                value = type(optimizer).step(*call_args, **call_kwargs)
            finally:
                self._in_closure_step = False
            gradients.tell(("done", value))
        else:
            while True:
                order, value = gradients.hear()
                if order == "done":
                    break
                broadcast_tensors(self._communicator, [t.data for t in elsewhere], OWNER, what)
                evaluate()
        return with_closure(be_idle(make_inert_stand_in(optimizer), value), lambda: value, args, kwargs)

    def _evaluate(self, closure: Callable[[], Any], tensors: list[torch.Tensor]) -> Any:
        """The loss over all replicas. Gradients that a closure assigns by hand are combined as those of a step are."""
        records = self._gradients.records
        records.after_step(tensors)  # what is assigned from now on is new, and not made of what is there
        loss = closure()
        has_left_over = not records.are_as_combined(tensors) and bool(records.left_over(tensors))
        loss, is_left_over = self._mean_loss(loss, has_left_over)
        if is_left_over:
            self._gradients.catch_up(tensors)
        return loss

    def _level_edits(self, storage: CentralStorage, what: str) -> None:
        """What a closure has done to parameters in place: the owner's counts."""
        if any(row[0] for row in agree(self._communicator, what, (float(storage.look_for_edits()),))):
            storage.publish_edits(self._communicator, what)


class _LeadersGradients:
    """Gradients that the owner's ``step(closure)`` zeroes, removes or replaces are so on every rank."""

    def __init__(
        self, communicator: Communicator, records: GradientRecords, tensors: list[torch.Tensor], what: str
    ) -> None:
        self._communicator, self._records, self._tensors, self._what = communicator, records, tensors, what
        self.note()

    def note(self) -> None:
        """They are alike on all ranks now."""
        self._noted = [(grad, 0 if grad is None else grad._version) for grad in (t.grad for t in self._tensors)]

    def tell(self, order: tuple[str, Any]) -> None:
        """On the owner: send ``order``, and what has become of gradients since they were noted."""
        changed = [
            place
            for place, (tensor, (grad, version)) in enumerate(zip(self._tensors, self._noted, strict=True))
            if tensor.grad is not grad or (grad is not None and grad._version != version)
        ]
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
            self._records.take_over(tensor, gradient, used=False)
        self.note()
