"""`CutTensor`, and how tensors of a step become pieces and pieces become tensors, forward and backward.

A `CutTensor` is what a step sees of a tensor that is cut over the replica's logical devices: a DTensor in every respect
but one. PyTorch's own rules for DTensors are never used, since some of them give wrong numbers without a word (partial
sums through nonlinear functions, convolutions over a cut dimension, dropout). A function that is called with a
`CutTensor` is looked up in `torchstrat.sharding.dtensor.operators`; one that is not there raises. So does whatever
reaches the tensor below that, from inside PyTorch.

In a step, a plain tensor is whole and equal on all logical devices, and a `CutTensor` is cut; of both, the gradient is
held exactly as the tensor is. An operator computes on pieces. Along the axes where it *varies*, its logical devices
compute different things; what is whole there gets from each of them but a part of its gradient, and the parts have to
be added up (`spread`). Where pieces of a result have to be added up going forward (`added_up`), the gradient of the sum
is that of every part. (Shoeybi et al., "Megatron-LM", 2019, call the two f and g.) Each move is the gradient of another
one, so that there are second derivatives as well.
"""

from __future__ import annotations

import importlib
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn, TypeVar

import torch
from torch.distributed.tensor import DTensor

from torchstrat.core._torch_private import DisableTorchFunctionSubclass, look_up, raise_on_data_pointer
from torchstrat.core.errors import UnsupportedError
from torchstrat.sharding.dtensor.devices import Cut, LogicalDevices, cut_axes

# What is not public API; a release of torch may move it.
_spec_module = importlib.import_module("torch.distributed.tensor._dtensor_spec")
_DTensorSpec = look_up("DTensorSpec", _spec_module)
_TensorMeta = look_up("TensorMeta", _spec_module)
look_up("_local_tensor", DTensor)  # type: ignore[arg-type]
look_up("_spec", DTensor)  # type: ignore[arg-type]
local_of: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""This process's piece, the tensor itself: no graph, no copy."""

_aten = torch.ops.aten
STAND_IN = "_stand_in"
"""The attribute of a variable under which a step finds the `CutTensor` that stands in for it."""


class CutTensor(DTensor):
    """Made by `cut_tensor` only."""

    apply: ClassVar[Callable[[Callable[..., object], Sequence[type], Sequence[object], dict[str, object]], object]]
    """What a function is on such tensors; `operators.rules` puts it here."""
    devices: LogicalDevices
    cut: Cut
    whole_shape: torch.Size
    variable: torch.Tensor | None
    """The parameter whose value it is in this step."""
    is_shown: bool
    """Whether that has its memory now, for the backend to work on."""
    is_value: bool
    """Whether its piece is the memory of a variable."""
    is_gradient: bool
    """Whether its piece is the gradient of one."""
    as_grad: torch.Tensor | None
    """The ``grad`` that the piece of a variable has, where it stands for that."""
    lender: weakref.ref[torch.Tensor] | None
    """Whose memory it shows, where that is not cut like it."""
    _seen_gradient: weakref.ref[CutTensor] | None = None
    """Of a variable: what its ``grad`` was when it was last asked for."""

    @property
    def can_be_written(self) -> bool:
        """Whether an edit of its piece changes a variable or its gradient, and nothing else."""
        return self.is_value or self.is_gradient

    def gradient(self) -> torch.Tensor | None:
        """Its ``grad``, as the step sees it."""
        if self.variable is None:
            with DisableTorchFunctionSubclass():
                return self.grad if self.is_leaf or self.retains_grad else None  # compilers ask, and PyTorch warns
        with DisableTorchFunctionSubclass():
            gradient = self.variable.grad
        if gradient is None:
            return None
        if gradient.requires_grad:
            raise refused(
                "Tensor.grad",
                "has the graph of backward(create_graph=True), which gets lost; leave parameters whole whose gradients "
                "a step differentiates (no sharding rule, no annotation)",
            )
        seen = None if self._seen_gradient is None else self._seen_gradient()
        if seen is not None and seen.as_grad is gradient:
            return seen  # one tensor, as in plain PyTorch: who gives it other memory does so for all who have it
        found: CutTensor = cut_tensor(gradient.detach(), self.cut, self.devices)
        found.is_gradient, found.as_grad = True, gradient
        self._seen_gradient = weakref.ref(found)
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return cls.apply(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: Sequence[type], args: Sequence[object] = (), kwargs: object = None
    ) -> torch.Tensor:
        """What PyTorch does by itself: add up the gradients of a tensor that was used twice, keep those that
        `retain_grad` asks for, look for NaN in them (`torch.autograd.detect_anomaly`), and the like."""
        first = args[0] if args else None
        if isinstance(first, CutTensor):
            piece, cut, devices = local_of(first), first.cut, first.devices
            if func is _aten.add.Tensor and len(args) == 2 and not kwargs:
                other = args[1]
                if isinstance(other, CutTensor) and cut == other.cut:
                    return cut_tensor(piece + local_of(other), cut, devices)
            if func is _aten.detach.default:
                return cut_tensor(piece.detach(), cut, devices)
            if func is _aten.clone.default:
                return cut_tensor(piece.clone(), cut, devices)
            if func is _aten.isnan.default:  # what all have found: one that raised alone would leave the others waiting
                return devices.largest(piece.isnan().any().float(), cut_axes(cut)).bool()
        raise refused(str(func), BELOW_FUNCTIONS)

    def to_local(self, **_: object) -> torch.Tensor:
        raise UnsupportedError(
            "to_local() of a tensor that is cut over logical devices: in a step a plain tensor counts as whole on all "
            "of them, and a piece is not. Use replicate_to_logical_devices for the whole tensor."
        )

    def redistribute(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedError(
            "redistribute() of a tensor that is cut over logical devices: use split_to_logical_devices or "
            "replicate_to_logical_devices of the strategy."
        )

    def full_tensor(self, **_: object) -> torch.Tensor:
        """All of it, as a plain tensor on every logical device; differentiable. All of them call it."""
        return whole(self)

    # Refused as methods too, where the class of a tensor is not asked: PyTorch's own answer for the piece, or end the
    # process.

    def share_memory_(self) -> NoReturn:
        raise refused("Tensor.share_memory_")

    def storage_offset(self) -> int:
        raise refused("Tensor.storage_offset")

    def const_data_ptr(self) -> int:
        raise refused("Tensor.const_data_ptr")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            shape, dtype = tuple(self.shape), self.dtype
        return f"CutTensor(shape={shape}, dtype={dtype}, piece={tuple(local_of(self).shape)}, cut={self.cut})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError(
            "a tensor that is cut over logical devices cannot be copied or pickled; pass what "
            "replicate_to_logical_devices returns."
        )

    def __deepcopy__(self, memo: object) -> CutTensor:
        return self.__reduce_ex__(0)


Kind = TypeVar("Kind", bound=CutTensor)


def cut_tensor(local: torch.Tensor, cut: Cut, devices: LogicalDevices, kind: type[Kind] = CutTensor) -> Kind:  # type: ignore[assignment]
    """``local`` as this process's piece of a tensor that is cut like ``cut``, without a graph."""
    shape = devices.axes.whole_shape(local.shape, cut)
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = _TensorMeta(torch.Size(shape), stride, local.dtype)
    with DisableTorchFunctionSubclass():
        spec = _DTensorSpec(devices.mesh, devices.placements(cut), tensor_meta=meta)
        made = kind(local, spec, requires_grad=False)
    raise_on_data_pointer(made)  # it has no memory, and who asks no class would take a null pointer for one
    made.devices, made.cut, made.whole_shape = devices, cut, torch.Size(shape)
    made.variable, made.is_shown, made.is_value, made.is_gradient = None, False, False, False
    made.as_grad = made.lender = None
    return made


def as_given(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as the program has it: of a stand-in, the variable."""
    return tensor.variable if isinstance(tensor, CutTensor) and tensor.variable is not None else tensor


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Of the whole tensor."""
    if isinstance(tensor, CutTensor):
        return tensor.whole_shape
    with DisableTorchFunctionSubclass():
        return tensor.shape


def requires_grad(tensor: torch.Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        return as_given(tensor).requires_grad


def refused(operator: str, why: str = "") -> UnsupportedError:
    """The error for what cannot be done with a tensor that is cut."""
    reason = f" {why}" if why else " is not among the operators that are proven equal to plain PyTorch there"
    return UnsupportedError(
        f"{operator} on a tensor that is cut over logical devices{reason}. Call "
        "strategy.replicate_to_logical_devices on the tensor before it: then every logical device computes all of it."
    )


BELOW_FUNCTIONS = (
    "was called below the functions that know such tensors, as a transform of torch.func (vmap, grad, jacrev …) does"
)

Axes = Sequence[int]


class _Kept:
    """What a move keeps for its gradient; where nobody goes backward through it, it stands in for PyTorch's context."""

    cut: Cut
    devices: LogicalDevices
    axes: Axes
    dim: int
    before: int
    after: int


def _moved(move: type[torch.autograd.Function], *args: object) -> torch.Tensor:
    """Going backward: with a graph where a second derivative is wanted, else without the costs of one."""
    moved: torch.Tensor = move.apply(*args) if torch.is_grad_enabled() else move.forward(_Kept(), *args)
    return moved


class _Open(torch.autograd.Function):
    """A `CutTensor` → its piece."""

    @staticmethod
    def forward(ctx: _Kept, tensor: CutTensor) -> torch.Tensor:
        ctx.cut, ctx.devices = tensor.cut, tensor.devices
        local = local_of(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> torch.Tensor:
        return _moved(_Close, gradient, ctx.cut, ctx.devices)


class _Close(torch.autograd.Function):
    """A piece → the `CutTensor`."""

    @staticmethod
    def forward(ctx: _Kept, local: torch.Tensor, cut: Cut, devices: LogicalDevices) -> CutTensor:
        ctx.cut, ctx.devices = cut, devices
        return cut_tensor(local.detach(), cut, devices)

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if isinstance(gradient, CutTensor) and gradient.cut == ctx.cut:
            return _moved(_Open, gradient), None, None
        # A hook or an autograd function of the user's has made it, whole or cut in another way.
        return enter(gradient, ctx.devices, ctx.cut, ()).clone(), None, None


class _Gather(torch.autograd.Function):
    """Pieces → the whole, which is used alike on all logical devices, or spread."""

    @staticmethod
    def forward(ctx: _Kept, local: torch.Tensor, devices: LogicalDevices, axes: Axes, dim: int) -> torch.Tensor:
        ctx.devices, ctx.axes, ctx.dim = devices, axes, dim
        return devices.gathered(local, axes, dim)

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _moved(_Take, gradient, ctx.devices, ctx.axes, ctx.dim), None, None, None


class _Take(torch.autograd.Function):
    """The whole → this process's part."""

    @staticmethod
    def forward(ctx: _Kept, whole: torch.Tensor, devices: LogicalDevices, axes: Axes, dim: int) -> torch.Tensor:
        ctx.devices, ctx.axes, ctx.dim = devices, axes, dim
        return devices.own_part(whole, axes, dim)

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _moved(_Gather, gradient, ctx.devices, ctx.axes, ctx.dim), None, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, whole: torch.Tensor, devices: LogicalDevices, axes: Axes) -> torch.Tensor:
        ctx.devices, ctx.axes = devices, axes
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _moved(_AddUp, gradient, ctx.devices, ctx.axes), None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, part: torch.Tensor, devices: LogicalDevices, axes: Axes) -> torch.Tensor:
        ctx.devices, ctx.axes = devices, axes
        return devices.summed(part, axes)

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return spread(gradient, ctx.devices, ctx.axes), None, None


class _WithEdges(torch.autograd.Function):
    """A piece with the neighbours' outermost rows: ``before`` of the previous one, ``after`` of the next."""

    @staticmethod
    def forward(
        ctx: _Kept, local: torch.Tensor, devices: LogicalDevices, axes: Axes, dim: int, sizes: tuple[int, int, float]
    ) -> torch.Tensor:
        before, after, fill = sizes
        ctx.devices, ctx.axes, ctx.dim, ctx.before, ctx.after = devices, axes, dim, before, after
        size = local.shape[dim]
        first, last = local.narrow(dim, 0, after), local.narrow(dim, size - before, before)
        previous, following = devices.edges(first, last, axes)
        if previous is None:
            previous = torch.full_like(last, fill)
        if following is None:
            following = torch.full_like(first, fill)
        return torch.cat([previous, local, following], dim)

    @staticmethod
    def backward(ctx: _Kept, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
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


def _apply(function: type[torch.autograd.Function], *args: object) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


# -- from tensors to pieces ----------------------------------------------------------------------------------------


def cut_of(tensor: torch.Tensor, devices: LogicalDevices) -> Cut:
    return tensor.cut if isinstance(tensor, CutTensor) else devices.axes.whole


def enter(tensor: torch.Tensor, devices: LogicalDevices, wanted: Cut, varying: Axes) -> torch.Tensor:
    """This process's piece of ``tensor`` cut like ``wanted``, for a computation that varies along ``varying``."""
    axes, have = devices.axes, cut_of(tensor, devices)
    if isinstance(tensor, CutTensor):
        if tensor.devices is not devices:
            raise UnsupportedError("a tensor that is cut over logical devices belongs to the strategy that cut it.")
        is_frozen = tensor.variable is not None and not requires_grad(tensor)  # its graph is there for when it is not
        local = _Open.forward(_Kept(), tensor) if is_frozen else _apply(_Open, tensor)
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
    return _apply(_Spread, whole, devices, tuple(axes))


# -- from pieces to tensors ----------------------------------------------------------------------------------------


def added_up(part: torch.Tensor, devices: LogicalDevices, axes: Axes) -> torch.Tensor:
    """The sum of the parts along ``axes``, which all of these have."""
    if not axes:
        return part
    return _apply(_AddUp, part, devices, tuple(axes))


def leave(local: torch.Tensor, devices: LogicalDevices, cut: Cut) -> torch.Tensor:
    """The tensor that ``local`` is the piece of; a plain one if nothing cuts it."""
    if cut == devices.axes.whole:
        return local
    return _apply(_Close, local, cut, devices)


def with_edges(
    local: torch.Tensor, devices: LogicalDevices, axes: Axes, dim: int, before: int, after: int, fill: float = 0.0
) -> torch.Tensor:
    """``local``, before it ``before`` rows of the previous piece along ``axes`` and behind it ``after`` of the next, in
    dimension ``dim``; at the ends rows of ``fill``."""
    if not before and not after:
        return local
    return _apply(_WithEdges, local, devices, tuple(axes), dim, (before, after, fill))


# -- annotations ---------------------------------------------------------------------------------------------------


def recut(tensor: torch.Tensor, devices: LogicalDevices, cut: Cut) -> torch.Tensor:
    """``tensor`` cut like ``cut``, and its gradient with it."""
    if cut_of(tensor, devices) == cut:
        return tensor
    return leave(enter(tensor, devices, cut, ()), devices, cut)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on every logical device, plain."""
    return recut(tensor, tensor.devices, tensor.devices.axes.whole) if isinstance(tensor, CutTensor) else tensor
