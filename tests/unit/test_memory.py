"""Estimates of memory, against what optimizers really allocate."""

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.errors import UnsupportedError


def optimizer_state_bytes(optimizer):
    model = nn.ParameterList(parameter for group in optimizer.param_groups for parameter in group["params"])
    [holding] = ts.OneDeviceStrategy("cpu:0").extended.estimate(model, optimizer).holdings
    return holding.optimizer_state_bytes


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
)
def test_optimizer_state_is_what_a_step_allocates(optimizer_type, options):
    def build(device):
        model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 7), nn.Embedding(11, 5)).to(device)
        return model, optimizer_type(model.parameters(), **options)

    _, meta_optimizer = build("meta")
    before = len(meta_optimizer.state)  # Adagrad makes its state when it is built
    expected = optimizer_state_bytes(meta_optimizer)
    assert len(meta_optimizer.state) == before
    model, optimizer = build("cpu")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    allocated = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    assert expected == allocated == optimizer_state_bytes(optimizer)


@pytest.mark.parametrize(
    ("make", "on_devices", "on_host"),
    [
        (lambda: ts.OneDeviceStrategy("cpu:0"), {"cpu:0": 3}, 3),
        (lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]), {"cpu:0": 3, "cpu:1": 2}, 5),
        (lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"]), None, 5),
    ],
)
def test_copies_are_counted_where_they_live(make, on_devices, on_host):
    """In the bytes of the weights: gradients are as many, and momentum."""
    model = nn.Linear(1000, 1000, bias=False, device="meta")
    strategy = make()
    found = strategy.extended.estimate(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    strategy.close()
    assert on_devices is None or found.per_device_bytes == {at: 4_000_000 * count for at, count in on_devices.items()}
    assert found.host_bytes == 4_000_000 * on_host
    assert on_devices is not None or "host: 19.1 MiB" in str(found)


class Wrapping(torch.optim.Optimizer):
    """Its step is that of another one."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {})

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_estimate_of_one_that_wraps_another_steps_neither():
    model = nn.Linear(4, 3)
    model(torch.ones(1, 4)).sum().backward()
    before, inner = (
        [parameter.detach().clone() for parameter in model.parameters()],
        torch.optim.Adam(model.parameters()),
    )
    found = optimizer_state_bytes(Wrapping(Wrapping(inner)))
    assert all(map(torch.equal, model.parameters(), before))
    assert not inner.state
    assert found == optimizer_state_bytes(inner) > 0


def test_what_cannot_be_stepped_alone_is_named():
    with pytest.raises(UnsupportedError, match=r"LBFGS keeps .* missing 1 required.*closure"):
        optimizer_state_bytes(torch.optim.LBFGS(nn.Linear(2, 1).parameters()))


def test_an_estimate_steps_nothing_of_the_users():
    """A scheduler puts a ``step`` of its own into the optimizer, which steps that very optimizer."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(1, 4)).sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = optimizer_state_bytes(optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    assert not optimizer.state
    assert found == optimizer_state_bytes(torch.optim.Adam(model.parameters())) > 0


def test_looking_for_state_before_the_first_step_makes_none():
    optimizer = torch.optim.Adam(nn.Linear(3, 3).parameters())
    known = optimizer_state_bytes(optimizer)
    assert not any(optimizer.state[one] for one in optimizer.param_groups[0]["params"])
    assert optimizer_state_bytes(optimizer) == known > 0
