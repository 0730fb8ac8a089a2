"""What a step may not ask: how a tensor lies in memory. On the devices each is whole and in the order of its shape."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torchstrat.core.errors import UnsupportedError
from torchstrat.sharding.tpu.named_functions import members
from torchstrat.sharding.tpu.places import current_place

_NAMES = (
    *("t", "T", "mT", "H", "mH", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint"),
    *(
        "expand",
        "expand_as",
        "broadcast_to",
        "unfold",
        "narrow",
        "select",
        "diagonal",
        "chunk",
        "split",
        "tensor_split",
    ),
    *(
        "unbind",
        "hsplit",
        "vsplit",
        "dsplit",
        "flip",
        "channel_shuffle",
        "pixel_shuffle",
        "broadcast_tensors",
        "__getitem__",
    ),
    *("rot90", "take_along_dim", "real", "imag", "unsafe_chunk", "unsafe_split", "einsum"),
)


_REARRANGE = members(_NAMES, torch, torch.Tensor)
"""Results of which plain PyTorch may not keep in the order of their shape, or as a part of something larger."""

_ORDER = members(("contiguous",), torch, torch.Tensor)
_READS_MEMORY = members(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"), torch, torch.Tensor)
_CHANGES_MEMORY = members(("as_strided_", "resize_", "resize_as_", "set_", "as_strided_scatter"), torch, torch.Tensor)


class Layouts:
    """Which tensors of one step plain PyTorch may keep in another order than the devices do."""

    def __init__(self) -> None:
        self._others: dict[int, weakref.ref[torch.Tensor]] = {}

    def require_known(self, func: Any, args: Any) -> None:
        """Raises `UnsupportedError` where ``func`` looks at memory that is not known."""
        if func not in _READS_MEMORY and func not in _CHANGES_MEMORY:
            return
        name = getattr(func, "__name__", str(func))
        if func in _CHANGES_MEMORY:
            raise UnsupportedError(
                f"{name} in a step changes how a tensor lies in memory (at {current_place()}), of which there is none "
                "on this strategy: make another tensor with reshape, as_strided or torch.empty."
            )
        if args and self._is_other(args[0]):
            raise UnsupportedError(
                f"{name} in a step reads a tensor by its place in memory (at {current_place()}), and this one has been "
                f"transposed, expanded or cut out of another. Call it on tensor.contiguous(), with strides to match."
            )

    def note(self, func: Any, args: Any, result: Any) -> None:
        """``func(*args)`` was ``result``."""
        if func in _ORDER or not (func in _REARRANGE or (self._others and any(map(self._is_other, args)))):
            return
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, torch.Tensor):
                self._others[id(one)] = weakref.ref(one)

    def _is_other(self, value: Any) -> bool:
        reference = self._others.get(id(value))
        return reference is not None and reference() is value
