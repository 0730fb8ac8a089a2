"""Views of variables that functions and modules have: where they cannot follow, an error says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.parameter_servers import Program, on_servers


def _linear() -> nn.Module:
    return nn.Linear(2, 2)


def _step_of(program: Program) -> Callable[[torch.Tensor], None]:
    model = program.made
    with program.strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    return step


def test_a_view_follows_a_parameter_whose_memory_has_moved() -> None:
    with on_servers(_linear) as program:
        model, step = program.made, _step_of(program)
        shown = model.weight.detach()[0]
        program.run(step, torch.ones(3, 2))

        def see() -> tuple[torch.Tensor, torch.Tensor]:
            return shown.clone(), model.weight.detach()[0].clone()

        program.run(see)

        def assign() -> torch.Tensor:
            model.weight.data = torch.ones(2, 2)
            return shown.clone()

        with pytest.raises(ts.errors.UnsupportedError, match=r"assigned \.data of weight of .*copy_"):
            program.run(assign)
        with pytest.raises(ts.errors.UnsupportedError):
            program.coordinator.join()
        program.run(step, torch.ones(3, 2))
        seen, held = program.run(see)
        torch.testing.assert_close(seen, held, rtol=0.0, atol=0.0)
        torch.testing.assert_close(seen, model.weight.detach()[0], rtol=0.0, atol=0.0)


def test_a_view_of_a_table_that_goes_by_rows_is_refused_where_the_table_trains() -> None:
    with on_servers(lambda: nn.Embedding(6, 2), shards=2) as program:
        table = program.made
        shown = table.weight.data
        with pytest.raises(ts.errors.NotSendableError, match=r"closure variable 'shown'.*goes by rows.*clone\(\)"):
            program.run(lambda: shown.sum())
        table.weight.requires_grad_(False)
        torch.testing.assert_close(program.run(lambda: shown.sum()), table.weight.sum())


def test_a_view_as_an_argument_is_the_value_of_the_moment() -> None:
    with on_servers(_linear) as program:
        model, step = program.made, _step_of(program)
        before = model.weight.detach().clone()

        def see(shown: torch.Tensor) -> torch.Tensor:
            step(torch.ones(3, 2))
            return shown.clone()

        torch.testing.assert_close(program.run(see, model.weight.data), before, rtol=0.0, atol=0.0)
