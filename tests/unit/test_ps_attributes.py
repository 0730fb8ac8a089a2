"""What a program sets on variables and in files: steps in parts look at it, and what does not travel is warned of.

What functions and whole optimizers see of it are rows of ``tests/matrix/ps_objects.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import parameter_servers
from tests.support.parameter_servers import PerTensor, on_servers


class Scaled(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] * getattr(p, "scale", 1.0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4).double()
        vars(self.layer.weight)["scale"] = 0.5
        self.optimizer = Scaled(self.parameters(), lr=0.1)

    def train_step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.layer(batch).square().mean().backward()
        self.optimizer.step()

    def change(self, turn: int) -> None:
        if turn == 2:
            vars(self.layer.weight)["scale"] = 3.0
        if turn == 3:
            del vars(self.layer.weight)["scale"]


def test_a_step_in_parts_has_what_is_set_on_its_variables() -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, 3, generator=draw, dtype=torch.float64) for _ in range(4)]
    plain = Model()
    with on_servers(Model, shards=2, elementwise_optimizers=[Scaled]) as program:
        for turn, batch in enumerate(batches):
            for model in (plain, program.made):
                model.change(turn)
            plain.train_step(batch)
            program.run(program.made.train_step, batch)
        for name, value in program.made.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=0.0, atol=1e-12)


def test_what_does_not_travel_is_warned_of_once() -> None:
    with on_servers(Model) as program:
        weight, batch = program.made.layer.weight, torch.ones(2, 3, dtype=torch.float64)
        vars(weight)["history"] = [1]
        with pytest.warns(UserWarning, match="attribute 'history' of a variable was set.*Numbers, strings and tuples"):
            program.run(program.made.layer, batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            vars(weight)["other"] = [2]
            program.run(program.made.layer, batch)


def test_a_function_of_a_file_that_is_replaced_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_servers(Model) as program:
        program.run(parameter_servers.states_are_close, {}, {})
        monkeypatch.setattr(parameter_servers, "states_are_close", dict)
        with pytest.warns(
            UserWarning, match="parameter_servers.states_are_close was replaced on the coordinator. Work"
        ):
            program.run(dict)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monkeypatch.setattr(parameter_servers, "states_are_close", list)
            program.run(dict)


def test_a_tensor_around_a_function_that_it_changes_is_warned_of_once() -> None:
    average, factor = torch.zeros(3), torch.ones(3)

    def follow() -> None:
        average.mul_(0.9).add_(factor)

    with on_servers(Model) as program:
        with pytest.warns(UserWarning, match=r"has changed a tensor of shape \(3,\), .* Each worker has a copy"):
            program.run(follow)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            program.run(follow)
            program.run(lambda: factor + 1)
    assert average.tolist() == [0.0] * 3
