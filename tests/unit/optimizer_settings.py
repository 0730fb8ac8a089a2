"""The optimizers that step each element for itself, in many settings, and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import optim

from torchstrat import Ftrl

SETTINGS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov foreach": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "Adam": partial(optim.Adam, lr=0.05),
    "Adam amsgrad foreach": partial(optim.Adam, lr=0.05, amsgrad=True, foreach=True),
    "Adam tensor rate": lambda p: optim.Adam(p, lr=torch.tensor(0.05)),
    "Adam fused": partial(optim.Adam, lr=0.05, amsgrad=True, fused=True),
    "AdamW": partial(optim.AdamW, lr=0.05, maximize=True),
    "AdamW fused": partial(optim.AdamW, lr=0.05, fused=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1),
    "Adagrad fused": partial(optim.Adagrad, lr=0.1, fused=True),
    "Adagrad foreach": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.3, foreach=True),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "RMSprop foreach": partial(optim.RMSprop, lr=0.01, foreach=True),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "Adadelta foreach": partial(optim.Adadelta, lr=0.5, foreach=True),
    "Adamax": partial(optim.Adamax, lr=0.05),
    "Adamax foreach": partial(optim.Adamax, lr=0.05, foreach=True),
    "NAdam": partial(optim.NAdam, lr=0.05, decoupled_weight_decay=True, weight_decay=0.1),
    "NAdam foreach": partial(optim.NAdam, lr=0.05, foreach=True),
    "RAdam": partial(optim.RAdam, lr=0.05),
    "RAdam foreach": partial(optim.RAdam, lr=0.05, foreach=True),
    "ASGD": partial(optim.ASGD, lr=0.05, t0=2),
    "ASGD foreach": partial(optim.ASGD, lr=0.05, foreach=True),
    "Rprop": partial(optim.Rprop, lr=0.05),
    "Rprop foreach": partial(optim.Rprop, lr=0.05, foreach=True),
    "Ftrl": partial(Ftrl, lr=0.1, lr_power=-0.4, l1=0.01, l2=0.1, l2_shrinkage=0.1, beta=0.2),
}
WHOLE: dict[str, Callable[[Any], optim.Optimizer]] = {"Adafactor": partial(optim.Adafactor, lr=0.1)}


def numbers(count: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """``count`` rows of ``size`` numbers of many magnitudes, the same at every call."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.logspace(-3, 1, size, dtype=torch.float64)
    drawn = torch.randn(count, size, generator=generator, dtype=torch.float64) * scales
    return list(drawn.to(dtype))
