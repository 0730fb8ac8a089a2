"""Captured objects whose own code raises while a worker makes them: they get a stand-in, and all others arrive.

An increment is one pickle, and what comes after it builds on it. Where unpickling fails, it is done again by Python's
own unpickler written in Python, whose steps can be watched.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from torchstrat.errors import FunctionError
from torchstrat.parameter_server.travel.not_here import NotHere, class_for
from torchstrat.parameter_server.travel.pickling import IncrementUnpickler, set_optimizer_state

_Step = Callable[["_Salvaging"], None]


def load_increment(
    blob: bytes,
    tensors: Sequence[torch.Tensor],
    buffers: int,
    resolve: Callable[[tuple[Any, ...]], Any],
    device: torch.device,
) -> Any:
    """As `IncrementUnpickler` loads it, if need be without what raises."""
    try:
        return IncrementUnpickler(blob, tensors, buffers, resolve, device).load()
    except Exception:
        arrays = [tensor.numpy() for tensor in tensors[len(tensors) - buffers :]]
        return _Salvaging(IncrementUnpickler(blob, tensors, buffers, resolve, device), blob, arrays).load()


class _Salvaging(pickle._Unpickler):
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    dispatch: ClassVar[Any] = dict(pickle._Unpickler.dispatch)

    def __init__(self, plain: IncrementUnpickler, blob: bytes, arrays: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(blob), buffers=arrays)
        self._plain = plain

    def find_class(self, module: str, name: str) -> Any:
        return self._plain.find_class(module, name)

    def persistent_load(self, reference: Any) -> Any:
        try:
            return self._plain.persistent_load(reference)
        except Exception as error:
            return _stand_in(str(reference[1]), error)

    def replace(self, old: Any, new: NotHere) -> None:
        """In the place of what is half made, wherever it is looked for from now on."""
        for stack in (self.stack, *self.metastack):
            stack[:] = [new if one is old else one for one in stack]
        self.memo.update({key: new for key, one in self.memo.items() if one is old})


def _stand_in(name: str, error: Exception) -> NotHere:
    why = FunctionError(
        f"{name} could not be made on this worker: its own code raised {type(error).__name__}: {error}. Correct what "
        "makes it when it is unpickled (__setstate__, __reduce__, its constructor), or make it in the function."
    )
    why.__cause__ = error
    return class_for(name, why)()


def _making(step: _Step, taken: int) -> _Step:
    """A step that takes so many things from the stack, first of all what makes an object, and puts the object there."""

    def guarded(self: _Salvaging) -> None:
        maker, *rest = self.stack[-taken:]
        below = len(self.stack) - taken
        try:
            step(self)
        except Exception as error:
            made = _stand_in(getattr(maker, "__qualname__", str(maker)), error)
            del self.stack[below:]
            self.stack.append(made)
            if maker is set_optimizer_state:
                optimizer = rest[0][0]
                self.replace(optimizer, _stand_in(type(optimizer).__qualname__, error))

    return guarded


def _filling(step: _Step) -> _Step:
    """A step that gives the object on the stack what comes after it there."""

    def guarded(self: _Salvaging) -> None:
        try:
            step(self)
        except Exception as error:
            half_made = self.stack[-1]
            self.replace(half_made, _stand_in(type(half_made).__qualname__, error))

    return guarded


for _code, _taken in ((pickle.REDUCE, 2), (pickle.NEWOBJ, 2), (pickle.NEWOBJ_EX, 3)):
    _Salvaging.dispatch[_code[0]] = _making(_Salvaging.dispatch[_code[0]], _taken)
for _code in (pickle.BUILD, pickle.SETITEM, pickle.SETITEMS, pickle.APPEND, pickle.APPENDS, pickle.ADDITEMS):
    _Salvaging.dispatch[_code[0]] = _filling(_Salvaging.dispatch[_code[0]])
