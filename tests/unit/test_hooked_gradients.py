"""Hooks on gradients where replicas take different ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.in_process_strategies import opened
from torchstrat.errors import ReplicaDivergenceError
from torchstrat.replicas.hooked_gradients import HookTurns


def meet(*places: int | None, turns: HookTurns | None = None) -> int:
    there = {replica: place for replica, place in enumerate(places) if place is not None}
    return (turns or HookTurns()).next(there, range(len(places)), lambda: range(9))


@pytest.mark.parametrize(
    ("places", "chosen"),
    [((3, 3), 3), ((3, None), 3), ((None, 3), 3), ((3, 5), 5), ((5, 3), 5), ((2, None, 4), 4)],
)
def test_the_gradient_that_is_ready_first_is_combined_first(places, chosen):
    assert meet(*places) == chosen


def test_a_replica_that_comes_late_is_noticed():
    turns = HookTurns()
    assert meet(5, 3, turns=turns) == 5
    assert meet(3, 3, turns=turns) == 3
    with pytest.raises(ReplicaDivergenceError, match="replica 1 comes in its backward pass"):
        meet(4, 5, turns=turns)


def test_what_one_pass_has_missed_the_next_one_may_have():
    turns = HookTurns()
    assert meet(5, None, turns=turns) == 5
    assert turns.end() == [(5, 0, [1])]
    assert meet(None, 5, turns=turns) == 5


@pytest.mark.parametrize("name", ["mirrored x2", "mirrored x3", "central x2", "apart x2"])
@pytest.mark.parametrize("kind", ["clamp", "after"])
def test_replicas_that_use_other_layers(name, kind):
    """Each replica uses a layer of its own after a common one; the hook sees the mean of all replicas' gradients."""
    with opened(name) as strategy:
        with strategy.scope():
            layers = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(4)])
            seen: dict[int, list[float]] = {}
            for index, layer in enumerate(layers):
                seen[index] = []
                if kind == "clamp":
                    layer.weight.register_hook(lambda g, at=index: seen[at].append(float(g.sum())) or g.clamp(-1, 1))
                else:
                    layer.weight.register_post_accumulate_grad_hook(
                        lambda p, at=index: seen[at].append(float(p.grad.sum()))
                    )
        count = strategy.num_replicas_in_sync

        def step():
            replica = ts.get_replica_context().replica_id_in_sync_group
            x = torch.full((1, 2), 6.0)
            (layers[0](x) + layers[1 + replica](x)).sum().backward()

        strategy.run(step)
        for index in range(1, 1 + count):
            assert seen[index] == [pytest.approx(12.0 / count)]
            top = 1.0 if kind == "clamp" else 6.0
            assert torch.allclose(layers[index].weight.grad, torch.full((1, 2), min(top, 6.0 / count)))
        assert seen[0] == [12.0] * count
