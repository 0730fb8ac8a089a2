"""How an exception that a function raised comes back as itself: its class, its arguments, its attributes."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable
from typing import Any

from torchstrat.errors import FunctionError
from torchstrat.parameter_server.dispatch import Raised
from torchstrat.parameter_server.travel.closures import Packed, pack_result, unpack_result
from torchstrat.parameter_server.travel.world import World


def pack_exception(error: BaseException, world: World) -> Raised:
    """On the worker, with its traceback as a note.

    What cannot travel arrives as the error's text in a `FunctionError`, and so does what would end the coordinator:
    ``sys.exit()`` in a function.
    """
    note = f"on the worker:\n{''.join(traceback.format_exception(error))}"
    as_text = _noted(FunctionError(f"{type(error).__name__}: {error}"), note)
    if not isinstance(error, Exception):
        return Raised(as_text)
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if _is_alike(copy, error):
            return Raised(_noted(copy, note))
    with contextlib.suppress(Exception):
        return Raised(as_text, pack_result(_in_parts(error, note), world, what=f"the {type(error).__name__} raised"))
    return Raised(as_text)


def unpack_exception(raised: Raised, unpack: Callable[[Packed], Any] = unpack_result) -> BaseException:
    """On the coordinator."""
    if isinstance(raised.packed, Packed):
        with contextlib.suppress(Exception):
            kind, args, state, note = unpack(raised.packed)
            return _noted(_from_parts(kind, args, state), note)
    return raised.error


def _in_parts(error: Exception, note: str) -> tuple[type[Exception], tuple[Any, ...], Any, str]:
    """What a class of the user's own, with arguments of its own, can be made of again without calling it."""
    reduced: Any = error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if reduced[0] is not type(error):
        raise TypeError(f"{type(error).__name__} says itself how it is pickled")
    return type(error), reduced[1], reduced[2] if len(reduced) > 2 else None, note


def _from_parts(kind: type[BaseException], args: tuple[Any, ...], state: Any) -> BaseException:
    error = kind.__new__(kind, *args)
    builtin: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    builtin.__init__(error, *args)  # for those that keep their arguments in C: the user's takes others
    if state is not None:
        error.__setstate__(state)
    return error


def _is_alike(copy: BaseException, error: BaseException) -> bool:
    """A class whose arguments are not those of `Exception` is often made again with other ones, silently."""
    return type(copy) is type(error) and str(copy) == str(error) and len(copy.args) == len(error.args)


def _noted(error: BaseException, note: str) -> BaseException:
    if hasattr(error, "add_note"):
        error.add_note(note)
    return error
