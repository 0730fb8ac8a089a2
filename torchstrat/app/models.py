"""The application's models for images and rows, plain `torch.nn`. They know nothing of strategies, unless they are to
be cut over the logical devices of a replica; where a replica has one, the annotations change nothing.

All are smooth: GELU and average pooling, where ReLU and max pooling are more usual. At a kink or a tie (the digits'
empty backgrounds are full of ties) a rounding difference of 1e-8 picks another branch and becomes a difference of 1e-3
after twenty steps; smooth models let runs under different strategies be compared to rounding (2e-7).

A static method ``sharding_rules(axes, **settings)`` of a model says how its parameters are to be cut along the axes of
a replica's logical devices: name → for each dimension the axes that cut it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

import torchstrat as ts
from torchstrat.app.config import require, require_one_of

T = TypeVar("T")
Rules = dict[str, list[list[str] | None]]


class Mlp(nn.Sequential):
    """Inputs, flattened → logits ``(batch, classes)``.

    With ``tensor_parallel``, every second layer has its outputs cut over logical devices, and the one after it adds up
    what the devices made of their parts: two layers cost one sum (Shoeybi et al., "Megatron-LM", 2019). `forward`
    raises `InvalidArgumentError` if the width of such a layer does not divide.

    Args:
        hidden: Widths of the hidden layers.
        tensor_parallel: Cut the layers, two by two, over a replica's logical devices. The numbers are the same.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        hidden: Sequence[int] = (128, 128),
        tensor_parallel: bool = False,
    ) -> None:
        widths = [math.prod(input_shape), *hidden]
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
        super().__init__(nn.Flatten(), *layers, nn.Linear(widths[-1], classes))
        self._is_cut = tensor_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widening, narrowing = _in_pairs([layer for layer in self if isinstance(layer, nn.Linear) and self._is_cut])
        for layer in self:
            x = layer(x)
            if layer in widening:
                strategy = ts.get_strategy()
                x = strategy.split_to_logical_devices(x, [1, strategy.num_logical_devices])
            elif layer in narrowing:
                x = ts.get_strategy().replicate_to_logical_devices(x)
        return x

    @staticmethod
    def sharding_rules(
        axes: Sequence[str], hidden: Sequence[int] = (128, 128), tensor_parallel: bool = False
    ) -> Rules | None:
        if not tensor_parallel:
            return None
        layers = [str(1 + 2 * number) for number in range(len(hidden) + 1)]  # between them, GELUs
        widening, narrowing = _in_pairs(layers)
        return {
            **{f"{name}.weight": [[*axes], None] for name in widening},  # (out, in)
            **{f"{name}.bias": [[*axes]] for name in widening},
            **{f"{name}.weight": [None, [*axes]] for name in narrowing},
        }


def _in_pairs(layers: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The layers whose outputs, and those whose inputs are cut. A last one without a partner is in neither."""
    paired = len(layers) // 2 * 2
    return layers[:paired:2], layers[1:paired:2]


class ConvNet(nn.Sequential):
    """Images ``(batch, channels, height, width)`` → logits ``(batch, classes)``.

    With ``spatially_parallel``, a convolution needs its neighbours' outermost rows, which the compiler has them
    exchange. Poolings make images lower: from where the height no longer divides, every logical device has all of it.
    `forward` raises `InvalidArgumentError` if the height of the model's input does not divide.

    Args:
        channels: Output channels of the 3×3 convolutions. Each but the first is followed by a 2×2 average pooling.
        norm: ``group``: per example, equal on any number of replicas. ``batch``: statistics of each replica's own rows.
            ``sync_batch``: statistics over all replicas' rows, which gives the numbers of one device.
        groups: Groups of ``norm=group``; each entry of ``channels`` must be a multiple.
        spatially_parallel: Cut images into bands of rows over a replica's logical devices. The numbers are the same.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        channels: Sequence[int] = (16, 32, 32),
        norm: str = "group",
        groups: int = 4,
        spatially_parallel: bool = False,
    ) -> None:
        require_images("convnet", input_shape)
        require_one_of("model.norm", norm, ("group", "batch", "sync_batch"))
        depth, height, width = input_shape
        halvings = len(channels) - 1
        require(
            min(height, width) >= 2**halvings,
            f"model.channels={[*channels]} halves {height}×{width} images {halvings} times; use fewer channels.",
        )
        layers: list[nn.Module] = []
        for index, (inputs, outputs) in enumerate(pairwise([depth, *channels])):
            norm_layer = nn.GroupNorm(groups, outputs) if norm == "group" else nn.BatchNorm2d(outputs)
            layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), norm_layer, nn.GELU()]
            layers += [nn.AvgPool2d(2)] if index > 0 else []
        features = channels[-1] * (height >> halvings) * (width >> halvings)
        super().__init__(*layers, nn.Flatten(), nn.Linear(features, classes))
        if norm == "sync_batch":
            ts.convert_sync_batchnorm(self)
        self._is_cut = spatially_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_cut:
            for layer in self:
                x = layer(x)
            return x
        strategy = ts.get_strategy()
        parts = strategy.num_logical_devices
        x = strategy.split_to_logical_devices(x, [1, 1, parts, 1])
        in_bands = True
        for index, layer in enumerate(self):
            rows = x.shape[2] // parts if x.ndim == 4 else 0
            if isinstance(layer, nn.Conv2d) and index > 0:
                in_bands = x.shape[2] % parts == 0
                if in_bands:
                    x = strategy.split_to_logical_devices(x, [1, 1, parts, 1])
                else:
                    x = strategy.replicate_to_logical_devices(x)
            elif isinstance(layer, nn.Flatten) or (in_bands and isinstance(layer, nn.AvgPool2d) and rows % 2):
                x, in_bands = strategy.replicate_to_logical_devices(x), False  # a band would be no band any more
            x = layer(x)
        return x


def require_images(model: str, input_shape: Sequence[int]) -> None:
    """Raise `InvalidArgumentError` unless inputs of this shape are images."""
    require(
        len(input_shape) == 3,
        f"model={model} needs images (channels, height, width); this data has inputs of shape {tuple(input_shape)}. "
        "Use model=mlp; or, with data=csv and data=npz, set data.image_shape=[channels,height,width].",
    )


class Block(nn.Module):
    """Attention and an MLP, each behind a layer normalisation and beside a residual connection.

    ``(batch, tokens, width)`` → the same. ``is_cut``: over logical devices; so two sums over them are all it costs
    (Shoeybi et al., "Megatron-LM", 2019). The key has no bias: attention does not depend on it.
    """

    def __init__(self, width: int, heads: int, *, is_cut: bool) -> None:
        super().__init__()
        self._heads, self._is_cut = heads, is_cut
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.widening, self.narrowing = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._whole(self.out(self._attention(self.attention_norm(x))))
        hidden = functional.gelu(self.widening(self.mlp_norm(x)))
        return x + self._whole(self.narrowing(self._cut(hidden, 2)))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        heads = [self._in_heads(layer(x)) for layer in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return mixed.transpose(1, 2).flatten(2)

    def _in_heads(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, tokens, width)`` → ``(batch, heads, tokens, width / heads)``."""
        return self._cut(x.unflatten(2, (self._heads, -1)).transpose(1, 2), 1)

    def _cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if not self._is_cut:
            return x
        strategy = ts.get_strategy()
        parts = [strategy.num_logical_devices if one == dim else 1 for one in range(x.ndim)]
        return strategy.split_to_logical_devices(x, parts)  # type: ignore[no-any-return]

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        return ts.get_strategy().replicate_to_logical_devices(x) if self._is_cut else x


class RowTransformer(nn.Module):
    """Images ``(batch, channels, height, width)`` → logits ``(batch, classes)``.

    ``tensor_parallel``: cut heads and hidden units over a replica's logical devices. The numbers are the same.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        width: int = 64,
        heads: int = 4,
        blocks: int = 2,
        tensor_parallel: bool = False,
    ) -> None:
        super().__init__()
        require_images("transformer", input_shape)
        require(width % heads == 0, f"model.width={width} cannot be split into model.heads={heads} heads.")
        channels, height, pixels = input_shape
        self.embedding = nn.Linear(channels * pixels, width)
        self.positions = nn.Parameter(torch.randn(height, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, is_cut=tensor_parallel) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embedding(images.transpose(1, 2).flatten(2)) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x).mean(1))
        return logits

    @staticmethod
    def sharding_rules(axes: Sequence[str], tensor_parallel: bool = False, **_settings: object) -> Rules | None:
        if not tensor_parallel:
            return None
        cut = [*axes]
        return {
            **{f"blocks.*.{name}.weight": [cut, None] for name in ("query", "key", "value", "widening")},  # (out, in)
            **{f"blocks.*.{name}.bias": [cut] for name in ("query", "value", "widening")},
            **{f"blocks.*.{name}.weight": [None, cut] for name in ("out", "narrowing")},
        }
