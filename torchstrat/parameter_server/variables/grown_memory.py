"""A tensor that gets more rows stays the same object, for whoever holds it: a parameter, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from torchstrat._torch_private import DisableTorchFunctionSubclass

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


def give_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """``memory``, of any number of rows, takes the place of what ``tensor`` has."""
    with DisableTorchFunctionSubclass():
        _DATA.__set__(tensor, memory)


def grow_gradient(parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
    """A gradient that is left is nothing of the new rows: it may still be added to, or set to zero."""
    with torch.no_grad(), DisableTorchFunctionSubclass():
        gradient = _GRAD.__get__(parameter)
        if gradient is None or tuple(gradient.shape) == shape:
            return
        if gradient.layout == torch.sparse_coo:
            grown = torch.sparse_coo_tensor(
                gradient._indices(),
                gradient._values(),
                shape,
                is_coalesced=gradient.is_coalesced(),
                check_invariants=False,
            )
        else:
            grown = gradient.new_zeros(shape)
            grown[: len(gradient)] = gradient
        _DATA.__set__(gradient, grown)
