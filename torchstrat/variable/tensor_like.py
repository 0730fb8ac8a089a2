"""Objects that stand for a tensor: torch functions, operators and attributes act on the tensor they stand for now."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from torchstrat import nest
from torchstrat.errors import UnsupportedError

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_IN_PLACE = frozenset(f"__i{name}__" for name in (*_ARITHMETIC, *_BITWISE))


def _open(value: Any) -> Any:
    return value._lend() if isinstance(value, TensorLike) else value


def _edits(name: str) -> bool:
    """Whether a function of this name writes to its first argument, by torch's naming rule."""
    return name in _IN_PLACE or name == "__setitem__" if name.startswith("__") else name.endswith("_")


def _refusal(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} would edit one component of a Variable behind its strategy's back; "
        "use assign, assign_add, assign_sub or scatter_add."
    )


def _binary(name: str) -> Any:
    def operator(self: TensorLike, other: Any) -> Any:
        return getattr(self._lend(), name)(_open(other))

    operator.__name__ = name
    return operator


def _unary(name: str) -> Any:
    def operator(self: TensorLike) -> Any:
        return getattr(self._lend(), name)()

    operator.__name__ = name
    return operator


def _refused(name: str) -> Any:
    def operator(self: TensorLike, other: Any) -> Any:
        raise _refusal(name)

    operator.__name__ = name
    return operator


class TensorLike(abc.ABC):
    """Reads like a tensor and is never edited like one: every result is a tensor of its own.

    Subclasses say which tensor they stand for; in-place operations on them raise `UnsupportedError`.
    """

    @abc.abstractmethod
    def _lend(self) -> torch.Tensor:
        """The tensor to compute with, which is not to be written to."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if (args and isinstance(args[0], TensorLike) and _edits(name)) or isinstance(kwargs.get("out"), TensorLike):
            raise _refusal(name)
        return func(*nest.map_structure(_open, list(args)), **nest.map_structure(_open, kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if _edits(name):
            raise _refusal(name)
        return getattr(self._lend(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._lend().detach().cpu().numpy(), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Called by ``torch.as_tensor`` and ``torch.tensor``, which otherwise build tensors of rows wrongly."""
        return self._lend().detach().clone().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._lend().__dlpack_device__()

    def __float__(self) -> float:
        return float(self._lend())

    def __int__(self) -> int:
        return int(self._lend())

    def __index__(self) -> int:
        return self._lend().__index__()

    def __bool__(self) -> bool:
        return bool(self._lend())

    def __len__(self) -> int:
        return len(self._lend())

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._lend())

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._lend()[_open(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _refusal("__setitem__")

    def __format__(self, spec: str) -> str:
        return format(self._lend(), spec) if spec else str(self)

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
    __iadd__ = _refused("__iadd__")
    __sub__ = _binary("__sub__")
    __rsub__ = _binary("__rsub__")
    __isub__ = _refused("__isub__")
    __mul__ = _binary("__mul__")
    __rmul__ = _binary("__rmul__")
    __imul__ = _refused("__imul__")
    __truediv__ = _binary("__truediv__")
    __rtruediv__ = _binary("__rtruediv__")
    __itruediv__ = _refused("__itruediv__")
    __floordiv__ = _binary("__floordiv__")
    __rfloordiv__ = _binary("__rfloordiv__")
    __ifloordiv__ = _refused("__ifloordiv__")
    __mod__ = _binary("__mod__")
    __rmod__ = _binary("__rmod__")
    __imod__ = _refused("__imod__")
    __pow__ = _binary("__pow__")
    __rpow__ = _binary("__rpow__")
    __ipow__ = _refused("__ipow__")
    __matmul__ = _binary("__matmul__")
    __rmatmul__ = _binary("__rmatmul__")
    __imatmul__ = _refused("__imatmul__")
    __and__ = _binary("__and__")
    __rand__ = _binary("__rand__")
    __iand__ = _refused("__iand__")
    __or__ = _binary("__or__")
    __ror__ = _binary("__ror__")
    __ior__ = _refused("__ior__")
    __xor__ = _binary("__xor__")
    __rxor__ = _binary("__rxor__")
    __ixor__ = _refused("__ixor__")
    __lshift__ = _binary("__lshift__")
    __rlshift__ = _binary("__rlshift__")
    __ilshift__ = _refused("__ilshift__")
    __rshift__ = _binary("__rshift__")
    __rrshift__ = _binary("__rrshift__")
    __irshift__ = _refused("__irshift__")
