"""Random numbers in a step of `TPUStrategy`: whose they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.unit.tpu_beside_mirrored import fake_tpu
from torchstrat import PerReplica, RunOptions
from torchstrat.errors import UnsupportedError

given = torch.Generator()


def results(step: Callable[[], object], replicas: int = 2) -> list[torch.Tensor]:
    with fake_tpu(replicas) as strategy:
        torch.manual_seed(0)
        return list(strategy.local_results(strategy.run(step)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(8),
        lambda: torch.empty(8).normal_(),
        lambda: torch.zeros(8).uniform_(),
        lambda: (torch.zeros(8) + 1).exponential_(),
        lambda: torch.empty(64).bernoulli_(0.5),
        lambda: nn.init.normal_(torch.empty(8)),
        lambda: nn.init.xavier_uniform_(torch.empty(3, 3)),
        lambda: nn.init.normal_(tensor=torch.empty(8)),
        lambda: torch.rand(8, generator=torch.default_generator),
        lambda: torch.empty(8).normal_(generator=torch.default_generator),
    ],
)
def test_each_replica_draws_its_own(draw: Callable[[], torch.Tensor]) -> None:
    first, second = results(draw)
    assert not torch.equal(first, second)


def test_first_values_of_a_variable_are_one_for_all() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 3)
        before = layer.weight.detach().clone()
        strategy.run(lambda: nn.init.normal_(layer.weight.data).sum())
        assert not torch.equal(before, layer.weight)


def test_a_tensor_with_an_alias_is_not_made_each_replicas_own() -> None:
    def view() -> torch.Tensor:
        total = torch.zeros(2, 3)
        kept = total.view(-1)
        total.normal_()
        return kept

    def rows() -> torch.Tensor:
        total = torch.zeros(2, 3)
        total[1:].normal_()
        return total

    def detached() -> torch.Tensor:
        total = torch.zeros(3)
        kept = total.detach()
        total.add_(torch.randn(3))
        return kept

    for step in (view, rows, detached):
        with pytest.raises(UnsupportedError, match="out of place"):
            results(step)


def test_a_generator_of_the_steps_own_is_each_replicas() -> None:
    def step() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        made = torch.rand(2, generator=generator)
        filled = torch.empty(2).normal_(generator=generator)
        return [made, filled, torch.randperm(5, generator=generator)]

    first, second = results(step)
    wanted = step()
    for own in (first, second):
        assert all(torch.equal(one, other) for one, other in zip(own, wanted, strict=True))


def test_from_a_generator_that_was_given_the_replicas_draw_in_turns() -> None:
    given.manual_seed(5)
    seen = results(lambda: torch.rand(2, generator=given))
    given.manual_seed(5)
    assert torch.equal(torch.cat(seen), torch.cat([torch.rand(2, generator=given) for _ in range(2)]))


def test_a_generator_with_values_that_differ_is_refused() -> None:
    x = PerReplica((torch.full((3,), 0.5), torch.full((3,), 0.2)))
    says = r"bernoulli with a generator.*test_tpu_draws\.py"
    with fake_tpu(2) as strategy, pytest.raises(UnsupportedError, match=says):
        strategy.run(lambda p: torch.bernoulli(p, generator=torch.Generator()), args=(x,))


def test_a_seed_in_a_step_is_every_replicas_seed() -> None:
    def step() -> torch.Tensor:
        torch.manual_seed(3)
        return torch.cat([torch.rand(4), torch.empty(4).normal_()])

    with fake_tpu(2) as strategy:
        torch.manual_seed(7)
        before = torch.default_generator.get_state()
        runs = [strategy.local_results(strategy.run(step)) for _ in range(2)]
        assert all(torch.equal(runs[0][0], one) for run in runs for one in run)
        # It is a seed of the replicas' streams: outside the generator is where it was.
        torch.manual_seed(7)
        wanted = torch.rand(3)
        torch.default_generator.set_state(before)
        strategy.run(step)
        assert torch.equal(torch.rand(3), wanted)


def test_a_draw_by_values_after_a_seed_in_the_step_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return nn.functional.dropout(x)

    with fake_tpu(2) as strategy, pytest.raises(UnsupportedError, match=r"dropout after torch\.manual_seed"):
        strategy.run(step, args=(PerReplica((torch.ones(3), torch.ones(3))),))


def test_with_a_global_view_a_generator_and_a_seed_are_those_of_one_device() -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4)
        return [torch.rand(3), torch.rand(3, generator=generator), torch.empty(3).normal_(generator=generator)]

    with fake_tpu(2) as strategy:
        runs = [strategy.run(step, options=RunOptions(global_view=True)) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert all(torch.equal(one, wanted) for one, wanted in zip(runs[0][1:], step()[1:], strict=True))
