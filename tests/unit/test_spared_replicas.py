"""Parameters that a branch spares a replica, as a mixture of experts does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.replicas import opened


def make(count: int) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    parameters = nn.ParameterList(torch.arange(3, dtype=torch.float64) + number for number in range(count))
    return parameters, torch.optim.SGD(parameters, lr=0.1)


def loss(parameters: nn.ParameterList, rows: torch.Tensor, but: int | None) -> torch.Tensor:
    used = [one for place, one in enumerate(parameters) if place != but]
    return torch.stack([(rows * one).square().mean() for one in used]).sum()


@pytest.mark.parametrize("count", range(2, 6))
@pytest.mark.parametrize("place", ["mirrored x2", "apart x2"])
def test_one_parameter_is_spared_one_replica(count: int, place: str) -> None:
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    halves = rows[:4], rows[4:]
    for spared in (0, 1):
        for but in range(count):
            plain, optimizer = make(count)
            parts = [loss(plain, part, but if half == spared else None) for half, part in enumerate(halves)]
            torch.stack(parts).mean().backward()
            optimizer.step()
            with opened(place) as strategy:
                with strategy.scope():
                    made, own = make(count)

                def step(
                    part: torch.Tensor, made: Any = made, own: Any = own, but: int = but, spared: int = spared
                ) -> None:
                    replica = ts.get_replica_context().replica_id_in_sync_group
                    loss(made, part, but if replica == spared else None).backward()
                    own.step()

                [batch] = strategy.distribute_dataset([rows])
                strategy.run(step, args=(batch,))
                for one, other in zip(made, plain, strict=True):
                    torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=1e-12)
