"""The optimizer's step with one replica per process: on every rank (mirrored), or on the owner alone (central)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchstrat.collectives.communicator import Communicator
from torchstrat.replicas.agreement import agree, fingerprint, same_bits
from torchstrat.replicas.bucketed_gradients import BucketedGradients
from torchstrat.replicas.central_step import closure_of, make_inert_stand_in, make_stand_in, with_closure
from torchstrat.replicas.transfer import broadcast_tensors

OWNER = 0
"""The rank that holds the central variables and the optimizer's state under central storage."""


class ProcessStep:
    """The step hooks of one run. ``central``: only the owner (the first rank of ``communicator``) steps, and then hands
    out the new values; the others' optimizers stay without state."""

    def __init__(
        self,
        communicator: Communicator,
        gradients: BucketedGradients,
        versions: dict[int, int],
        captured: Callable[[torch.Tensor], bool],
        mean_loss: Callable[[Any], Any],
        *,
        central: bool,
    ) -> None:
        self._communicator = communicator
        self._gradients = gradients
        self._versions = versions
        self._captured = captured
        self._mean_loss = mean_loss
        self._central = central
        self._order: dict[int, int] = {}
        self._handles: list[Any] = []
        self._in_closure_step = False
        self.enabled = True

    def __enter__(self) -> ProcessStep:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def watch(self, optimizer: Optimizer) -> None:
        """Apply to one optimizer for good, for steps outside of a run: there, too, the owner alone may have state."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        if not self._owns:
            optimizer.register_load_state_dict_post_hook(lambda loaded: loaded.state.clear())

    @property
    def _owns(self) -> bool:
        return not self._central or self._communicator.rank == OWNER

    def _call_name(self, optimizer: Optimizer) -> str:
        number = self._order.setdefault(id(optimizer), len(self._order))
        return f"{type(optimizer).__name__}.step() (optimizer {number})"

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        tensors = [tensor for tensor in tensors_of(optimizer) if self._captured(tensor)]
        if not tensors or self._in_closure_step or not self.enabled:
            return None
        closure = closure_of(args, kwargs)
        call = self._call_name(optimizer) + (" with a closure" if closure is not None else "")
        self._make_equal(call, tensors)
        if closure is None:
            return None if self._owns else ((make_stand_in(optimizer), *args[1:]), kwargs)
        return self._step_with_closure(optimizer, closure, args, kwargs, tensors)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        tensors = [tensor for tensor in tensors_of(optimizer) if self._captured(tensor)]
        if not tensors or self._in_closure_step or not self.enabled:
            return
        if self._central:
            broadcast_tensors(self._communicator, [t.data for t in tensors], OWNER, "the owner's new parameters")
        self._note_versions(tensors)
        self._gradients.after_step(tensors)

    def _note_versions(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._versions[id(tensor)] = tensor._version

    def _make_equal(self, call: str, tensors: list[torch.Tensor]) -> None:
        """Before a step: combine what no backward pass has, and undo what edits made different.

        Clipping edits every rank's gradient alike, random noise does not: where fingerprints of edited gradients and
        parameters differ, rank 0's count, as they would in one process.
        """
        edited = [t.data for t in tensors if self._versions.get(id(t), t._version) != t._version]
        left_over = self._gradients.left_over(tensors)
        edited += self._gradients.edited(t for t in tensors if all(t is not other for other in left_over))
        numbers = (float(bool(left_over)), float(len(edited)), *fingerprint(edited))
        everyone = agree(self._communicator, call, numbers)
        if any(row[0] for row in everyone):
            self._gradients.catch_up(tensors)
        if not all(
            same_bits(one, other) for row in everyone for one, other in zip(row[1:], everyone[0][1:], strict=True)
        ):
            everything = itertools.chain((t.data for t in tensors), (t.grad for t in tensors if t.grad is not None))
            broadcast_tensors(self._communicator, list(everything), 0, call)

    # -- step(closure) ----------------------------------------------------------------------------------------------

    def _step_with_closure(
        self, optimizer: Optimizer, closure: Callable[[], Any], args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> Any:
        """The closure's loss is averaged, so every rank decides alike; under central storage the owner leads."""
        if not self._central:
            return with_closure(optimizer, lambda: self._mean_loss(closure()), args, kwargs)
        what = f"{self._call_name(optimizer)} with a closure"

        def evaluate() -> Any:
            with torch.enable_grad():
                return self._mean_loss(closure())

        if self._owns:

            def lead() -> Any:
                self._communicator.broadcast_object(("evaluate", None), OWNER, what)
                broadcast_tensors(self._communicator, [t.data for t in tensors], OWNER, what)
                return evaluate()

            self._in_closure_step = True
            try:
                call_args, call_kwargs = with_closure(optimizer, lead, args, kwargs)
                value = type(optimizer).step(*call_args, **call_kwargs)
            finally:
                self._in_closure_step = False
            self._communicator.broadcast_object(("done", value), OWNER, what)
        else:
            while True:
                order, value = self._communicator.broadcast_object(None, OWNER, what)
                if order == "done":
                    break
                broadcast_tensors(self._communicator, [t.data for t in tensors], OWNER, what)
                evaluate()
        return with_closure(make_inert_stand_in(optimizer), lambda: value, args, kwargs)


def tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]
