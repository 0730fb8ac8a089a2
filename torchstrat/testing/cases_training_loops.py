"""Training cases: what surrounds the step, and a second look at the model between steps."""

from __future__ import annotations

import torch
from torch import nn

from torchstrat.context import get_strategy
from torchstrat.testing.training import STEPS, Batch, Case, Mlp, Training, plain_step, squared_error


def evaluated_between_steps() -> Training:
    """The model is read outside of `run`, in evaluation mode, after every step; its dropout then does nothing."""
    model = nn.Sequential(*Mlp(), nn.Dropout(0.0))
    scores = torch.zeros(STEPS)
    probe = torch.linspace(-1.0, 1.0, 12).reshape(2, 6)

    def after(step_index: int, loss: torch.Tensor) -> None:
        model.eval()
        with torch.inference_mode():
            scores[step_index] = model(probe).sum().item()
        model.train()

    train = plain_step(model, torch.optim.Adam(model.parameters(), lr=0.05))
    return Training(train, {"model": model, "scores": scores}, after=after)


def evaluated_in_step() -> Training:
    """Every step trains, then scores its rows again without a graph."""
    model = Mlp()
    train = plain_step(model, torch.optim.Adam(model.parameters(), lr=0.05))

    def step(batch: Batch) -> torch.Tensor:
        train(batch)
        x, y = batch
        model.eval()
        with torch.no_grad():
            losses = squared_error(model(x), y)
        model.train()
        return losses

    return Training(step, {"model": model})


def edited_between_steps() -> Training:
    """The script writes a parameter itself, outside of `run`."""
    model = Mlp()

    @torch.no_grad()
    def after(step_index: int, loss: torch.Tensor) -> None:
        model.first.weight.mul_(0.9)
        model.last.bias[0] = float(step_index)

    train = plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return Training(train, {"model": model}, after=after)


def own_buffer() -> Training:
    """A running mean the model keeps by itself, of a shape and a rule no library layer has."""

    class Centred(nn.Module):
        centre: torch.Tensor
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()
            self.register_buffer("centre", torch.zeros(6))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.centre.lerp_(x.mean(dim=0), 0.1)
                self.calls += 1
            y: torch.Tensor = self.inner(x)
            return y

    model = Centred()
    get_strategy().extended.set_aggregation(model, "centre", "mean")
    return Training(plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), {"model": model})


CASES = (
    Case("evaluated_between_steps", evaluated_between_steps),
    Case("evaluated_in_step", evaluated_in_step),
    Case("edited_between_steps", edited_between_steps),
    Case("own_buffer", own_buffer),
)
