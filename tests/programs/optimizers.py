"""Optimizers of pytorch_optimizer and schedulefree, on a small net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.programs.table import PROGRAMS, Program, train, vectors

Make = Callable[[Any], torch.optim.Optimizer]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def _of_library(name: str, **options: Any) -> Make:
    def make(parameters: Any) -> torch.optim.Optimizer:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(parameters, **options)  # type: ignore[no-any-return]

    return make


def _stepped(make: Make) -> Any:
    net = _net()
    optimizer = make(net.parameters())
    return {"net": net}, lambda batch: train(optimizer, F.mse_loss(net(batch[0]), batch[1]))


def _looking_ahead() -> Any:
    import pytorch_optimizer

    return _stepped(lambda p: pytorch_optimizer.Lookahead(torch.optim.SGD(p, lr=0.05), k=2))


def _sharpness_aware() -> Any:
    """Two passes for one update."""
    import pytorch_optimizer

    net = _net()
    optimizer = pytorch_optimizer.SAM(net.parameters(), torch.optim.SGD, lr=0.05)

    def step(batch: Any) -> None:
        F.mse_loss(net(batch[0]), batch[1]).backward()
        optimizer.first_step(zero_grad=True)
        F.mse_loss(net(batch[0]), batch[1]).backward()
        optimizer.second_step(zero_grad=True)

    return {"net": net}, step


def _free_of_schedules(name: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import schedulefree

        net = _net()
        optimizer = getattr(schedulefree, name)(net.parameters(), lr=0.02, **options)
        optimizer.train()
        return {"net": net}, lambda batch: train(optimizer, F.mse_loss(net(batch[0]), batch[1]))

    return build


_LISTED: dict[str, dict[str, Any]] = {
    "AdaBelief": {"lr": 0.01},
    "Adan": {"lr": 0.01},
    "AdamP": {"lr": 0.01},
    "DiffGrad": {"lr": 0.01},
    "Lamb": {"lr": 0.01},
    "LARS": {"lr": 0.01},
    "Lion": {"lr": 0.001},
    "MADGRAD": {"lr": 0.01},
    "Ranger": {"lr": 0.01},
    "Tiger": {"lr": 0.001},
}
_BUILDS: dict[str, tuple[str, Callable[[], Any]]] = {
    **{
        f"optimizer_{name}": ("pytorch_optimizer", lambda name=name, o=options: _stepped(_of_library(name, **o)))
        for name, options in _LISTED.items()
    },
    "optimizer_Lookahead": ("pytorch_optimizer", _looking_ahead),
    "optimizer_SAM": ("pytorch_optimizer", _sharpness_aware),
    "schedulefree_AdamW": ("schedulefree", _free_of_schedules("AdamWScheduleFree", warmup_steps=2)),
    "schedulefree_SGD": ("schedulefree", _free_of_schedules("SGDScheduleFree")),
    "schedulefree_RAdam": ("schedulefree", _free_of_schedules("RAdamScheduleFree")),
}
PROGRAMS.update({name: Program(name, build, vectors, (needs,)) for name, (needs, build) in _BUILDS.items()})
