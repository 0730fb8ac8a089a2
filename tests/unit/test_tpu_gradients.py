"""Gradients that a step of `TPUStrategy` asks for itself: as on a `MirroredStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import assert_as_mirrored, fake_tpu, own, rows_of
from torchstrat.errors import InvalidArgumentError, UnsupportedError

COUNTS = [(4, 4), (3, 1), (2, 0), (2, 2, 1)]


def program_of(body: Callable[[nn.Linear, torch.Tensor], Any], counts: tuple[int, ...]) -> Callable[[ts.Strategy], Any]:
    """Runs ``body(layer, rows)`` twice; watches its results, the layer and its gradients."""

    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            layer = nn.Linear(3, 2)
        found = [strategy.run(lambda x: body(layer, x), args=(rows_of(counts, seed=seed),)) for seed in range(2)]
        return [found, [(p, p.grad) for p in layer.parameters() if p.grad is not None], list(layer.parameters())]

    return program


# -- gradients of a replica's own tensors ---------------------------------------------------------------------------


def wrt_rows(layer: nn.Linear, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    assert x.requires_grad
    (slope,) = torch.autograd.grad(layer(x).square().mean(), x)
    return slope


def wrt_parameters(layer: nn.Linear, x: torch.Tensor) -> Any:
    """The replica's own gradient, not the combined one."""
    return torch.autograd.grad(layer(x).square().mean(), [layer.weight, layer.bias])


def wrt_both(layer: nn.Linear, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])


def with_grad_outputs(layer: nn.Linear, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    out = layer(x)
    return torch.autograd.grad(out, x, grad_outputs=out.detach() * 2)


def unused(layer: nn.Linear, x: torch.Tensor) -> Any:
    other = torch.ones(2, requires_grad=True)
    found = torch.autograd.grad(layer(x).sum(), [layer.bias, other], allow_unused=True)
    assert found[1] is None
    return found[0]


def penalty(layer: nn.Linear, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    out = layer(x).tanh()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = out.mean() + slope.square().mean()
    layer.zero_grad()
    loss.backward()
    return slope.detach()


def input_grad_after_backward(layer: nn.Linear, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    assert x.grad is None
    layer.zero_grad()
    layer(x).square().mean().backward()
    return x.grad


def input_grad_twice(layer: nn.Linear, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    layer(x).square().mean().backward()
    layer(x).mean().backward()
    return x.grad


def hook_on_an_activation(layer: nn.Linear, x: torch.Tensor) -> Any:
    layer.zero_grad()
    out = layer(x)
    out.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) + out.detach() * 0.01)
    out.square().mean().backward()
    return out.detach()


def hook_that_only_looks(layer: nn.Linear, x: torch.Tensor) -> Any:
    seen: list[torch.Tensor] = []
    x = x.detach().requires_grad_()
    handle = (x * 1).register_hook(lambda _: None)
    handle.remove()
    out = layer(x)
    out.register_hook(lambda gradient: seen.append(gradient * 1))
    layer.zero_grad()
    out.square().mean().backward()
    assert len(seen) == 1
    return seen[0]


def gradient_of_a_gradient_argument(layer: nn.Linear, x: torch.Tensor) -> Any:
    layer.zero_grad()
    out = layer(x)
    out.backward(gradient=torch.ones_like(out) * 0.5)
    return out.detach()


def several_roots(layer: nn.Linear, x: torch.Tensor) -> Any:
    layer.zero_grad()
    out = layer(x)
    torch.autograd.backward([out.mean(), out.square().mean()])
    return out.detach()


def only_some_inputs(layer: nn.Linear, x: torch.Tensor) -> Any:
    layer.zero_grad()
    layer(x).square().mean().backward(inputs=[layer.bias])
    assert layer.weight.grad is None
    return x


def func_grad(layer: nn.Linear, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda weight: (x @ weight.T).square().mean())(layer.weight)


def func_vmap(layer: nn.Linear, x: torch.Tensor) -> Any:
    return torch.func.vmap(lambda row: layer(row).square().sum())(x).detach()


GRADIENTS = [
    wrt_rows,
    wrt_parameters,
    wrt_both,
    with_grad_outputs,
    unused,
    penalty,
    input_grad_after_backward,
    input_grad_twice,
    hook_on_an_activation,
    hook_that_only_looks,
    gradient_of_a_gradient_argument,
    several_roots,
    only_some_inputs,
    func_grad,
    func_vmap,
]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("body", GRADIENTS)
def test_gradients(body: Callable[[nn.Linear, torch.Tensor], Any], counts: tuple[int, ...]) -> None:
    assert_as_mirrored(program_of(body, counts), replicas=len(counts))


def test_the_gradient_with_respect_to_a_variable_is_the_replicas_own() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            holder = nn.ParameterList([torch.tensor(1.0)])
        weight = holder[0]
        (slopes,) = strategy.run(lambda x: torch.autograd.grad(weight * x, weight), args=(own(2.0, 5.0),))
        assert [float(one) for one in slopes.values] == [2.0, 5.0]
        assert weight.grad is None


def test_a_loss_of_several_elements() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 2, dtype=torch.float64)
        with pytest.raises(InvalidArgumentError, match=r"backward needs a scalar.*shape \(2, 2\) on each replica"):
            strategy.run(lambda x: layer(x).backward(), args=(rows_of((2, 2)),))
        with pytest.raises(InvalidArgumentError, match=r"needs a scalar.*shape \(2, 2\)"):
            strategy.run(lambda x: torch.autograd.grad(layer(x), x.requires_grad_()), args=(rows_of((2, 2)),))


def test_what_has_no_meaning_is_refused() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 2, dtype=torch.float64)

        def to_rows(x: torch.Tensor) -> None:
            x = x.detach().requires_grad_()
            layer(x).sum().backward(inputs=[x])

        def batched(x: torch.Tensor) -> None:
            torch.autograd.grad(layer(x).sum(), layer.weight, is_grads_batched=True)

        def assigned(x: torch.Tensor) -> None:
            x.requires_grad_().grad = x * 2

        for step, message in (
            (to_rows, "only variables accumulate gradients"),
            (batched, "is_grads_batched=True"),
            (assigned, "only variables can be assigned a gradient"),
        ):
            with pytest.raises(UnsupportedError, match=message):
                strategy.run(step, args=(rows_of((2, 2)),))


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
