"""Tensors as the bytes that they are in memory."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """``(bytes,)`` uint8 in the memory of a contiguous tensor.

    PyTorch calls a tensor of one element contiguous whatever its strides are, such as a column of one row, and does not
    see it as bytes; so those that ``view(-1)`` has taken along are replaced.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
