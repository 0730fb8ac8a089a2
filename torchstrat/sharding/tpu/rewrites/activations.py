"""Activations that torch_xla 2.9 gets wrong: its gradients of the ELU family, and ``prelu`` under ``vmap``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def elu(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.elu`."""
    return _store(input, inplace, lambda x: _elu(x, alpha, 1.0, 1.0))


def celu(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.celu`."""
    return _store(input, inplace, lambda x: _elu(x, alpha, 1.0, 1.0 / alpha))


def selu(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.selu`."""
    return _store(input, inplace, lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE, 1.0))


def rrelu(
    input: torch.Tensor,  # noqa: A002 - torch's name
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.rrelu`."""
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    slope = lower + (upper - lower) * torch.rand_like(input)
    return _store(input, inplace, lambda x: torch.where(x < 0, slope * x, x))


def gumbel_softmax(
    logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """`torch.nn.functional.gumbel_softmax`."""
    noise = -torch.empty_like(logits).exponential_().log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    places = torch.arange(soft.shape[dim], device=soft.device)
    after = soft.dim() - 1 - dim % soft.dim()
    chosen = places.reshape(-1, *[1] * after) == soft.argmax(dim, keepdim=True)
    return chosen.to(soft.dtype) - soft.detach() + soft


def prelu(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.prelu`. ``weight``: one slope, or ``(channels,)`` for an input ``(rows, channels, …)``."""
    if weight.numel() != 1 and (input.dim() < 2 or weight.shape != (input.shape[1],)):
        return torch.prelu(input, weight)  # raises
    slope = weight.reshape(()) if weight.numel() == 1 else weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, slope * input)


def _elu(x: torch.Tensor, alpha: float, scale: float, input_scale: float) -> torch.Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    positive = wide > 0
    # Filled, since the gradient of a branch that is not taken is multiplied by 0, and may not be infinite. Not clamped:
    # at 0 itself clamp's gradient is 1 up to torch 2.13 and 0 in 2.15; the original's is that of the negative branch.
    negative = (scale * alpha) * torch.expm1(wide.masked_fill(positive, 0) * input_scale)
    return torch.where(positive, scale * wide, negative).to(x.dtype)


def _store(x: torch.Tensor, inplace: bool, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """In place of a copy: the gradient needs what was there."""
    return x.copy_(function(x.clone())) if inplace else function(x)
