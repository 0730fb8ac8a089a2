"""What PyTorch keeps for a whole process is, on workers and servers, what the coordinator's program has set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchstrat as ts

STEPS = 5


@pytest.fixture
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    # Keeps a product of its coefficients in the default dtype.
    return model, torch.optim.NAdam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, torch.dtype]:
    optimizer.zero_grad()
    loss = model(torch.tensor([[0.1, 0.2, 0.3]])).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach()), torch.ones(1).dtype


@pytest.mark.usefixtures("default_float64")
def test_the_default_dtype_of_the_program_is_that_of_workers_and_servers() -> None:
    model, optimizer = built()
    wanted = [step(model, optimizer) for _ in range(STEPS)]
    with ts.testing.LocalCluster(workers=1, ps=1) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            on_servers, its_optimizer = built()
        coordinator = ts.ClusterCoordinator(strategy)
        seen = [coordinator.schedule(step, args=(on_servers, its_optimizer)).get() for _ in range(STEPS)]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(on_servers.state_dict()[name], value, rtol=1e-12, atol=1e-12)

        def sets_another() -> None:
            torch.set_default_dtype(torch.float16)

        coordinator.schedule(sets_another).get()
        torch.set_default_dtype(torch.float32)
        assert coordinator.schedule(lambda: torch.ones(1).dtype).get() is torch.float32
        strategy.close()
    assert [dtype for _, dtype in seen] == [torch.float64] * STEPS
    assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in wanted], rel=1e-12)
