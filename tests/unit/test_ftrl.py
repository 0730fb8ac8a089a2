"""`ts.Ftrl` against the algorithm as the paper states it, number by number in plain Python."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from torchstrat import Ftrl
from torchstrat.errors import InvalidArgumentError


def by_hand(weights: list[float], gradients: list[list[float]], **settings: Any) -> list[float]:
    """McMahan et al. (2013), Algorithm 1, coordinate by coordinate, with an exponent and a shrinkage."""
    lr, power = settings.get("lr", 1e-3), settings.get("lr_power", -0.5)
    l1, l2, beta = settings.get("l1", 0.0), settings.get("l2", 0.0), settings.get("beta", 0.0)
    shrinkage = settings.get("l2_shrinkage", 0.0)
    result = []
    for i, w in enumerate(weights):
        n, z = settings.get("initial_accumulator_value", 0.1), 0.0
        for gradient in gradients:
            g = gradient[i]
            sigma = ((n + g * g) ** -power - n**-power) / lr
            z += g + 2 * shrinkage * w - sigma * w
            n += g * g
            if abs(z) <= l1:
                w = 0.0
            else:
                w = -(z - math.copysign(l1, z)) / ((beta + n**-power) / lr + 2 * l2)
        result.append(w)
    return result


SETTINGS: list[dict[str, Any]] = [
    {},
    {"lr": 0.5},
    {"lr": 0.5, "l1": 0.3},
    {"lr": 0.5, "l1": 0.05, "l2": 0.2, "beta": 1.0},
    {"lr": 0.1, "lr_power": -0.7, "initial_accumulator_value": 0.0},
    {"lr": 0.1, "lr_power": 0.0, "l1": 0.1},
    {"lr": 0.5, "l2_shrinkage": 0.1, "l1": 0.05},
]


def run(start: torch.Tensor, gradients: torch.Tensor, **settings: Any) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = Ftrl([parameter], **settings)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("settings", SETTINGS)
def test_as_the_paper_says(settings):
    torch.manual_seed(2)
    start, gradients = torch.randn(7, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64)
    expected = torch.tensor(by_hand(start.tolist(), gradients.tolist(), **settings), dtype=torch.float64)
    torch.testing.assert_close(run(start, gradients, **settings), expected, rtol=1e-12, atol=1e-14)


def test_l1_makes_weights_without_use_exactly_zero():
    gradients = torch.tensor([[1.0, 0.1], [1.0, -0.1]] * 3, dtype=torch.float64)
    found = run(torch.ones(2, dtype=torch.float64), gradients, lr=0.5, l1=0.3)
    assert found[0] < -0.5
    assert found[1] == 0.0


def test_sparse_gradients_step_the_rows_they_name():
    torch.manual_seed(2)
    start = torch.randn(5, 2)
    indices, values = torch.tensor([[3, 1, 3]]), torch.randn(3, 2)
    sparse = torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=False)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = Ftrl([parameter], lr=0.3, l1=0.01)
    for _ in range(2):
        parameter.grad = sparse
        optimizer.step()
    dense = run(start, torch.stack([sparse.to_dense()] * 2), lr=0.3, l1=0.01)
    rows = torch.tensor([1, 3])
    assert torch.equal(parameter[rows], dense[rows])
    rest = torch.tensor([0, 2, 4])
    assert torch.equal(parameter[rest], start[rest])
    assert not torch.equal(dense[rest], start[rest]), "the control: the dense rule changes rows without gradient"


def test_maximizing_is_minimizing_the_negative():
    torch.manual_seed(2)
    start, gradients = torch.randn(4), torch.randn(3, 4)
    assert torch.equal(run(start, gradients, lr=0.3, maximize=True), run(start, -gradients, lr=0.3))
    nothing = run(torch.ones(2), torch.zeros(1, 2), initial_accumulator_value=0.0)
    assert torch.equal(nothing, torch.zeros(2)), "elements without any gradient are zero, and not nan"


def test_closure_state_dict_and_parameters_without_gradient():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Ftrl([used, unused], lr=0.3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 2.0
    assert torch.equal(unused, torch.ones(2))
    assert unused not in optimizer.state
    again = torch.nn.Parameter(used.detach().clone())
    other = Ftrl([again, unused], lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, one in ((used, optimizer), (again, other)):
        parameter.grad = torch.ones(2)
        one.step()
    assert torch.equal(used, again)


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.0}, {"lr": -1.0}, {"lr": float("nan")}, {"lr_power": 0.5}]
    + [{name: -0.1} for name in ("initial_accumulator_value", "l1", "l2", "l2_shrinkage", "beta")],
)
def test_values_out_of_range(settings):
    with pytest.raises(InvalidArgumentError, match=next(iter(settings))):
        Ftrl([torch.nn.Parameter(torch.ones(2))], **settings)


@pytest.mark.parametrize(
    ("gradient", "lr", "message"),
    [
        (torch.ones(2, 2), 0.0, r"lr=0.0 at this step.*by a scheduler"),
        (torch.eye(2).to_sparse(2), 1e-3, "2 sparse dimensions"),
    ],
)
def test_steps_that_are_refused(gradient, lr, message):
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Ftrl([parameter])
    optimizer.param_groups[0]["lr"] = lr
    parameter.grad = gradient
    with pytest.raises(InvalidArgumentError, match=message):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(2, 2))
