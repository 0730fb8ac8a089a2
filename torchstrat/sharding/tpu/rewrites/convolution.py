"""Convolutions in groups, for replicas of several logical devices.

Where the rows are cut over some of the devices and kept whole on the others, XLA's SPMD partitioner (torch_xla 2.9)
sums the weight gradient of a convolution in groups over all devices, and it comes out as many times too large as there
are devices with the same rows. Without groups it is right. So it is without logical devices, and then nothing is
rewritten.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

Sizes = int | Sequence[int]


def convolution(spatial: int) -> Callable[..., torch.Tensor]:
    """The replacement of `torch.conv1d`, ``conv2d`` or ``conv3d`` by the number of spatial dimensions."""
    return partial(_convolution, spatial)


def transposed_convolution(spatial: int) -> Callable[..., torch.Tensor]:
    """The replacement of `torch.conv_transpose1d` and so on."""
    return partial(_transposed_convolution, spatial)


_CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., torch.Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def _convolution(
    spatial: int,
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> torch.Tensor:
    """``input``: ``([rows,] channels, …)``, ``weight``: ``(outputs, channels / groups, …)``.

    A sum over the places of the kernel, of the input moved to there times the weights of that place.
    """
    if groups == 1 or not _fits(spatial, input, weight, bias, groups):  # the latter raises
        return _CONVOLUTIONS[spatial](input, weight, bias, stride, padding, dilation, groups)
    if input.dim() == spatial + 1:
        whole = input.unsqueeze(0)
        return _convolution(spatial, whole, weight, bias, stride, padding, dilation, groups).squeeze(0)
    kernel = weight.shape[2:]
    strides, dilations = _per_dim(stride, spatial), _per_dim(dilation, spatial)
    reach = [step * (size - 1) for step, size in zip(dilations, kernel, strict=True)]
    padded = F.pad(input, _margins(padding, reach))
    outputs = [(size - far - 1) // s + 1 for size, far, s in zip(padded.shape[2:], reach, strides, strict=True)]
    wide = torch.float32 if input.dtype in (torch.bfloat16, torch.float16) else input.dtype
    x = padded.to(wide).unflatten(1, (groups, -1))
    w = weight.to(wide).unflatten(0, (groups, -1))  # (groups, outputs / groups, channels / groups, *kernel)
    y: torch.Tensor | None = None
    for place in itertools.product(*map(range, kernel)):
        window: list[Any] = [Ellipsis]
        for at, d, s, size in zip(place, dilations, strides, outputs, strict=True):
            window.append(slice(at * d, at * d + (size - 1) * s + 1, s))
        here: tuple[Any, ...] = (*[slice(None)] * 3, *place)
        term = torch.einsum("ngc...,goc->ngo...", x[tuple(window)], w[here])
        y = term if y is None else y + term
    assert y is not None
    y = y.flatten(1, 2)
    return (y if bias is None else y + bias.to(wide).reshape(-1, *[1] * spatial)).to(input.dtype)


def _transposed_convolution(
    spatial: int,
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> torch.Tensor:
    """``input``: ``([rows,] channels, …)``, ``weight``: ``(channels, outputs / groups, …)``. Group by group."""
    original = _TRANSPOSED[spatial]
    if groups == 1 or weight.shape[0] % groups or input.shape[-spatial - 1] != weight.shape[0]:  # the latter raise
        return original(input, weight, bias, stride, padding, output_padding, groups, dilation)
    inputs, weights = input.chunk(groups, dim=-spatial - 1), weight.chunk(groups, dim=0)
    biases: Any = [None] * groups if bias is None else bias.chunk(groups)
    parts = [
        original(x, w, b, stride, padding, output_padding, 1, dilation)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    ]
    return torch.cat(parts, dim=-spatial - 1)


def _fits(spatial: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int) -> bool:
    return (
        x.dim() in (spatial + 1, spatial + 2)
        and weight.dim() == spatial + 2
        and groups > 0
        and weight.shape[0] % groups == 0
        and x.shape[-spatial - 1] == weight.shape[1] * groups
        and (bias is None or bias.shape == (weight.shape[0],))
    )


def _per_dim(sizes: Sizes, spatial: int) -> list[int]:
    given = [sizes] if isinstance(sizes, int) else list(sizes)
    return given * spatial if len(given) == 1 else given


def _margins(padding: Sizes | str, reach: list[int]) -> list[int]:
    """What `torch.nn.functional.pad` is given: before and after, from the last dimension to the first."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        before = [far // 2 for far in reach]
        after = [far - own for far, own in zip(reach, before, strict=True)]
    else:
        assert not isinstance(padding, str)
        before = after = _per_dim(padding, len(reach))
    pairs = list(zip(before, after, strict=True))
    return [margin for pair in reversed(pairs) for margin in pair]
