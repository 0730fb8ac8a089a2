"""Tensors as the bytes that they are in memory, and where they are."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from torchstrat._torch_private import DisableTorchFunctionSubclass


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """``(bytes,)`` uint8 in the memory of a contiguous tensor.

    PyTorch calls a tensor of one element contiguous whatever its strides are, such as a column of one row, and does not
    see it as bytes; so those that ``view(-1)`` has taken along are replaced.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same shape. By value NaN, which programs fill buffers with that
    are not known yet, would be another one each time."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_as_integers(one), _as_integers(other))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def has_address(tensor: torch.Tensor) -> bool:
    """Whether it is plain memory, which can be shared."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.layout == torch.strided and (tensor.is_cpu or tensor.is_cuda)
    with DisableTorchFunctionSubclass():  # a variable that is cut over logical devices says where its pieces are
        return tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda") and not is_lazy(tensor)


def address_of(tensor: torch.Tensor) -> int:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.untyped_storage().data_ptr()
    with DisableTorchFunctionSubclass():  # one of parameter servers would bring its values, and keep them in mind
        return tensor.untyped_storage().data_ptr()
