"""Says once, by name, that replicas have changed the same thing in different ways, of which one lasts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.gradients import CombinedGradient
from torchstrat.replicas.in_process.tensor_slot import TensorSlot
from torchstrat.replicas.optimizer_state import Difference, SharedState, is_plain
from torchstrat.replicas.samples import sample


class DifferingEdits:
    """Of one strategy. ``describe(tensor)`` names a variable."""

    def __init__(self, describe: Callable[[torch.Tensor], str]) -> None:
        self._describe = describe
        self.is_told = False
        self.is_told_of_settings = False

    def report(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor] = (),
        state: Sequence[torch.Tensor] = (),
    ) -> None:
        """``gradients``: variables whose gradients they are; ``state``: whose state an optimizer keeps. All replicas
        come to the same ones."""
        if self.is_told or not (parameters or gradients or state):
            return
        self.is_told = True
        names = [*map(self._describe, parameters), *(f"the gradient of {self._describe(one)}" for one in gradients)]
        names += [f"what an optimizer keeps of {self._describe(one)}" for one in state]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"the replicas have changed {names[0]}{others} in the step, each in another way. What the first one did "
            "counts for all of them, and what the others did is lost. If each has used what its own rows gave "
            "(torch.autograd.grad, say), combine that first: g = ts.get_replica_context().all_reduce('mean', g); or "
            "let an optimizer step with it: p.grad = g. If it was random noise, this is as it should be.",
            stacklevel=2,
        )

    def report_settings(self, helper: Any, found: Difference | None) -> None:
        """``found``: what replicas have set differently in an optimizer or scheduler. All come to the same."""
        if found is None or self.is_told_of_settings:
            return
        self.is_told_of_settings = True
        group = f" of group {found.group}" if isinstance(helper, Optimizer) else ""
        warnings.warn(
            f"the replicas have set {found.name}{group} of {type(helper).__name__} differently in the step "
            f"({found.first!r} and {found.other!r}), and the first one's counts for all of them. A scheduler that looks"
            " at a loss needs that of the whole batch: ts.get_replica_context().all_reduce('mean', loss) in the step, "
            "or strategy.reduce('mean', losses) and scheduler.step(loss) outside of Strategy.run.",
            stacklevel=2,
        )


def edited_differently(slots: Iterable[TensorSlot], replicas: Sequence[int]) -> list[torch.Tensor]:
    """Parameters that replicas in one process have changed in place, each in another way. For parked slots."""
    first, *others = replicas
    return [
        slot.tensor
        for slot in slots
        if any(slot.is_edited(replica) for replica in replicas)
        and any(not _are_equal(slot.data[first], slot.data[other]) for other in others)
        and slot.is_shared
        and not slot.is_copy
    ]


def state_edited_differently(states: Iterable[SharedState]) -> list[torch.Tensor]:
    """Parameters of which replicas in one process have changed what optimizers keep, each in another way."""
    looked_at = [found for state in states if state.is_looked_at for found in state.looked_at()]
    return [
        key
        for key, (first, *others) in looked_at
        if isinstance(key, torch.Tensor) and not all(_are_alike(first, other) for other in others)
    ]


def _are_alike(one: Any, other: Any) -> bool:
    """Of values that an optimizer keeps."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or _are_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_alike(value, other[name]) for name, value in one.items())
    return not (is_plain(one) and is_plain(other)) or (one or None) == (other or None)


CombinedOf = Callable[[int, torch.Tensor], CombinedGradient | None]
"""What is known of a replica's gradient of a tensor."""


def data_edited_differently(
    slots: Iterable[TensorSlot], replicas: Sequence[int], combined_of: CombinedOf
) -> list[torch.Tensor]:
    """The same through ``.data``, which no version counter shows: looked for where there is no gradient that a backward
    pass has combined, for what an optimizer steps is hardly edited otherwise."""
    found = []
    for slot in slots:
        if not slot.tensor.requires_grad or not slot.is_shared or slot.is_copy:
            continue
        if combined_of(replicas[0], slot.tensor) is not None:
            continue
        own, *others = [sample(slot.data[replica]) for replica in replicas]
        if any(other != own for other in others):
            found.append(slot.tensor)
    return found


def gradients_edited_differently(
    slots: Iterable[TensorSlot], replicas: Sequence[int], combined_of: CombinedOf
) -> list[torch.Tensor]:
    """The same of combined gradients, which clipping changes alike on all of them."""
    first, *others = replicas
    found = []
    for slot in slots:
        combined, grad = combined_of(first, slot.tensor), slot.grads.get(first)
        if combined is None or grad is None or combined.version == grad._version:
            continue
        if combined.used or not combined.is_in(grad):
            continue
        own = sample(grad)
        if any(other is not None and sample(other) != own for other in (slot.grads.get(one) for one in others)):
            found.append(slot.tensor)
    return found


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != torch.strided:
        return one.shape == other.shape
    return torch.equal(one.nan_to_num(), other.to(one.device).nan_to_num())
