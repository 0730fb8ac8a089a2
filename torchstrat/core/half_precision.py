"""Half precision, and what PyTorch computes in when it is given that."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """In single precision at least: in that PyTorch adds up half precision, and sums of squares do not overflow."""
    return tensor.float() if tensor.dtype in HALF else tensor
