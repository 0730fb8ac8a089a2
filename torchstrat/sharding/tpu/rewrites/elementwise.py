"""Elementwise functions and activations that torch_xla 2.9 gets wrong.

It keeps constants in single precision and shifts signs away; its gradients of the ELU family are others; and ``prelu``
fails under ``vmap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from torchstrat.core.half_precision import widen

Tensor = torch.Tensor
_TENSOR: Any = torch.Tensor


def functions() -> dict[Any, Callable[..., Tensor]]:
    """The function of PyTorch → its replacement."""
    found: dict[object, Callable[..., Tensor]] = {}
    for name, base in (("log2", 2.0), ("log10", 10.0)):
        plain, stored = _logarithm(math.log(base)), getattr(torch.Tensor, f"{name}_")
        found |= {getattr(torch, name): plain, getattr(torch.Tensor, name): plain, stored: in_place(plain)}
    for owner in (torch, torch.Tensor):
        found[owner.logit] = logit
    found[torch.special.logit] = logit
    found[torch.threshold] = threshold
    found[torch.threshold_] = in_place(threshold)
    for name in ("pow", "float_power", "hypot", "cumprod"):  # whose gradients need what was there
        found[getattr(torch.Tensor, f"{name}_")] = in_place(getattr(torch, name))
    found[_TENSOR.__ipow__] = in_place(torch.pow)
    for shift in (torch.bitwise_right_shift, torch.Tensor.bitwise_right_shift, _TENSOR.__rshift__):
        found[shift] = right_shift
    for shift in (torch.Tensor.bitwise_right_shift_, _TENSOR.__irshift__):
        found[shift] = in_place(right_shift)
    found[_TENSOR.__rrshift__] = lambda by, other: right_shift(torch.as_tensor(other, device=by.device), by)
    found[torch.Tensor.logit_] = in_place(logit)
    return {**found, **_ACTIVATIONS}


def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In place of a copy: the gradient needs what was there."""

    def stored(input: Tensor, *args: object, **kwargs: object) -> Tensor:  # noqa: A002 - torch's name
        return input.copy_(function(input.clone(), *args, **kwargs))

    return stored


def _number(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def _logarithm(divisor: float) -> Callable[..., Tensor]:
    def logarithm(input: Tensor, *, out: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
        x = _number(input)
        result = (torch.log(widen(x)) / divisor).to(x.dtype)
        return result if out is None else out.copy_(result)

    return logarithm


def right_shift(input: object, other: Any, *, out: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
    """`torch.bitwise_right_shift`; this compiler shifts the sign away."""
    x = input if isinstance(input, Tensor) else torch.as_tensor(input, device=other.device)
    if x.is_floating_point():
        return torch.bitwise_right_shift(x, other)
    result = torch.where(x < 0, ~torch.bitwise_right_shift(~x, other), torch.bitwise_right_shift(x, other))
    return result if out is None else out.copy_(result)


def logit(input: Tensor, eps: float | None = None, *, out: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
    """`torch.logit`. Outside of ``[eps, 1 - eps]`` there is no gradient."""
    x = _number(input)
    wide = widen(x)
    if eps is not None:
        wide = wide.clamp(min=eps, max=1.0 - eps)
    result = (torch.log(wide) - torch.log(1.0 - wide)).to(x.dtype)
    return result if out is None else out.copy_(result)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.hardsigmoid`."""
    x = input.clone() if inplace else input
    result = (widen(x).add(3.0).clamp(min=0.0, max=6.0) / 6.0).to(x.dtype)
    # At the corners the original has no gradient, and that of clamp is 1.
    inside = (x > -3.0) & (x < 3.0)
    result = torch.where(inside, result, result.detach())
    return input.copy_(result) if inplace else result


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.hardswish`."""
    x = input.clone() if inplace else input
    wide = widen(x)
    result = torch.where(wide <= -3.0, 0.0 * wide, torch.where(wide < 3.0, wide * (wide + 3.0) / 6.0, wide)).to(x.dtype)
    return input.copy_(result) if inplace else result


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:  # noqa: A002
    """`torch.nn.functional.threshold`."""
    x = input.clone() if inplace else input
    result = torch.where(x > threshold, x, torch.full((), value, dtype=x.dtype, device=x.device))
    return input.copy_(result) if inplace else result


def gelu(input: Tensor, approximate: str = "none") -> Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.gelu`."""
    x = widen(input)
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
        return (0.5 * x * (1.0 + torch.tanh(inner))).to(input.dtype)
    if approximate != "none":
        return F.gelu(input, approximate=approximate)  # raises
    return (0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))).to(input.dtype)


_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.elu`."""
    return _store(input, inplace, lambda x: _elu(x, alpha, 1.0, 1.0))


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.celu`."""
    return _store(input, inplace, lambda x: _elu(x, alpha, 1.0, 1.0 / alpha))


def selu(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.selu`."""
    return _store(input, inplace, lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE, 1.0))


def rrelu(
    input: Tensor,  # noqa: A002 - torch's name
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """`torch.nn.functional.rrelu`."""
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    slope = lower + (upper - lower) * torch.rand_like(input)
    return _store(input, inplace, lambda x: torch.where(x < 0, slope * x, x))


def gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """`torch.nn.functional.gumbel_softmax`."""
    noise = -torch.empty_like(logits).exponential_().log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    places = torch.arange(soft.shape[dim], device=soft.device)
    after = soft.dim() - 1 - dim % soft.dim()
    chosen = places.reshape(-1, *[1] * after) == soft.argmax(dim, keepdim=True)
    return chosen.to(soft.dtype) - soft.detach() + soft


def prelu(input: Tensor, weight: Tensor) -> Tensor:  # noqa: A002 - torch's name
    """`torch.nn.functional.prelu`. ``weight``: one slope, or ``(channels,)`` for an input ``(rows, channels, …)``."""
    if weight.numel() != 1 and (input.dim() < 2 or weight.shape != (input.shape[1],)):
        return torch.prelu(input, weight)  # raises
    slope = weight.reshape(()) if weight.numel() == 1 else weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, slope * input)


_ACTIVATIONS: dict[Any, Callable[..., Tensor]] = {
    F.hardsigmoid: hardsigmoid,
    F.hardswish: hardswish,
    F.threshold: threshold,
    F.gelu: gelu,
    F.gumbel_softmax: gumbel_softmax,
    F.elu: elu,
    F.elu_: partial(elu, inplace=True),
    **dict.fromkeys((F.celu, torch.celu), celu),
    torch.celu_: partial(celu, inplace=True),
    **dict.fromkeys((F.selu, torch.selu), selu),
    torch.selu_: partial(selu, inplace=True),
    **dict.fromkeys((F.rrelu, torch.rrelu), rrelu),
    torch.rrelu_: partial(rrelu, inplace=True),
    **dict.fromkeys((F.prelu, torch.prelu, torch.Tensor.prelu), prelu),
}


def _elu(x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    positive = wide > 0
    # Filled, since the gradient of a branch that is not taken is multiplied by 0, and may not be infinite. Not clamped:
    # at 0 itself clamp's gradient is 1 up to torch 2.13 and 0 in 2.15; the original's is that of the negative branch.
    negative = (scale * alpha) * torch.expm1(wide.masked_fill(positive, 0) * input_scale)
    return torch.where(positive, scale * wide, negative).to(x.dtype)


def _store(x: Tensor, inplace: bool, function: Callable[[Tensor], Tensor]) -> Tensor:
    return in_place(function)(x) if inplace else function(x)
