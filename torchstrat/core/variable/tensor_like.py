"""Objects that stand for a tensor: torch functions, operators and attributes act on the tensor they stand for now, and
give tensors of their own.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from torchstrat.core import nest
from torchstrat.core.errors import UnsupportedError


def open_tensor(value: object) -> Any:
    """The tensor that ``value`` stands for; anything else as it is."""
    return value._lend() if isinstance(value, TensorOperators) else value  # noqa: SLF001


def components_here(value: object) -> tuple[object, ...] | None:
    """Of what stands for a tensor, in this process: several where each replica has its own. None for all else."""
    return value._local_components() if isinstance(value, TensorLike) else None  # noqa: SLF001


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values, in the tensor's own memory where NumPy has its dtype and it is on the CPU."""
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return np.asarray(tensor.detach().cpu().numpy())


def _binary(name: str) -> Callable[[TensorOperators, object], torch.Tensor]:
    def operator(self: TensorOperators, other: object) -> torch.Tensor:
        made: torch.Tensor = getattr(self._lend(), name)(open_tensor(other))
        return made

    operator.__name__ = name
    return operator


def _unary(name: str) -> Callable[[TensorOperators], torch.Tensor]:
    def operator(self: TensorOperators) -> torch.Tensor:
        made: torch.Tensor = getattr(self._lend(), name)()
        return made

    operator.__name__ = name
    return operator


class TensorOperators:
    """Comparisons and arithmetic, without the in-place ones: what these mean is the subclass's to say."""

    def _lend(self) -> torch.Tensor:
        """The tensor to compute with, which is not to be written to."""
        raise NotImplementedError

    def __dlpack_device__(self) -> object:
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


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_IN_PLACE = frozenset(f"__i{name}__" for name in (*_ARITHMETIC, *_BITWISE))


def _edits(name: str) -> bool:
    """Whether a function of this name writes to its first argument, by torch's naming rule."""
    return name in _IN_PLACE or name == "__setitem__" if name.startswith("__") else name.endswith("_")


def _refusal(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} would edit one component of a Variable behind its strategy's back; "
        "use assign, assign_add, assign_sub or scatter_add."
    )


def _refused(name: str) -> Callable[[TensorLike, object], NoReturn]:
    def operator(self: TensorLike, other: object) -> NoReturn:
        raise _refusal(name)

    operator.__name__ = name
    return operator


class TensorLike(TensorOperators, abc.ABC):
    """Reads like a tensor and is never edited like one: every result is a tensor of its own.

    Subclasses say which tensor they stand for; in-place operations on them raise `UnsupportedError`.
    """

    @abc.abstractmethod
    def _lend(self) -> torch.Tensor:
        """The tensor to compute with, which is not to be written to."""

    def _local_components(self) -> tuple[object, ...]:
        return (self,)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if (args and isinstance(args[0], TensorLike) and _edits(name)) or isinstance(kwargs.get("out"), TensorLike):
            raise _refusal(name)
        return func(*nest.map_structure(open_tensor, list(args)), **nest.map_structure(open_tensor, kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if _edits(name):
            raise _refusal(name)
        return getattr(self._lend(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(array_of(self._lend()), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Called by ``torch.as_tensor`` and ``torch.tensor``, which otherwise build tensors of rows wrongly."""
        return self._lend().detach().clone().__dlpack__(**options)

    def __float__(self) -> float:
        return float(self._lend())

    def __int__(self) -> int:
        return int(self._lend())

    def __index__(self) -> int:
        return self._lend().__index__()

    def __complex__(self) -> complex:
        return complex(self._lend())

    def __bool__(self) -> bool:
        return bool(self._lend())

    def __contains__(self, value: object) -> bool:
        return open_tensor(value) in self._lend()

    def __len__(self) -> int:
        return len(self._lend())

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._lend())

    def __getitem__(self, key: object) -> torch.Tensor:
        return self._lend()[open_tensor(key)]

    def __setitem__(self, key: object, value: object) -> None:
        raise _refusal("__setitem__")

    def __format__(self, spec: str) -> str:
        return format(self._lend(), spec) if spec else str(self)

    __iadd__ = _refused("__iadd__")
    __isub__ = _refused("__isub__")
    __imul__ = _refused("__imul__")
    __itruediv__ = _refused("__itruediv__")
    __ifloordiv__ = _refused("__ifloordiv__")
    __imod__ = _refused("__imod__")
    __ipow__ = _refused("__ipow__")
    __imatmul__ = _refused("__imatmul__")
    __iand__ = _refused("__iand__")
    __ior__ = _refused("__ior__")
    __ixor__ = _refused("__ixor__")
    __ilshift__ = _refused("__ilshift__")
    __irshift__ = _refused("__irshift__")


class TensorInShards(TensorOperators):
    """A tensor whose rows are those of several variables.

    Operators, torch functions and ``torch.as_tensor`` convert it; each result is a tensor of its own.

    There are no in-place operators, so that ``v += x`` makes ``v`` another name for the sum.
    """

    # NumPy would otherwise spread an operator over the elements of an array on its left.
    __array_ufunc__ = None

    @property
    def variables(self) -> list[Any]:
        """The shards, in the order of their rows. One that is no tensor and no `Variable` has ``read`` and ``edit``."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        """Of the whole variable."""
        raise NotImplementedError

    @property
    def row_spans(self) -> tuple[tuple[int, int], ...]:
        """The rows ``(start, stop)`` of each shard, in order."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if (args and isinstance(args[0], TensorInShards) and _edits(name)) or isinstance(
            kwargs.get("out"), TensorInShards
        ):
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


def _is_whole(value: object) -> bool:
    return isinstance(value, TensorInShards)
