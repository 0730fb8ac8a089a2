"""`layer_norm`, `group_norm` and `rms_norm` written out, so that a compiler that cuts tensors can cut them.

As single operations of torch_xla they become an XLA operation which the SPMD partitioner does not split: it gathers the
whole activation on every device first. Means and products it splits along any dimension.

All of them compute as the originals do: half precision in single precision, rounded once at the end; the variance from
centred values, so that a large mean does not cancel it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from torchstrat.core.half_precision import widen


def layer_norm(
    input: torch.Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """`torch.nn.functional.layer_norm` and `torch.layer_norm`. ``input``: ``(…, *normalized_shape)``."""
    if not _is_tail(normalized_shape, input, weight, bias):
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)  # raises, in PyTorch's words
    dims = list(range(-len(normalized_shape), 0))
    return scale_and_shift(standardize(widen(input), dims, eps), weight, bias).to(input.dtype)


def rms_norm(
    input: torch.Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` and `torch.rms_norm`. ``input``: ``(…, *normalized_shape)``."""
    if not _is_tail(normalized_shape, input, weight):
        return F.rms_norm(input, list(normalized_shape), weight, eps)  # raises, in PyTorch's words
    x = widen(input)
    dims = list(range(-len(normalized_shape), 0))
    # Without a number it is that of the type computed in: half precision too gets that of single precision.
    smallest = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * torch.rsqrt(x.square().mean(dim=dims, keepdim=True) + smallest)
    return scale_and_shift(y, weight, None).to(input.dtype)


def group_norm(
    input: torch.Tensor,  # noqa: A002 - torch's name
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """`torch.nn.functional.group_norm` and `torch.group_norm`. ``input``: ``(rows, channels, …)``."""
    if not _has_groups(num_groups, input, weight, bias):
        return F.group_norm(input, num_groups, weight, bias, eps)  # raises, in PyTorch's words
    # The dimensions after the channels stay as they are: one that is cut over devices must not be merged with others.
    grouped = widen(input).unflatten(1, (num_groups, input.shape[1] // num_groups))
    y = standardize(grouped, list(range(2, grouped.dim())), eps).flatten(1, 2)
    return scale_and_shift(y, per_channel(weight, y.dim()), per_channel(bias, y.dim())).to(input.dtype)


def standardize(x: torch.Tensor, dims: list[int], eps: float) -> torch.Tensor:
    """``x`` with mean 0 and (biased) variance 1 over ``dims``."""
    centred = x - x.mean(dim=dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim=dims, keepdim=True) + eps)


def scale_and_shift(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """In the type of ``x``: parameters of half precision are widened, the result is not rounded in between."""
    if weight is not None:
        x = x * weight.to(x.dtype)
    return x if bias is None else x + bias.to(x.dtype)


def per_channel(parameter: torch.Tensor | None, rank: int) -> torch.Tensor | None:
    """``(channels,)`` made ``(channels, 1, …)``, to go with a tensor ``(rows, channels, …)`` of ``rank`` dimensions."""
    return None if parameter is None else parameter.reshape(-1, *[1] * (rank - 2))


def _is_tail(normalized_shape: Sequence[int], x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    shape = tuple(normalized_shape)
    tensors = [one.shape for one in parameters if one is not None]
    return 0 < len(shape) <= x.dim() and all(shape == found for found in (x.shape[-len(shape) :], *tensors))


def _has_groups(num_groups: int, x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    if x.dim() < 2 or num_groups < 1 or x.shape[1] % num_groups != 0:
        return False
    channels = (x.shape[1],)
    # Groups of one value over the whole batch have no variance, and PyTorch refuses them.
    return x.numel() > num_groups and all(one is None or one.shape == channels for one in parameters)
