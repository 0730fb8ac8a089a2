"""Training cases: helpers that live beside model and optimizer, and models that are exchanged on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from torchstrat.testing.training import (
    Batch,
    Case,
    Mlp,
    Training,
    plain_step,
    regression,
    squared_error,
)


@torch.no_grad()
def _blend(average: nn.Module, model: nn.Module) -> None:
    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, 0.2)


def moving_average(*, in_step: bool) -> Training:
    """An average by deepcopy, which no registration hook sees; its parameters still require grad, as users leave it."""
    model = Mlp()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    train = plain_step(model, optimizer)
    watch = {"model": model, "average": average}

    def step(batch: Batch) -> torch.Tensor:
        losses = train(batch)
        _blend(average, model)
        return losses

    def after(step_index: int, loss: torch.Tensor) -> None:
        _blend(average, model)

    return Training(step, watch) if in_step else Training(train, watch, after=after)


def averaged_model(*, in_step: bool) -> Training:
    """torch's own average, which counts in an integral buffer."""
    model = Mlp()
    average = AveragedModel(model)
    train = plain_step(model, torch.optim.SGD(model.parameters(), lr=0.2))
    watch = {"model": model, "average": average}

    def step(batch: Batch) -> torch.Tensor:
        losses = train(batch)
        average.update_parameters(model)
        return losses

    def after(step_index: int, loss: torch.Tensor) -> None:
        average.update_parameters(model)

    return Training(step, watch) if in_step else Training(train, watch, after=after)


def deepcopy_in_step(*, keep: bool) -> Training:
    """A target network copied inside the step: afresh every time, or only at every second step."""
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    kept: dict[str, nn.Module] = {}

    def after(step_index: int, loss: torch.Tensor) -> None:
        if step_index % 2 == 1:
            kept.clear()

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        if not keep or "target" not in kept:
            kept["target"] = copy.deepcopy(model)
        optimizer.zero_grad()
        with torch.no_grad():
            goal = y + 0.3 * kept["target"](x)
        losses = squared_error(model(x), goal)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model}, after=after)


def scaled_training(*, clip: bool) -> Training:
    """Float32 with `GradScaler`. Batches are (x, y, factor); an infinite factor makes that row's gradient infinite."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(batch: Batch) -> torch.Tensor:
        x, y, factor = batch
        optimizer.zero_grad()
        losses = squared_error(model(x), y)
        scaler.scale((losses * factor).mean()).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        scaler.step(optimizer)
        scaler.update()
        return losses.detach()

    return Training(step, {"model": model, "scale": scaler.get_scale})


def _overflowing(step_index: int | None) -> list[Batch]:
    """In the batch at ``step_index`` the last row, which is on the last replica, overflows."""
    batches: list[Batch] = []
    for index, (x, y) in enumerate(regression()):
        factor = torch.ones(len(x))
        if index == step_index:
            factor[-1] = torch.inf
        batches.append((x, y, factor))
    return batches


def autocast() -> Training:
    model = Mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            prediction = model(x)
        losses = squared_error(prediction.float(), y)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    return Training(step, {"model": model})


def exchanged(exchange: Callable[[Mlp], None]) -> Training:
    """``exchange(model)`` replaces tensors of the model half-way; a new optimizer takes over."""
    model = Mlp()
    current = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    def before(step_index: int) -> None:
        if step_index == 2:
            exchange(model)
            current["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def step(batch: Batch) -> torch.Tensor:
        return plain_step(model, current["optimizer"])(batch)

    return Training(step, {"model": model}, before=before)


def _assign(model: Mlp) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()}, assign=True)


def _prune(model: Mlp) -> None:
    prune.l1_unstructured(model.first, "weight", amount=0.4)


def _another_layer(model: Mlp) -> None:
    layer = nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.1)
    model.last = layer


CASES = (
    Case("moving_average_in_step", partial(moving_average, in_step=True)),
    Case("moving_average_outside", partial(moving_average, in_step=False)),
    Case("averaged_model_in_step", partial(averaged_model, in_step=True)),
    Case("averaged_model_outside", partial(averaged_model, in_step=False)),
    Case("deepcopy_in_step", partial(deepcopy_in_step, keep=False)),
    Case("deepcopy_kept_between_steps", partial(deepcopy_in_step, keep=True)),
    Case("grad_scaler", partial(scaled_training, clip=False), partial(_overflowing, None), 1e-5, torch.float32),
    Case("grad_scaler_overflow", partial(scaled_training, clip=False), partial(_overflowing, 2), 1e-5, torch.float32),
    Case(
        "grad_scaler_clip_overflow", partial(scaled_training, clip=True), partial(_overflowing, 1), 1e-5, torch.float32
    ),
    Case("autocast", autocast, tolerance=5e-3, dtype=torch.float32),
    Case("assigned_state_dict", partial(exchanged, _assign)),
    Case("pruned_half_way", partial(exchanged, _prune)),
)
