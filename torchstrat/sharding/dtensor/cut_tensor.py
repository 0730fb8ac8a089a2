"""`CutTensor`: what a step sees of a tensor that is cut over the replica's logical devices.

A DTensor in every respect but one: PyTorch's own rules for DTensors are never used, since some of them give wrong
numbers without a word (partial sums through nonlinear functions, convolutions over a cut dimension, dropout). A
function that is called with a `CutTensor` is looked up in `torchstrat.sharding.dtensor.operators`; one that is not
there raises. So does whatever reaches the tensor below that, from inside PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchstrat.core.errors import UnsupportedError
from torchstrat.sharding.dtensor._torch_dtensor import WithoutSubclasses, local_of, make_dtensor
from torchstrat.sharding.dtensor.axes import Cut
from torchstrat.sharding.dtensor.devices import LogicalDevices

STAND_IN = "_stand_in"
"""The attribute of a variable under which a step finds the `CutTensor` that stands in for it."""


class CutTensor(DTensor):
    """Made by `cut_tensor` only."""

    _devices: LogicalDevices
    _cut: Cut
    _whole_shape: torch.Size
    _variable: torch.Tensor | None
    """The parameter whose value it is in this step."""
    _is_value: bool
    """Whether its piece is the memory of a variable."""
    _is_gradient: bool
    """Whether its piece is the gradient of one."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        from torchstrat.sharding.dtensor.operators import apply

        return apply(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """What PyTorch does by itself: add up the gradients of a tensor that was used twice, and the like."""
        if func is torch.ops.aten.add.Tensor and len(args) == 2 and not kwargs:
            one, other = args
            if isinstance(one, CutTensor) and isinstance(other, CutTensor) and one._cut == other._cut:
                return cut_tensor(local_of(one) + local_of(other), one._cut, one._devices)
        if func is torch.ops.aten.detach.default:
            return cut_tensor(local_of(args[0]).detach(), args[0]._cut, args[0]._devices)
        raise refused(str(func))

    def to_local(self, **_: Any) -> torch.Tensor:
        raise UnsupportedError(
            "to_local() of a tensor that is cut over logical devices: in a step a plain tensor counts as whole on all "
            "of them, and a piece is not. Use replicate_to_logical_devices for the whole tensor."
        )

    def redistribute(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            "redistribute() of a tensor that is cut over logical devices: use split_to_logical_devices or "
            "replicate_to_logical_devices of the strategy."
        )

    def full_tensor(self, **_: Any) -> torch.Tensor:
        """All of it, as a plain tensor on every logical device; differentiable. All of them call it."""
        from torchstrat.sharding.dtensor.moves import whole

        return whole(self)

    # Refused as methods too, where the class of a tensor is not asked: PyTorch's own answer for the piece, or end the
    # process.

    def share_memory_(self) -> Any:
        raise refused("Tensor.share_memory_")

    def storage_offset(self) -> int:
        raise refused("Tensor.storage_offset")

    def const_data_ptr(self) -> int:
        raise refused("Tensor.const_data_ptr")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with WithoutSubclasses():
            shape, dtype = tuple(self.shape), self.dtype
        return f"CutTensor(shape={shape}, dtype={dtype}, piece={tuple(local_of(self).shape)}, cut={self._cut})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a tensor that is cut over logical devices cannot be copied or pickled; pass what "
            "replicate_to_logical_devices returns."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(0)


def cut_tensor(local: torch.Tensor, cut: Cut, devices: LogicalDevices) -> CutTensor:
    """``local`` as this process's piece of a tensor that is cut like ``cut``, without a graph."""
    shape = devices.axes.whole_shape(local.shape, cut)
    made: CutTensor = make_dtensor(CutTensor, local, shape, devices.mesh, devices.placements(cut))
    made._devices, made._cut, made._whole_shape = devices, cut, torch.Size(shape)
    made._variable, made._is_value, made._is_gradient = None, False, False
    return made


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Of the whole tensor."""
    if isinstance(tensor, CutTensor):
        return tensor._whole_shape
    with WithoutSubclasses():
        return tensor.shape


def requires_grad(tensor: torch.Tensor) -> bool:
    with WithoutSubclasses():
        return tensor.requires_grad


def refused(operator: str, why: str = "") -> UnsupportedError:
    """The error for what cannot be done with a tensor that is cut."""
    reason = f" {why}" if why else " is not among the operators that are proven equal to plain PyTorch there"
    return UnsupportedError(
        f"{operator} on a tensor that is cut over logical devices{reason}. Call "
        "strategy.replicate_to_logical_devices on the tensor before it: then every logical device computes all of it."
    )
