"""What may be asked of a tensor whose values are somewhere else: its shape and kind, its gradient, its hooks."""

from __future__ import annotations

from typing import Any

import torch


def _methods(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names}


def _properties(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


def _is_kind(name: str) -> bool:
    """Whether it is a property that says of which kind a tensor is: ``is_meta``, ``is_cuda``, ``is_quantized`` …"""
    return name.startswith("is_") and not callable(getattr(torch.Tensor, name))


_GRAD: Any = torch.Tensor.grad
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad

NEEDS_NO_VALUES = frozenset(
    {
        *_properties("grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim"),
        *_properties("nbytes", "itemsize", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *_properties(*(name for name in dir(torch.Tensor) if _is_kind(name))),
        *_methods("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset"),
        *_methods("is_contiguous", "is_floating_point", "is_complex", "get_device", "__hash__", "__len__"),
        *_methods("is_inference", "is_signed", "is_coalesced", "_is_view", "dim_order"),
        *_methods("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(_GRAD.__set__, _GRAD.__delete__, _REQUIRES_GRAD.__set__),
    }
)
