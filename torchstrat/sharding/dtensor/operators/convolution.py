"""Convolutions and poolings, also over images that are cut into bands.

A band then gets the neighbours' outermost rows before it is convolved. That works where each band makes its own band of
the result: the result's height times the stride has to be the height.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from torchstrat.sharding.dtensor import cut_tensors
from torchstrat.sharding.dtensor.operators.contraction import INNER, agree_on_labels, cut_by_labels
from torchstrat.sharding.dtensor.operators.reductions import mean
from torchstrat.sharding.dtensor.operators.rules import Call, rule, shape_of

Sides = tuple[int, int]


def _each(value: Any, count: int) -> list[int]:
    """One number for all spatial dimensions, or one for each."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * count if len(sizes) == 1 else sizes


def with_neighbours(
    call: Call,
    local: torch.Tensor,
    whole: Sequence[int],
    axes_of_dim: Callable[[int], Sequence[int]],
    windows: Sequence[tuple[int, int, Sides]],
    fill: float,
) -> tuple[torch.Tensor, list[Sides]]:
    """Bands with what they need of their neighbours.

    Args:
        whole: the shape of the whole tensor; its last dimensions are the spatial ones.
        axes_of_dim: the axes that cut a dimension.
        windows: of each spatial dimension the extent of a window, its stride, and the padding on both sides.
        fill: what is beyond the edge of the whole.

    Returns the bands, and the padding that is still to be added in each spatial dimension.
    """
    rest: list[Sides] = []
    first = len(whole) - len(windows)
    for dim, (extent, stride, (left, right)) in enumerate(windows, start=first):
        axes = axes_of_dim(dim)
        if not axes:
            rest.append((left, right))
            continue
        size, band = whole[dim], local.shape[dim]
        outputs = (size + left + right - extent) // stride + 1
        after = extent - stride - left
        if outputs * stride != size or band % stride or max(left, after) > band:
            raise call.refused(
                f"with windows of {extent}, stride {stride} and padding {(left, right)} over dimension {dim}, of size "
                f"{size} in bands of {band}, does not make the same band of its result of size {outputs} from each: "
                f"{outputs} x {stride} has to be {size}, and windows no larger than bands"
            )
        local = cut_tensors.with_edges(local, call.devices, axes, dim, left, max(0, after), fill)
        if after < 0:  # rows at the end of a band that no window needs
            local = local.narrow(dim, 0, local.shape[dim] + after)
        rest.append((0, 0))
    return local, rest


def _padding(call: Call, padding: object, windows: Sequence[tuple[int, int]]) -> list[Sides]:
    """``windows``: extent and stride of each spatial dimension."""
    if padding == "valid":
        return [(0, 0)] * len(windows)
    if padding == "same":
        return [((extent - 1) // 2, extent - 1 - (extent - 1) // 2) for extent, _ in windows]
    return [(one, one) for one in _each(padding, len(windows))]


@rule("conv1d", "conv2d", "conv3d")
def convolution(
    call: Call,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
) -> torch.Tensor:
    """``input``: ``([batch,] channels, …)``, ``weight``: ``(outputs, channels / groups, …)``."""
    spatial = len(shape_of(weight)) - 2
    batched = len(shape_of(input)) == spatial + 2
    places = [f"place {dim}" for dim in range(spatial)]
    of_input = [*(["batch"] if batched else []), INNER, *places]
    result = [*(["batch"] if batched else []), "out", *places]
    of_weight = ["out", INNER, *[None] * spatial]
    chosen = agree_on_labels(call, (input, weight), (of_input, of_weight))
    if groups > 1:
        chosen = [None if label in ("out", INNER) else label for label in chosen]
    varying = [axis for axis, label in enumerate(chosen) if label is not None]
    parts = [axis for axis in varying if chosen[axis] == INNER]
    of_pieces = cut_by_labels(chosen, of_input)
    local = call.enter(input, of_pieces, varying)
    kernel = call.enter(weight, cut_by_labels(chosen, of_weight), varying)
    own_bias = None
    if bias is not None and shape_of(bias) != shape_of(weight)[:1]:
        raise call.refused("takes a bias (outputs)")
    if bias is not None:
        of_bias = tuple(0 if label == "out" else None for label in chosen)
        own_bias = call.enter(bias, of_bias, [axis for axis in varying if axis not in parts])
    strides, dilations = _each(stride, spatial), _each(dilation, spatial)
    extents = [step * (size - 1) + 1 for step, size in zip(dilations, shape_of(weight)[2:], strict=True)]
    sides = _padding(call, padding, list(zip(extents, strides, strict=True)))
    local, rest = with_neighbours(
        call,
        local,
        shape_of(input),
        lambda dim: call.devices.axes.axes_of(of_pieces, dim),
        list(zip(extents, strides, sides, strict=True)),
        0.0,
    )
    even = [left for left, right in rest]
    if any(left != right for left, right in rest):
        local = functional.pad(local, [side for sides in reversed(rest) for side in sides])
        even = [0] * spatial
    convolved = call.function(local, kernel, None if parts else own_bias, strides, even, dilations, groups)
    if parts:
        convolved = call.added_up(convolved, parts)
        if own_bias is not None:
            convolved = convolved + own_bias.to(convolved.dtype).view(-1, *[1] * spatial)
    return call.leave(convolved, cut_by_labels(chosen, result))


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(
    call: Call,
    input: torch.Tensor,
    kernel_size: Any,
    stride: object = None,
    padding: object = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    windows = _Windows(call, kernel_size, stride, padding)
    local, rest = _pooled(call, input, windows, ceil_mode, 0.0)
    if any(side for sides in windows.sides for side in sides) and not count_include_pad:
        raise call.refused("with padding and count_include_pad=False")
    options = {} if call.name == "avg_pool1d" else {"divisor_override": divisor_override}
    pooled = call.function(local, windows.sizes, windows.steps, rest, **options)
    return call.leave(pooled, call.cut(input))


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    call: Call,
    input: torch.Tensor,
    kernel_size: object,
    stride: object = None,
    padding: object = 0,
    dilation: object = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor:
    if return_indices:
        raise call.refused("with return_indices")
    if _each(dilation, 1) != [1] * len(_each(dilation, 1)):
        raise call.refused("with dilation")
    windows = _Windows(call, kernel_size, stride, padding)
    local, rest = _pooled(call, input, windows, ceil_mode, -math.inf)
    pooled = getattr(torch, call.name)(local, windows.sizes, windows.steps, rest)
    return call.leave(pooled, call.cut(input))


class _Windows:
    """Of a pooling: size, stride and padding in each spatial dimension."""

    def __init__(self, call: Call, kernel_size: Any, stride: Any, padding: object) -> None:
        spatial = int(call.name[-2])
        self.sizes = _each(kernel_size, spatial)
        self.steps = self.sizes if stride is None or stride in ([], ()) else _each(stride, spatial)
        self.sides = _padding(call, padding, list(zip(self.sizes, self.steps, strict=True)))


def _pooled(
    call: Call, input: torch.Tensor, windows: _Windows, ceil_mode: bool, fill: float
) -> tuple[torch.Tensor, list[int]]:
    """The band with what its windows need of others, and the padding that is left to do, the same on both sides."""
    if ceil_mode:
        raise call.refused("with ceil_mode")
    of_each = list(zip(windows.sizes, windows.steps, windows.sides, strict=True))
    local, rest = with_neighbours(
        call, call.open(input), shape_of(input), lambda dim: call.axes_of(input, dim), of_each, fill
    )
    return local, [left for left, _ in rest]


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_average_pool(call: Call, input: torch.Tensor, output_size: Any) -> torch.Tensor:
    spatial = int(call.name[-2])
    if _each(output_size, spatial) == [1] * spatial:
        return mean(call, input, list(range(-spatial, 0)), True)
    cut = call.cut(input)
    if any(dim is not None and dim >= len(shape_of(input)) - spatial for dim in cut):
        raise call.refused("over a dimension that is cut makes averages of size 1 only")
    return call.leave(call.function(call.open(input), output_size), cut)
