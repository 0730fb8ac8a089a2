"""What travels: the rows of a table that a batch touches, in both directions, and nothing of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.parameter_server.messages import Push
from torchstrat.parameter_server.server.store import VariableStore
from torchstrat.testing.fake_cluster import FakeCluster

ROWS, WIDTH = 10_000, 8


@pytest.fixture
def elements(monkeypatch) -> dict[str, int]:
    """Elements of tables that servers were asked for and sent, by direction."""
    counted = {"down": 0, "up": 0}
    read, read_rows, push = VariableStore.read, VariableStore.read_rows, VariableStore.push

    def count_read(store: Any, keys: Any, *memory: Any) -> Any:
        values = read(store, keys, *memory)
        counted["down"] += sum(value.numel() for value in values)
        return values

    def count_rows(store: Any, requests: Any, *memory: Any) -> Any:
        values = read_rows(store, requests, *memory)
        counted["down"] += sum(value.numel() for value in values)
        return values

    def count_push(store: Any, message: Push, *memory: Any) -> Any:
        for step in message.steps:
            counted["up"] += sum(gradient.numel() for _, gradient in step.dense)
            counted["up"] += sum(gradient.numel() for _, _, gradient in step.rows)
        reply = push(store, message, *memory)
        counted["down"] += sum(value.numel() for value in reply.values)
        return reply

    monkeypatch.setattr(VariableStore, "read", count_read)
    monkeypatch.setattr(VariableStore, "read_rows", count_rows)
    monkeypatch.setattr(VariableStore, "push", count_push)
    return counted


def train(partitioner: Any) -> None:
    ids = torch.tensor([[3, 9_999, 3], [17, 5_000, 9_999]])
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(partitioner, rows_only=True)
        with strategy.scope():
            table = nn.Embedding(ROWS, WIDTH)
            optimizer = torch.optim.Adam(table.parameters(), 0.1)
        coordinator = ts.ClusterCoordinator(strategy)

        def step() -> None:
            optimizer.zero_grad()
            table(ids).sum().backward()
            optimizer.step()

        coordinator.schedule(step).get(timeout=60)


def test_only_the_rows_of_the_batch_travel(elements):
    train(ts.partitioners.FixedShardsPartitioner(3))
    assert elements == {"down": 4 * WIDTH, "up": 4 * WIDTH}


def test_without_a_partitioner_the_whole_table_does(elements):
    """The control: what the test above counts."""
    train(None)
    assert elements == {"down": 2 * ROWS * WIDTH, "up": ROWS * WIDTH}
