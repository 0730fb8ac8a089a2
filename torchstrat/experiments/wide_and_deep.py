"""A wide-and-deep model of clicks, plain `torch.nn`. It knows nothing of strategies.

Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016): a linear model, which memorises, and a network on
embeddings, which generalises, add up to one logit.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from torchstrat.config import WideAndDeepConfig
from torchstrat.experiments.click_rows import CATEGORIES, INTEGERS, ClickInputs

_INITIAL_DEVIATION = 0.01
"""Of embeddings. With `nn.Embedding`'s own 1.0 the rows of rare categories would be noise that drowns the others."""


class WideAndDeep(nn.Module):
    """`ClickInputs` → logits ``(batch,)``.

    All fields share two tables (`hash_categories` says why): one with a number, one with ``embedding_width`` numbers
    for a category. Two lookups then serve 26 fields, and it is large tables that are worth cutting up over servers.

    Args:
        category_rows: Rows of both tables.
        config: Widths, and whether the tables' gradients are sparse.
    """

    def __init__(self, category_rows: int, config: WideAndDeepConfig) -> None:
        super().__init__()
        sparse = config.sparse_gradients
        self.wide_categories = nn.EmbeddingBag(category_rows, 1, mode="sum", sparse=sparse)
        self.wide_integers = nn.Linear(INTEGERS, 1)
        self.embedding = nn.Embedding(category_rows, config.embedding_width, sparse=sparse)
        widths = [INTEGERS + CATEGORIES * config.embedding_width, *config.hidden]
        hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
        self.deep = nn.Sequential(*hidden, nn.Linear(widths[-1], 1))
        nn.init.zeros_(self.wide_categories.weight)
        nn.init.normal_(self.embedding.weight, std=_INITIAL_DEVIATION)

    def forward(self, inputs: ClickInputs) -> torch.Tensor:
        integers, table_rows = inputs  # (batch, 13), (batch, 26)
        wide = self.wide_categories(table_rows) + self.wide_integers(integers)
        embedded = self.embedding(table_rows).flatten(start_dim=1)  # (batch, 26 * embedding_width)
        logits: torch.Tensor = wide + self.deep(torch.cat([integers, embedded], dim=1))
        return logits.squeeze(1)
