"""The operators of objects that stand for a tensor: each acts on that tensor, and gives a tensor of its own."""

from __future__ import annotations

from typing import Any

import torch


def open_tensor(value: Any) -> Any:
    """The tensor that ``value`` stands for; anything else as it is."""
    return value._lend() if isinstance(value, TensorOperators) else value


def _binary(name: str) -> Any:
    def operator(self: TensorOperators, other: Any) -> Any:
        return getattr(self._lend(), name)(open_tensor(other))

    operator.__name__ = name
    return operator


def _unary(name: str) -> Any:
    def operator(self: TensorOperators) -> Any:
        return getattr(self._lend(), name)()

    operator.__name__ = name
    return operator


class TensorOperators:
    """Comparisons and arithmetic, without the in-place ones: what these mean is the subclass's to say."""

    def _lend(self) -> torch.Tensor:
        """The tensor to compute with, which is not to be written to."""
        raise NotImplementedError

    def __dlpack_device__(self) -> Any:
        return self._lend().__dlpack_device__()

    def __eq__(self, other: object) -> Any:
        return self._lend() == open_tensor(other)

    def __ne__(self, other: object) -> Any:
        return self._lend() != open_tensor(other)

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
