"""Training with one worker gives the numbers of one device, whatever the shards, the optimizer and the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.unit.ps_clusters import (
    ROWS,
    DenseNet,
    TableNet,
    batch_of,
    doubles,
    largest_difference,
    plain_loop,
    scheduled_loop,
    train_step,
)
from torchstrat._torch_private import DisableTorchFunction
from torchstrat.testing.fake_cluster import FakeCluster

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}
WHOLE = {
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], 0.01),
}


@pytest.fixture(autouse=True)
def _in_doubles():
    with doubles():
        yield


@pytest.mark.parametrize("shards", [None, 1, 2, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_parameters(name, shards):
    partitioner = None if shards is None else ts.partitioners.FixedShardsPartitioner(shards)
    wanted = plain_loop(DenseNet, OPTIMIZERS[name], 6)
    with FakeCluster(workers=1, ps=2) as cluster:
        losses, state = scheduled_loop(cluster, DenseNet, OPTIMIZERS[name], 6, partitioner)
    assert losses == pytest.approx(wanted[0], abs=1e-9)
    assert largest_difference(state, wanted[1]) <= 1e-9


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_look_at_whole_tensors_get_them(name):
    wanted = plain_loop(DenseNet, WHOLE[name], 6)
    with FakeCluster(workers=1, ps=2) as cluster:
        partitioner = ts.partitioners.FixedShardsPartitioner(3)
        losses, state = scheduled_loop(cluster, DenseNet, WHOLE[name], 6, partitioner)
    assert losses == pytest.approx(wanted[0], abs=1e-9)
    assert largest_difference(state, wanted[1]) <= 1e-9


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_tables_by_rows_with_plain_sgd_are_tables_as_a_whole(shards):
    wanted = plain_loop(TableNet, OPTIMIZERS["sgd"], 6)
    with FakeCluster(workers=1, ps=2) as cluster:
        partitioner = ts.partitioners.FixedShardsPartitioner(shards)
        losses, state = scheduled_loop(cluster, TableNet, OPTIMIZERS["sgd"], 6, partitioner)
    assert losses == pytest.approx(wanted[0], abs=1e-9)
    assert largest_difference(state, wanted[1]) <= 1e-9


def rows_only_loop(name: str, steps: int) -> tuple[list[float], torch.Tensor]:
    """By hand: the optimizer sees a dense parameter made of the rows that a batch touches, with their own state; other
    rows stay as they are, decay and momentum included. Scalar state (``step``) counts the table's steps."""
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, 4).weight.detach()
    state: dict[str, torch.Tensor] = {}
    losses = []
    for step in range(steps):
        ids, labels = batch_of(step)
        unique, places = torch.unique(ids, return_inverse=True)
        rows = nn.Parameter(table[unique])
        optimizer = OPTIMIZERS[name]([rows])
        own = optimizer.state[rows]
        if state:
            for key, value in state.items():
                own[key] = value[unique].clone() if value.dim() else value.clone()
        loss = F.cross_entropy(F.embedding(places, rows).mean(1)[:, :3], labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        table[unique] = rows.detach()
        for key, value in optimizer.state[rows].items():
            if isinstance(value, torch.Tensor) and value.dim():
                first = {"sum": 0.1, "step_size": 0.01}.get(key, 0.0)
                state.setdefault(key, torch.full((ROWS, 4), first))[unique] = value
            elif isinstance(value, torch.Tensor):
                state[key] = value
    return losses, table


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_move_rows_only(name, shards):
    wanted_losses, wanted = rows_only_loop(name, 6)

    def step(table, optimizer, number):
        ids, labels = batch_of(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(table(ids).mean(1)[:, :3], labels)
        loss.backward()
        assert table.weight.grad.layout == torch.strided, "it looks as on one device"
        with DisableTorchFunction():
            assert table.weight.grad.layout == torch.sparse_coo, "and goes by rows"
        optimizer.step()
        return loss.detach()

    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(shards), rows_only=True)
        with strategy.scope():
            torch.manual_seed(0)
            table = nn.Embedding(ROWS, 4)
            optimizer = OPTIMIZERS[name](table.parameters())
        coordinator = ts.ClusterCoordinator(strategy)
        results = [coordinator.schedule(step, args=(table, optimizer, number)) for number in range(6)]
        coordinator.join()
        assert coordinator.fetch(results) == pytest.approx(wanted_losses, abs=1e-9)
        assert float((table.state_dict()["weight"] - wanted).abs().max()) <= 1e-9


def test_a_table_that_is_also_used_as_a_matrix_is_held_whole():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(ROWS, 4)

        def forward(self, ids):
            return self.table(ids).mean(1) @ self.table.weight.t()[:, :3]

    make_optimizer = OPTIMIZERS["adam"]
    wanted = plain_loop(Tied, make_optimizer, 5)
    with FakeCluster(workers=1, ps=2) as cluster:
        got = scheduled_loop(cluster, Tied, make_optimizer, 5, ts.partitioners.FixedShardsPartitioner(3))
    assert got[0] == pytest.approx(wanted[0], abs=1e-9)
    assert largest_difference(got[1], wanted[1]) <= 1e-9


def test_learning_rates_are_those_of_the_call_that_scheduled():
    def plain():
        torch.manual_seed(0)
        model = DenseNet()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for number in range(6):
            train_step(model, optimizer, number)
            scheduler.step()
        return model.state_dict()

    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            torch.manual_seed(0)
            model = DenseNet()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        coordinator = ts.ClusterCoordinator(strategy)
        for number in range(6):
            coordinator.schedule(train_step, args=(model, optimizer, number))
            scheduler.step()
        coordinator.join()
        assert largest_difference(model.state_dict(), plain()) <= 1e-9


def test_what_the_coordinator_writes_is_what_workers_see():
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            model = DenseNet()
        coordinator = ts.ClusterCoordinator(strategy)

        def total():
            return sum(parameter.sum() for parameter in model.parameters())

        coordinator.schedule(total).fetch()
        model.load_state_dict({name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()})
        elements = sum(parameter.numel() for parameter in model.parameters())
        assert float(coordinator.schedule(total).fetch()) == 2.0 * elements


@pytest.mark.parametrize("shards", [1, 5])
def test_meta_tables_are_initialised_on_the_servers(shards):
    def values(count):
        with FakeCluster(workers=1, ps=2) as cluster:
            strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(count))
            with strategy.scope():
                torch.manual_seed(3)
                table = nn.Embedding(1000, 8, padding_idx=4, device="meta")
            coordinator = ts.ClusterCoordinator(strategy)
            assert table.weight.is_meta
            return coordinator.schedule(lambda: table(torch.arange(1000)).detach()).get()

    drawn = values(shards)
    assert torch.equal(drawn, values(1))
    assert not drawn[4].any()
    assert abs(float(drawn.mean())) < 0.05
    assert abs(float(drawn.std()) - 1.0) < 0.05


def test_train_and_eval_on_the_coordinator_reach_the_workers():
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        coordinator = ts.ClusterCoordinator(strategy)

        def modes():
            return [module.training for module in model.modules()]

        assert coordinator.schedule(modes).fetch() == [True] * 3
        model.eval()
        assert coordinator.schedule(modes).fetch() == [False] * 3
        model[1].train()
        assert coordinator.schedule(modes).fetch() == [False, False, True]


def test_optimizer_state_comes_and_goes_with_state_dicts():
    def make(parameters):
        return torch.optim.Adam(parameters, 0.01)

    torch.manual_seed(0)
    plain = DenseNet()
    reference = make(plain.parameters())
    for number in range(3):
        train_step(plain, reference, number)
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(3))
        with strategy.scope():
            torch.manual_seed(0)
            model = DenseNet()
            optimizer = make(model.parameters())
        coordinator = ts.ClusterCoordinator(strategy)
        for number in range(3):
            coordinator.schedule(train_step, args=(model, optimizer, number))
        coordinator.join()
        mine, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
        assert mine.keys() == theirs.keys()
        for key, state in theirs.items():
            for name, value in state.items():
                torch.testing.assert_close(mine[key][name], value, rtol=0, atol=1e-12)
        optimizer.load_state_dict(reference.state_dict())
        coordinator.schedule(train_step, args=(model, optimizer, 3))
        coordinator.join()
        train_step(plain, reference, 3)
        assert largest_difference(model.state_dict(), plain.state_dict()) <= 1e-9


def test_a_gradient_scaler_skips_and_scales_as_elsewhere():
    def step(model, optimizer, scaler, number, blow_up):
        ids, labels = batch_of(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), labels)
        scaler.scale(loss * (float("inf") if blow_up else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    def make_scaler():
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)

    torch.manual_seed(0)
    plain = DenseNet()
    reference, scaler = torch.optim.SGD(plain.parameters(), 0.1), make_scaler()
    for number in range(4):
        step(plain, reference, scaler, number, number == 1)
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            torch.manual_seed(0)
            model = DenseNet()
            optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), make_scaler()
        coordinator = ts.ClusterCoordinator(strategy)
        for number in range(4):
            coordinator.schedule(step, args=(model, optimizer, scaler, number, number == 1))
        coordinator.join()
        assert largest_difference(model.state_dict(), plain.state_dict()) <= 1e-9


def test_max_norm_shortens_the_rows_on_the_servers():
    def plain():
        torch.manual_seed(0)
        return nn.Embedding(ROWS, 4, max_norm=0.5)

    ids = torch.tensor([[1, 3, 3], [7, 19, 0]])
    reference = plain()
    wanted = reference(ids)
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(3))
        with strategy.scope():
            table = plain()
        coordinator = ts.ClusterCoordinator(strategy)
        got = coordinator.schedule(lambda: table(ids).detach()).get()
        torch.testing.assert_close(got, wanted.detach(), rtol=0, atol=1e-6)
        torch.testing.assert_close(table.state_dict()["weight"], reference.weight.detach(), rtol=0, atol=1e-6)


def test_an_id_that_is_not_in_the_table_is_named():
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(3))
        with strategy.scope():
            table = nn.Embedding(ROWS, 4)
        coordinator = ts.ClusterCoordinator(strategy)
        coordinator.schedule(lambda: table(torch.tensor([1, ROWS])))
        with pytest.raises(ts.errors.InvalidArgumentError, match=f"id {ROWS} .*rows 0 to {ROWS - 1}"):
            coordinator.join()


def test_closures_and_optimizers_made_in_the_function_are_refused():
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            model = DenseNet()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        coordinator = ts.ClusterCoordinator(strategy)
        coordinator.schedule(lambda: optimizer.step(lambda: 1.0))
        with pytest.raises(NotImplementedError, match="without a closure"):
            coordinator.join()
        coordinator.schedule(lambda: torch.optim.SGD(model.parameters(), 0.1).step())
        with pytest.raises(ValueError, match=r"strategy\.scope"):
            coordinator.join()


def test_functions_draw_the_same_numbers_wherever_they_run():
    def draws(workers):
        with FakeCluster(workers=workers, ps=1) as cluster:
            strategy = cluster.strategy()
            with strategy.scope():
                torch.manual_seed(7)
            coordinator = ts.ClusterCoordinator(strategy)
            state = torch.get_rng_state()
            results = [coordinator.schedule(lambda: torch.rand(2)) for _ in range(4)]
            coordinator.join()
            assert torch.equal(torch.get_rng_state(), state)
            return [result.get() for result in results]

    first, second = draws(1), draws(1)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert len({float(one[0]) for one in first}) == 4
