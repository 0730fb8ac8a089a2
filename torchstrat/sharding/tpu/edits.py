"""Operations in place within a step, whose target may be one tensor for all replicas."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchstrat.core import nest
from torchstrat.core._torch_private import is_view, swap_tensor_impl
from torchstrat.core.buffer_rules import is_statistic
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.reduction import VariableAggregation
from torchstrat.core.variables import BufferSlot, VariableRegistry
from torchstrat.replicas.state import DifferingEdits
from torchstrat.sharding.tpu.backward import LaneBackward
from torchstrat.sharding.tpu.lanes import Lanes
from torchstrat.sharding.tpu.own_leaves import OwnLeaves

_TENSOR: Any = torch.Tensor
_ALIASES = frozenset((torch.detach, _TENSOR.detach, _TENSOR.data.__get__))
"""Results that share memory with the argument, and are no views to autograd on all devices."""

_NO_EDITS = frozenset(("requires_grad_", "detach_", "retain_grad_", "share_memory_"))


def is_edit(func: object) -> bool:
    """Whether ``func`` writes to its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.startswith("_") and name not in _NO_EDITS) or name == "__setitem__"


_SHOWS = frozenset((torch.detach, torch.Tensor.detach, _TENSOR.data.__get__, _TENSOR.data.__set__))
"""Calls behind which a tensor can be changed without a call that has it as its argument."""


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Of the arguments, what the call may change."""
    found = [*nest.leaves(args[0])] if args and (func in _SHOWS or is_edit(func)) else []
    if kwargs.get("out") is not None:
        found += nest.leaves(kwargs["out"])
    return [one for one in found if isinstance(one, torch.Tensor)]


def _is_noted(notes: dict[int, weakref.ref[torch.Tensor]], tensor: torch.Tensor) -> bool:
    reference = notes.get(id(tensor))
    return reference is not None and reference() is tensor


def _adds_up(registry: VariableRegistry, slot: BufferSlot) -> bool:
    """Whether an edit counts once for each replica, though all make the same."""
    return registry.buffer_rules.get(slot.module, slot.name) is VariableAggregation.SUM


def require_whole(registry: VariableRegistry, slot: BufferSlot, what: str) -> None:
    """Raises `UnsupportedError` if what a step does to the buffer should count for each replica."""
    if _adds_up(registry, slot):
        raise UnsupportedError(
            f"set_aggregation({type(slot.module).__name__}, {slot.name!r}, 'sum') adds up what replicas do to the "
            f"buffer as a whole and in place, on this strategy, and in this step {what}. Write it as an edit of the "
            f"whole buffer: module.{slot.name} += change, or module.{slot.name}.index_add_(0, index, change)."
        )


class Edits:
    """What edits mean in one pass."""

    def __init__(
        self,
        lanes: Lanes,
        backward: LaneBackward,
        own: OwnLeaves,
        registry: VariableRegistry,
        merged: Callable[[Any, VariableAggregation, torch.Tensor], Any],
        expose: Callable[[torch.Tensor], None],
        differing: DifferingEdits,
    ) -> None:
        """``merged``: over all replicas, of a buffer that they have changed differently, and that was so before.

        ``expose``: told of a tensor whose ``data`` the step asks for, or replaces."""
        self._lanes, self._backward, self._registry, self._merged = lanes, backward, registry, merged
        self._own, self._differing = own, differing
        self.expose = expose
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._aliased: dict[int, weakref.ref[torch.Tensor]] = {}

    def note_result(self, func: Any, args: Any, result: Any) -> None:
        """Remember a tensor that the step has made: nobody outside of it knows it. One that shares memory with such a
        tensor is none, and the tensor from then on cannot become each replica's own."""
        if not isinstance(result, torch.Tensor) or self._lanes.is_lane_tensor(result):
            return
        of = [one for one in args if isinstance(one, torch.Tensor)]
        if any(one is result for one in of):
            return
        if func in _ALIASES or is_view(result):
            for one in of:
                self._own.note_alias(one, result)
                if _is_noted(self._made, one) or _is_noted(self._aliased, one):
                    for alias in (one, result):
                        self._aliased[id(alias)] = weakref.ref(alias)
        elif getattr(func, "__name__", "") != "__get__":
            self.note_made(result)

    def note_made(self, tensor: torch.Tensor) -> None:
        self._made[id(tensor)] = weakref.ref(tensor)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made the memory of ``tensor``, so that no other run and no variable sees it."""
        return _is_noted(self._made, tensor) or _is_noted(self._aliased, tensor)

    def is_alone(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made ``tensor``, which shares memory with no other, for all replicas."""
        return (
            _is_noted(self._made, tensor)
            and not _is_noted(self._aliased, tensor)
            and not tensor.requires_grad
            and not self._lanes.is_lane_tensor(tensor)
        )

    def edit(self, func: Any, do: Callable[..., Any], args: Any, kwargs: dict[str, object]) -> Any:
        """An operation in place, perhaps with operands that differ between replicas. ``do``: it, or what replaces it.

        Variables and gradients then take what the first replica makes of them, which is said once, and buffers what
        their aggregation says (`BufferRules`), as on every strategy; a gradient that is copied into ``.grad`` is
        combined. A tensor that the step has made becomes each replica's own (``total += loss``).
        """
        target = args[0]
        if self._lanes.is_inside_transform:
            return do(*args, **kwargs)
        is_lane = self._lanes.is_lane_tensor(target)
        if is_lane and not self._own.has(target):
            return do(*args, **kwargs)
        is_alike = not any(self._lanes.is_lane_tensor(value) for value in nest.leaves((args[1:], kwargs)))
        if is_lane:
            return self._own.edit_alike(target, lambda: do(*args, **kwargs)) if is_alike else do(*args, **kwargs)
        if is_alike:
            slot = self._slot_that_adds_up(*args)
            if slot is None:
                return do(*args, **kwargs)
        elif self._own.is_new(target):
            self._own.make_own(target)
            return do(*args, **kwargs)
        else:
            slot = self._slot_of(target)
        variables = self._registry.tensors()
        gradient_of = next((one for one in variables if one.grad is target), None)
        if gradient_of is None and slot is None and not any(one is target for one in variables):
            self.make_own(func, target)
            return do(*args, **kwargs)
        if func is torch.Tensor.copy_ and gradient_of is not None:
            return target.copy_(self._backward.combined_gradient(args[1]))
        with self._lanes.left("an edit of a variable"):
            expanded = self._lanes.stacked(target.detach()).clone()
        edited = self._lanes.hide(expanded)
        do(edited, *args[1:], **kwargs)
        if slot is not None:
            target.copy_(self._merged(edited, self._aggregation_of(slot, target), target.detach()))
            return target
        if gradient_of is not None:
            self._differing.report([], [gradient_of])
        else:
            self._differing.report([target])
        target.copy_(self._lanes.first(edited))
        return target

    def _slot_of(self, target: torch.Tensor) -> BufferSlot | None:
        """Where it is a buffer of the strategy's modules."""
        base = target._base if is_view(target) else target
        slot = next((slot for slot in self._registry.buffer_slots() if slot.tensor is base), None)
        if slot is not None and base is not target:
            require_whole(self._registry, slot, "a part of it is edited")
            return None
        return slot

    def _slot_that_adds_up(self, target: torch.Tensor, *operands: object) -> BufferSlot | None:
        """The same, where an edit that all replicas make alike counts once for each of them."""
        rows, rules = self._backward.rows_of_each, self._registry.buffer_rules
        may_count = rows > 1 and bool(operands) and type(operands[0]) is int and operands[0] == rows
        slot = self._slot_of(target) if rules or may_count else None
        if slot is None or _adds_up(self._registry, slot):
            return slot
        if may_count and target.numel() == 1 and not is_statistic(slot.module, slot.name):
            rules.look_at_count(slot.module, slot.name, 0, rows, rows)
        return None

    def _aggregation_of(self, slot: BufferSlot, target: torch.Tensor) -> VariableAggregation:
        module, name, rules = slot.module, slot.name, self._registry.buffer_rules
        if rules.keeps_own(module, name):
            raise UnsupportedError(
                f"set_aggregation({type(module).__name__}, {name!r}, 'none') lets every replica keep its own value, "
                "and on this strategy a buffer has one for all of them. Hand it to the step and return it: "
                "state = strategy.run(step, args=(batch, state))."
            )
        if is_statistic(module, name):
            return VariableAggregation.MEAN
        return rules.aggregation_of(module, name, target, are_alike=True, training=module.training)

    def make_own(self, func: object, target: torch.Tensor) -> None:
        """Let a tensor that a step made be each replica's own from now on, as the same object."""
        with self._lanes.left("an edit in place"):
            expanded = self._lanes.stacked(target).clone()
        try:
            if not self.is_alone(target):
                raise RuntimeError("others may look at its values")
            swap_tensor_impl(target, self._lanes.hide(expanded))
        except RuntimeError as error:
            raise UnsupportedError(
                f"{getattr(func, '__name__', func)} in place would write what differs between replicas into a tensor "
                f"that they share ({error}). Write it out of place: total = total + value."
            ) from error

    def set_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """``tensor.grad = gradient``: what the replicas' ones combine to, or each one's for a tensor of its own."""
        if gradient is not None and self._lanes.is_lane_tensor(gradient) and self._own.is_new(tensor):
            self._own.make_own(tensor)
        if self._lanes.is_lane_tensor(tensor):
            self._own.set_gradient(tensor, gradient)
            return
        if gradient is not None and self._lanes.is_lane_tensor(gradient):
            gradient = self._backward.combined_gradient(gradient)
            if gradient.stride() != tensor.stride():
                gradient = torch.empty_like(tensor).copy_(gradient)  # as backward's lies: fused steps go by memory
        tensor.grad = gradient
