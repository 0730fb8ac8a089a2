"""Interpolation by the factor asked for: bilinear, by products with each dimension's weights in the precision asked
for, and of the nearest pixel. The compiler's own goes by the ratio of the sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from torchstrat.core.half_precision import widen

Tensor = torch.Tensor


def interpolate(
    input: Tensor,  # noqa: A002 - torch's name
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """`torch.nn.functional.interpolate`."""
    rank = input.dim() - 2
    is_ours = mode == "nearest" or (mode == "bilinear" and rank == 2 and not antialias)
    if not is_ours or (size is None) == (scale_factor is None) or (size is not None and recompute_scale_factor):
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    factors: list[float | None] = [None] * rank
    if scale_factor is None:
        assert size is not None
        sizes = [size] * rank if isinstance(size, int) else list(size)
    else:
        given = [scale_factor] * rank if isinstance(scale_factor, int | float) else list(scale_factor)
        sizes = [math.floor(float(own * factor)) for own, factor in zip(input.shape[2:], given, strict=True)]
        factors = list(given) if not recompute_scale_factor else factors
    if mode == "nearest":
        for dim, (wanted, factor) in enumerate(zip(sizes, factors, strict=True), 2):
            input = input.index_select(dim, _nearest(int(input.shape[dim]), wanted, factor).to(input.device))  # noqa: A001
        return input
    x = widen(input)
    for dim, (wanted, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        weights = _weights(int(input.shape[dim]), wanted, factor, bool(align_corners)).to(x.dtype).to(x.device)
        x = (x.movedim(dim, -1) @ weights.t()).movedim(-1, dim)
    return x.to(input.dtype)


def upsample_bilinear(
    input: Tensor,  # noqa: A002 - torch's name
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
) -> Tensor:
    """`torch.nn.functional.upsample_bilinear`."""
    return interpolate(input, size, scale_factor, mode="bilinear", align_corners=True)


def upsample(
    input: Tensor,  # noqa: A002 - torch's name
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """`torch.nn.functional.upsample`."""
    return interpolate(input, size, scale_factor, mode, align_corners)


def _weights(inputs: int, outputs: int, factor: float | None, align_corners: bool) -> Tensor:
    """``[outputs, inputs]``, on the host in double precision."""
    weights = [[0.0] * inputs for _ in range(outputs)]
    if align_corners:
        step = (inputs - 1) / (outputs - 1) if outputs > 1 else 0.0
    else:
        step = 1.0 / factor if factor else inputs / outputs
    for place, row in enumerate(weights):
        at = step * place if align_corners else max(0.0, step * (place + 0.5) - 0.5)
        low = min(int(at), inputs - 1)
        high = min(low + 1, inputs - 1)
        share = min(max(at - low, 0.0), 1.0)
        row[low] += 1.0 - share
        row[high] += share
    return torch.tensor(weights, dtype=torch.float64, device="cpu").reshape(outputs, inputs)


def _nearest(inputs: int, outputs: int, factor: float | None) -> Tensor:
    """Which pixel each one takes, on the host; in the single precision in which PyTorch computes it."""
    places = torch.arange(outputs, device="cpu")
    if inputs == outputs:
        return places
    step = 1.0 / factor if factor else inputs / outputs
    at = places.to(torch.float32) * torch.tensor(step, dtype=torch.float32, device="cpu")
    return at.floor().long().clamp(max=inputs - 1)
