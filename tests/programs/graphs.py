"""torch_geometric: one graph that every replica has, batches of its nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.programs.table import nodes, program, train, vectors

NODES, FEATURES = 12, 6


def _graph() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    edges = torch.randint(0, NODES, (2, 30), generator=draw)
    return torch.randn(NODES, FEATURES, generator=draw, dtype=torch.float64), edges


def _on_nodes(make: Any, **options: Any) -> Any:
    features, edges = _graph()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = make(FEATURES, 8, **options), make(8, 3, **options)

        def forward(self) -> torch.Tensor:
            return self.last(self.first(features, edges).relu(), edges)  # type: ignore[no-any-return]

    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(batch: Any) -> None:
        train(optimizer, F.cross_entropy(model()[batch[0]], batch[1]))

    return {"model": model, "optimizer": optimizer}, step


@program("torch_geometric", batches=nodes)
def graph_convolution() -> Any:
    from torch_geometric.nn import GCNConv

    return _on_nodes(GCNConv)


@program("torch_geometric", batches=nodes)
def graph_attention() -> Any:
    from torch_geometric.nn import GATConv

    return _on_nodes(GATConv, dropout=0.0)


@program("torch_geometric", batches=nodes)
def graph_sage() -> Any:
    from torch_geometric.nn import SAGEConv

    return _on_nodes(SAGEConv)


@program("torch_geometric", batches=vectors)
def graphs_by_the_row() -> Any:
    """Each row is a graph of its own: with `Batch` they become one."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GINConv, global_add_pool

    convolution = GINConv(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8))).double()
    head = nn.Linear(8, 3).double()
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    optimizer = torch.optim.Adam([*convolution.parameters(), *head.parameters()], lr=0.01)

    def step(batch: Any) -> None:
        whole = Batch.from_data_list([Data(x=row.view(3, 2), edge_index=edges) for row in batch[0]])
        out = head(global_add_pool(convolution(whole.x, whole.edge_index), whole.batch))
        train(optimizer, F.mse_loss(out, batch[1]))

    return {"convolution": convolution, "head": head, "optimizer": optimizer}, step
