"""Optimizers of classes that may do anything: one object, on the one server that has their variables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.matrix.own_optimizers import CountsInGroup, KeepsParameters, Lion, Lists, Normalised, Own
from tests.unit.ps_server_helpers import add_optimizer, dense_step, make_store, options_of, push_of, whole
from torchstrat import host_memory
from torchstrat.errors import InvalidArgumentError, NotSendableError, TorchstratError, UnsupportedError
from torchstrat.parameter_server.messages import OptimizerStep, Snapshot
from torchstrat.testing.fake_cluster import FakeCluster

ONES = torch.ones(3)


def parameters(count: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)) for _ in range(count)]


class Wrong(Own):
    """Makes another shape of its parameter."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.data = p.data[:2]


class StartsWithState(Own):
    """Its constructor makes state from values that parameters have then."""

    def prepare(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["first"] = p.detach().clone()

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"])
        p.lerp_(self.state[p]["first"], 0.5)


def test_steps_without_a_gradient_are_steps():
    optimizer = CountsInGroup(parameters(2), lr=1.0)
    store = make_store(torch.zeros(3), torch.zeros(3))
    add_optimizer(store, optimizer, [[0, 1]])
    store.push(push_of(steps=(dense_step(optimizer),)))
    store.push(push_of(steps=(dense_step(optimizer, v1=ONES),)))
    assert torch.equal(whole(store, 1), -ONES / 2)
    assert torch.equal(whole(store, 0), torch.zeros(3))


def test_all_parameters_change_whatever_has_a_gradient():
    optimizer = Lists(parameters(2), lr=1.0)
    store = make_store(torch.zeros(3), torch.zeros(3))
    add_optimizer(store, optimizer, [[0, 1]])
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES, v1=ONES),)))
    store.push(push_of(steps=(dense_step(optimizer, v1=ONES),)))
    torch.testing.assert_close(whole(store, 0), -ONES * (1 + 0.9 / 2))


def test_what_the_program_sets_and_what_steps_set():
    optimizer = CountsInGroup(parameters(), lr=1.0)
    store = make_store(torch.zeros(3))
    add_optimizer(store, optimizer, [[0]])
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    optimizer.param_groups[0]["lr"] = 4.0  # as a scheduler does
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert torch.equal(whole(store), -ONES * 3)
    optimizer.param_groups[0]["k"] = 7
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert torch.equal(whole(store), -ONES * 3.5)


def test_what_the_program_was_told_comes_back_and_is_no_wish():
    optimizer = CountsInGroup(parameters(), lr=1.0)
    store = make_store(torch.zeros(3))
    add_optimizer(store, optimizer, [[0]])
    for count in (1, 2):
        store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
        assert store.optimizer_options(0) == [{"k": count}]
    optimizer.param_groups[0]["k"] = 1  # as it was told once, in functions that were scheduled then
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert store.optimizer_options(0) == [{"k": 3}]
    store.load_optimizer_options(0, [{"lr": 2.0, "k": 1}])
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert store.optimizer_options(0) == [{"k": 2}]
    torch.testing.assert_close(whole(store), -ONES * (1 + 1 / 2 + 1 / 3 + 1 / 2))  # lr is the program's: 1


def test_the_program_and_steps_set_the_same():
    optimizer = CountsInGroup(parameters(), lr=1.0, k=0)
    store = make_store(torch.zeros(3))
    add_optimizer(store, optimizer, [[0]])
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    before = whole(store)
    optimizer.param_groups[0]["k"] = 7
    with pytest.raises(UnsupportedError, match=r"param_groups\[0\]\['k'\] of .* to 7, and its steps.* set it to 1"):
        store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert torch.equal(whole(store), before)


def test_state_of_its_constructor():
    optimizer = StartsWithState([nn.Parameter(torch.ones(3))], lr=1.0)
    store = make_store(torch.ones(3))
    add_optimizer(store, optimizer, [[0]])
    before = store.snapshot()
    for _ in range(2):
        store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert torch.equal(whole(store), ONES * 0.25)
    store.restore(Snapshot(before.values, before.states, before.applied))
    assert torch.equal(whole(store), ONES)
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert torch.equal(whole(store), ONES * 0.5)


def test_state_comes_and_goes():
    optimizer = Lion(parameters(), lr=1.0)
    store = make_store(torch.zeros(3))
    add_optimizer(store, optimizer, [[0]])
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    state = store.optimizer_state(0)[0, 0]
    torch.testing.assert_close(state["average"], ONES * 0.01)
    store.load_optimizer_state(0, {(0, 0): {"average": -ONES * 100}})
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert torch.equal(whole(store), torch.zeros(3))


def test_groups_and_parameters_that_come_later():
    first, second, third = parameters(3)
    optimizer = Lists([first], lr=1.0)
    store = make_store(*(torch.zeros(3) for _ in range(3)))
    add_optimizer(store, optimizer, [[0]])
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    optimizer.param_groups[0]["params"].append(second)
    optimizer.add_param_group({"params": [third]})
    add_optimizer(store, optimizer, [[0, 1], [2]])
    with pytest.raises(
        TorchstratError, match=r"Lists.step raised ValueError: zip"
    ):  # its lists are shorter: as in plain
        store.push(push_of(steps=(dense_step(optimizer, v1=ONES),)))

    counting = CountsInGroup([first], lr=1.0)
    store = make_store(*(torch.zeros(3) for _ in range(3)))
    add_optimizer(store, counting, [[0]])
    store.push(push_of(steps=(dense_step(counting, v0=ONES),)))
    counting.param_groups[0]["params"].append(second)
    counting.add_param_group({"params": [third], "lr": 2.0})
    add_optimizer(store, counting, [[0, 1], [2]])
    store.push(push_of(steps=(dense_step(counting, v0=ONES, v1=ONES, v2=ONES),)))
    assert [float(whole(store, number)[0]) for number in range(3)] == [-1.5, -0.5, -2.0]


def test_sparse_gradients_stay_sparse():
    seen = []

    class Looks(Own):
        def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
            seen.append((grad.layout, tuple(grad.shape), grad.coalesce().indices().tolist()))

    optimizer = Looks([nn.Parameter(torch.zeros(6, 2))])
    store = make_store(torch.zeros(6, 2))
    add_optimizer(store, optimizer, [[0]])
    rows = (((0, 0), torch.tensor([1, 4]), torch.ones(2, 2)),)
    store.push(push_of(steps=(OptimizerStep(0, options_of(optimizer), rows=rows),)))
    assert seen == [(torch.sparse_coo, (6, 2), [[1, 4]])]


def test_a_step_that_makes_another_shape():
    optimizer = Wrong(parameters())
    store = make_store(torch.zeros(3))
    add_optimizer(store, optimizer, [[0]])
    with pytest.raises(TorchstratError, match=r"has made torch.float32 of shape \(2,\) of 'v0'.* keep both"):
        store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))


def test_what_cannot_be_sent():
    optimizer = KeepsParameters([nn.Parameter(torch.zeros(3, device="meta"))])
    with pytest.raises(NotSendableError, match=r"KeepsParameters keeps a tensor .* on the meta device"):
        add_optimizer(make_store(torch.zeros(3)), optimizer, [[0]])


# -- where its variables lie ------------------------------------------------------------------------------------------


def servers_of(strategy: Any, tensors: list[nn.Parameter]) -> list[list[int]]:
    variables = strategy._job.variables
    return [[shard.server for shard in variables.spec_of(tensor).shards] for tensor in tensors]


def test_variables_lie_together_and_the_others_are_spread():
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(2))
        with strategy.scope():
            tensors = [nn.Parameter(torch.zeros(4, 2)) for _ in range(7)]
            # The second and the third share a parameter, so all of theirs are together.
            optimizers = [Normalised(tensors[:2]), Normalised([tensors[2], tensors[4]]), Lion([tensors[4], tensors[3]])]
            optimizers += [torch.optim.SGD(tensors[5:6]), torch.optim.Adafactor(tensors[6:])]
        places = servers_of(strategy, tensors)
        assert len(optimizers) == 5
    assert places[0] == places[1]
    assert places[2] == places[3] == places[4]
    assert places[0] != places[2]
    assert sorted(places[5]) == [0, 1]
    assert len(places[6]) == 1


def test_a_named_class_is_spread():
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(2), elementwise_optimizers=[Lion])
        with strategy.scope():
            tensors = [nn.Parameter(torch.zeros(4, 2))]
            optimizer = Lion(tensors)
        assert servers_of(strategy, tensors) == [[0, 1]]
        del optimizer


def test_a_table_that_fits_on_no_server(monkeypatch):
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(2))
        with strategy.scope():
            pass
        monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
        says = r"weight of module .* bytes.*Lion steps it, .* one server, whole\..*elementwise_optimizers=\[Lion\]"

        def build() -> tuple[nn.Embedding, Lion]:
            with strategy.scope():
                table = nn.Embedding(100, 8)
                return table, Lion(table.parameters())

        with pytest.raises(InvalidArgumentError, match=says):
            build()


# -- on workers -------------------------------------------------------------------------------------------------------


class InTwoParts(Own):
    """As SAM: a step away, and the step from there."""

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.copy_(self.state[p]["old"]).sub_(grad)


@pytest.mark.parametrize("then_steps", [True, False])
def test_state_that_a_function_makes_by_itself(then_steps):
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = InTwoParts(model.parameters())
        before = {name: value.clone() for name, value in model.state_dict().items()}

        def step():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.first_step()
            if then_steps:
                optimizer.step()

        coordinator = ts.ClusterCoordinator(strategy)
        with pytest.raises(UnsupportedError, match=r"put state into InTwoParts\.state outside of its step\(\)"):
            coordinator.schedule(step).get(timeout=60)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_another_models_optimizer_steps_between_forward_and_backward():
    """As GANs do, with batch norm: its step brings back the buffers of all."""

    def build():
        torch.manual_seed(0)
        first, second = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1)
        models = nn.ModuleList([first, second]).double()
        return models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step(batch, models, optimizers):
        made = models[0](batch)
        optimizers[1].zero_grad()
        models[1](made.detach()).square().mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = models[1](made).square().mean()
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    batches = torch.randn(3, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    models, optimizers = build()
    expected = [step(batch, models, optimizers) for batch in batches]
    wanted = models.state_dict()
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            models, optimizers = build()
        coordinator = ts.ClusterCoordinator(strategy)
        scheduled = [coordinator.schedule(step, args=(batch, models, optimizers)) for batch in batches]
        torch.testing.assert_close([one.get(timeout=60) for one in scheduled], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(dict(models.state_dict()), dict(wanted), rtol=1e-10, atol=1e-10)
