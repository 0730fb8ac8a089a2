"""Where a program's numbers begin to differ from the plain loop's, on programs that are right, wrong and refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchstrat.errors import InvalidArgumentError
from torchstrat.testing import compare
from torchstrat.testing.training import regression


def build():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def step(program, batch):
    model, optimizer = program
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()


def local_update(program, batch):
    """What replicas do differently: the first one's counts, which are not the numbers of one device."""
    model, _ = program
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=0.1)  # here


def with_closure(program, batch):
    model, _ = program
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        return loss

    optimizer.step(closure)


IN_PROCESS = ["one_device", "mirrored x2", "central_storage x2"]


def test_a_right_program_is_right_in_process_and_on_servers():
    comparison = compare(build, step, regression, [*IN_PROCESS, "parameter_server"])
    assert comparison.is_right, str(comparison)
    assert [finding.verdict for finding in comparison.findings] == ["right"] * 4


@pytest.mark.filterwarnings("ignore:the replicas have changed")
def test_the_variable_the_step_and_the_line_are_named():
    alone, mirrored = compare(build, local_update, regression, ["one_device", "mirrored x2"]).findings
    assert alone.verdict == "right"
    assert (mirrored.verdict, mirrored.variable, mirrored.step) == ("different", "[0].0.weight", 0)
    assert mirrored.line.endswith("parameter.sub_(gradient, alpha=0.1)  # here")
    assert "[0].0.weight after step 0; at " in str(mirrored)


@pytest.mark.filterwarnings("ignore:the replicas have changed")
def test_a_difference_that_begins_later():
    batches = regression()
    batches[0] = tuple(tensor[:1].expand(8, -1) for tensor in batches[0])  # equal rows: the replicas do the same
    (found,) = compare(build, local_update, batches, ["mirrored x2"]).findings
    assert (found.verdict, found.step) == ("different", 1)


def test_what_is_refused_is_no_difference():
    comparison = compare(build, with_closure, regression, ["parameter_server"])
    (found,) = comparison.findings
    assert found.verdict == "refused"
    assert comparison.is_right
    assert "LBFGS" in found.text


def fails(program, batch):
    if len(batch[0]) < 8:
        raise ValueError("a step of few rows")


def test_other_errors_are_failures():
    comparison = compare(build, fails, regression, ["mirrored x2"])
    assert not comparison.is_right
    assert "few rows" in str(comparison)


def test_bad_input():
    with pytest.raises(InvalidArgumentError, match="no strategy is called mirored"):
        compare(build, step, regression, ["mirored"])
    with pytest.raises(InvalidArgumentError, match="batches is empty"):
        compare(build, step, [])
