"""How the work of an optimizer's step can be shared out.

This is a list of classes, not a trial. A trial sees one small parameter; an optimizer that looks at several at once (a
norm over all of them), or keeps things outside of ``state``, would pass it and be wrong when cut. Subclasses of these
classes may do anything, and count as unknown.
"""

from __future__ import annotations

import enum

import torch
from torch.optim import Optimizer

from torchstrat.ftrl import Ftrl

_BY_ELEMENT: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.ASGD,
        torch.optim.Rprop,
        Ftrl,
    }
)
_BY_PARAMETER: frozenset[type[Optimizer]] = frozenset(
    {torch.optim.Adafactor, torch.optim.SparseAdam, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else [])}
)


class Tier(enum.Enum):
    ELEMENTS = "each element for itself"
    PARAMETERS = "each parameter for itself"
    ALL = "all at once"


def tier_of(optimizer: Optimizer) -> Tier:
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return Tier.ALL  # its step is part of a graph of the user's
    if type(optimizer) in _BY_ELEMENT:
        return Tier.ELEMENTS
    return Tier.PARAMETERS if type(optimizer) in _BY_PARAMETER else Tier.ALL
