"""Average pooling with unusual borders, and its opposite for maxima, which torch_xla 2.9 gets wrong or ends with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from torchstrat.core.half_precision import widen

Tensor = torch.Tensor
Sizes = int | Sequence[int]


def functions() -> dict[Any, Callable[..., Any]]:
    """The function of PyTorch → its replacement."""
    average: tuple[Any, ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
    unpool: tuple[Any, ...] = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
    return {
        **{function: partial(_average, function, spatial) for spatial, function in enumerate(average, 1)},
        torch.avg_pool1d: partial(_average, F.avg_pool1d, 1),
        **{function: partial(_unpool, spatial) for spatial, function in enumerate(unpool, 1)},
    }


def _per_dim(sizes: Sizes, spatial: int) -> list[int]:
    given = [sizes] if isinstance(sizes, int) else list(sizes)
    return given * spatial if len(given) == 1 else given


def _average(
    original: Callable[..., Tensor],
    spatial: int,
    input: Tensor,  # noqa: A002 - torch's name
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """A sum over the places of the kernel. With usual borders the original, which is right."""
    rest = () if divisor_override is None else (divisor_override,)
    kernel, margins = _per_dim(kernel_size, spatial), _per_dim(padding, spatial)
    strides = kernel if stride is None or stride == () else _per_dim(stride, spatial)
    sizes = input.shape[-spatial:]
    usual = not ceil_mode and divisor_override is None and (count_include_pad or not any(margins))
    malformed = input.dim() not in (spatial + 1, spatial + 2) or any(
        2 * m > k for m, k in zip(margins, kernel, strict=True)
    )
    if usual or malformed or divisor_override == 0:  # the latter raise
        return original(input, kernel_size, stride, padding, ceil_mode, count_include_pad, *rest)
    outputs, pads, counts = [], [], []
    for size, k, s, m in zip(sizes, kernel, strides, margins, strict=True):
        steps = (size + 2 * m - k) / s
        many = (math.ceil(steps) if ceil_mode else math.floor(steps)) + 1
        if ceil_mode and (many - 1) * s >= size + m:
            many -= 1  # the last one would begin behind the margin
        outputs.append(many)
        pads.append((m, max(0, (many - 1) * s + k - size - m)))
        starts = [at * s - m for at in range(many)]
        whole = [min(start + k, size + m) - start for start in starts]
        inside = [min(start + k, size) - max(start, 0) for start in starts]
        counts.append(whole if count_include_pad else inside)
    padded = F.pad(widen(input), [one for pair in reversed(pads) for one in pair])
    total: Tensor | None = None
    for place in itertools.product(*map(range, kernel)):
        window = tuple(
            slice(at, at + (many - 1) * s + 1, s) for at, many, s in zip(place, outputs, strides, strict=True)
        )
        places: tuple[Any, ...] = (Ellipsis, *window)
        here = padded[places]
        total = here if total is None else total + here
    assert total is not None
    if divisor_override is not None:
        return (total / divisor_override).to(input.dtype)
    for dim, own in enumerate(counts):
        shape = [-1 if at == dim else 1 for at in range(spatial)]
        total = total / torch.tensor(own, dtype=total.dtype).to(total.device).reshape(shape)
    return total.to(input.dtype)


def _unpool(
    spatial: int,
    input: Tensor,  # noqa: A002 - torch's name
    indices: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    output_size: Sequence[int] | None = None,
) -> Tensor:
    """A comparison of places for each value, whose gradient is a sum."""
    kernel, margins = _per_dim(kernel_size, spatial), _per_dim(padding, spatial)
    strides = kernel if stride is None else _per_dim(stride, spatial)
    sizes = F._unpool_output_size(input, kernel, strides, margins, output_size)  # type: ignore[attr-defined]
    values, at = input.flatten(-spatial), indices.flatten(-spatial)
    places = torch.arange(math.prod(sizes), device=input.device)
    chosen = at.unsqueeze(-1) == places
    # Of equal places the last value is kept, as on the host.
    order = torch.arange(1, at.shape[-1] + 1, device=input.device).unsqueeze(-1)
    last = (chosen * order).amax(dim=-2, keepdim=True)
    kept = chosen & (order == last)
    spread = values.unsqueeze(-1)
    result = torch.where(kept, spread.detach(), 0).sum(dim=-2)
    # Every value has the gradient of its place, whether it is seen there or not.
    through = torch.where(chosen, spread - spread.detach(), 0).sum(dim=-2)
    unpooled: Tensor = (result + through).unflatten(-1, list(sizes))
    return unpooled
