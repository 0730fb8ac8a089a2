"""Collectives in a step of `TPUStrategy`, their gradients and the replicas' weights: as on a `MirroredStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import assert_as_mirrored, fake_tpu, here, own, rows_of
from torchstrat.errors import ContextError, InvalidArgumentError, WrongTypeError

Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""From the model and the replica's rows to its loss."""


def alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def by_mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    features = model(x)
    centre = here().all_reduce("mean", features.mean(dim=0))
    return (features - centre).square().mean()


def by_sum_of_a_nest(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    features = model(x)
    found = here().all_reduce("sum", {"total": features.sum(dim=0), "more": [features.square().mean()]})
    return (features * found["total"]).mean() + found["more"][0]


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    features = model(x)
    first = here().all_reduce("sum", features.mean(dim=0))
    second = here().all_reduce("mean", (features * first).sum(dim=0))
    return (second * features).square().mean()


def by_gather(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    features = model(x)
    everyone = here().all_gather(features, axis=0)
    return (features @ everyone.T).logsumexp(dim=1).mean()


def by_gather_of_columns(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    features = model(x).mean(dim=0, keepdim=True)  # (1, 2)
    everyone = here().all_gather(features, axis=1)
    return (everyone * torch.arange(1.0, everyone.shape[1] + 1)).square().sum()


def of_variables(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = here().all_reduce("mean", next(model.parameters()))
    return (x @ weight.T).square().mean()


BODIES = [by_mean, by_sum_of_a_nest, twice, by_gather, by_gather_of_columns, of_variables]


def trained(body: Body, x: ts.PerReplica, weights: Any = None, own_gradients: str = "") -> Callable[[ts.Strategy], Any]:
    """Two steps of SGD. ``weights``: for `set_weight`; ``own_gradients``: of the rows, "grad" or ".grad"."""

    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, weight: Any) -> Any:
            if weight is not None:
                here().set_weight(weight)
            optimizer.zero_grad()
            if not own_gradients:
                loss = body(model, x)
                loss.backward()
                optimizer.step()
                return loss.detach(), None
            x = x.detach().requires_grad_()
            loss = body(model, x)
            if own_gradients == "grad":
                (slope,) = torch.autograd.grad(loss, x)
            else:
                loss.backward()
                slope = x.grad
            return loss.detach(), slope + 0

        found = [strategy.run(step, args=(x, weights)) for _ in range(2)]
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        return [found, list(model.parameters()), gradients]

    return program


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("reduce_op", ["mean", "sum"])
@pytest.mark.parametrize("counts", [(4, 4), (3, 1), (2, 2, 3)])
def test_training_with_collectives(body: Body, reduce_op: str, counts: tuple[int, ...]) -> None:
    assert_as_mirrored(trained(body, rows_of(counts)), replicas=len(counts), gradient_reduce_op=reduce_op)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("weights", [2.0, ts.PerReplica([3.0, 1.0]), own(0.5, 2.5)])
def test_training_with_weights_of_the_steps_own(body: Body, weights: Any) -> None:
    assert_as_mirrored(trained(body, rows_of((4, 4)), weights))


@pytest.mark.parametrize("weights", [ts.PerReplica([1.0, 0.0]), own(0.0, 2.0), 0.0])
def test_replicas_without_weight(weights: Any) -> None:
    """Without collectives: through one, such a replica passes no gradient to the others here."""
    assert_as_mirrored(trained(alone, rows_of((4, 4)), weights))


@pytest.mark.parametrize("weights", [ts.PerReplica([3.0, 1.0]), own(0.5, 2.5)])
def test_weights_of_the_steps_own_on_uneven_rows(weights: Any) -> None:
    assert_as_mirrored(trained(by_mean, rows_of((3, 1)), weights))


@pytest.mark.parametrize("how", ["grad", ".grad"])
@pytest.mark.parametrize("body", [by_mean, by_sum_of_a_nest, by_gather])
@pytest.mark.parametrize("weights", [None, ts.PerReplica([3.0, 1.0])])
@pytest.mark.parametrize("counts", [(4, 4), (3, 1)])
def test_gradients_of_the_replicas_rows(body: Body, how: str, counts: tuple[int, int], weights: Any) -> None:
    assert_as_mirrored(trained(body, rows_of(counts), weights, own_gradients=how))


def test_a_replicas_own_gradient_of_a_variable_does_not_cross_replicas() -> None:
    """There is one backward pass for each replica then, and another replica's would have to wait for it."""

    def step(x: torch.Tensor) -> Any:
        loss = (layer(x) - here().all_reduce("mean", layer(x).mean(dim=0))).square().mean()
        return torch.autograd.grad(loss, layer.weight)

    with fake_tpu() as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 1, dtype=torch.float64)
        with pytest.raises(NotImplementedError, match=r"autograd\.grad"):
            strategy.run(step, args=(rows_of((2, 2)),))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none(weight: Any) -> None:
    with fake_tpu() as strategy, pytest.raises(InvalidArgumentError, match="finite number that is not negative"):
        strategy.run(lambda: here().set_weight(weight))


def test_a_weight_is_a_scalar() -> None:
    with fake_tpu() as strategy, pytest.raises(InvalidArgumentError, match=r"one number; got a tensor of shape \(2,\)"):
        strategy.run(lambda x: here().set_weight(x), args=(own([1.0, 2.0], [1.0, 2.0]),))


def test_values_of_collectives() -> None:
    def step(x: torch.Tensor) -> Any:
        context = here()
        return {
            "sum": context.all_reduce("sum", x),
            "mean": context.all_reduce(ts.ReduceOp.MEAN, x),
            "mean of integers": context.all_reduce("mean", x.long()),
            "sum of integers": context.all_reduce("sum", x.to(torch.int32)),
            "gathered": context.all_gather(x, axis=0),
            "along the last": context.all_gather({"x": x.reshape(1, -1)}, axis=-1)["x"],
            "of what they share": context.all_reduce("sum", torch.ones(2)),
        }

    assert_as_mirrored(lambda strategy: strategy.run(step, args=(own([1.0, 2.0], [4.0, 6.0]),)))


def test_gathering_rows_that_differ_in_number() -> None:
    program = lambda strategy: strategy.run(lambda x: here().all_gather(x, axis=0) * len(x), args=(rows_of((3, 1)),))  # noqa: E731
    assert_as_mirrored(program)


@pytest.mark.parametrize("value", ["text", None, object()])
def test_collectives_of_no_tensor(value: Any) -> None:
    with fake_tpu() as strategy, pytest.raises(TypeError, match="all_reduce"):
        strategy.run(lambda: here().all_reduce("sum", value))


def test_bools_are_not_added() -> None:
    with fake_tpu() as strategy, pytest.raises(WrongTypeError, match="cannot combine bool tensors"):
        strategy.run(lambda x: here().all_reduce("sum", x > 0), args=(own(1.0, 2.0),))


def test_a_context_ends_with_its_run() -> None:
    with fake_tpu() as strategy:
        kept: list[Any] = []
        strategy.run(lambda: kept.append(here()))
        with pytest.raises(ContextError, match="not the running one"):
            strategy.run(lambda: kept[0].all_reduce("sum", torch.ones(1)))


def test_collectives_inside_a_transform() -> None:
    def step(x: torch.Tensor) -> Any:
        return torch.func.grad(lambda y: here().all_reduce("sum", y).sum())(x)

    with fake_tpu() as strategy, pytest.raises(NotImplementedError, match=r"inside a transform of torch\.func"):
        strategy.run(step, args=(own([1.0], [2.0]),))


# -- merge_call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(2, 2), (3, 1)])
def test_merge_call(counts: tuple[int, int]) -> None:
    def merged(strategy: ts.Strategy, x: ts.PerReplica, constant: int, *, factor: ts.PerReplica) -> Any:
        assert ts.in_cross_replica_context()
        total = strategy.reduce("sum", x)
        parts = [one * total + constant for one in strategy.local_results(factor)]
        return {"total": total, "each": ts.PerReplica(parts), "none": None}

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        found = here().merge_call(merged, args=(x.sum(), 3), kwargs={"factor": factor})
        assert found["none"] is None
        return found["total"] + 0, found["each"] * len(x)

    assert_as_mirrored(lambda strategy: strategy.run(step, args=(rows_of(counts), own(2.0, 5.0))))


def test_merge_call_gives_python_values_back() -> None:
    calls: list[Any] = []

    def merged(strategy: ts.Strategy, value: Any) -> Any:
        calls.append(value)
        return "done"

    with fake_tpu() as strategy:
        assert strategy.run(lambda: here().merge_call(merged, args=("text",))) == "done"
    assert calls == ["text"]


def test_a_variable_is_one_in_merge_call() -> None:
    with fake_tpu() as strategy:
        with strategy.scope():
            layer = nn.Linear(2, 1)
        assert strategy.run(lambda: here().merge_call(lambda _, weight: weight is layer.weight, (layer.weight,)))


def test_merge_call_hands_on_what_it_raised() -> None:
    def merged(strategy: ts.Strategy) -> None:
        raise LookupError("mine")

    with fake_tpu() as strategy:
        with pytest.raises(LookupError, match="mine"):
            strategy.run(lambda: here().merge_call(merged))
        assert strategy.run(lambda: 1) == 1


# -- batch normalisation over all replicas --------------------------------------------------------------------------


class ThenActs(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        return super().forward(input).tanh()


class CallsTheFunction(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        y = F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True, 0.3, self.eps)
        return F.leaky_relu(y)


@pytest.mark.parametrize("counts", [(4, 4), (3, 2), (2, 2, 1)])
@pytest.mark.parametrize("reduce_op", ["mean", "sum"])
@pytest.mark.parametrize(
    ("kind", "affine"), [(nn.BatchNorm1d, True), (nn.BatchNorm1d, False), (ThenActs, True), (CallsTheFunction, True)]
)
def test_batch_normalisation_over_all_replicas(
    counts: tuple[int, ...], reduce_op: str, kind: type[nn.BatchNorm1d], affine: bool
) -> None:
    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            layers = nn.Linear(3, 4), ts.convert_sync_batchnorm(kind(4, affine=affine)), nn.Linear(4, 1)
            model = nn.Sequential(*layers)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            losses = (model(x) - x[:, :1]).square()
            (losses.mean() if reduce_op == "mean" else losses.sum()).backward()
            optimizer.step()
            return losses.detach().sum()

        found = [strategy.run(step, args=(rows_of(counts, seed=seed),)) for seed in range(3)]
        return [found, *model.state_dict().values()]

    assert_as_mirrored(program, replicas=len(counts), gradient_reduce_op=reduce_op)


def test_batch_normalisation_counts_batches_on_the_host_no_more() -> None:
    with fake_tpu() as strategy:
        with strategy.scope():
            layer = ts.convert_sync_batchnorm(nn.BatchNorm1d(3, momentum=None, dtype=torch.float64))
        with pytest.raises(NotImplementedError, match="momentum=None counts batches on the host"):
            strategy.run(layer, args=(rows_of((2, 2)),))
