"""Training cases: unusual ways to a gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from torchstrat.testing.training import (
    Batch,
    Case,
    Mlp,
    Training,
    plain_step,
    plain_training,
    regression,
    squared_error,
)


def forward_hooks() -> Training:
    model = Mlp()
    model.first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
    model.tanh.register_forward_hook(lambda module, inputs, output: output * 0.5)
    return plain_training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def _treble(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return (3.0 * grad_input[0],)


def _halve_output(module: nn.Module, grad_output: Any) -> Any:
    return (0.5 * grad_output[0],)


def backward_hooks() -> Training:
    model = Mlp()
    model.tanh.register_full_backward_hook(_treble)
    model.last.register_full_backward_pre_hook(_halve_output)
    return plain_training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def tensor_hooks() -> Training:
    """On a parameter, before and after accumulation, and on an activation made in the step."""
    model = Mlp()
    model.first.weight.register_hook(lambda gradient: gradient * 2.0)
    model.last.weight.register_post_accumulate_grad_hook(_halve)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        hidden = model.tanh(model.first(x))
        hidden.register_hook(lambda gradient: gradient + 0.01 / len(x))
        losses = squared_error(model.last(hidden), y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def compiled(backend: str | None) -> Training:
    """``backend`` of `torch.compile`; None does not compile, for the reference."""
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    called: Any = model if backend is None else torch.compile(model, backend=backend)
    return Training(plain_step(called, optimizer), {"model": model})


def checkpointed(*, use_reentrant: bool) -> Training:
    """Recomputes its middle in backward; the reentrant kind runs a backward inside of the backward."""
    first, middle, last = nn.Linear(6, 5), Mlp(5, 7, 5), nn.Linear(5, 3)
    model = nn.ModuleList([first, middle, last])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses: torch.Tensor = squared_error(last(checkpoint(middle, first(x), use_reentrant=use_reentrant)), y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def gradient_penalty() -> Training:
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        x = x.detach().requires_grad_()
        optimizer.zero_grad()
        prediction = model(x)
        (slope,) = torch.autograd.grad(prediction.sum(), x, create_graph=True)
        losses: torch.Tensor = squared_error(prediction, y) + (slope.norm(dim=1) - 1.0).square()
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def assigned_gradients(*, accumulate_in_place: bool) -> Training:
    """`autograd.grad` runs no hook of a parameter; the gradients reach the optimizer by hand."""
    model = Mlp()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        losses = squared_error(model(x), y)
        gradients = torch.autograd.grad(losses.mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if accumulate_in_place and parameter.grad is not None:
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = gradient
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def func_grad() -> Training:
    model = Mlp()
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)

    def loss_of(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
        losses = squared_error(functional_call(model, values, (x,)), y)
        return losses.mean(), losses

    def step(batch: Batch) -> torch.Tensor:
        gradients, losses = torch.func.grad(loss_of, has_aux=True)(parameters, *batch)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer.step()
        return torch.as_tensor(losses).detach()

    return Training(step, {"model": model})


def through_functional_call() -> Training:
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        doubled = {name: 2.0 * parameter for name, parameter in model.named_parameters()}
        losses = squared_error(functional_call(model, doubled, (x,)), y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def unused_parameters() -> Training:
    """An expert that only the first row asks for, and only at some steps, and a layer nothing asks for.

    Momentum and decay move a parameter whose gradient is zero and leave alone one whose gradient is missing.
    """
    model = nn.ModuleDict({"base": nn.Linear(6, 3), "expert": nn.Linear(6, 3), "never": nn.Linear(6, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def step(batch: Batch) -> torch.Tensor:
        x, y, asks = batch
        optimizer.zero_grad()
        prediction = model["base"](x)
        if bool(asks.any()):
            prediction = prediction + model["expert"](x) * asks.unsqueeze(1)
        losses = squared_error(prediction, y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def _first_row_asks(every: int) -> list[Batch]:
    batches: list[Batch] = []
    for index, (x, y) in enumerate(regression()):
        asks = torch.zeros(len(x))
        asks[0] = float(index % every != 0)
        batches.append((x, y, asks))
    return batches


def frozen_then_unfrozen() -> Training:
    model = Mlp()
    model.first.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)

    def before(step_index: int) -> None:
        if step_index == 2:
            model.first.requires_grad_(True)
        if step_index == 4:
            model.last.requires_grad_(False)

    return Training(plain_step(model, optimizer), {"model": model}, before=before)


def two_models_one_backward() -> Training:
    """Two models, one backward over both, stepped by two optimizers in the other order."""
    encoder, decoder = Mlp(6, 5, 4), Mlp(4, 5, 3)
    of_encoder = torch.optim.SGD(encoder.parameters(), lr=0.1)
    of_decoder = torch.optim.Adam(decoder.parameters(), lr=0.05)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        of_encoder.zero_grad()
        of_decoder.zero_grad()
        losses = squared_error(decoder(encoder(x)), y)
        torch.autograd.backward(losses.mean())
        of_decoder.step()
        of_encoder.step()
        return losses.detach()

    return Training(step, {"encoder": encoder, "decoder": decoder})


CASES = (
    Case("forward_hooks", forward_hooks),
    Case("backward_hooks", backward_hooks),
    Case("tensor_hooks", tensor_hooks),
    Case("compiled", partial(compiled, "aot_eager"), plain=partial(compiled, None)),
    Case("compiled_inductor", partial(compiled, "inductor"), plain=partial(compiled, None), needs_compiler=True),
    Case("checkpoint_reentrant", partial(checkpointed, use_reentrant=True)),
    Case("checkpoint_not_reentrant", partial(checkpointed, use_reentrant=False)),
    Case("gradient_penalty", gradient_penalty),
    Case("assigned_gradients", partial(assigned_gradients, accumulate_in_place=False)),
    Case("assigned_gradients_in_place", partial(assigned_gradients, accumulate_in_place=True)),
    Case("func_grad", func_grad),
    Case("functional_call", through_functional_call),
    Case("unused_on_all_but_one_replica", unused_parameters, partial(_first_row_asks, 6)),
    Case("unused_on_all_sometimes", unused_parameters, partial(_first_row_asks, 2)),
    Case("frozen_then_unfrozen", frozen_then_unfrozen),
    Case("two_models_one_backward", two_models_one_backward),
)
