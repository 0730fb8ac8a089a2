"""What kind of optimizer is this? The one place that says so: for parameter servers, for parameters that are cut over
logical devices, for blocks of a step, and for steps that processes share out.

This is a list of classes, not a trial. A trial sees a few small parameters; an optimizer that looks at several at once
(a norm over all of them), or keeps things outside of ``state``, might pass it and be wrong when cut. Subclasses of
these classes may do anything, and count as unknown. Where the user says of a class that it works element by element, a
trial checks that (`torchstrat.parameter_server.variables.optimizer_state`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from torchstrat.ftrl import Ftrl


class Tier(enum.Enum):
    """What a step looks at, and therefore how it may be shared out."""

    ELEMENTS = "each element for itself"
    ROWS = "each row for itself"
    PARAMETERS = "each parameter for itself"
    ALL = "all at once"


class Gradients(enum.Enum):
    """What a step makes of the layout of a gradient."""

    ALIKE = "a sparse gradient is stepped as the dense one of its rows"
    SPARSE = "only sparse ones are stepped"
    BY_LAYOUT = "dense and sparse ones may be stepped in different ways"


@dataclass(frozen=True)
class Kind:
    tier: Tier
    gradients: Gradients = Gradients.ALIKE

    @property
    def may_cut_rows(self) -> bool:
        """Whether a step of some rows of a parameter is what the step of the whole does to these."""
        return self.tier in (Tier.ELEMENTS, Tier.ROWS)


UNKNOWN = Kind(Tier.ALL, Gradients.BY_LAYOUT)
"""A class that is not listed may do anything."""

_KINDS: Mapping[type[Optimizer], Kind] = {
    torch.optim.SGD: Kind(Tier.ELEMENTS),
    torch.optim.Adam: Kind(Tier.ELEMENTS),
    torch.optim.AdamW: Kind(Tier.ELEMENTS),
    torch.optim.Adagrad: Kind(Tier.ELEMENTS),
    torch.optim.RMSprop: Kind(Tier.ELEMENTS),
    torch.optim.Adadelta: Kind(Tier.ELEMENTS),
    torch.optim.Adamax: Kind(Tier.ELEMENTS),
    torch.optim.NAdam: Kind(Tier.ELEMENTS),
    torch.optim.RAdam: Kind(Tier.ELEMENTS),
    torch.optim.ASGD: Kind(Tier.ELEMENTS),
    torch.optim.Rprop: Kind(Tier.ELEMENTS),
    Ftrl: Kind(Tier.ELEMENTS),
    torch.optim.SparseAdam: Kind(Tier.ROWS, Gradients.SPARSE),
    torch.optim.Adafactor: Kind(Tier.PARAMETERS),
    **({torch.optim.Muon: Kind(Tier.PARAMETERS)} if hasattr(torch.optim, "Muon") else {}),
    torch.optim.LBFGS: Kind(Tier.ALL),
}


def is_listed(cls: type[Optimizer]) -> bool:
    """Whether it is known what steps of this very class do."""
    return cls in _KINDS


def kind_of_class(cls: type[Optimizer]) -> Kind:
    return _KINDS.get(cls, UNKNOWN)


def kind_of(optimizer: Optimizer) -> Kind:
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return UNKNOWN  # its step is part of a graph of the user's
    return kind_of_class(type(optimizer))


def tier_of(optimizer: Optimizer) -> Tier:
    return kind_of(optimizer).tier


def names_of(tier: Tier) -> str:
    """The listed classes of a tier, for error messages."""
    return ", ".join(cls.__name__ for cls, kind in _KINDS.items() if kind.tier is tier)
