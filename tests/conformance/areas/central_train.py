"""Linear regression under `CentralStorageStrategy`: losses and weights after every step, for 1 to 3 replicas.

The recorded gradients are sums over replicas of a loss divided by the global batch, hence ``gradient_reduce_op="sum"``.
Adam's epsilon stands elsewhere in PyTorch's formula; with 1e-7 that is far below the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.areas.merge_call import context
from tests.conformance.harness import Case, Difference, decode, load_cases, make_strategy

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]
MakeStep = Callable[[Case, ts.Strategy], tuple[Step, Callable[[], torch.Tensor]]]
"""Builds a step that returns the replica's loss, and what reads the weights: w, then b."""


def recorded_data() -> dict[str, Any]:
    """``x`` (30, 3), ``y`` (30, 1), ``w0`` (3, 1), ``b0``: stands in the first case only."""
    [first] = [case for case in load_cases(["central_train"]) if isinstance(case.inputs["data"], dict)]
    return decode(first.inputs["data"])


def train(make_step: MakeStep, case: Case) -> dict[str, Any]:
    strategy, data = make_strategy(case.setup), recorded_data()
    rows, size = case.inputs["rows_used"], case.inputs["global_batch"]
    batches = [(data["x"][i : min(i + size, rows)], data["y"][i : min(i + size, rows)]) for i in range(0, rows, size)]
    with strategy.scope():
        step, read_weights = make_step(case, strategy)
    losses, weights = [], []
    for batch in strategy.distribute_dataset(batches):
        losses.append(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None).item())
        weights.append(read_weights().tolist())
    assert len(losses) == case.inputs["steps"]
    return {"losses_sum_over_replicas": losses, "weights_after_each_step_w_then_b": weights}


def with_optimizer(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> MakeStep:
    """An ordinary PyTorch model, optimizer and step."""

    def make_step(case: Case, _: ts.Strategy) -> tuple[Step, Callable[[], torch.Tensor]]:
        model, data = torch.nn.Linear(3, 1), recorded_data()
        with torch.no_grad():
            model.weight.copy_(data["w0"].T)
            model.bias.fill_(data["b0"])
        optimizer = make_optimizer(model.parameters())

        def step(batch: Batch) -> torch.Tensor:
            x, y = batch
            optimizer.zero_grad()
            loss = (model(x) - y).square().sum() / case.inputs["global_batch"]
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, lambda: torch.cat([model.weight.detach().flatten(), model.bias.detach()])

    return make_step


class Weights:
    """``w`` and ``b`` as `ts.Variable`, which only assignments change."""

    def __init__(self, aggregation: ts.VariableAggregation) -> None:
        data = recorded_data()
        self.w = ts.Variable(data["w0"], aggregation=aggregation)
        self.b = ts.Variable(torch.tensor([data["b0"]]), aggregation=aggregation)

    def read(self) -> torch.Tensor:
        return torch.cat([self.w.read_value().flatten(), self.b.read_value()])

    def gradients(self, batch: Batch, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """The loss, and its gradients by w and b, on one replica's rows."""
        x, y = batch
        w, b = (one.read_value().detach().clone().requires_grad_() for one in (self.w, self.b))
        loss = loss_of((x @ w + b - y).square())
        return [loss.detach(), *torch.autograd.grad(loss, [w, b])]


def assign_sub(aggregation: ts.VariableAggregation, loss_of: Callable[[Case, torch.Tensor], torch.Tensor]) -> MakeStep:
    """Every replica subtracts its own share; the variable's aggregation makes one update of them."""

    def make_step(case: Case, _: ts.Strategy) -> tuple[Step, Callable[[], torch.Tensor]]:
        weights = Weights(aggregation)

        def step(batch: Batch) -> torch.Tensor:
            loss, w_gradient, b_gradient = weights.gradients(batch, partial(loss_of, case))
            weights.w.assign_sub(case.inputs["lr"] * w_gradient)
            weights.b.assign_sub(case.inputs["lr"] * b_gradient)
            return loss

        return step, weights.read

    return make_step


def adam_by_hand(case: Case, _: ts.Strategy) -> tuple[Step, Callable[[], torch.Tensor]]:
    """`all_reduce` of the gradients, then one update of all state in a `merge_call`."""
    weights, (beta1, beta2, epsilon) = Weights(ts.VariableAggregation.SUM), (0.9, 0.999, 1e-7)
    variables = [weights.w, weights.b]
    moments = [[ts.Variable(torch.zeros_like(one.read_value())) for one in variables] for _ in range(2)]
    steps = ts.Variable(0.0)

    def update(strategy: ts.Strategy, *gradients: Any) -> None:
        extended = strategy.extended
        extended.update(steps, lambda one: one.assign_add(1.0))
        t = steps.read_value()
        rate = case.inputs["lr"] * (1 - beta2**t).sqrt() / (1 - beta1**t)
        for variable, mean, square, gradient in zip(variables, *moments, gradients, strict=True):
            extended.update(mean, lambda one, g: one.assign(beta1 * one.read_value() + (1 - beta1) * g), (gradient,))
            extended.update(
                square, lambda one, g: one.assign(beta2 * one.read_value() + (1 - beta2) * g * g), (gradient,)
            )
            change = rate * mean.read_value() / (square.read_value().sqrt() + epsilon)
            extended.update(variable, lambda one, value: one.assign_sub(value), (change,))

    def step(batch: Batch) -> torch.Tensor:
        loss, *gradients = weights.gradients(batch, lambda errors: errors.sum() / case.inputs["global_batch"])
        context().merge_call(update, args=tuple(context().all_reduce("sum", gradients)))
        return loss

    return step, weights.read


def operation(make_step: MakeStep) -> Callable[[Case], Any]:
    return lambda case: train(make_step, case)


SUM, MEAN = ts.VariableAggregation.SUM, ts.VariableAggregation.MEAN
_SGD = operation(with_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1)))
OPS: dict[str, Callable[[Case], Any]] = {
    "adam_keras": operation(with_optimizer(lambda parameters: torch.optim.Adam(parameters, lr=0.1, eps=1e-7))),
    "adam_manual": operation(adam_by_hand),
    "adam_v1": operation(with_optimizer(lambda parameters: torch.optim.Adam(parameters, lr=0.1, eps=1e-8))),
    "momentum_v1": operation(with_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))),
    "sgd_assign_sub": operation(assign_sub(SUM, lambda case, errors: errors.sum() / case.inputs["global_batch"])),
    "sgd_keras": _SGD,
    "sgd_mean_aggregation": operation(assign_sub(MEAN, lambda _, errors: errors.mean())),
    "sgd_v1": _SGD,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
