"""What `ts.estimate` says processes send in a step, against the bytes that their communicators are given."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.collectives.process_group import ProcessGroupCommunicator
from torchstrat.estimates.synchronous import ON_SEVERAL_HOSTS
from torchstrat.testing.spawn import spawn

PROCESSES = 3
NOTES_BYTES = 1024  # calls below that are agreements, of a few numbers


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def bytes_of_a_step(name: str) -> tuple[int, int]:
    """(in sums, as the source of broadcasts), in this process."""
    summed, handed_out = 0, 0
    all_reduce, broadcast = ProcessGroupCommunicator.all_reduce, ProcessGroupCommunicator.broadcast

    def count_sum(self: Any, tensor: torch.Tensor, what: str) -> Any:
        nonlocal summed
        summed += tensor.nbytes if tensor.nbytes > NOTES_BYTES else 0
        return all_reduce(self, tensor, what)

    def count_broadcast(self: Any, tensor: torch.Tensor, source: int, what: str) -> None:
        nonlocal handed_out
        handed_out += tensor.nbytes if tensor.nbytes > NOTES_BYTES and self.rank == source else 0
        broadcast(self, tensor, source, what)

    strategy = ts.registry.create(name, timeout=timedelta(seconds=100), collectives="process_group")
    with strategy.scope():
        model = build()
        optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    strategy.run(step, args=(torch.ones(4, 64),))
    strategy.run(step, args=(torch.ones(4, 64),))  # the first one finds out the order of gradients
    ProcessGroupCommunicator.all_reduce, ProcessGroupCommunicator.broadcast = count_sum, count_broadcast
    try:
        strategy.run(step, args=(torch.ones(4, 64),))
    finally:
        ProcessGroupCommunicator.all_reduce, ProcessGroupCommunicator.broadcast = all_reduce, broadcast
        strategy.close()
    return summed, handed_out


@pytest.mark.parametrize("name", ["multi_worker_mirrored", "central_storage"])
def test_processes_without_common_memory_send_what_is_estimated(name: str) -> None:
    measured = spawn(bytes_of_a_step, PROCESSES, (name,))
    sent = [2 * summed * (PROCESSES - 1) // PROCESSES + handed_out * (PROCESSES - 1) for summed, handed_out in measured]
    rows = ts.estimate(build, "adam", replicas=PROCESSES).of(name, ON_SEVERAL_HOSTS)
    assert [row.sent_bytes for row in rows for _ in range(row.count)] == sent
