"""Tensors that have a shape and no values, and say so when they meet one that has.

PyTorch does not: on the CPU a linear layer or a convolution of a tensor with weights on ``meta`` returns a tensor with
whatever was in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrat.dtensor._torch_dtensor import WithoutSubclasses
from torchstrat.errors import ContextError
from torchstrat.operands import tensors_in


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, on meta, as one that raises `ContextError` where values are needed; so does what is made of it."""
    tensor.__class__ = _class_of(type(tensor))
    return tensor


@functools.cache
def _class_of(kind: type) -> type:
    if kind.__dict__.get("_has_no_values", False):
        return kind

    def among_themselves(
        cls: type, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with WithoutSubclasses():
            if not all(one.is_meta for one in tensors_in((args, kwargs))):
                raise ContextError(
                    f"{getattr(func, '__name__', func)} was called outside of run with a variable that is cut over "
                    "logical devices, where it has no values (it is on meta). Call it in the function that "
                    "strategy.run calls, or use what state_dict() returns."
                )
            result = func(*args, **(kwargs or {}))
            for one in tensors_in(result):
                without_values(one)
            return result

    members = {
        "__module__": kind.__module__,
        "__torch_function__": classmethod(among_themselves),
        "_has_no_values": True,
    }
    made: type = type(kind)(kind.__name__, (kind,), members)
    return made
