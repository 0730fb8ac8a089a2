"""Bilinear interpolation by products with each dimension's weights, in the precision and by the factor asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from torchstrat.half_precision import widen

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
    is_ours = mode == "bilinear" and input.dim() == 4 and not antialias and (size is None) != (scale_factor is None)
    if not is_ours or (size is not None and recompute_scale_factor):
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    factors: list[float | None] = [None, None]
    if scale_factor is None:
        assert size is not None
        sizes = [size, size] if isinstance(size, int) else list(size)
    else:
        given = [scale_factor] * 2 if isinstance(scale_factor, int | float) else list(scale_factor)
        sizes = [math.floor(float(own * factor)) for own, factor in zip(input.shape[2:], given, strict=True)]
        factors = list(given) if not recompute_scale_factor else factors
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
