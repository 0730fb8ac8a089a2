"""Hooks on gradients where replicas take different ways."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.replicas import opened
from torchstrat.errors import ReplicaDivergenceError


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


def test_a_replica_that_comes_late_is_noticed():
    """The gradient that is ready first is combined first; a replica that has another order has missed it."""
    with opened("mirrored x2") as strategy:
        with strategy.scope():
            layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
            for layer in layers:
                layer.weight.register_hook(lambda g: g * 1)

        def step():
            first = ts.get_replica_context().replica_id_in_sync_group
            layers[1 - first](layers[first](torch.ones(1, 2))).sum().backward()

        with pytest.raises(ReplicaDivergenceError, match="replica 1 comes in its backward pass"):
            strategy.run(step)


def test_what_one_pass_has_missed_the_next_one_may_have():
    seen: list[float] = []
    with opened("mirrored x2") as strategy:
        with strategy.scope():
            common, other = (nn.Linear(2, 1, bias=False) for _ in range(2))
            other.weight.register_hook(lambda g: seen.append(float(g.sum())))

        def step(who):
            x = torch.ones(1, 2)
            is_who = ts.get_replica_context().replica_id_in_sync_group == who
            (common(x) + other(3 * x) if is_who else common(x)).sum().backward()

        for who in (0, 1):
            strategy.run(step, args=(who,))
    assert seen == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:the step uses trainable variables")
@pytest.mark.parametrize("name", ["mirrored x2", "central x2"])
def test_hooks_of_a_strategy_that_goes_meanwhile_are_nobodys_own(name):
    model = nn.Linear(2, 1, bias=False)

    def step(before_backward=lambda: None):
        before_backward()
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()

    forgotten = []
    with opened(name) as earlier:
        earlier.run(step)
        hooks = model.weight._post_accumulate_grad_hooks
        forgotten += hooks.items()  # as they are there until a strategy that was not closed is collected
    model.weight._post_accumulate_grad_hooks = OrderedDict(forgotten)
    with opened(name) as strategy:

        def collected():
            if ts.get_replica_context().replica_id_in_sync_group == 1:
                for key, _ in forgotten:
                    model.weight._post_accumulate_grad_hooks.pop(key, None)

        strategy.run(step, args=(collected,))
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
