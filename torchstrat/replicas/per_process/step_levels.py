"""Before an optimizer steps, replicas in several processes make equal what the step reads."""

from __future__ import annotations

import zlib
from collections.abc import Container

import torch
from torch.optim import Optimizer

from torchstrat.collectives.agreement import agree, all_equal, fingerprint
from torchstrat.collectives.communicator import Communicator
from torchstrat.errors import InvalidArgumentError, ReplicaDivergenceError
from torchstrat.optimizers import stepped_by
from torchstrat.replicas import optimizer_state
from torchstrat.replicas.central.storage import CentralStorage
from torchstrat.replicas.gradient_records import GradientStatus
from torchstrat.replicas.gradient_synchronizer import GradientSynchronizer
from torchstrat.replicas.optimizer_step import StepCall
from torchstrat.replicas.per_process.edits import ParameterEdits
from torchstrat.replicas.state import DifferingEdits
from torchstrat.replicas.transfer import broadcast_gradients


class StepLevels:
    """``storage``: central storage in memory that the ranks share."""

    def __init__(
        self,
        gradients: GradientSynchronizer,
        edits: ParameterEdits,
        differing: DifferingEdits,
        storage: CentralStorage | None,
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
        state = self._edits.state.digest(optimizer) if storage is None or is_shared else 0.0
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
        if not all_equal([row[-2:-1] for row in everyone]):
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
