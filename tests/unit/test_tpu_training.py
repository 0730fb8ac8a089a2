"""Training steps of `TPUStrategy`: collectives, gradients, uneven batches; the numbers of a `MirroredStrategy`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

import torchstrat as ts
from tests.support.tpu import assert_as_mirrored, fake_tpu, here, own, rows_of, seen
from torchstrat.errors import InvalidArgumentError, UnsupportedError
from torchstrat.testing.fake_tpu import batch_of_replicas

Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""From the model and the replica's rows to its loss."""


def alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def by_mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    features = model(x)
    return (features - here().all_reduce("mean", features.mean(dim=0))).square().mean()


def by_sum_of_a_nest(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    features = model(x)
    found = here().all_reduce("sum", {"total": features.sum(dim=0), "more": [features.square().mean()]})
    return (features * found["total"]).mean() + found["more"][0]


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    features = model(x)
    first = here().all_reduce("sum", features.mean(dim=0))
    return (here().all_reduce("mean", (features * first).sum(dim=0)) * features).square().mean()


def by_gather(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    features = model(x)
    return (features @ here().all_gather(features, axis=0).T).logsumexp(dim=1).mean()


def by_gather_of_columns(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    everyone = here().all_gather(model(x).mean(dim=0, keepdim=True), axis=1)
    return (everyone * torch.arange(1.0, everyone.shape[1] + 1)).square().sum()


def of_variables(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (x @ here().all_reduce("mean", next(model.parameters())).T).square().mean()


BODIES = [by_mean, by_sum_of_a_nest, twice, by_gather, by_gather_of_columns, of_variables]
THREE_TO_ONE, BY_TENSOR = ts.PerReplica([3.0, 1.0]), own(0.5, 2.5)
TRAININGS = [
    # body, rows, the weights that the step gives itself, how it takes gradients of its rows, reduction
    *(
        (body, counts, None, "", op)
        for body, counts, op in product(BODIES, [(4, 4), (3, 1), (2, 2, 3)], ["mean", "sum"])
    ),
    *((body, (4, 4), weights, "", "mean") for body, weights in product(BODIES, [2.0, THREE_TO_ONE, BY_TENSOR])),
    *((by_mean, (3, 1), weights, "", "mean") for weights in (THREE_TO_ONE, BY_TENSOR)),
    # Replicas without weight. Through a collective such a replica passes no gradient to the others here.
    *((alone, (4, 4), weights, "", "mean") for weights in (ts.PerReplica([1.0, 0.0]), own(0.0, 2.0), 0.0)),
    *(
        (body, counts, weights, how, "mean")
        for body, counts, weights, how in product(
            [by_mean, by_sum_of_a_nest, by_gather], [(4, 4), (3, 1)], [None, THREE_TO_ONE], ["grad", ".grad"]
        )
    ),
]


@pytest.mark.parametrize(("body", "counts", "weights", "of_rows", "reduce_op"), TRAININGS)
def test_training(body: Body, counts: tuple[int, ...], weights: Any, of_rows: str, reduce_op: str) -> None:
    """Two steps of SGD."""

    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, weight: Any) -> Any:
            if weight is not None:
                here().set_weight(weight)
            optimizer.zero_grad()
            if not of_rows:
                loss = body(model, x)
                loss.backward()
                optimizer.step()
                return loss.detach()
            x = x.detach().requires_grad_()
            loss = body(model, x)
            if of_rows == "grad":
                return loss.detach(), torch.autograd.grad(loss, x)[0] + 0
            loss.backward()
            return loss.detach(), x.grad + 0

        found = [strategy.run(step, args=(rows_of(counts), weights)) for _ in range(2)]
        return [found, list(model.parameters()), [one.grad for one in model.parameters() if one.grad is not None]]

    assert_as_mirrored(program, replicas=len(counts), gradient_reduce_op=reduce_op)


def test_values_of_collectives() -> None:
    def step(x: torch.Tensor, rows: torch.Tensor) -> Any:
        context = here()
        return {
            "sum": context.all_reduce("sum", x),
            "mean": context.all_reduce(ts.ReduceOp.MEAN, x),
            "mean of integers": context.all_reduce("mean", x.long()),
            "sum of integers": context.all_reduce("sum", x.to(torch.int32)),
            "gathered": context.all_gather(x, axis=0),
            "along the last": context.all_gather({"x": x.reshape(1, -1)}, axis=-1)["x"],
            "of what they share": context.all_reduce("sum", torch.ones(2)),
            "rows that differ in number": context.all_gather(rows, axis=0) * len(rows),
        }

    for counts in ((2, 2), (3, 1)):
        args = own([1.0, 2.0], [4.0, 6.0]), rows_of(counts)
        assert_as_mirrored(lambda strategy: strategy.run(step, args=args))  # noqa: B023


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


def test_what_merge_call_is_given_and_gives_back() -> None:
    """Python values as they are, variables as one, and errors."""
    calls: list[Any] = []

    def merged(strategy: ts.Strategy, value: Any) -> Any:
        calls.append(value)
        return "done"

    def raises(strategy: ts.Strategy) -> None:
        raise LookupError("mine")

    with fake_tpu() as strategy:
        with strategy.scope():
            layer = nn.Linear(2, 1)
            layer.register_buffer("seen", torch.zeros(2))
        assert strategy.run(lambda: here().merge_call(merged, args=("text",))) == "done"
        assert calls == ["text"]
        for one in (layer.weight, layer.seen):
            assert strategy.run(lambda one=one: here().merge_call(lambda _, given: given is one, (one,)))
        for uneven in ([torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(2, dtype=torch.long)]):
            with pytest.raises(UnsupportedError, match=r"float32\[2\] and (float32\[3\]|int64\[2\])"):
                strategy.run(lambda uneven=uneven: here().merge_call(lambda _: ts.PerReplica(uneven)))
        with pytest.raises(LookupError, match="mine"):
            strategy.run(lambda: here().merge_call(raises))
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


# == gradients that a step asks for itself ===========================================================================


def by_autograd_grad(layer: nn.Linear, x: torch.Tensor) -> Any:
    """Of rows and variables, which are the replica's own and not the combined ones."""
    x, other = x.detach().requires_grad_(), torch.ones(2, requires_grad=True)
    out = layer(x)
    partly = grad(layer(x).sum(), [layer.bias, other], allow_unused=True)
    assert partly[1] is None
    unused = grad(layer(x).sum(), [layer.bias, layer.weight, other], materialize_grads=True)
    zeros = grad(layer.bias.sum(), [layer.bias, layer.weight], materialize_grads=True)
    with pytest.raises((InvalidArgumentError, RuntimeError), match="shape"):
        layer(x).backward(torch.ones((), dtype=x.dtype))
    return [
        *unused,
        *zeros,
        grad(layer(x).square().mean(), x),
        grad(layer(x).square().mean(), [layer.weight, layer.bias]),
        grad(layer(x).square().sum(), [x, layer.weight]),
        grad(out, x, grad_outputs=out.detach() * 2),
        partly[0],
    ]


def without_weight(layer: nn.Linear, x: torch.Tensor) -> Any:
    here().set_weight(here().replica_id_in_sync_group * 1.0)
    x = x.detach().requires_grad_()
    return grad(layer(x).square().mean(), x)


def penalty(layer: nn.Linear, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    out = layer(x).tanh()
    (slope,) = grad(out.sum(), x, create_graph=True)
    layer.zero_grad()
    (out.mean() + slope.square().mean()).backward()
    return slope.detach()


def of_inputs_by_backward(layer: nn.Linear, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    assert x.requires_grad
    assert x.grad is None
    layer.zero_grad()
    layer(x).square().mean().backward()
    once = x.grad * 1
    layer(x).mean().backward()
    return once, x.grad


def hooks_on_activations(layer: nn.Linear, x: torch.Tensor) -> Any:
    """One that changes the gradient, one that only looks, and one that is gone."""
    looked: list[torch.Tensor] = []
    handle = (x.detach().requires_grad_() * 1).register_hook(lambda _: None)
    handle.remove()
    layer.zero_grad()
    out, other = layer(x), layer(x)
    out.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) + out.detach() * 0.01)
    other.register_hook(lambda gradient: looked.append(gradient * 1))
    out.square().mean().backward()
    other.square().mean().backward()
    assert len(looked) == 1
    return out.detach(), looked[0]


def hooks_on_activations_of_own_gradients(layer: nn.Linear, x: torch.Tensor) -> Any:
    """Each is given one replica's gradient, and what it adds belongs to that replica."""
    out = layer(x)
    out.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) + out.detach() * 0.01)
    inner = layer(out.tanh()[:, :1] * x)
    inner.register_hook(lambda gradient: gradient * gradient)
    found = grad(inner.square().mean(), [layer.weight, out, layer.bias], create_graph=True)
    return [one.detach() for one in (*found, *grad(found[0].square().sum(), [layer.bias]))]


def backward_with_arguments(layer: nn.Linear, x: torch.Tensor) -> Any:
    layer.zero_grad()
    layer(x).square().mean().backward(inputs=[layer.bias])
    assert layer.weight.grad is None
    out = layer(x)
    out.backward(gradient=torch.ones_like(out) * 0.5)
    out = layer(x)
    torch.autograd.backward([out.mean(), out.square().mean()])
    return out.detach()


def of_a_graph_where_none_is_recorded(layer: nn.Linear, x: torch.Tensor) -> Any:
    """Backward passes within ``no_grad``, which PyTorch allows."""
    layer.zero_grad()
    with torch.no_grad():
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = layer(x)
            total, loss = out.sum(), out.square().mean()
        (slope,) = grad(total, x, retain_graph=True, create_graph=True)
        own = grad(total, layer.bias, retain_graph=True)
        loss.backward()
    return slope.detach(), own


def by_transforms(layer: nn.Linear, x: torch.Tensor) -> Any:
    slope = torch.func.grad(lambda weight: (x @ weight.T).square().mean())(layer.weight)
    return slope, torch.func.vmap(lambda row: layer(row).square().sum())(x).detach()


def leaves_of_the_step(layer: nn.Linear, x: torch.Tensor) -> Any:
    """Tensors that the step makes and trains on its own rows, in all ways to make one."""
    made = [
        torch.zeros(3, dtype=x.dtype, requires_grad=True),
        torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype, requires_grad=True),
        torch.ones_like(layer.weight[0], requires_grad=True),
        x.new_full((3,), 0.5, requires_grad=True),
        layer.weight[0].detach().clone().requires_grad_(),
        torch.ones(3, dtype=x.dtype).requires_grad_(),
        x[0].detach().clone().requires_grad_(),
    ]
    inner = torch.optim.SGD([{"params": made[:2], "lr": 0.3}, {"params": made[2:]}], lr=0.1, momentum=0.5)
    for _ in range(2):
        inner.zero_grad()
        sum(((one - x) ** 2).mean() for one in made).backward()
        inner.step()
    made[0].grad = None
    return [one.detach() for one in made], [None if one.grad is None else one.grad * 1 for one in made]


GRADIENTS = [
    leaves_of_the_step,
    *(by_autograd_grad, without_weight, penalty, of_inputs_by_backward, hooks_on_activations, backward_with_arguments),
    *(by_transforms, hooks_on_activations_of_own_gradients, of_a_graph_where_none_is_recorded),
]


@pytest.mark.parametrize("counts", [(4, 4), (3, 1), (2, 0), (2, 2, 1)])
@pytest.mark.parametrize("body", GRADIENTS)
def test_gradients(body: Callable[[nn.Linear, torch.Tensor], Any], counts: tuple[int, ...]) -> None:
    """Two runs of ``body(layer, rows)``: its results, the layer and its gradients."""

    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            layer = nn.Linear(3, 2)
        found = [strategy.run(lambda x: body(layer, x), args=(rows_of(counts, seed=seed),)) for seed in range(2)]
        return [found, [(p, p.grad) for p in layer.parameters() if p.grad is not None], list(layer.parameters())]

    assert_as_mirrored(program, replicas=len(counts))


class Raising(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ValueError("no step")


def test_a_step_goes_on_after_an_optimizers_that_raises() -> None:
    def trained(kind: type[torch.optim.Optimizer]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        with fake_tpu(2) as strategy:
            with strategy.scope():
                layer = nn.Linear(3, 2, dtype=torch.float64)
            first, optimizer = kind(layer.parameters(), 0.1), torch.optim.SGD(layer.parameters(), 0.1)

            def step(x: torch.Tensor) -> Any:
                with contextlib.suppress(ValueError):
                    first.step()
                own_one = torch.zeros(3, dtype=x.dtype, requires_grad=True)
                layer(x + own_one).square().mean().backward()
                optimizer.step()
                return own_one.grad

            return seen(strategy.run(step, args=(rows_of((2, 2)),))), layer.weight.tolist()

    assert trained(Raising) == trained(torch.optim.SGD)


def test_an_optimizer_of_variables_and_of_tensors_of_the_step_is_refused() -> None:
    def step(x: torch.Tensor) -> None:
        own_one = torch.zeros(3, requires_grad=True)
        inner = torch.optim.SGD([own_one, *layer.parameters()], lr=0.1)
        layer(x + own_one).sum().backward()
        inner.step()

    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 1, dtype=torch.float64)
        before = layer.weight.detach().clone()
        with pytest.raises(ts.errors.UnsupportedError, match=r"SGD has both variables.*an optimizer for each"):
            strategy.run(step, args=(rows_of((2, 2)),))
        assert torch.equal(layer.weight, before)


def test_the_gradient_with_respect_to_a_variable_is_the_replicas_own() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            holder = nn.ParameterList([torch.tensor(1.0)])
        (slopes,) = strategy.run(lambda x: grad(holder[0] * x, holder[0]), args=(own(2.0, 5.0),))
        assert seen(slopes) == [2.0, 5.0]
        assert holder[0].grad is None


def test_backward_outside_of_run_is_torchs_own() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 1, dtype=torch.float64)
        batch = rows_of((2, 2))
        strategy.run(lambda x: layer(x).mean().backward(), args=(batch,))
        inside = layer.weight.grad.clone()
        layer.zero_grad()
        torch.autograd.backward(layer(torch.cat(batch.values)).mean())
        torch.testing.assert_close(layer.weight.grad, inside)


# == several passes of one step, for replicas with other numbers of rows, as if they were one ========================

COUNTS = [(4, 4), (3, 1), (1, 3), (2, 0), (0, 2), (2, 2, 1), (3, 1, 2), (1, 0, 1), (2, 1, 0, 2)]

Step = Callable[[torch.Tensor], Any]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def helped() -> tuple[Step, Any]:
    """Gradients clipped, a scheduler, an average of weights, and weights that are edited before and after."""
    model, average = mlp(), mlp()
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        optimizer.zero_grad()
        loss = model(x).square().mean() + average(x).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model[0].weight.clamp_(-0.3, 0.3)
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return loss.detach() + norm

    return step, [model, average, lambda: torch.tensor([optimizer.param_groups[0]["lr"], float(scheduler.last_epoch)])]


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


UNEVEN = [
    *((helped, counts, "mean") for counts in COUNTS),
    *((batch_statistics, counts, "mean") for counts in ((3, 2), (2, 2, 3))),
    *((helped, counts, "sum") for counts in ((3, 1), (2, 0), (2, 2, 1))),
]
"""Several optimizers, and gradients of several passes, are cases of the contract: `test_contract_on_tpu`."""


@pytest.mark.parametrize(("make", "counts", "reduce_op"), UNEVEN)
def test_training_on_uneven_batches(
    make: Callable[[], tuple[Step, Any]], counts: tuple[int, ...], reduce_op: str
) -> None:
    """Three runs: even, ``counts``, even. ``make``: the step, and what to watch."""

    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            step, watched = make()
        batches = [rows_of([2] * len(counts)), rows_of(counts, seed=5), rows_of([2] * len(counts), seed=6)]
        found = [strategy.run(step, args=(batch,)) for batch in batches]
        return [found, *([*one.state_dict().values()] if isinstance(one, nn.Module) else one() for one in watched)]

    assert_as_mirrored(program, replicas=len(counts), gradient_reduce_op=reduce_op)


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (3, 2, 1)])
def test_hooks_of_parameters_see_the_combined_gradient_once(counts: tuple[int, ...]) -> None:
    hooked: list[torch.Tensor] = []
    accumulated: list[Any] = []
    with fake_tpu(len(counts)) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        layer.weight.register_hook(hooked.append)
        layer.weight.register_hook(lambda gradient: gradient * 10)
        layer.weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
        batch = rows_of(counts)
        strategy.run(lambda x: layer(x).mean().backward(), args=(batch,))
    expected = torch.cat(batch.values).mean(dim=0, keepdim=True)
    assert len(hooked) == len(accumulated) == 1
    torch.testing.assert_close(hooked[0], expected)
    torch.testing.assert_close(accumulated[0], 10 * expected)
    torch.testing.assert_close(layer.weight.grad, 10 * expected)


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (2, 0)])
def test_hooks_of_parameters_see_the_combined_gradient_of_autograd_grad(counts: tuple[int, ...], op: str) -> None:
    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            layer = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer.weight.register_hook(lambda gradient: gradient * gradient + 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            losses = layer(x).tanh().square()
            layer.bias.grad, layer.weight.grad = grad(losses.mean(), [layer.bias, layer.weight])
            optimizer.step()
            return losses.detach()

        return [[strategy.run(step, args=(rows_of(counts, seed=seed),)) for seed in range(2)], *layer.parameters()]

    assert_as_mirrored(program, replicas=len(counts), gradient_reduce_op=op)


class Remembering(nn.Module):
    """Keeps what it has computed, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.kept = nn.Linear(3, 2), 0, [torch.zeros(())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.inner(x).tanh()
        self.kept.append(self.last.detach().mean())
        return self.last / self.calls


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (3, 2, 1)])
def test_what_modules_keep_is_each_replicas_own(counts: tuple[int, ...]) -> None:
    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            model = Remembering()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            model.kept.clear()
            model(x).square().mean().backward()
            (model.last.detach().mean() * model(x).mean()).backward()
            optimizer.step()
            return model.last.detach().mean(), sum(model.kept), torch.tensor(model.calls)

        found = [strategy.run(step, args=(rows_of(counts, seed=seed),)) for seed in range(2)]
        return [found, *model.parameters()]

    assert_as_mirrored(program, replicas=len(counts))


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (3, 2, 1)])
def test_hooks_that_a_step_registers(counts: tuple[int, ...]) -> None:
    def halve(p: torch.Tensor) -> None:
        p.grad = p.grad * 0.5

    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            layer = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            handles = [layer.weight.register_hook(lambda gradient: gradient * gradient)]
            handles.append(layer.bias.register_post_accumulate_grad_hook(halve))
            losses = layer(x).tanh().square()
            losses.mean().backward()
            for handle in handles:
                handle.remove()
            optimizer.step()
            optimizer.zero_grad()
            return losses.detach()

        return [[strategy.run(step, args=(rows_of(counts, seed=seed),)) for seed in range(2)], *layer.parameters()]

    assert_as_mirrored(program, replicas=len(counts))


# -- results --------------------------------------------------------------------------------------------------------


def test_results_of_several_passes_are_in_the_replicas_order() -> None:
    batch = rows_of((2, 1, 2, 3))
    with fake_tpu(4) as strategy:
        result = strategy.run(lambda x: (x.sum(), x, len(x), "same"), args=(batch,))
        assert result[0].replica_ids == (0, 1, 2, 3)
        assert torch.equal(strategy.gather(result[1], axis=0), torch.cat(batch.values))
        torch.testing.assert_close(torch.stack(result[0].values), torch.stack([one.sum() for one in batch.values]))
        torch.testing.assert_close(strategy.reduce("sum", result[0]), torch.cat(batch.values).sum())
        assert result[2].values == (2, 1, 2, 3)
        assert result[3] == "same"


def test_replicas_without_rows_return_nothing() -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return torch.as_tensor(here().replica_id_in_sync_group) + 0

    with fake_tpu(3) as strategy:
        result = strategy.run(step, args=(rows_of((2, 0, 2)),))
        assert (result.replica_ids, seen(result), calls) == ((0, 2), [0, 2], [2])
        nobody = strategy.run(step, args=(rows_of((0, 0, 0)),))
        assert (nobody.values, calls) == ((), [2])
        asked_to = batch_of_replicas([torch.ones(2, 3), torch.ones(0, 3), torch.ones(2, 3)], run_empty=True)
        assert seen(strategy.run(lambda x: x.sum(), args=(asked_to,))) == [6.0, 0.0, 6.0]


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


def test_inputs_of_other_dtypes_are_passes_of_their_own() -> None:
    with fake_tpu(2) as strategy:
        result = strategy.run(lambda x: x * 2, args=(own([1.5], [2]),))
        assert [(one.dtype, one.tolist()) for one in result.values] == [(torch.float32, [3.0]), (torch.int64, [4])]


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("when", ["at once", "after an edit", "after the backward"])
def test_a_step_that_raises_in_one_pass(failing: int, when: str) -> None:
    def step(x: torch.Tensor, fails: str) -> None:
        def may_fail(now: str) -> None:
            if len(x) == failing and now == fails:
                raise LookupError("mine")

        may_fail("at once")
        if fails:
            with torch.no_grad():
                layer.weight.mul_(2)
            nn.init.constant_(fresh.weight, 5.0)
        may_fail("after an edit")
        layer(x).mean().backward()
        may_fail("after the backward")

    batch = rows_of((2, 1))
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer, fresh = nn.Linear(3, 1, bias=False, dtype=torch.float64), nn.Linear(1, 1)
        before, of_fresh = layer.weight.detach().clone(), fresh.weight.detach().clone()
        with pytest.raises(LookupError, match="mine"):
            strategy.run(step, args=(batch, when))
        assert torch.equal(fresh.weight, of_fresh)
        assert any(torch.equal(layer.weight, before * factor) for factor in (1, 2))  # never twice
        layer.weight.grad = None
        strategy.run(step, args=(batch, ""))
        torch.testing.assert_close(layer.weight.grad, torch.cat(batch.values).mean(dim=0, keepdim=True))


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


def test_statistics_that_a_step_has_changed_and_reads_are_warned_of_once() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.BatchNorm1d(3).eval()

        def change(x: torch.Tensor) -> None:
            F.batch_norm(x, layer.running_mean, layer.running_var, training=True)

        def read(x: torch.Tensor) -> Any:
            return layer(x)

        def change_and_read(x: torch.Tensor) -> Any:
            change(x)
            return layer(x)

        x = rows_of((4, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in (change, read):
                strategy.run(step, args=(x,))
        with pytest.warns(UserWarning, match="running statistics that it has changed before.*TPUStrategy.*at once"):
            strategy.run(change_and_read, args=(x,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            strategy.run(change_and_read, args=(x,))


@pytest.mark.parametrize("counts", [(3, 2), (1, 3)])
def test_what_replicas_made_of_uneven_batches_counts_by_their_rows_in_statistics(counts: tuple[int, int]) -> None:
    """One pass, for what they hand to the second step has one shape, and rows that differ."""

    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            layer = nn.BatchNorm1d(3)
        scale = torch.arange(1.0, 5.0).unsqueeze(1)
        features = strategy.run(lambda x: x.mean(0, keepdim=True) * scale, args=(rows_of(counts),))
        strategy.run(layer, args=(features,))
        return [layer.running_mean, layer.running_var]

    assert_as_mirrored(program)


@pytest.mark.parametrize("are_rows", [True, False])
def test_weights_beyond_half_precision(are_rows: bool) -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(1, 1, bias=False).half()

        def step(x: torch.Tensor, tokens: torch.Tensor) -> None:
            if not are_rows:
                here().set_weight(tokens)
            layer(x[:1].half()).sum().backward()

        counts = (60000, 20000) if are_rows else (1, 1)
        batch = batch_of_replicas(
            [torch.full((count, 1), value) for count, value in zip(counts, (1.0, 3.0), strict=True)]
        )
        strategy.run(step, args=(batch, own(60000.0, 20000.0)))
        assert layer.weight.grad is not None
        assert layer.weight.grad.item() == 1.5


def test_batches_with_other_shares_are_named_where_gradients_are_averaged() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(2, 1)
        first, second = (next(iter(strategy.distribute_dataset([torch.ones(rows, 2)]))) for rows in (3, 4))

        def step(first: torch.Tensor, second: torch.Tensor, weight: float | None) -> None:
            if weight is not None:
                here().set_weight(weight)
            (layer(first).mean() + layer(second).mean()).backward()

        with pytest.raises(InvalidArgumentError, match=r"\[2, 1\] rows of one and \[2, 2\] of another"):
            strategy.run(step, args=(first, second, None))
        strategy.run(step, args=(first, second, 1.0))
