"""Objects that take part in computations as the tensor they can be converted to, and are otherwise no tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchstrat import nest
from torchstrat.errors import UnsupportedError


def _open(value: Any) -> Any:
    return value._lend() if isinstance(value, WholeTensor) else value


def _binary(name: str) -> Any:
    def operator(self: WholeTensor, other: Any) -> Any:
        return getattr(self._lend(), name)(_open(other))

    operator.__name__ = name
    return operator


def _unary(name: str) -> Any:
    def operator(self: WholeTensor) -> Any:
        return getattr(self._lend(), name)()

    operator.__name__ = name
    return operator


class WholeTensor:
    """Operators, torch functions and ``torch.as_tensor`` convert it; each result is a tensor of its own.

    There are no in-place operators, so that ``v += x`` makes ``v`` another name for the sum.
    """

    # NumPy would otherwise spread an operator over the elements of an array on its left.
    __array_ufunc__ = None

    def _lend(self) -> torch.Tensor:
        """The whole value to compute with; part of the autograd graph where its parts are."""
        raise NotImplementedError

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
        return func(*nest.map_structure(_open, list(args)), **nest.map_structure(_open, kwargs))

    def __dlpack__(self, **options: Any) -> Any:
        """Called by ``torch.as_tensor``, which then has the values outside of the autograd graph."""
        return self._lend().detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._lend().__dlpack_device__()

    def __eq__(self, other: object) -> Any:
        return self._lend() == _open(other)

    def __ne__(self, other: object) -> Any:
        return self._lend() != _open(other)

    def __hash__(self) -> int:  # by identity, as tensors do
        return id(self)

    __lt__ = _binary("__lt__")
    __le__ = _binary("__le__")
    __gt__ = _binary("__gt__")
    __ge__ = _binary("__ge__")
    __neg__ = _unary("__neg__")
    __pos__ = _unary("__pos__")
    __abs__ = _unary("__abs__")
    __invert__ = _unary("__invert__")
    __add__ = _binary("__add__")
    __radd__ = _binary("__radd__")
    __sub__ = _binary("__sub__")
    __rsub__ = _binary("__rsub__")
    __mul__ = _binary("__mul__")
    __rmul__ = _binary("__rmul__")
    __truediv__ = _binary("__truediv__")
    __rtruediv__ = _binary("__rtruediv__")
    __floordiv__ = _binary("__floordiv__")
    __rfloordiv__ = _binary("__rfloordiv__")
    __mod__ = _binary("__mod__")
    __rmod__ = _binary("__rmod__")
    __pow__ = _binary("__pow__")
    __rpow__ = _binary("__rpow__")
    __matmul__ = _binary("__matmul__")
    __rmatmul__ = _binary("__rmatmul__")
    __and__ = _binary("__and__")
    __rand__ = _binary("__rand__")
    __or__ = _binary("__or__")
    __ror__ = _binary("__ror__")
    __xor__ = _binary("__xor__")
    __rxor__ = _binary("__rxor__")
    __lshift__ = _binary("__lshift__")
    __rlshift__ = _binary("__rlshift__")
    __rshift__ = _binary("__rshift__")
    __rrshift__ = _binary("__rrshift__")


def _is_whole(value: Any) -> bool:
    return isinstance(value, WholeTensor)


def _edits(name: str) -> bool:
    """Whether a function of this name writes to its first argument, by torch's naming rule."""
    return name.endswith("_") and not name.startswith("__")
