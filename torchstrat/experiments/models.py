"""The application's models for images and rows, plain `torch.nn`. They know nothing of strategies, unless they are to
be cut over the logical devices of a replica (`logical_devices`, `transformer`).

All are smooth: GELU and average pooling, where ReLU and max pooling are more usual. At a kink or a tie (the digits'
empty backgrounds are full of ties) a rounding difference of 1e-8 picks another branch and becomes a difference of 1e-3
after twenty steps; smooth models let runs under different strategies be compared to rounding (2e-7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

import torchstrat as ts
from torchstrat.config import ConvNetConfig, MlpConfig, ModelConfig, TransformerConfig
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments.logical_devices import InBands, InColumns, rules_for_columns
from torchstrat.experiments.transformer import RowTransformer, rules_for_heads


def build(config: ModelConfig, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A fresh model: ``(batch, *input_shape)`` float32 → logits ``(batch, classes)``.

    Call it inside ``strategy.scope()``, which decides where the parameters live.
    """
    for schema, builder in _BUILDERS.items():
        if isinstance(config, schema):
            return builder(config, input_shape, classes)
    raise InvalidArgumentError(f"model.name={config.name} is not known; choose one of mlp, convnet, transformer.")


def _build_mlp(config: MlpConfig, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    widths = [math.prod(input_shape), *config.hidden]
    hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
    kind = InColumns if config.tensor_parallel else nn.Sequential
    return kind(nn.Flatten(), *hidden, nn.Linear(widths[-1], classes))


def sharding_rules(config: ModelConfig, axes: Sequence[str]) -> dict[str, list[list[str] | None]] | None:
    """How a model's parameters are to be cut along ``axes``, by name; None: every logical device has all of them."""
    if isinstance(config, MlpConfig) and config.tensor_parallel:
        layers = len(config.hidden) + 1
        return rules_for_columns([str(1 + 2 * number) for number in range(layers)], axes)  # between them, GELUs
    if isinstance(config, TransformerConfig) and config.tensor_parallel:
        return rules_for_heads(axes)
    return None


def _build_convnet(config: ConvNetConfig, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    if len(input_shape) != 3:
        raise InvalidArgumentError(
            f"model=convnet needs images (channels, height, width); this data has inputs of shape {input_shape}. Use "
            "model=mlp, or set data.image_shape."
        )
    channels, height, width = input_shape
    halvings = len(config.channels) - 1
    if min(height, width) < 2**halvings:
        raise InvalidArgumentError(
            f"model.channels={config.channels} halves the image {halvings} times, and {height}×{width} is too small "
            "for that; use fewer channels."
        )
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(zip([channels, *config.channels], config.channels, strict=False)):
        layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), _norm(config, outputs), nn.GELU()]
        if index > 0:
            layers.append(nn.AvgPool2d(2))
    features = config.channels[-1] * (height >> halvings) * (width >> halvings)
    kind = InBands if config.spatially_parallel else nn.Sequential
    model = kind(*layers, nn.Flatten(), nn.Linear(features, classes))
    return ts.convert_sync_batchnorm(model) if config.norm == "sync_batch" else model


def _build_transformer(config: TransformerConfig, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    if len(input_shape) != 3:
        raise InvalidArgumentError(
            f"model=transformer needs images (channels, height, width); this data has inputs of shape {input_shape}. "
            "Use model=mlp, or set data.image_shape."
        )
    return RowTransformer(
        input_shape,
        classes,
        width=config.width,
        heads=config.heads,
        blocks=config.blocks,
        is_cut=config.tensor_parallel,
    )


def _norm(config: ConvNetConfig, channels: int) -> nn.Module:
    if config.norm == "group":
        return nn.GroupNorm(config.groups, channels)
    return nn.BatchNorm2d(channels)


_BUILDERS: dict[type[ModelConfig], Callable[[Any, tuple[int, ...], int], nn.Module]] = {
    MlpConfig: _build_mlp,
    ConvNetConfig: _build_convnet,
    TransformerConfig: _build_transformer,
}
