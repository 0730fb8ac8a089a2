"""Models whose activations are cut over a replica's logical devices.

Plain `nn.Sequential`s otherwise, with the same parameters under the same names: where a replica has one logical device
the annotations change nothing, and nothing here depends on which strategy it is that has more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

import torchstrat as ts

T = TypeVar("T")


class InBands(nn.Sequential):
    """Layers for images ``(batch, channels, height, width)``, cut into bands of rows, one per logical device.

    A convolution then needs its neighbours' outermost rows, which the compiler has them exchange. Poolings make images
    lower: from where the height no longer divides, every logical device has all of it.

    `forward` raises `InvalidArgumentError` if the height of the model's input does not divide.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        strategy = ts.get_strategy()
        parts = strategy.num_logical_devices
        x = strategy.split_to_logical_devices(x, [1, 1, parts, 1])
        in_bands = True
        for index, layer in enumerate(self):
            if isinstance(layer, nn.Conv2d) and index > 0:
                in_bands = x.shape[2] % parts == 0
                if in_bands:
                    x = strategy.split_to_logical_devices(x, [1, 1, parts, 1])
                else:
                    x = strategy.replicate_to_logical_devices(x)
            elif isinstance(layer, nn.Flatten) or (in_bands and not _keeps_bands(layer, x.shape[2] // parts)):
                x, in_bands = strategy.replicate_to_logical_devices(x), False
            x = layer(x)
        return x


def _keeps_bands(layer: nn.Module, rows: int) -> bool:
    """Whether a band of ``rows`` becomes a band of the layer's output."""
    if not isinstance(layer, nn.AvgPool2d):
        return True
    stride = layer.stride if isinstance(layer.stride, int) else layer.stride[0]
    return rows % stride == 0


class InColumns(nn.Sequential):
    """Layers for rows ``(batch, width)``, in which every second `nn.Linear` has its outputs cut over logical devices.

    The one after it adds up what the devices made of their parts, so that two layers cost one sum over the logical
    devices (Shoeybi et al., "Megatron-LM", 2019). `rules_for_columns` cuts the weights to match.

    `forward` raises `InvalidArgumentError` if the width of such a layer does not divide.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        strategy = ts.get_strategy()
        parts = strategy.num_logical_devices
        widening, narrowing = in_pairs([layer for layer in self if isinstance(layer, nn.Linear)])
        for layer in self:
            x = layer(x)
            if layer in widening:
                x = strategy.split_to_logical_devices(x, [1, parts])
            elif layer in narrowing:
                x = strategy.replicate_to_logical_devices(x)
        return x


def rules_for_columns(linear_layers: Sequence[str], axes: Sequence[str]) -> dict[str, list[list[str] | None]]:
    """Sharding rules for the parameters of an `InColumns`: name → for each dimension the axes that cut it.

    Args:
        linear_layers: the names of the model's `nn.Linear`, in order.
        axes: all axes of a replica's logical devices, ``["d0"]`` where they are in a row.
    """
    widening, narrowing = in_pairs(linear_layers)
    cut = [*axes]
    return {
        **{f"{name}.weight": [cut, None] for name in widening},  # (out, in)
        **{f"{name}.bias": [cut] for name in widening},
        **{f"{name}.weight": [None, cut] for name in narrowing},
    }


def in_pairs(layers: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The layers whose outputs, and those whose inputs are cut. A last one without a partner is in neither."""
    paired = len(layers) // 2 * 2
    return layers[:paired:2], layers[1:paired:2]
