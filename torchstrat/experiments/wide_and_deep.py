"""A wide-and-deep model of clicks, plain `torch.nn`. It knows nothing of strategies.

Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016): a linear model, which memorises, and a network on
embeddings, which generalises, add up to one logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from torchstrat.config import require, require_positive
from torchstrat.experiments.click_rows import CATEGORIES, INTEGERS, ClickInputs

_INITIAL_DEVIATION = 0.01
"""Of embeddings. With `nn.Embedding`'s own 1.0 the rows of rare categories would be noise that drowns the others."""


class WideAndDeep(nn.Module):
    """`ClickInputs` → logits ``(batch,)``.

    All fields share two tables (`hash_categories` says why): one with a number, one with ``embedding_width`` numbers
    for a category. Two lookups then serve 26 fields, and it is large tables that are worth cutting up over servers.

    Args:
        category_rows: Rows of both tables.
        embedding_width: Numbers that the deep part keeps for a category; the wide part keeps one.
        hidden: Widths of the deep part's hidden layers.
        sparse_gradients: The gradient of a table has only the rows that a batch looks up. SGD and Adagrad can use it,
            Adam cannot.
    """

    def __init__(
        self,
        category_rows: int,
        embedding_width: int = 16,
        hidden: Sequence[int] = (128, 64),
        sparse_gradients: bool = True,
    ) -> None:
        require_positive("model.embedding_width", embedding_width)
        require(all(width > 0 for width in hidden), f"model.hidden={[*hidden]} must be positive widths.")
        super().__init__()
        sparse = sparse_gradients
        self.wide_categories = nn.EmbeddingBag(category_rows, 1, mode="sum", sparse=sparse)
        self.wide_integers = nn.Linear(INTEGERS, 1)
        self.embedding = nn.Embedding(category_rows, embedding_width, sparse=sparse)
        widths = [INTEGERS + CATEGORIES * embedding_width, *hidden]
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
        self.deep = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        nn.init.zeros_(self.wide_categories.weight)
        nn.init.normal_(self.embedding.weight, std=_INITIAL_DEVIATION)

    def forward(self, inputs: ClickInputs) -> torch.Tensor:
        integers, table_rows = inputs  # (batch, 13), (batch, 26)
        wide = self.wide_categories(table_rows) + self.wide_integers(integers)
        embedded = self.embedding(table_rows).flatten(start_dim=1)  # (batch, 26 * embedding_width)
        logits: torch.Tensor = wide + self.deep(torch.cat([integers, embedded], dim=1))
        return logits.squeeze(1)
