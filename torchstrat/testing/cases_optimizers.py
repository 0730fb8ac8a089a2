"""Training cases: which optimizer, and how its state and its settings change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from torchstrat.testing.training import (
    Batch,
    Case,
    Mlp,
    Training,
    classification,
    plain_step,
    plain_training,
    squared_error,
)


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Training:
    model = Mlp()
    return plain_training(model, make(model.parameters()))


class _Inertia(torch.optim.Optimizer):
    """Stands for optimizers of other packages: Python state of its own, and no check for missing gradients."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.steps_taken = 0
        self.velocity: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.velocity:
            self.velocity = [[torch.zeros_like(p) for p in group["params"]] for group in self.param_groups]
        self.steps_taken += 1
        for group, velocities in zip(self.param_groups, self.velocity, strict=True):
            for index, parameter in enumerate(group["params"]):
                velocity = velocities[index].mul_(0.9).add_(parameter.grad)
                parameter.sub_(velocity, alpha=group["lr"] / self.steps_taken)


def third_party_optimizer() -> Training:
    model = Mlp()
    optimizer = _Inertia(model.parameters(), lr=0.1)
    return Training(plain_step(model, optimizer), {"model": model})


def sparse_adam() -> Training:
    table = nn.Embedding(12, 4, sparse=True)
    head = nn.Linear(4, 3)
    optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.05), torch.optim.SGD(head.parameters(), lr=0.1)]

    def step(batch: Batch) -> torch.Tensor:
        ids, label = batch
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = nn.functional.cross_entropy(head(table(ids).mean(dim=1)), label, reduction="none")
        losses.mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        return losses.detach()

    return Training(step, {"table": table, "head": head})


def lbfgs(line_search: str | None) -> Training:
    model = Mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, line_search_fn=line_search)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = squared_error(model(x), y).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            return squared_error(model(x), y)

    return Training(step, {"model": model})


def closure_of_sgd() -> Training:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = squared_error(model(x), y).mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        # Every replica is given the same value: the loss over the global batch.
        return torch.as_tensor(loss).detach().expand(len(x)).clone()

    return Training(step, {"model": model})


def scheduler_in_step(make: Callable[[Any], lr_scheduler.LRScheduler]) -> Training:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = make(optimizer)
    train = plain_step(model, optimizer)

    def step(batch: Batch) -> torch.Tensor:
        losses = train(batch)
        scheduler.step()
        return losses

    return Training(step, {"model": model, "optimizer": optimizer, "scheduler": scheduler})


def scheduler_outside() -> Training:
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)

    def after(step_index: int, loss: torch.Tensor) -> None:
        scheduler.step()

    watch = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Training(plain_step(model, optimizer), watch, after=after)


def scheduler_on_plateau() -> Training:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)

    def after(step_index: int, loss: torch.Tensor) -> None:
        scheduler.step(loss)

    return Training(plain_step(model, optimizer), {"model": model, "optimizer": optimizer}, after=after)


def rate_set_by_hand() -> Training:
    model = Mlp()
    groups: list[dict[str, Any]] = [
        {"params": model.first.parameters(), "lr": 0.3},
        {"params": model.last.parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)

    def step(batch: Batch) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
        return train(batch)

    train = plain_step(model, optimizer)
    return Training(step, {"model": model, "optimizer": optimizer})


def group_added_later() -> Training:
    model = Mlp()
    optimizer = torch.optim.Adam(model.last.parameters(), lr=0.05)

    def before(step_index: int) -> None:
        if step_index == 2:
            optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.01})

    return Training(plain_step(model, optimizer), {"model": model, "optimizer": optimizer}, before=before)


def state_dict_round_trip() -> Training:
    """Saves after the second step and goes back there after the third: model, optimizer and scheduler."""
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    saved: list[dict[str, Any]] = []

    def after(step_index: int, loss: torch.Tensor) -> None:
        scheduler.step()
        parts: tuple[Any, ...] = (model, optimizer, scheduler)
        if step_index == 1:
            saved.extend(copy.deepcopy(part.state_dict()) for part in parts)
        if step_index == 2:
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)

    watch = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Training(plain_step(model, optimizer), watch, after=after)


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam_foreach": partial(torch.optim.Adam, lr=0.05, foreach=True),
    "adam_amsgrad": partial(torch.optim.Adam, lr=0.05, amsgrad=True, foreach=False),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.05, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "tensor_rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05), foreach=False),
}


def _one_cycle(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)


def _exponential(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, gamma=0.8)


CASES = (
    *(Case(name, partial(with_optimizer, make)) for name, make in _OPTIMIZERS.items()),
    Case("third_party_optimizer", third_party_optimizer),
    Case("sparse_adam", sparse_adam, classification),
    Case("lbfgs", partial(lbfgs, None), tolerance=1e-6),
    Case("lbfgs_strong_wolfe", partial(lbfgs, "strong_wolfe"), tolerance=1e-6),
    Case("closure_of_sgd", closure_of_sgd),
    Case("scheduler_in_step", partial(scheduler_in_step, _exponential)),
    Case("one_cycle_scheduler_in_step", partial(scheduler_in_step, _one_cycle)),
    Case("scheduler_outside", scheduler_outside),
    Case("scheduler_on_plateau", scheduler_on_plateau),
    Case("rate_set_by_hand", rate_set_by_hand),
    Case("group_added_later", group_added_later),
    Case("state_dict_round_trip", state_dict_round_trip),
)
