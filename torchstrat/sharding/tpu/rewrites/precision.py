"""Elementwise functions: torch_xla 2.9 keeps constants in single precision, and shifts signs away."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchstrat.core.half_precision import widen

Tensor = torch.Tensor
_TENSOR: Any = torch.Tensor


def functions() -> dict[Any, Callable[..., Tensor]]:
    """The function of PyTorch → its replacement."""
    found: dict[Any, Callable[..., Tensor]] = {}
    for name, base in (("log2", 2.0), ("log10", 10.0)):
        plain, stored = _logarithm(math.log(base)), getattr(torch.Tensor, f"{name}_")
        found |= {getattr(torch, name): plain, getattr(torch.Tensor, name): plain, stored: _in_place(plain)}
    for owner in (torch, torch.Tensor):
        found[owner.logit] = logit
    found[torch.special.logit] = logit
    found[torch.threshold] = threshold
    found[torch.threshold_] = _in_place(threshold)
    for name in ("pow", "float_power", "hypot", "cumprod"):  # whose gradients need what was there
        found[getattr(torch.Tensor, f"{name}_")] = _in_place(getattr(torch, name))
    found[_TENSOR.__ipow__] = _in_place(torch.pow)
    for shift in (torch.bitwise_right_shift, torch.Tensor.bitwise_right_shift, _TENSOR.__rshift__):
        found[shift] = right_shift
    for shift in (torch.Tensor.bitwise_right_shift_, _TENSOR.__irshift__):
        found[shift] = _in_place(right_shift)
    found[_TENSOR.__rrshift__] = lambda by, other: right_shift(torch.as_tensor(other, device=by.device), by)
    found[torch.Tensor.logit_] = _in_place(logit)
    return found


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def stored(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 - torch's name
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


def right_shift(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
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
        return torch.nn.functional.gelu(input, approximate=approximate)  # raises
    return (0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))).to(input.dtype)
