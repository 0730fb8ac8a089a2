"""Training cases: what a step does between backward and optimizer, and to its parameters by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from torchstrat.testing.references import no_numbers
from torchstrat.testing.training import (
    STEPS,
    Batch,
    Case,
    Mlp,
    Training,
    plain_step,
    regression,
    squared_error,
)


def edited_gradients(edit: Callable[[nn.Module], None]) -> Training:
    """``edit(model)`` runs between backward and step, and sees the gradient of the global batch."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward()
        edit(model)
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def _clip_once(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)


def _clip_twice(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.02)


def _add_noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(torch.linspace(-1.0, 1.0, parameter.numel()).reshape(parameter.shape))


def _add_random_noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(torch.randn_like(parameter), alpha=0.1)


def edited_parameters(
    before: Callable[[nn.Module], None] | None = None, after: Callable[[nn.Module], None] | None = None
) -> Training:
    """Parameters written in place by the step itself, at its begin and at its end."""
    model = Mlp()
    train = plain_step(model, torch.optim.Adam(model.parameters(), lr=0.1))

    def step(batch: Batch) -> torch.Tensor:
        if before is not None:
            before(model)
        losses = train(batch)
        if after is not None:
            after(model)
        return losses

    return Training(step, {"model": model})


@torch.no_grad()
def _decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.99)


@torch.no_grad()
def _clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


def _decay_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.99)


def decay_before_the_optimizer() -> Training:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward()
        _decay(model)
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def zero_grad(set_to_none: bool, *, with_model: bool = False) -> Training:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        losses = squared_error(model(x), y)
        losses.mean().backward()
        optimizer.step()
        (model if with_model else optimizer).zero_grad(set_to_none=set_to_none)
        return losses.detach()

    return Training(step, {"model": model})


def several_backwards(of_rows: Callable[[torch.Tensor], torch.Tensor]) -> Training:
    """``of_rows``: `torch.mean` or `torch.sum`. A gradient that is already summed must not be summed again."""
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        hidden = model.first(x)
        of_rows(hidden.square().mean(dim=1)).backward(retain_graph=True)
        losses = squared_error(model.last(model.tanh(hidden)), y)
        of_rows(losses).backward()
        of_rows(squared_error(model(2 * x), y)).backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def accumulation(*, no_sync: bool) -> Training:
    """Two runs only accumulate, the third steps as well, and so on; written out as its user has to."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepping = [index % 3 == 2 or index == STEPS - 1 for index in range(STEPS)]

    def accumulate(batch: Batch) -> torch.Tensor:
        x, y = batch
        losses = squared_error(model(x), y)
        (losses.mean() / 3).backward()
        return losses.detach()

    def step(batch: Batch) -> torch.Tensor:
        losses = accumulate(batch)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    accumulating = frozenset(index for index in range(STEPS) if not stepping[index])
    return Training(step, {"model": model}, accumulate=accumulate, accumulate_on=accumulating, no_sync=no_sync)


def inspected_gradients() -> Training:
    """The gradient a step looks at is that of the global batch, on every replica."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        losses.mean().backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        return norm.detach().expand(len(x)).clone()

    return Training(step, {"model": model})


CASES = (
    Case("clip_once", partial(edited_gradients, _clip_once)),
    Case("clip_twice", partial(edited_gradients, _clip_twice)),
    Case("gradient_noise", partial(edited_gradients, _add_noise)),
    Case(
        "gradient_noise_drawn_in_step",
        partial(edited_gradients, _add_random_noise),
        expected=no_numbers,
        warns="the replicas have changed the gradient of ",
    ),
    Case("inspected_gradients", inspected_gradients),
    Case("parameter_decay_first", partial(edited_parameters, before=_decay)),
    Case("parameter_decay_last", partial(edited_parameters, after=_decay)),
    Case("parameter_decay_through_data", partial(edited_parameters, after=_decay_data)),
    Case("parameter_decay_between", decay_before_the_optimizer),
    Case("parameter_clamp", partial(edited_parameters, after=_clamp)),
    Case("zero_grad_to_none", partial(zero_grad, True)),
    Case("zero_grad_to_zero", partial(zero_grad, False)),
    Case("zero_grad_of_model", partial(zero_grad, True, with_model=True)),
    Case("several_backwards", partial(several_backwards, torch.mean)),
    Case("several_backwards_summed", partial(several_backwards, torch.sum), gradient_reduce_op="sum"),
    Case("accumulation_no_sync", partial(accumulation, no_sync=True)),
    Case("accumulation_synchronized", partial(accumulation, no_sync=False)),
    Case("accumulation_uneven", partial(accumulation, no_sync=True), partial(regression, (8, 5, 7, 3, 6))),
)
