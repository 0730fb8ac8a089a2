"""Objects that take part in computations as the tensor they can be converted to, and are otherwise no tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchstrat import nest
from torchstrat.errors import UnsupportedError
from torchstrat.variable.tensor_operators import TensorOperators, open_tensor


class WholeTensor(TensorOperators):
    """Operators, torch functions and ``torch.as_tensor`` convert it; each result is a tensor of its own.

    There are no in-place operators, so that ``v += x`` makes ``v`` another name for the sum.
    """

    # NumPy would otherwise spread an operator over the elements of an array on its left.
    __array_ufunc__ = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if (args and isinstance(args[0], WholeTensor) and _edits(name)) or isinstance(kwargs.get("out"), WholeTensor):
            raise UnsupportedError(
                f"{name} would edit a copy of the {cls.__name__}; use its assign, assign_add, assign_sub or scatter_* "
                "methods, or edit each of its .variables."
            )
        if func is torch.autograd.grad and any(map(_is_whole, nest.leaves([args[1:2], kwargs.get("inputs")]))):
            raise UnsupportedError(
                f"a {cls.__name__} is not differentiated as a whole; pass its .variables to torch.autograd.grad."
            )
        return func(*nest.map_structure(open_tensor, list(args)), **nest.map_structure(open_tensor, kwargs))

    def __dlpack__(self, **options: Any) -> Any:
        """Called by ``torch.as_tensor``, which then has the values outside of the autograd graph."""
        return self._lend().detach().__dlpack__(**options)


def _is_whole(value: Any) -> bool:
    return isinstance(value, WholeTensor)


def _edits(name: str) -> bool:
    """Whether a function of this name writes to its first argument, by torch's naming rule."""
    return name.endswith("_") and not name.startswith("__")
