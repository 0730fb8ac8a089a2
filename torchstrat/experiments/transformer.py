"""A small Transformer for images: each row of pixels is a token. Plain `torch.nn`, unless it is cut over the logical
devices of a replica: then each has some of the heads, and some of the hidden units of each block's MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import torchstrat as ts
from torchstrat.config import require
from torchstrat.experiments.models import Rules, require_images


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
    def sharding_rules(axes: Sequence[str], tensor_parallel: bool = False, **_settings: Any) -> Rules | None:
        if not tensor_parallel:
            return None
        cut = [*axes]
        return {
            **{f"blocks.*.{name}.weight": [cut, None] for name in ("query", "key", "value", "widening")},  # (out, in)
            **{f"blocks.*.{name}.bias": [cut] for name in ("query", "value", "widening")},
            **{f"blocks.*.{name}.weight": [None, cut] for name in ("out", "narrowing")},
        }
