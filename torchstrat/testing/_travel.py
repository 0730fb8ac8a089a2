"""How functions and results get to a group's processes and back: by name where the other side can import them."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torchstrat.parameter_server.serialization.plain import ClassesHere


def pack(value: Any) -> bytes:
    """``value`` for another process: by Python's own pickle, and by cloudpickle what that refuses (a function of a
    function) or what nobody can import: all of a ``__main__`` without a file, as a notebook's and ``python -c``'s is.

    Raises what pickle raises, where neither can.
    """
    try:
        if _children_have_main():
            return pickle.dumps(value)
        first: Exception | None = None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        first = error
    import cloudpickle  # type: ignore[import-untyped]  # needed for these alone

    try:
        by_value: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise first or error from None
    return by_value


def unpack(packed: bytes) -> Any:
    """In the process that the classes came from: they stay as they are there."""
    return ClassesHere(io.BytesIO(packed)).load()


def by_value(function: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """The function, for processes that cannot import the module, of which it may use all."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    try:
        return _Packed(cloudpickle.dumps(function), getattr(function, "__qualname__", repr(function)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class _Packed:
    def __init__(self, packed: bytes, name: str) -> None:
        self._packed = packed
        self.__qualname__ = name

    def __call__(self, *arguments: Any) -> Any:
        return pickle.loads(self._packed)(*arguments)


def _children_have_main() -> bool:
    """Whether `multiprocessing` prepares this program's ``__main__`` in new processes, as their ``__mp_main__``."""
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) is not None:  # python -m
        return True
    return os.path.isfile(getattr(main, "__file__", None) or "")
