"""What makes a tensor of another one, or a number of it, and asks neither's class: functions, methods and constructors.

Here they ask. What a program has bound by itself before (``from torch import tensor``) and the constructors of one
dtype each (``torch.DoubleTensor``) cannot be replaced. They would ask a class that has ``__torch_dispatch__``, but a
tensor gets such a class only with another implementation below its object: graphs that were built before would lose it,
and NumPy refuses it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from torchstrat.core._torch_private import look_up
from torchstrat.core.tensor_functions import tensors_in

_asked: tuple[type, ...] = ()

_FUNCTIONS = (
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "full", "full_like"),
    *(f"sparse_{layout}_tensor" for layout in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
    *("nested.nested_tensor", "to_dlpack", "utils.dlpack.to_dlpack"),
)
_METHODS = ("new_tensor", "new", "new_full", "set_")


class _Asking:
    """Takes the place of a function, and is equal to it: compilers and modes find what they know of one by either.

    Numbers in lists are asked by PyTorch (``__float__``), so only ``in_lists`` has them looked through.
    """

    def __init__(self, read: Any, *, in_lists: bool = False) -> None:
        self._read, self._in_lists = read, in_lists
        functools.update_wrapper(self, read)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._read

    def __hash__(self) -> int:
        return hash(self._read)

    def __get__(self, owner: object, kind: object = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _asked:
            for one in tensors_in((args, kwargs)) if self._in_lists else (*args, *kwargs.values()):
                if isinstance(one, _asked):
                    kind: Any = type(one)
                    return kind.__torch_function__(self._read, (kind,), args, kwargs)
        return self._read(*args, **kwargs)


def _replaced() -> Iterator[tuple[dict[str, Any], str, Any, _Asking]]:
    """Where each of the functions is, by which name, and what takes its place."""
    for path in _FUNCTIONS:
        module, _, name = path.rpartition(".")
        home = look_up(module) if module else torch
        read = look_up(name, home)
        yield vars(home), name, read, _Asking(read, in_lists=module == "nested")


_places = list(_replaced())


@functools.cache
def _have_methods_ask() -> None:
    """For good, in the whole process: a class that changes all the time is slow for who uses it."""
    base: Any = look_up("_C.TensorBase")
    for name in _METHODS:
        setattr(torch.Tensor, name, _Asking(getattr(base, name)))
    torch.Tensor.__new__ = _asking_constructor(base.__new__)  # type: ignore[method-assign]
    register = look_up("_register_builtin", importlib.import_module("torch.jit._builtins"))
    for _, name, _, asking in _places:
        register(asking, f"aten::{name}")  # TorchScript goes by the ``id``


def _asking_constructor(construct: Any) -> Callable[..., Any]:
    """A function: PyTorch's compiler, where it is imported from now on, takes nothing else."""
    asking = _Asking(construct)

    def make(*args: Any, **kwargs: Any) -> Any:
        return asking(*args, **kwargs)

    return make


def have_readers_ask(*kinds: type) -> Callable[[], None]:
    """Until what this returns is called, `torch.tensor`, `torch.as_tensor`, `torch.asarray`, ``torch.Tensor(tensor)``,
    `torch.Tensor.new_tensor` and their like, which ask no class about a tensor that they read, ask these."""
    _have_methods_ask()
    _set_asked((*_asked, *kinds))

    def end() -> None:
        rest = list(_asked)
        for kind in kinds:
            rest.remove(kind)
        _set_asked(tuple(rest))

    return end


def _set_asked(kinds: tuple[type, ...]) -> None:
    global _asked
    _asked = kinds
    for home, name, read, asking in _places:
        home[name] = asking if kinds else read
