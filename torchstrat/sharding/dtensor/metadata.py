"""What can be asked of a tensor without a look at its elements."""

from __future__ import annotations

from typing import Any

import torch

from torchstrat.core import gradients


def getters(*names: str) -> set[Any]:
    """The functions that PyTorch reports when one of these attributes is read; not every version has all."""
    found = (getattr(torch.Tensor, name, None) for name in names)
    return {one.__get__ for one in found if one is not None}


METADATA = {
    *getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "itemsize", "nbytes"),
    *getters("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.get_device,
    torch.Tensor.__len__,
    gradients.register_hook,
    gradients.told_hook,
    torch.Tensor.retain_grad,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
