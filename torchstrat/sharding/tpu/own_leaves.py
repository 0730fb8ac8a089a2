"""Leaves that a step makes itself: each replica's own, with their gradients, while the run lasts.

A deep copy of a module, a parameter in no module and a tensor that takes gradients are what a replica adapts to its own
rows. Those that are made as one for all replicas, as copies are, become each replica's own when they are first used
where gradients are recorded: a copy that only follows its original, as an average of weights does, stays one for all,
may be kept, and is a variable of the next run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core._torch_private import is_of_transform, own_parameters, swap_tensor_impl, version_of
from torchstrat.core.creation import MembersWatch, Watcher
from torchstrat.core.errors import ReplicaDivergenceError, UnsupportedError
from torchstrat.sharding.tpu import _functorch_private as functorch
from torchstrat.sharding.tpu.backward import LaneBackward, LaneWeights
from torchstrat.sharding.tpu.lanes import Lanes


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
        self.members: dict[int, weakref.ref[torch.Tensor]] = {}
        """By `id`: of modules, other than deep copies. They are variables."""
        self.stepped: weakref.WeakKeyDictionary[Optimizer, OwnLeaves] = weakref.WeakKeyDictionary()
        """Optimizers of replicas' own leaves, and the pass that has stepped each."""


class OwnLeaves:
    """Of one pass. ``known``: `id` of the tensors that were there before it. ``several``: whether there are several
    replicas; with one, what it makes is the program's."""

    def __init__(
        self,
        lanes: Lanes,
        weights: LaneWeights,
        backward: LaneBackward,
        known: Collection[int],
        made: MadeInRun,
        several: bool,
    ) -> None:
        self._lanes, self._weights, self._backward = lanes, weights, backward
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
            self._made.members[id(member)] = weakref.ref(member)

    def is_member(self, tensor: torch.Tensor) -> bool:
        """Whether a pass has put ``tensor`` into a module, other than a deep copy."""
        reference = self._made.members.get(id(tensor))
        return reference is not None and reference() is tensor

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

    def take_up(self, args: Any, kwargs: dict[str, Any]) -> None:
        """A function that may be differentiated is about to be called with these."""
        for one in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(one, torch.Tensor):
                # Of replicas' own it says so only where a parameter was made of one: nothing behind it knows.
                if one.requires_grad and id(one) not in self._known:
                    self._take_up(one)
            elif isinstance(one, list | tuple):
                self.take_up(one, {})

    def _take_up(self, tensor: torch.Tensor) -> None:
        if self._lanes.is_lane_tensor(tensor):
            if not isinstance(tensor, nn.Parameter) or self.has(tensor):
                return
            with functorch.leave_levels():
                if self.is_member(tensor):  # a variable, which begins with the first replica's values
                    value = self._lanes.stacked(tensor)[self._lanes.active[0]].detach().clone()
                    swap_tensor_impl(tensor, value.requires_grad_())
                else:
                    behind = self._lanes.behind(tensor).detach().requires_grad_()
                    self._become(tensor, self._lanes.hide_as(behind, tensor))
        elif self.is_new(tensor):
            self.make_own(tensor)

    def make_own(self, leaf: torch.Tensor) -> None:
        """Let a leaf that `is_new` be each replica's own from now on, as the same object."""
        gradient = leaf.grad
        with functorch.leave_levels():
            stacked = self._lanes.stacked(leaf.detach()).clone().requires_grad_(leaf.requires_grad)
            self._become(leaf, self._lanes.hide(stacked))
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
        self._lanes.notes.add(leaf)
        self._own[id(leaf)] = _Own(weakref.ref(leaf), version_of(self._lanes.behind(leaf)))

    def edit_alike(self, tensor: torch.Tensor, edit: Callable[[], Any]) -> Any:
        """``tensor``, which differs between replicas, is edited alike on all of them."""
        found = self._found(tensor)
        is_unchanged = found is not None and found.version == version_of(self._lanes.behind(tensor))
        edited = edit()
        if found is not None and is_unchanged:
            self._own[id(tensor)] = found._replace(version=version_of(self._lanes.behind(tensor)))
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
        if not self._lanes.is_lane_tensor(leaf) or leaf.shape != data.shape:
            raise UnsupportedError(
                f"a step assigned .data of shape {tuple(data.shape)} to a tensor of shape {tuple(leaf.shape)}, and it "
                "differs between replicas: on this strategy that is possible for a tensor that the step has made (a "
                "deep copy, a parameter in no module), of the same shape."
            )
        with functorch.leave_levels():
            stacked = self._lanes.stacked(data).clone()
            self._lanes.behind(leaf).data = stacked.movedim(0, self._lanes.dim_of(leaf))
        self._own.pop(id(leaf), None)

    def close(self) -> None:
        """The pass is over: what has become each replica's own and was changed by none is one for all again."""
        for own in self._own.values():
            leaf = own.leaf()
            if leaf is None or not self._lanes.is_lane_tensor(leaf):
                continue
            behind = self._lanes.behind(leaf)
            if version_of(behind) != own.version or behind.grad is not None:
                continue
            value = self._lanes.stacked(leaf).detach()[self._lanes.active[0]].clone()
            with suppress(RuntimeError):  # where others look at it, it stays what it is, and says so when it is used
                swap_tensor_impl(leaf, value.requires_grad_(behind.requires_grad))
        self._known, self._handed = (), {}

    # -- their gradients --------------------------------------------------------------------------------------------

    def gradient_of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """``.grad`` of a leaf of each replica's own, the same object until there is another gradient."""
        behind = self._lanes.behind(leaf).grad
        handed = self._handed.get(id(leaf))
        if handed is not None and handed.behind is behind and handed.behind_version == version_of(behind):
            return handed.gradient
        gradient = self._backward.gradient_of(leaf)
        if behind is not None and gradient is not None:
            version = version_of(self._lanes.behind(gradient))
            self._handed[id(leaf)] = _Handed(leaf, behind, version_of(behind), gradient, version)
        return gradient

    def set_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """``leaf.grad = gradient``: each replica's own gradient of its own loss."""
        self._handed.pop(id(leaf), None)
        if gradient is None:
            self._lanes.behind(leaf).grad = None
            return
        with functorch.leave_levels():
            own = self._lanes.stacked(gradient)
            factors = self._weights.factors(own)
            # As a backward pass of the combined loss would leave it, and add to it; see `without_factors`.
            weighted = torch.where(factors > 0, own * factors, own)
            behind = self._lanes.behind(leaf)
            behind.grad = weighted.movedim(0, self._lanes.dim_of(leaf))
        if behind.grad is not None:
            version = version_of(self._lanes.behind(gradient))
            self._handed[id(leaf)] = _Handed(leaf, behind.grad, version_of(behind.grad), gradient, version)

    def before_backward(self) -> None:
        """What a step has made of its gradients in place is what the backward pass adds to."""
        for handed in list(self._handed.values()):
            if version_of(self._lanes.behind(handed.gradient)) != handed.version:
                self.set_gradient(handed.leaf, handed.gradient)
        self._handed.clear()
