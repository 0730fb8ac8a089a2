"""What a program sets on parameters and buffers (``weight.no_decay = True``), for functions and steps to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.matrix.own_optimizers import Own

Numbers = Mapping[str, torch.Tensor]
Change = Callable[[nn.Parameter], object]
ROUNDS = 4


class _Scaled(Own):
    """Looks at parameters in its steps."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] * getattr(p, "scale", 1.0))


def _keep(p: Any) -> None:
    pass


def _set(p: Any) -> None:
    p.scale = 0.25


def _delete(p: Any) -> None:
    del p.scale


def _made(way: Any, kind: type[torch.optim.Optimizer]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    with way.scope():
        model: Any = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        optimizer: Any = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        for number, p in enumerate(model.parameters()):
            p.scale = 0.5 + number
        model[1].running_mean.tags = ("kept", 0.3)
    return model, optimizer


def _trained(
    way: Any, *, change: Change = _keep, kind: type[torch.optim.Optimizer] = torch.optim.SGD, by_steps: bool = False
) -> Numbers:
    model, optimizer = _made(way, kind)

    def step(batch: torch.Tensor) -> list[float]:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if not by_steps:
            loss = loss + 0.1 * sum(getattr(p, "scale", 1.0) * p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        return [float(loss), getattr(model[1].running_mean, "tags", ("lost", -1.0))[1]]

    draw = torch.Generator().manual_seed(1)
    found = {}
    for number in range(ROUNDS):
        if number == 2:
            change(model[0].weight)
            model[1].running_mean.tags = ("other", 0.7)
        seen = way.call(step, torch.randn(3, 4, generator=draw, dtype=torch.float64))
        found[f"seen {number}"] = torch.tensor(seen, dtype=torch.float64)
    return found | {name: value.clone() for name, value in model.state_dict().items()}


ROW = "what is set on variables"
ROWS: Mapping[str, Mapping[str, Callable[[Any], Numbers]]] = {
    ROW: {
        "read by functions": _trained,
        "read by functions, set anew": partial(_trained, change=_set),
        "read by functions, deleted": partial(_trained, change=_delete),
        "read by steps": partial(_trained, kind=_Scaled, by_steps=True),
        "read by steps, set anew": partial(_trained, kind=_Scaled, by_steps=True, change=_set),
        "read by steps, deleted": partial(_trained, kind=_Scaled, by_steps=True, change=_delete),
    },
}
