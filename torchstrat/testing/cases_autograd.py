"""Training cases: unusual ways to a gradient."""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import torchstrat as ts
from torchstrat.core._torch_private import version_of
from torchstrat.testing.training import (
    Batch,
    Case,
    Mlp,
    Training,
    adam,
    named,
    plain_step,
    plain_training,
    regression,
    sgd,
    squared_error,
    train_step,
)

UNEVEN_ROWS = (8, 12, 5, 7, 9)
uneven = partial(regression, UNEVEN_ROWS)


def forward_hooks() -> Training:
    model = Mlp()
    model.first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
    model.tanh.register_forward_hook(lambda module, inputs, output: output * 0.5)
    return plain_training(model, sgd(model))


def backward_hooks() -> Training:
    model = Mlp()
    model.tanh.register_full_backward_hook(lambda _, gradients, __: _times(3.0, gradients))
    model.last.register_full_backward_pre_hook(lambda _, gradients: _times(0.5, gradients))
    return plain_training(model, sgd(model))


def _times(factor: float, gradients: Any) -> Any:
    return (factor * gradients[0],)


def tensor_hooks() -> Training:
    """On a parameter, before and after accumulation, and on an activation made in the step."""
    model = Mlp()
    model.first.weight.register_hook(lambda gradient: gradient * 2.0)
    model.last.weight.register_post_accumulate_grad_hook(_halve)

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = model.tanh(model.first(x))
        hidden.register_hook(lambda gradient: gradient + 0.01 / len(x))
        return squared_error(model.last(hidden), y)

    return Training(train_step(losses, sgd(model)), {"model": model})


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def compiled(backend: str | None) -> Training:
    """``backend`` of `torch.compile`; None does not compile, for the reference."""
    model = Mlp()
    called: Any = model if backend is None else torch.compile(model, backend=backend)
    return Training(plain_step(called, adam(model)), {"model": model})


def checkpointed(*, use_reentrant: bool) -> Training:
    """Recomputes its middle in backward; the reentrant kind runs a backward inside of the backward."""
    first, middle, last = nn.Linear(6, 5), Mlp(5, 7, 5), nn.Linear(5, 3)
    model = nn.ModuleList([first, middle, last])

    def call(x: torch.Tensor) -> Any:
        return last(checkpoint(middle, first(x), use_reentrant=use_reentrant))

    return Training(plain_step(call, sgd(model)), {"model": model})


def nested_reentrant_checkpoints() -> Training:
    model, head = Mlp(6, 6, 6), nn.Linear(6, 3)

    def inner(x: torch.Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=True)

    def call(x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        return head(inner(checkpoint(lambda v: inner(v) + model(v), x, use_reentrant=True)))

    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.05)
    return Training(plain_step(call, sgd(model, head, momentum=0.0), edit=clip), {"model": model, "head": head})


def gradient_penalty() -> Training:
    model = Mlp()

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        prediction = model(x)
        (slope,) = torch.autograd.grad(prediction.sum(), x, create_graph=True)
        found: torch.Tensor = squared_error(prediction, y) + (slope.norm(dim=1) - 1.0).square()
        return found

    return Training(train_step(losses, adam(model)), {"model": model})


def assigned_gradients(*, accumulate_in_place: bool) -> Training:
    """`autograd.grad` runs no hook of a parameter; the gradients reach the optimizer by hand."""
    model = Mlp()
    parameters, optimizer = list(model.parameters()), sgd(model)

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


def hooks_for_a_pass() -> Training:
    """The step registers hooks on modules, and removes one when it has been backward; one stays from the first step."""
    model = Mlp()
    optimizer = sgd(model)
    steps: list[object] = []

    def halved(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * 0.5

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        handle = model.first.register_forward_hook(halved)
        if not steps:
            model.last.register_forward_pre_hook(lambda module, inputs: inputs[0] * 0.5)
        losses = squared_error(model(batch[0]), batch[1])
        losses.mean().backward()
        handle.remove()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model}, after=lambda *_: steps.append(None))


def func_grad() -> Training:
    model = Mlp()
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    optimizer = sgd(model, momentum=0.0)

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

    def call(x: torch.Tensor) -> Any:
        return functional_call(model, {name: 2.0 * value for name, value in model.named_parameters()}, (x,))

    return Training(plain_step(call, adam(model)), {"model": model})


def unused_parameters() -> Training:
    """An expert that only the first row asks for, and only at some steps, and a layer nothing asks for.

    Momentum and decay move a parameter whose gradient is zero and leave alone one whose gradient is missing.
    """
    model = nn.ModuleDict({"base": nn.Linear(6, 3), "expert": nn.Linear(6, 3), "never": nn.Linear(6, 3)})

    def losses(x: torch.Tensor, y: torch.Tensor, asks: torch.Tensor) -> torch.Tensor:
        prediction = model["base"](x)
        if bool(asks.any()):
            prediction = prediction + model["expert"](x) * asks.unsqueeze(1)
        return squared_error(prediction, y)

    return Training(train_step(losses, sgd(model, weight_decay=0.1)), {"model": model})


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

    def before(step_index: int) -> None:
        if step_index == 2:
            model.first.requires_grad_(True)
        if step_index == 4:
            model.last.requires_grad_(False)

    return Training(plain_step(model, adam(model, weight_decay=0.1)), {"model": model}, before=before)


def two_models_one_backward() -> Training:
    """Two models, one backward over both, stepped by two optimizers in the other order."""
    encoder, decoder = Mlp(6, 5, 4), Mlp(4, 5, 3)
    step = plain_step(lambda x: decoder(encoder(x)), adam(decoder), sgd(encoder, momentum=0.0))
    return Training(step, {"encoder": encoder, "decoder": decoder})


# -- several passes --------------------------------------------------------------------------------------------------


def several_backwards(of_rows: Callable[[torch.Tensor], torch.Tensor]) -> Training:
    """``of_rows``: `torch.mean` or `torch.sum`. A gradient that is already summed must not be summed again."""
    model = Mlp()

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = model.first(x)
        of_rows(hidden.square().mean(dim=1)).backward(retain_graph=True)
        found = squared_error(model.last(model.tanh(hidden)), y)
        of_rows(found).backward()
        of_rows(squared_error(model(2 * x), y)).backward()
        return found

    return Training(train_step(losses, adam(model), loss=_has_gone_back), {"model": model})


def _has_gone_back(losses: torch.Tensor) -> None:
    """The loss of what has made its backward passes itself."""


def backward_twice_over_one_graph() -> Training:
    model = Mlp()

    def loss(losses: torch.Tensor) -> torch.Tensor:
        losses.mean().backward(retain_graph=True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return losses.mean()

    return Training(plain_step(model, sgd(model, momentum=0.0), loss=loss), {"model": model})


def backward_of_some_inputs() -> Training:
    model = Mlp()
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.05)

    def loss(losses: torch.Tensor) -> None:
        losses.mean().backward(inputs=list(model.last.parameters()))

    return Training(plain_step(model, sgd(model, momentum=0.0), loss=loss, edit=clip), {"model": model})


def double_backward_across_all_reduce() -> Training:
    model = Mlp()

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        context = ts.get_replica_context()
        assert context is not None
        found = squared_error(model(x), y)
        mean = context.all_reduce("mean", found.square().mean())
        # The gradient of an all_reduced mean is the local mean's, which has so many rows fewer.
        rows = mean.square() / context.num_replicas_in_sync + found.sum()
        (gradient,) = torch.autograd.grad(rows, x, create_graph=True)
        penalty: torch.Tensor = gradient.square().sum(dim=1)
        return found + penalty

    return Training(train_step(losses, sgd(model, lr=0.05, momentum=0.0)), {"model": model})


def sums_zeroed_in_place() -> Training:
    """Some rows in one pass, all of them in another; gradients are zeroed, not freed."""
    model = Mlp()
    optimizer = sgd(model, lr=0.02)

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        found = squared_error(model(x), y)
        found[x[:, 0] > 0].sum().backward(retain_graph=True)
        found.square().sum().backward()
        optimizer.step()
        return found

    return Training(train_step(losses, loss=_has_gone_back), {"model": model})


def sums_of_branches() -> Training:
    """Each row decides which of two layers its replica uses, in each of several backward passes."""
    layers: Any = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x))
        for passes in range(3):
            found = torch.zeros(len(x))
            for index, layer in enumerate(layers):
                rows = (x[:, passes] > 0.5) == bool(index)
                if rows.any():
                    found = found.masked_scatter(rows, squared_error(layer(x[rows]), y[rows]))
            (found.sum() + layers[0].weight.sum() * 0).backward()
            total = total + found.detach()
        return total

    return Training(train_step(losses, sgd(layers, lr=0.02, momentum=0.0), loss=_has_gone_back), {"layers": layers})


def graph_kept_over_a_step() -> Training:
    """Backward needs what the optimizer has changed since: PyTorch's error, as it is known by ``_version``."""
    model = Mlp()
    optimizer = sgd(model)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        losses = squared_error(model(batch[0]), batch[1])
        losses.mean().backward(retain_graph=True)
        optimizer.step()
        try:
            torch.autograd.grad(losses.mean(), model.first.weight)
        except RuntimeError:
            return losses.detach() + 100
        return losses.detach()

    return Training(step, {"model": model})


def blocks_over_the_whole_step() -> Training:
    """What PyTorch and Python keep globally while a block lasts, which has the backward pass and the step in it:
    weights that are computed once, a hook on all modules, filters of warnings."""
    model = Mlp()
    weight_norm(model.first)
    optimizer = sgd(model)
    filters = len(warnings.filters)

    def halve(module: nn.Module, inputs: object, output: Any) -> Any:
        return output * 0.5 if isinstance(module, nn.Tanh) else None

    def step(batch: Batch) -> torch.Tensor:
        handle = register_module_forward_hook(halve)
        with parametrize.cached(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.zero_grad()
            losses = squared_error(model(batch[0]), batch[1])
            losses.mean().backward()
            optimizer.step()
            more: torch.Tensor = model(batch[0]).detach().square().mean(dim=-1)
        handle.remove()
        return losses.detach() + more

    return Training(step, {"model": model, "filters": lambda: torch.tensor(len(warnings.filters) - filters)})


_RATE = contextvars.ContextVar("_RATE", default=1.0)


class _OfThread(threading.local):
    """Settings as libraries keep them, with their defaults on a thread that has set none."""

    scale = 1.0


def settings_of_the_thread() -> Training:
    """A context variable and an object with other attributes on each thread, which the program sets before each run
    and the step sets again."""
    model, settings = Mlp(), _OfThread()
    optimizer = sgd(model)

    def before(index: int) -> None:
        _RATE.set(_RATE.get() * 0.9 if index else 0.8)
        settings.scale = settings.scale * 0.9 if index else 0.7

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        losses = squared_error(model(batch[0]) * _RATE.get(), batch[1])
        (losses.mean() * settings.scale).backward()
        optimizer.step()
        _RATE.set(_RATE.get() * 1.05)
        settings.scale *= 1.05
        return losses.detach()

    numbers = {"rate": lambda: torch.tensor(_RATE.get()), "scale": lambda: torch.tensor(settings.scale)}
    return Training(step, {"model": model, **numbers}, before=before)


def cached_by_version() -> Training:
    """The script makes something of a weight anew where its ``_version`` is another. Some replicas have no rows in the
    last runs."""
    model = Mlp()
    kept: list[Any] = [None, None]

    def norm() -> torch.Tensor:
        weight = model.last.weight
        if kept[0] != version_of(weight):
            kept[:] = version_of(weight), weight.detach().norm()
        return kept[1]  # type: ignore[no-any-return]

    return Training(plain_step(model, sgd(model)), {"model": model, "norm": norm}, after=lambda *_: norm())


CASES = (
    *named(forward_hooks, backward_hooks, tensor_hooks, gradient_penalty, func_grad, frozen_then_unfrozen),
    *named(two_models_one_backward, double_backward_across_all_reduce, hooks_for_a_pass),
    *named(graph_kept_over_a_step, blocks_over_the_whole_step),
    *named(settings_of_the_thread, batches=uneven),
    *named(cached_by_version, batches=partial(regression, (12, 12, 1, 1))),
    *named(nested_reentrant_checkpoints, backward_twice_over_one_graph, backward_of_some_inputs, batches=uneven),
    *named(sums_zeroed_in_place, sums_of_branches, batches=uneven, gradient_reduce_op="sum"),
    Case("compiled", partial(compiled, "aot_eager"), plain=partial(compiled, None)),
    Case("compiled_inductor", partial(compiled, "inductor"), plain=partial(compiled, None), needs_compiler=True),
    Case("checkpoint_reentrant", partial(checkpointed, use_reentrant=True)),
    Case("checkpoint_not_reentrant", partial(checkpointed, use_reentrant=False)),
    Case("assigned_gradients", partial(assigned_gradients, accumulate_in_place=False)),
    Case("assigned_gradients_in_place", partial(assigned_gradients, accumulate_in_place=True)),
    Case("assigned_gradients_uneven", partial(assigned_gradients, accumulate_in_place=False), uneven),
    Case("assigned_gradients_in_place_uneven", partial(assigned_gradients, accumulate_in_place=True), uneven),
    Case("functional_call", through_functional_call),
    Case("unused_on_all_but_one_replica", unused_parameters, partial(_first_row_asks, 6)),
    Case("unused_on_all_sometimes", unused_parameters, partial(_first_row_asks, 2)),
    Case("several_backwards", partial(several_backwards, torch.mean)),
    Case("several_backwards_summed", partial(several_backwards, torch.sum), gradient_reduce_op="sum"),
)
