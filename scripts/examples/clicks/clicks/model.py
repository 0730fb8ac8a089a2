"""A wide-and-deep model of clicks, plain PyTorch (Cheng et al., "Wide & Deep Learning", 2016)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from clicks.logs import CATEGORIES, INTEGERS


class WideAndDeep(nn.Module):
    """Counts ``(batch, 13)`` and table rows ``(batch, 26)`` → logits ``(batch,)``.

    A linear model, which memorises, and a network on embeddings, which generalises, add up. All fields share two
    tables: two lookups serve 26 fields, and it is large tables that are worth cutting up over servers.
    """

    def __init__(
        self,
        category_rows: int,
        embedding_width: int = 16,
        hidden: Sequence[int] = (128, 64),
        sparse_gradients: bool = True,  # only the rows that a batch looks up; for SGD and Adagrad
    ):
        super().__init__()
        self.wide_categories = nn.EmbeddingBag(category_rows, 1, mode="sum", sparse=sparse_gradients)
        self.wide_integers = nn.Linear(INTEGERS, 1)
        self.embedding = nn.Embedding(category_rows, embedding_width, sparse=sparse_gradients)
        widths = [INTEGERS + CATEGORIES * embedding_width, *hidden]
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
        self.deep = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        nn.init.zeros_(self.wide_categories.weight)
        nn.init.normal_(self.embedding.weight, std=0.01)  # with 1.0, rows of rare categories would be noise

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        integers, table_rows = inputs
        wide = self.wide_categories(table_rows) + self.wide_integers(integers)
        embedded = self.embedding(table_rows).flatten(start_dim=1)
        return (wide + self.deep(torch.cat([integers, embedded], dim=1))).squeeze(1)
