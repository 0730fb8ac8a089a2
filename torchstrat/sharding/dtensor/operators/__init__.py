"""The operators that are proven equal to plain PyTorch on tensors that are cut; see `rules` for how one is written."""

from torchstrat.sharding.dtensor.operators import (
    contraction,
    convolution,
    data_attribute,
    elementwise,
    losses,
    normalization,
    reductions,
    shapes,
)
from torchstrat.sharding.dtensor.operators.rules import apply, operators, with_stand_ins

__all__ = [
    "apply",
    "attention",
    "contraction",
    "convolution",
    "data_attribute",
    "dropout",
    "elementwise",
    "embedding",
    "gradients",
    "in_place",
    "losses",
    "normalization",
    "operators",
    "reductions",
    "shapes",
    "softmax",
    "with_stand_ins",
]
