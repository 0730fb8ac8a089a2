"""Functions for which there is no other way: this compiler has other numbers, or fails when the step is run.

A program that the compiler refuses takes later ones with it, so what is known to end like that is refused at its line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from torchstrat.errors import UnsupportedError
from torchstrat.tpu.places import current_place

_NAMES = """
    cond eig eigvals geqrf inv_ex lstsq lu_unpack matrix_rank ormqr pca_lowrank pinv pinverse svd svd_lowrank svdvals
    logdet slogdet nuclear_norm polygamma_ new_empty_strided
"""


def functions() -> dict[Any, Callable[..., Any]]:
    """The function of PyTorch → what refuses it."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in _NAMES.split():
        for owner in (torch, torch.Tensor, torch.linalg, F):
            member = getattr(owner, name, None)
            if callable(member):
                found[member] = refuse(name)
    return found


def refuse(name: str, instead: str = "Write it with other operations, or compute it outside of the step.") -> Any:
    """What stands for a function of that name."""

    def refused(*_args: Any, **_kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{name} in a step (at {current_place()}): this strategy's compiler has other numbers, or none. {instead}"
        )

    return refused
