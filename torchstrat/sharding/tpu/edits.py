"""What a step changes in place, where the target may be one tensor for all replicas, and leaves that it makes itself.

A deep copy of a module, a parameter in no module and a tensor that takes gradients are what a replica adapts to its own
rows. Those that are made as one for all replicas, as copies are, become each replica's own when they are first used
where gradients are recorded: a copy that only follows its original, as an average of weights does, stays one for all,
may be kept, and is a variable of the next run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core import nest
from torchstrat.core._torch_private import (
    base_of,
    is_of_transform,
    is_view,
    own_parameters,
    swap_tensor_impl,
    version_of,
)
from torchstrat.core.buffer_rules import is_statistic
from torchstrat.core.errors import ReplicaDivergenceError, UnsupportedError
from torchstrat.core.reachable import MembersWatch, Watcher
from torchstrat.core.reduction import VariableAggregation
from torchstrat.core.tensor_classes import getter, setter
from torchstrat.core.variables import BufferSlot, VariableRegistry
from torchstrat.replicas.state import DifferingEdits
from torchstrat.sharding.tpu import _functorch_private as functorch
from torchstrat.sharding.tpu.backward import LaneBackward
from torchstrat.sharding.tpu.lanes import TensorSet


class _Own(NamedTuple):
    leaf: weakref.ref[torch.Tensor]
    version: int
    """Of what is behind it, as long as only edits that are alike on all replicas have been made."""


class _Handed(NamedTuple):
    """A gradient that the step has asked for, and may edit in place."""

    leaf: torch.Tensor
    behind: torch.Tensor
    behind_version: int
    gradient: torch.Tensor
    version: int


class MadeInRun:
    """What all passes of one run have made, where others may find it."""

    def __init__(self) -> None:
        self.members = TensorSet()
        """Of modules, other than deep copies. They are variables."""
        self.stepped: weakref.WeakKeyDictionary[Optimizer, OwnLeaves] = weakref.WeakKeyDictionary()
        """Optimizers of replicas' own leaves, and the pass that has stepped each."""


class OwnLeaves:
    """Of one pass. ``known``: `id` of the tensors that were there before it. ``several``: whether there are several
    replicas; with one, what it makes is the program's."""

    def __init__(self, backward: LaneBackward, known: Collection[int], made: MadeInRun, *, several: bool) -> None:
        self.lanes, self.backward = backward.lanes, backward
        backward.before = self._before_backward
        self._known, self._made, self._several = known, made, several
        self._own: dict[int, _Own] = {}
        self._aliases: dict[int, tuple[weakref.ref[torch.Tensor], list[weakref.ref[torch.Tensor]]]] = {}
        self._handed: dict[int, _Handed] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the pass is recorded, on this thread."""
        thread = threading.get_ident()
        ignore = lambda *_: None  # noqa: E731
        watch = MembersWatch(Watcher(lambda: threading.get_ident() == thread, self._on_member, ignore, ignore))
        watch.begin()
        try:
            yield
        finally:
            watch.end()

    def _on_member(self, module: nn.Module, name: str, member: object) -> None:
        if not isinstance(member, torch.Tensor):
            return
        others = [one for one in own_parameters(module).values() if one is not None]
        if not any(self.has(one) or self.is_new(one) for one in others):  # else it is a deep copy
            self._made.members.add(member)

    def is_member(self, tensor: torch.Tensor) -> bool:
        """Whether a pass has put ``tensor`` into a module, other than a deep copy."""
        return tensor in self._made.members

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has become each replica's own."""
        return self._found(tensor) is not None

    def _found(self, tensor: torch.Tensor) -> _Own | None:
        found = self._own.get(id(tensor))
        return None if found is None or found.leaf() is not tensor else found

    # -- what becomes each replica's own ----------------------------------------------------------------------------

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a leaf that the pass has made for itself, and so far as one for all replicas."""
        return (
            self._several
            and (tensor.requires_grad or isinstance(tensor, nn.Parameter))
            and tensor.is_leaf
            and id(tensor) not in self._known
            and not self.is_member(tensor)
            and not is_of_transform(tensor)
        )

    def take_up(self, args: Sequence[object], kwargs: dict[str, object]) -> None:
        """A function that may be differentiated is about to be called with these."""
        for one in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(one, torch.Tensor):
                # Of replicas' own it says so only where a parameter was made of one: nothing behind it knows.
                if one.requires_grad and id(one) not in self._known:
                    self._take_up(one)
            elif isinstance(one, list | tuple):
                self.take_up(one, {})

    def _take_up(self, tensor: torch.Tensor) -> None:
        if self.lanes.is_lane_tensor(tensor):
            if not isinstance(tensor, nn.Parameter) or self.has(tensor):
                return
            with functorch.leave_levels():
                if self.is_member(tensor):  # a variable, which begins with the first replica's values
                    value = self.lanes.stacked(tensor)[self.lanes.active[0]].detach().clone()
                    swap_tensor_impl(tensor, value.requires_grad_())
                else:
                    behind = self.lanes.behind(tensor).detach().requires_grad_()
                    self._become(tensor, self.lanes.hide_as(behind, tensor))
        elif self.is_new(tensor):
            self.make_own(tensor)

    def make_own(self, leaf: torch.Tensor) -> None:
        """Let a leaf that `is_new` be each replica's own from now on, as the same object."""
        gradient = leaf.grad
        with functorch.leave_levels():
            stacked = self.lanes.stacked(leaf.detach()).clone().requires_grad_(leaf.requires_grad)
            self._become(leaf, self.lanes.hide(stacked))
        if gradient is not None:
            self.set_gradient(leaf, gradient)

    def note_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """``alias`` shares memory with ``tensor``, which may be a leaf that `is_new`."""
        if self.is_new(tensor):
            of, known = self._aliases.get(id(tensor), (None, []))
            kept = known if of is not None and of() is tensor else []
            self._aliases[id(tensor)] = weakref.ref(tensor), [*kept, weakref.ref(alias)]

    def _become(self, leaf: torch.Tensor, own: torch.Tensor) -> None:
        try:
            of, aliases = self._aliases.pop(id(leaf), (None, []))
            if of is not None and of() is leaf and any(alias() is not None for alias in aliases):
                raise RuntimeError("by another tensor of the same memory")
            swap_tensor_impl(leaf, own)
        except RuntimeError as error:
            raise UnsupportedError(
                f"a step has made a tensor of shape {tuple(leaf.shape)} (a deep copy, or a parameter in no module), "
                f"which has to become each replica's own, and others look at its values ({error}). Make it, and what "
                "looks at it, of torch.zeros(…, requires_grad=True) or tensor.detach().clone().requires_grad_()."
            ) from error
        self.lanes.notes.add(leaf)
        self._own[id(leaf)] = _Own(weakref.ref(leaf), version_of(self.lanes.behind(leaf)))

    def edit_alike(self, tensor: torch.Tensor, edit: Callable[[], object]) -> object:
        """``tensor``, which differs between replicas, is edited alike on all of them."""
        found = self._found(tensor)
        is_unchanged = found is not None and found.version == version_of(self.lanes.behind(tensor))
        edited = edit()
        if found is not None and is_unchanged:
            self._own[id(tensor)] = _Own(found.leaf, version_of(self.lanes.behind(tensor)))
        return edited

    def before_step(self, optimizer: Optimizer) -> None:
        """Its tensors that have not been used yet are each replica's own, as those are that have."""
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if self.is_new(tensor):
                    self.make_own(tensor)

    def note_step_of(self, optimizer: Optimizer) -> None:
        """Raises `ReplicaDivergenceError` where another pass has stepped an optimizer of replicas' own leaves."""
        if self._made.stepped.setdefault(optimizer, self) is not self:
            raise ReplicaDivergenceError(
                f"replicas with different numbers of rows step one {type(optimizer).__name__} over tensors that are no "
                "variables of the strategy (in no module, or in a deep copy), and each would make steps of its own. "
                "Make variables that replicas share, and their optimizer, within `with strategy.scope():`."
            )

    def set_data(self, leaf: torch.Tensor, data: torch.Tensor) -> None:
        """``leaf.data = data``, where one of the two differs between replicas."""
        if self.is_new(leaf):
            self.make_own(leaf)
        if not self.lanes.is_lane_tensor(leaf) or leaf.shape != data.shape:
            raise UnsupportedError(
                f"a step assigned .data of shape {tuple(data.shape)} to a tensor of shape {tuple(leaf.shape)}, and it "
                "differs between replicas: on this strategy that is possible for a tensor that the step has made (a "
                "deep copy, a parameter in no module), of the same shape."
            )
        with functorch.leave_levels():
            stacked = self.lanes.stacked(data).clone()
            self.lanes.behind(leaf).data = stacked.movedim(0, self.lanes.dim_of(leaf))
        self._own.pop(id(leaf), None)

    def close(self) -> None:
        """The pass is over: what has become each replica's own and was changed by none is one for all again."""
        for own in self._own.values():
            leaf = own.leaf()
            if leaf is None or not self.lanes.is_lane_tensor(leaf):
                continue
            behind = self.lanes.behind(leaf)
            if version_of(behind) != own.version or behind.grad is not None:
                continue
            value = self.lanes.stacked(leaf).detach()[self.lanes.active[0]].clone()
            with suppress(RuntimeError):  # where others look at it, it stays what it is, and says so when it is used
                swap_tensor_impl(leaf, value.requires_grad_(behind.requires_grad))
        self._known, self._handed = (), {}

    # -- their gradients --------------------------------------------------------------------------------------------

    def gradient_of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """``.grad`` of a leaf of each replica's own, the same object until there is another gradient."""
        behind = self.lanes.behind(leaf).grad
        handed = self._handed.get(id(leaf))
        if handed is not None and handed.behind is behind and handed.behind_version == version_of(behind):
            return handed.gradient
        gradient = self.backward.gradient_of(leaf)
        if behind is not None and gradient is not None:
            version = version_of(self.lanes.behind(gradient))
            self._handed[id(leaf)] = _Handed(leaf, behind, version_of(behind), gradient, version)
        return gradient

    def set_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """``leaf.grad = gradient``: each replica's own gradient of its own loss."""
        self._handed.pop(id(leaf), None)
        if gradient is None:
            self.lanes.behind(leaf).grad = None
            return
        with functorch.leave_levels():
            own = self.lanes.stacked(gradient)
            factors = self.backward.weights.factors(own)
            # As a backward pass of the combined loss would leave it, and add to it; see `without_factors`.
            weighted = torch.where(factors > 0, own * factors, own)
            behind = self.lanes.behind(leaf)
            behind.grad = weighted.movedim(0, self.lanes.dim_of(leaf))
        if behind.grad is not None:
            version = version_of(self.lanes.behind(gradient))
            self._handed[id(leaf)] = _Handed(leaf, behind.grad, version_of(behind.grad), gradient, version)

    def _before_backward(self) -> None:
        """What a step has made of its gradients in place is what the backward pass adds to."""
        for handed in list(self._handed.values()):
            if version_of(self.lanes.behind(handed.gradient)) != handed.version:
                self.set_gradient(handed.leaf, handed.gradient)
        self._handed.clear()


_ALIASES = frozenset((torch.detach, torch.Tensor.detach, getter("data")))
"""Results that share memory with the argument, and are no views to autograd on all devices."""

_EDITING_OPERATORS = frozenset(("__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"))
"""That PyTorch has no other function for."""

_NO_EDITS = frozenset(("requires_grad_", "detach_", "retain_grad_", "share_memory_"))


def is_edit(func: object) -> bool:
    """Whether ``func`` writes to its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.startswith("_") and name not in _NO_EDITS) or name in _EDITING_OPERATORS


_SHOWS = _ALIASES | {setter("data")}
"""Calls behind which a tensor can be changed without a call that has it as its argument."""


def written(func: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """Of the arguments, what the call may change."""
    # Functions of torch.nn.init hand on what they fill by its name alone.
    found = [*nest.leaves(args[0] if args else kwargs.get("tensor"))] if func in _SHOWS or is_edit(func) else []
    if kwargs.get("out") is not None:
        found += nest.leaves(kwargs["out"])
    return [one for one in found if isinstance(one, torch.Tensor)]


_OF_LISTS: dict[object, Callable[..., object]] = {
    getattr(torch, name): getattr(torch.Tensor, {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}.get(one, one))
    for name in dir(torch)
    if name.startswith("_foreach_") and (one := name.removeprefix("_foreach_")).endswith("_")
}


def edits_of_each(
    func: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[Callable[..., object], tuple[object, ...], dict[str, object]]] | None:
    """What ``torch._foreach_add_`` and its kin do to each tensor of their list; None for other functions, and for lists
    that do not fit each other. On this device an edit of lists leaves the tensors' versions as they were."""
    method = _OF_LISTS.get(func)
    if method is None or not args or not isinstance(args[0], list | tuple):
        return None
    options = {name: one for name, one in kwargs.items() if name in ("alpha", "value", "non_blocking")}
    operands = [*args[1:], *(one for name, one in kwargs.items() if name not in options)]
    if len(operands) == 3:  # a factor, which methods of one tensor take by its name alone
        factor = operands.pop()
        options["value"] = factor.tolist() if isinstance(factor, torch.Tensor) else factor
    lists = [one for one in (*operands, *options.values()) if isinstance(one, list | tuple)]
    if any(len(one) != len(args[0]) for one in lists):
        return None

    def of(number: int, operand: object) -> object:
        return operand[number] if isinstance(operand, list | tuple) else operand

    return (
        (
            method,
            (target, *(of(number, one) for one in operands)),
            {name: of(number, one) for name, one in options.items()},
        )
        for number, target in enumerate(args[0])
    )


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
        own: OwnLeaves,
        registry: VariableRegistry,
        differing: DifferingEdits,
        merged: Callable[[torch.Tensor, VariableAggregation, torch.Tensor], torch.Tensor],
        expose: Callable[[torch.Tensor], None],
    ) -> None:
        """``merged``: over all replicas, of a buffer that they have changed differently, and that was so before.

        ``expose``: told of a tensor whose ``data`` the step asks for, or replaces."""
        self.own, self.lanes, self.backward = own, own.lanes, own.backward
        self.registry, self._differing, self._merged = registry, differing, merged
        self.expose = expose
        self._made, self._aliased = TensorSet(), TensorSet()

    def note_result(self, func: object, args: Sequence[object], result: object) -> None:
        """Remember a tensor that the step has made: nobody outside of it knows it. One that shares memory with such a
        tensor is none, and the tensor from then on cannot become each replica's own."""
        if not isinstance(result, torch.Tensor) or self.lanes.is_lane_tensor(result):
            return
        of = [one for one in args if isinstance(one, torch.Tensor)]
        if any(one is result for one in of):
            return
        if func in _ALIASES or is_view(result):
            for one in of:
                self.own.note_alias(one, result)
                if self.is_made(one):
                    self._aliased.add(one)
                    self._aliased.add(result)
        elif getattr(func, "__name__", "") != "__get__":
            self.note_made(result)

    def note_made(self, tensor: torch.Tensor) -> None:
        self._made.add(tensor)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made the memory of ``tensor``, so that no other run and no variable sees it."""
        return tensor in self._made or tensor in self._aliased

    def is_alone(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made ``tensor``, which shares memory with no other, for all replicas."""
        return (
            tensor in self._made
            and tensor not in self._aliased
            and not tensor.requires_grad
            and not self.lanes.is_lane_tensor(tensor)
        )

    def edit(
        self,
        func: object,
        do: Callable[..., object],
        target: torch.Tensor,
        operands: Sequence[object],
        kwargs: dict[str, object],
    ) -> object:
        """An operation in place, perhaps with operands that differ between replicas. ``do``: it, or what replaces it.

        Variables and gradients then take what the first replica makes of them, which is said once, and buffers what
        their aggregation says (`BufferRules`), as on every strategy; a gradient that is copied into ``.grad`` is
        combined. A tensor that the step has made becomes each replica's own (``total += loss``).
        """
        if self.lanes.is_inside_transform:
            return do(target, *operands, **kwargs)
        is_lane = self.lanes.is_lane_tensor(target)
        if is_lane and not self.own.has(target):
            return do(target, *operands, **kwargs)
        is_alike = not any(self.lanes.is_lane_tensor(value) for value in nest.leaves((operands, kwargs)))
        if is_lane and is_alike:
            return self.own.edit_alike(target, lambda: do(target, *operands, **kwargs))
        if is_lane:
            return do(target, *operands, **kwargs)
        if is_alike:
            slot = self._slot_that_adds_up(target, *operands)
            if slot is None:
                return do(target, *operands, **kwargs)
        elif self.own.is_new(target):
            self.own.make_own(target)
            return do(target, *operands, **kwargs)
        else:
            slot = self._slot_of(target)
        variables = self.registry.tensors()
        gradient_of = next((one for one in variables if one.grad is target), None)
        if gradient_of is None and slot is None and not any(one is target for one in variables):
            self.make_own(func, target)
            return do(target, *operands, **kwargs)
        if func is torch.Tensor.copy_ and gradient_of is not None and isinstance(operands[0], torch.Tensor):
            return target.copy_(self.backward.combined_gradient(operands[0]))
        with self.lanes.left("an edit of a variable"):
            expanded = self.lanes.stacked(target.detach()).clone()
        edited = self.lanes.hide(expanded)
        do(edited, *operands, **kwargs)
        if slot is not None:
            target.copy_(self._merged(edited, self._aggregation_of(slot, target), target.detach()))
            return target
        if gradient_of is not None:
            self._differing.report([], [gradient_of])
        else:
            self._differing.report([target])
        target.copy_(self.lanes.first(edited))
        return target

    def _slot_of(self, target: torch.Tensor) -> BufferSlot | None:
        """Where it is a buffer of the strategy's modules."""
        base = base_of(target)
        whole = target if base is None else base
        slot = next((slot for slot in self.registry.buffer_slots() if slot.tensor is whole), None)
        if slot is not None and base is not None:
            require_whole(self.registry, slot, "a part of it is edited")
            return None
        return slot

    def _slot_that_adds_up(self, target: torch.Tensor, *operands: object) -> BufferSlot | None:
        """The same, where an edit that all replicas make alike counts once for each of them."""
        rows, rules = self.backward.rows_of_each, self.registry.buffer_rules
        may_count = rows > 1 and bool(operands) and type(operands[0]) is int and operands[0] == rows
        slot = self._slot_of(target) if rules or may_count else None
        if slot is None or _adds_up(self.registry, slot):
            return slot
        if may_count and target.numel() == 1 and not is_statistic(slot.module, slot.name):
            rules.look_at_count(slot.module, slot.name, 0, rows, rows)
        return None

    def _aggregation_of(self, slot: BufferSlot, target: torch.Tensor) -> VariableAggregation:
        module, name, rules = slot.module, slot.name, self.registry.buffer_rules
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
        with self.lanes.left("an edit in place"):
            expanded = self.lanes.stacked(target).clone()
        try:
            if not self.is_alone(target):
                raise RuntimeError("others may look at its values")
            swap_tensor_impl(target, self.lanes.hide(expanded))
        except RuntimeError as error:
            raise UnsupportedError(
                f"{getattr(func, '__name__', func)} in place would write what differs between replicas into a tensor "
                f"that they share ({error}). Write it out of place: total = total + value."
            ) from error

    def set_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """``tensor.grad = gradient``: what the replicas' ones combine to, or each one's for a tensor of its own."""
        if gradient is not None and self.lanes.is_lane_tensor(gradient) and self.own.is_new(tensor):
            self.own.make_own(tensor)
        if self.lanes.is_lane_tensor(tensor):
            self.own.set_gradient(tensor, gradient)
            return
        if gradient is not None and self.lanes.is_lane_tensor(gradient):
            gradient = self.backward.combined_gradient(gradient)
            if gradient.stride() != tensor.stride():
                gradient = torch.empty_like(tensor).copy_(gradient)  # as backward's lies: fused steps go by memory
        tensor.grad = gradient
