"""Functions for which there is no other way: this compiler has other numbers, or fails when the step is run.

A program that the compiler refuses takes later ones with it, so what is known to end like that is refused at its line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from torchstrat.core.errors import UnsupportedError
from torchstrat.sharding.tpu.limits import current_place

_NAMES = """
    cond eig eigvals geqrf inv_ex lstsq lu_unpack matrix_rank ormqr pca_lowrank pinv pinverse svd svd_lowrank
    svdvals logdet slogdet nuclear_norm polygamma_ new_empty_strided native_batch_norm native_layer_norm
    lobpcg _native_batch_norm_legit _batch_norm_with_update
"""


def functions() -> dict[object, Callable[..., object]]:
    """The function of PyTorch → what refuses it."""
    found: dict[object, Callable[..., object]] = {}
    for name in _NAMES.split():
        for owner in (torch, torch.Tensor, torch.linalg, F):
            member = getattr(owner, name, None)
            if callable(member):
                found[member] = refuse(name)
    for member in (torch.linalg.matrix_norm, torch.linalg.norm):
        found[member] = partial(_without_singular_values, member)
    return found


def _without_singular_values(norm: Callable[..., Any], A: Any, ord: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002, N803
    if ord == "nuc" or (ord in (2, -2) and (norm is torch.linalg.matrix_norm or _dims(args, kwargs, A) > 1)):
        refuse(f"a matrix norm of order {ord!r}")()
    if ord is None and norm is torch.linalg.matrix_norm:
        ord = "fro"  # noqa: A001
    return norm(A, ord, *args, **kwargs)


def _dims(args: Any, kwargs: dict[str, Any], A: torch.Tensor) -> int:  # noqa: N803
    """How many dimensions the norm is over."""
    dim = args[0] if args else kwargs.get("dim")
    return A.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)


def refuse(name: str, instead: str = "Write it with other operations, or compute it outside of the step.") -> Any:
    """What stands for a function of that name."""

    def refused(*_args: object, **_kwargs: object) -> object:
        raise UnsupportedError(
            f"{name} in a step (at {current_place()}): this strategy's compiler has other numbers, or none. {instead}"
        )

    return refused
