"""Dropout: every logical device draws for the whole tensor, and uses its part.

So the replica's stream of random numbers goes on everywhere as it would with one logical device, and so do the masks.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from torchstrat.sharding.dtensor.axes import Cut
from torchstrat.sharding.dtensor.operators.rules import Call, rule, shape_of


def own_noise(call: Call, shape: torch.Size, cut: Cut, like: torch.Tensor, p: float) -> torch.Tensor:
    """This process's part of what dropout multiplies a tensor of ``shape`` with: 0 or 1 / (1 - p)."""
    noise = functional.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p, True)
    return call.devices.own_piece(noise, cut)


@rule("dropout")
def dropout(
    call: Call, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if inplace:
        raise call.refused("would change it in place with inplace=True; leave that out")
    if not training or p == 0:
        return input
    local, cut = call.open(input), call.cut(input)
    return call.leave(local * own_noise(call, shape_of(input), cut, local.detach(), p), cut)
