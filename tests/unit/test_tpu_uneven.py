"""Batches whose replicas have different numbers of rows, or none: several passes of one step, as if they were one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import assert_as_mirrored, fake_tpu, here, own, rows_of
from torchstrat.errors import ReplicaError
from torchstrat.values import BatchInfo

COUNTS = [(4, 4), (3, 1), (1, 3), (2, 0), (0, 2), (2, 2, 1), (3, 1, 2), (1, 0, 1), (2, 1, 0, 2)]

Step = Callable[[torch.Tensor], Any]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def training(make: Callable[[], tuple[Step, Any]], counts: tuple[int, ...]) -> Callable[[ts.Strategy], Any]:
    """Three runs: even, ``counts``, even. ``make``: the step, and what to watch."""

    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            step, watched = make()
        batches = [rows_of([2] * len(counts)), rows_of(counts, seed=5), rows_of([2] * len(counts), seed=6)]
        found = [strategy.run(step, args=(batch,)) for batch in batches]
        tensors: list[Any] = []
        for one in watched:
            tensors += [*one.state_dict().values()] if isinstance(one, nn.Module) else [one() if callable(one) else one]
        return [found, tensors]

    return program


def clipped() -> tuple[Step, Any]:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach() + norm

    return step, [model]


def two_optimizers() -> tuple[Step, Any]:
    first, second = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizers = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(second.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        features = first(x)
        features.square().mean().backward()
        optimizers[0].step()
        loss = second(first(x).detach()).square().mean()  # sees the step of the first
        loss.backward()
        optimizers[1].step()
        return loss.detach()

    return step, [first, second]


def scheduler_in_the_step() -> tuple[Step, Any]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return step, [model, lambda: torch.tensor([optimizer.param_groups[0]["lr"], float(scheduler.last_epoch)])]


def moving_average() -> tuple[Step, Any]:
    model, average = mlp(), mlp()
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() + average(x).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return loss.detach()

    return step, [model, average]


def batch_statistics() -> tuple[Step, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].momentum = 0.3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.train(len(x) > 1)  # one row has no variance
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [model[0], model[2]]


def accumulated() -> tuple[Step, Any]:
    """Two backwards, the gradient edited by hand in between, and kept from run to run."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        loss = model(2 * x).abs().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [model, *(lambda p=p: p.grad for p in model.parameters())]


def decayed_by_hand() -> tuple[Step, Any]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.clamp_(-0.3, 0.3)
        return loss.detach()

    return step, [model]


MAKES = [clipped, two_optimizers, scheduler_in_the_step, moving_average, accumulated, decayed_by_hand]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("make", MAKES)
def test_steps_on_uneven_batches(make: Callable[[], tuple[Step, Any]], counts: tuple[int, ...]) -> None:
    assert_as_mirrored(training(make, counts), replicas=len(counts))


@pytest.mark.parametrize("counts", [(3, 2), (2, 2, 3)])
def test_statistics_of_uneven_batches(counts: tuple[int, ...]) -> None:
    assert_as_mirrored(training(batch_statistics, counts), replicas=len(counts))


@pytest.mark.parametrize("counts", [(3, 1), (2, 0), (2, 2, 1)])
def test_sums_of_gradients(counts: tuple[int, ...]) -> None:
    assert_as_mirrored(training(clipped, counts), replicas=len(counts), gradient_reduce_op="sum")


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (3, 2, 1)])
def test_hooks_of_parameters_see_the_combined_gradient_once(counts: tuple[int, ...]) -> None:
    seen: list[torch.Tensor] = []
    with fake_tpu(len(counts)) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        layer.weight.register_hook(seen.append)
        layer.weight.register_hook(lambda gradient: gradient * 10)
        accumulated: list[Any] = []
        layer.weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
        batch = rows_of(counts)
        strategy.run(lambda x: layer(x).mean().backward(), args=(batch,))
    expected = torch.cat(batch.values).mean(dim=0, keepdim=True)
    assert len(seen) == len(accumulated) == 1
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(accumulated[0], 10 * expected)
    torch.testing.assert_close(layer.weight.grad, 10 * expected)


# -- results --------------------------------------------------------------------------------------------------------


def test_results_of_several_passes_are_in_the_replicas_order() -> None:
    batch = rows_of((2, 1, 2, 3))
    with fake_tpu(4) as strategy:
        result = strategy.run(lambda x: (x.sum(), x), args=(batch,))
        assert result[0].replica_ids == (0, 1, 2, 3)
        assert torch.equal(strategy.gather(result[1], axis=0), torch.cat(batch.values))
        torch.testing.assert_close(torch.stack(result[0].values), torch.stack([one.sum() for one in batch.values]))
        torch.testing.assert_close(strategy.reduce("sum", result[0]), torch.cat(batch.values).sum())


def test_replicas_without_rows_return_nothing() -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return torch.as_tensor(here().replica_id_in_sync_group) + 0

    with fake_tpu(3) as strategy:
        result = strategy.run(step, args=(rows_of((2, 0, 2)),))
        assert result.replica_ids == (0, 2)
        assert [int(one) for one in result.values] == [0, 2]
        assert calls == [2]
        nobody = strategy.run(step, args=(rows_of((0, 0, 0)),))
        assert nobody.values == ()
        assert calls == [2]


def test_what_one_replica_returns_is_its_own() -> None:
    """Not the same for all of them: it is added up once."""
    with fake_tpu(2) as strategy:
        step = lambda x: {"sum": x.sum(), "rows": len(x), "x": x, "text": "same"}  # noqa: E731
        result = strategy.run(step, args=(rows_of((2, 0)),))
        assert (result["sum"].replica_ids, result["rows"].values, result["text"]) == ((0,), (2,), "same")
        assert strategy.reduce("sum", result["rows"]) == 2
        torch.testing.assert_close(strategy.reduce("sum", result["sum"]), result["sum"].values[0])
        torch.testing.assert_close(strategy.reduce("sum", result["x"], axis=0), result["x"].values[0].sum(0))
        assert torch.equal(strategy.gather(result["x"], axis=0), result["x"].values[0])


def test_replicas_without_rows_run_when_asked_to() -> None:
    batch = ts.PerReplica([torch.ones(2, 3), torch.ones(0, 3)], batch_info=BatchInfo((2, 0), run_empty=True))
    with fake_tpu(2) as strategy:
        result = strategy.run(lambda x: x.sum(), args=(batch,))
        assert [float(one) for one in result.values] == [6.0, 0.0]


def test_python_results_of_the_passes() -> None:
    with fake_tpu(2) as strategy:
        result = strategy.run(lambda x: {"rows": len(x), "text": "same"}, args=(rows_of((2, 1)),))
        assert result["rows"].values == (2, 1)
        assert result["text"] == "same"


def test_inputs_of_other_dtypes_are_passes_of_their_own() -> None:
    with fake_tpu(2) as strategy:
        values = ts.PerReplica([torch.tensor([1.5]), torch.tensor([2])])
        result = strategy.run(lambda x: x * 2, args=(values,))
        assert [(one.dtype, one.tolist()) for one in result.values] == [(torch.float32, [3.0]), (torch.int64, [4])]


# -- errors in one pass ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("when", ["at once", "after an edit", "after the backward"])
def test_a_step_that_raises_in_one_pass(failing: int, when: str) -> None:
    def step(x: torch.Tensor) -> None:
        if len(x) == failing and when == "at once":
            raise LookupError("mine")
        with torch.no_grad():
            layer.weight.mul_(2)
        if len(x) == failing and when == "after an edit":
            raise LookupError("mine")
        layer(x).mean().backward()
        if len(x) == failing:
            raise LookupError("mine")

    def good(x: torch.Tensor) -> torch.Tensor:
        layer.zero_grad()
        loss = layer(x).mean()
        loss.backward()
        return loss.detach()

    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        before = layer.weight.detach().clone()
        with pytest.raises(LookupError, match="mine"):
            strategy.run(step, args=(rows_of((2, 1)),))
        after = layer.weight.detach()
        assert any(torch.equal(after, before * factor) for factor in (1, 2))  # never twice
        batch = rows_of((2, 1))
        layer.weight.grad = None
        strategy.run(good, args=(batch,))
        torch.testing.assert_close(layer.weight.grad, torch.cat(batch.values).mean(dim=0, keepdim=True))


def test_passes_that_make_different_calls() -> None:
    def step(x: torch.Tensor) -> Any:
        return here().all_reduce("sum", x.sum()) if len(x) == 2 else x.sum()

    with fake_tpu(2) as strategy:
        with pytest.raises(ReplicaError, match="all_reduce"):
            strategy.run(step, args=(rows_of((2, 1)),))
        assert strategy.run(lambda: 1) == 1


def test_what_a_replica_without_weight_computes_reaches_nothing() -> None:
    with fake_tpu(3) as strategy:
        with strategy.scope():
            layer = nn.Linear(1, 1, bias=False)

        def step(x: torch.Tensor, weight: torch.Tensor) -> None:
            here().set_weight(weight)
            (layer(x) + x.log()).sum().backward()

        x = own([[1.0]], [[0.0]], [[2.0]])  # the loss of replica 1 is minus infinity
        strategy.run(step, args=(x, own(1.0, 0.0, 1.0)))
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[1.5]]
