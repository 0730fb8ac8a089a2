"""What stands on a worker for a captured object that is not there: its class or module cannot be imported, or its own
code raised when it was made.

One such object must not keep everything that was captured with it, or after it, from arriving: a program that never
uses it on a worker runs. Whatever is asked of the stand-in raises the error of the import, or of that code.
"""

from __future__ import annotations

import types
from typing import Any, NoReturn

from torchstrat.errors import FunctionError


class NotHere:
    """Base of the classes that stand for missing ones; see `class_for`."""

    _why: FunctionError

    def __new__(cls, *_: Any, **__: Any) -> NotHere:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    # -- what unpickling does to an object, whatever class it has

    def __setstate__(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    # -- what programs do to it

    def __getattr__(self, name: str) -> NoReturn:
        raise FunctionError(str(self._why)) from self._why

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FunctionError(str(self._why)) from self._why

    __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = __lt__ = __int__ = __float__ = (
        _refuse
    )
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __index__ = __enter__ = __exit__ = _refuse
    __hash__ = object.__hash__


def missing_error(error: Exception, what: str) -> FunctionError:
    """Of something captured: what this process cannot import, and the remedy."""
    module = error.name if isinstance(error, ModuleNotFoundError) and error.name else what.rpartition(".")[0] or what
    made = FunctionError(
        f"captured objects need {what}, which this worker cannot import ({type(error).__name__}: {error}). Install the "
        f"module {module!r} on the workers and start them again, or have it sent: "
        f"cloudpickle.register_pickle_by_value({module}) on the coordinator, before the objects are made in a scope."
    )
    made.__cause__ = error
    return made


def class_for(name: str, why: FunctionError) -> type[NotHere]:
    """The class that stands for the missing one of that name, or for a function: a call of it makes a stand-in."""
    return type(name, (NotHere,), {"_why": why})


class MissingModule(types.ModuleType):
    """Stands for a module that cannot be imported."""

    def __init__(self, name: str, why: FunctionError) -> None:
        super().__init__(name)
        self.__dict__["_why"] = why

    def __getattr__(self, name: str) -> NoReturn:
        why: FunctionError = self.__dict__["_why"]
        raise FunctionError(str(why)) from why
