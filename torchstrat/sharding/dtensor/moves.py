"""How tensors of a step become pieces and pieces become tensors, forward and backward.

In a step, a plain tensor is whole and equal on all logical devices, and a `CutTensor` is cut; of both, the gradient is
held exactly as the tensor is. An operator computes on pieces. Along the axes where it *varies*, its logical devices
compute different things; what is whole there gets from each of them but a part of its gradient, and the parts have to
be added up (`spread`). Where pieces of a result have to be added up going forward (`added_up`), the gradient of the sum
is that of every part. (Shoeybi et al., "Megatron-LM", 2019, call the two f and g.) Each move is the gradient of another
one, so that there are second derivatives as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchstrat.core.errors import UnsupportedError
from torchstrat.sharding.dtensor._torch_dtensor import local_of
from torchstrat.sharding.dtensor.axes import Cut
from torchstrat.sharding.dtensor.cut_tensor import CutTensor, cut_tensor, requires_grad
from torchstrat.sharding.dtensor.devices import LogicalDevices

Axes = Sequence[int]


class _NoGraph:
    """Stands in for the context of a move that nobody goes backward through."""


def _moved(move: type[torch.autograd.Function], *args: Any) -> Any:
    """Going backward: with a graph where a second derivative is wanted, else without the costs of one."""
    return move.apply(*args) if torch.is_grad_enabled() else move.forward(_NoGraph(), *args)


class _Open(torch.autograd.Function):
    """A `CutTensor` → its piece."""

    @staticmethod
    def forward(ctx: Any, tensor: CutTensor) -> torch.Tensor:
        ctx.cut, ctx.devices = tensor._cut, tensor._devices
        local = local_of(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _moved(_Close, gradient, ctx.cut, ctx.devices)


class _Close(torch.autograd.Function):
    """A piece → the `CutTensor`."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, cut: Cut, devices: LogicalDevices) -> CutTensor:
        ctx.cut, ctx.devices = cut, devices
        return cut_tensor(local.detach(), cut, devices)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if isinstance(gradient, CutTensor) and gradient._cut == ctx.cut:
            return _moved(_Open, gradient), None, None
        # A hook or an autograd function of the user's has made it, whole or cut in another way.
        return enter(gradient, ctx.devices, ctx.cut, ()).clone(), None, None


class _Gather(torch.autograd.Function):
    """Pieces → the whole, which is used alike on all logical devices, or spread."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, devices: LogicalDevices, axes: Axes, dim: int) -> torch.Tensor:
        ctx.devices, ctx.axes, ctx.dim = devices, axes, dim
        return devices.gathered(local, axes, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _moved(_Take, gradient, ctx.devices, ctx.axes, ctx.dim), None, None, None


class _Take(torch.autograd.Function):
    """The whole → this process's part."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, devices: LogicalDevices, axes: Axes, dim: int) -> torch.Tensor:
        ctx.devices, ctx.axes, ctx.dim = devices, axes, dim
        return devices.own_part(whole, axes, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _moved(_Gather, gradient, ctx.devices, ctx.axes, ctx.dim), None, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, devices: LogicalDevices, axes: Axes) -> torch.Tensor:
        ctx.devices, ctx.axes = devices, axes
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _moved(_AddUp, gradient, ctx.devices, ctx.axes), None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, devices: LogicalDevices, axes: Axes) -> torch.Tensor:
        ctx.devices, ctx.axes = devices, axes
        return devices.summed(part, axes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return spread(gradient, ctx.devices, ctx.axes), None, None


class _WithEdges(torch.autograd.Function):
    """A piece with the neighbours' outermost rows: ``before`` of the previous one, ``after`` of the next."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, devices: LogicalDevices, axes: Axes, dim: int, sizes: tuple[int, int, float]
    ) -> torch.Tensor:
        before, after, fill = sizes
        ctx.devices, ctx.axes, ctx.dim, ctx.before, ctx.after = devices, axes, dim, before, after
        size = local.shape[dim]
        first, last = local.narrow(dim, 0, after), local.narrow(dim, size - before, before)
        previous, following = devices.edges(first, last, axes)
        ctx.has_previous, ctx.has_next = previous is not None, following is not None
        if previous is None:
            previous = torch.full_like(last, fill)
        if following is None:
            following = torch.full_like(first, fill)
        return torch.cat([previous, local, following], dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a second derivative (create_graph=True) through a convolution or pooling of images that are cut into "
                "bands over logical devices: call strategy.replicate_to_logical_devices on the images before it."
            )
        dim, before, after = ctx.dim, ctx.before, ctx.after
        size = gradient.shape[dim] - before - after
        own = gradient.narrow(dim, before, size).clone()
        of_previous, of_next = gradient.narrow(dim, 0, before), gradient.narrow(dim, before + size, after)
        from_previous, from_next = ctx.devices.edges(of_previous, of_next, ctx.axes)
        if from_previous is not None:
            own.narrow(dim, 0, after).add_(from_previous)
        if from_next is not None:
            own.narrow(dim, size - before, before).add_(from_next)
        return own, None, None, None, None


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


# -- from tensors to pieces ----------------------------------------------------------------------------------------


def cut_of(tensor: torch.Tensor, devices: LogicalDevices) -> Cut:
    return tensor._cut if isinstance(tensor, CutTensor) else devices.axes.whole


def enter(tensor: torch.Tensor, devices: LogicalDevices, wanted: Cut, varying: Axes) -> torch.Tensor:
    """This process's piece of ``tensor`` cut like ``wanted``, for a computation that varies along ``varying``."""
    axes, have = devices.axes, cut_of(tensor, devices)
    if isinstance(tensor, CutTensor):
        if tensor._devices is not devices:
            raise UnsupportedError("a tensor that is cut over logical devices belongs to the strategy that cut it.")
        local = _apply(_Open, tensor)
    elif isinstance(tensor, DTensor):
        raise UnsupportedError(
            "a DTensor of another kind cannot be cut over logical devices, nor be used with a tensor that is; use "
            "replicate_to_logical_devices for the one, and full_tensor() of the other."
        )
    else:
        local = tensor
    if have != wanted:
        dims = range(local.ndim)
        kept = {dim: axes.axes_of(have, dim) for dim in dims}
        for dim in dims:
            own, goal = kept[dim], axes.axes_of(wanted, dim)
            if own and own != goal[: len(own)]:  # cut further, a piece is the right one only along its slower axes
                local, kept[dim] = _apply(_Gather, local, devices, own, dim), ()
        for dim in dims:
            missing = axes.axes_of(wanted, dim)[len(kept[dim]) :]
            if missing:
                local = _apply(_Take, local, devices, missing, dim)
    return spread(local, devices, [axis for axis in varying if wanted[axis] is None])


def spread(whole: torch.Tensor, devices: LogicalDevices, axes: Axes) -> torch.Tensor:
    """``whole``, for a computation that varies along ``axes``."""
    if not axes or not whole.requires_grad:
        return whole
    spread_out: torch.Tensor = _apply(_Spread, whole, devices, tuple(axes))
    return spread_out


# -- from pieces to tensors ----------------------------------------------------------------------------------------


def added_up(part: torch.Tensor, devices: LogicalDevices, axes: Axes) -> torch.Tensor:
    """The sum of the parts along ``axes``, which all of these have."""
    if not axes:
        return part
    total: torch.Tensor = _apply(_AddUp, part, devices, tuple(axes))
    return total


def leave(local: torch.Tensor, devices: LogicalDevices, cut: Cut) -> torch.Tensor:
    """The tensor that ``local`` is the piece of; a plain one if nothing cuts it."""
    if cut == devices.axes.whole:
        return local
    made: CutTensor = _apply(_Close, local, cut, devices)
    return made


def with_edges(
    local: torch.Tensor, devices: LogicalDevices, axes: Axes, dim: int, before: int, after: int, fill: float = 0.0
) -> torch.Tensor:
    """``local``, before it ``before`` rows of the previous piece along ``axes`` and behind it ``after`` of the next, in
    dimension ``dim``; at the ends rows of ``fill``."""
    if not before and not after:
        return local
    joined: torch.Tensor = _apply(_WithEdges, local, devices, tuple(axes), dim, (before, after, fill))
    return joined


# -- annotations ---------------------------------------------------------------------------------------------------


def recut(tensor: torch.Tensor, devices: LogicalDevices, cut: Cut) -> torch.Tensor:
    """``tensor`` cut like ``cut``, and its gradient with it."""
    if cut_of(tensor, devices) == cut:
        return tensor
    return leave(enter(tensor, devices, cut, ()), devices, cut)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on every logical device, plain."""
    return recut(tensor, tensor._devices, tensor._devices.axes.whole) if isinstance(tensor, CutTensor) else tensor


__all__ = ["added_up", "cut_of", "enter", "leave", "recut", "requires_grad", "spread", "whole", "with_edges"]
