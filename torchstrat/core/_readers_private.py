"""What makes a tensor of another one, or a number of it, and asks neither's class: functions, methods, constructors,
assigning to ``.data``.

Here they ask, also under the names that modules have imported (``from torch import tensor``). What a program keeps
elsewhere, in a closure, and the constructors of one dtype each (``torch.DoubleTensor``) cannot be replaced. They would
ask a class that has ``__torch_dispatch__``, but a tensor gets such a class only with another implementation below its
object: graphs that were built before would lose it, and NumPy refuses it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import torch

from torchstrat.core._torch_private import look_up
from torchstrat.core.tensor_functions import tensors_in

_asked: tuple[type, ...] = ()
_changing = threading.Lock()
_may_ask: Callable[[], bool] = look_up("_C._is_torch_function_enabled")

_FUNCTIONS = (
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "full", "full_like"),
    *(f"sparse_{layout}_tensor" for layout in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
    *("nested.nested_tensor", "to_dlpack", "utils.dlpack.to_dlpack"),
)
_HOMES = {"torch" + f".{path}".rpartition(".")[0] for path in _FUNCTIONS}
_METHODS = ("new_tensor", "new", "new_full", "set_")


class _Asking:
    """Takes the place of a function, and is equal to it: compilers and modes find what they know of one by either.

    Numbers in lists are asked by PyTorch (``__float__``), so only ``in_lists`` has them looked through.
    """

    def __init__(self, path: str, read: Any, *, in_lists: bool = False) -> None:
        self._path, self._read, self._in_lists = path, read, in_lists
        functools.update_wrapper(self, read)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._read

    def __hash__(self) -> int:
        return hash(self._read)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return look_up, (self._path,)

    def __get__(self, owner: object, kind: object = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _asked and _may_ask():
            for one in tensors_in((args, kwargs)) if self._in_lists else (*args, *kwargs.values()):
                if isinstance(one, _asked):
                    kind: Any = type(one)
                    return kind.__torch_function__(self._read, (kind,), args, kwargs)
        return self._read(*args, **kwargs)


class _AskingData(property):
    """`torch.Tensor.data`: the tensor that is assigned asks as well. PyTorch passes on the ``__get__`` and ``__set__``
    that it finds here, which stay its own."""

    def __init__(self, data: Any) -> None:
        super().__init__(data.__get__, _Asking("Tensor.data", data.__set__))
        vars(self).update(__get__=data.__get__, __set__=data.__set__)


@functools.cache
def _have_all_ask() -> None:
    """For good, in the whole process: modules keep what they import, and a class that changes all the time is slow for
    who uses it."""
    base: Any = look_up("_C.TensorBase")
    for name in _METHODS:
        setattr(torch.Tensor, name, _Asking(f"Tensor.{name}", getattr(base, name)))
    torch.Tensor.data = _AskingData(inspect.getattr_static(torch.Tensor, "data"))  # type: ignore[assignment]
    torch.Tensor.__new__ = _asking_constructor(base.__new__)  # type: ignore[method-assign]
    register = look_up("_register_builtin", importlib.import_module("torch.jit._builtins"))
    asking: dict[int, _Asking] = {}
    for path in _FUNCTIONS:
        home, _, name = path.rpartition(".")
        read = look_up(path)
        made = asking[id(read)] = _Asking(path, read, in_lists=home == "nested")
        register(made, f"aten::{name}")  # TorchScript goes by the ``id``
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and _is_served(module):
            names = vars(module)
            for name, value in list(names.items()):
                if id(value) in asking:
                    names[name] = asking[id(value)]


def _is_served(module: ModuleType) -> bool:
    """PyTorch's own modules call its functions as they are, but for those from which programs take them."""
    name = module.__name__
    return name.partition(".")[0] != "torch" or name in _HOMES


def _asking_constructor(construct: Any) -> Callable[..., Any]:
    """A function: PyTorch's compiler, where it is imported from now on, takes nothing else."""
    asking = _Asking("Tensor.__new__", construct)

    def make(*args: Any, **kwargs: Any) -> Any:
        return asking(*args, **kwargs)

    return make


def have_readers_ask(*kinds: type) -> Callable[[], None]:
    """Until what this returns is called, `torch.tensor`, `torch.as_tensor`, `torch.asarray`, ``torch.Tensor(tensor)``,
    `torch.Tensor.new_tensor`, ``tensor.data = other`` and their like, which ask no class about a tensor that they read,
    ask these."""
    global _asked
    with _changing:
        _have_all_ask()
        _asked = (*_asked, *kinds)

    def end() -> None:
        global _asked
        with _changing:
            rest = list(_asked)
            for kind in kinds:
                rest.remove(kind)
            _asked = tuple(rest)

    return end
