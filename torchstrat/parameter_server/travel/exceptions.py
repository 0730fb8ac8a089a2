"""How an exception that a function raised comes back as itself: its class, its arguments, its attributes."""

from __future__ import annotations

import contextlib
import pickle
import traceback
import types
from collections.abc import Callable
from typing import Any

from torchstrat.errors import FunctionError, NotSendableError
from torchstrat.parameter_server.dispatch import Raised
from torchstrat.parameter_server.travel.closures import Packed, pack_result, unpack_result
from torchstrat.parameter_server.travel.world import World
from torchstrat.tracebacks import shorten


def pack_exception(error: BaseException, world: World) -> Raised:
    """On the worker, with its traceback as a note.

    What cannot travel arrives as the error's text in a `FunctionError`, and so does what would end the coordinator:
    ``sys.exit()`` in a function.
    """
    shorten(error)
    note = f"on the worker:\n{''.join(traceback.format_exception(error))}"
    as_text = _noted(FunctionError(f"{type(error).__name__}: {error}"), note)
    if not isinstance(error, Exception):
        return Raised(as_text)
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if _is_alike(copy, error):
            return Raised(_noted(copy, note))
    what = f"the {type(error).__name__} raised"
    with contextlib.suppress(Exception):
        kind, args, state = _in_parts(error)
        with contextlib.suppress(NotSendableError):
            return Raised(as_text, pack_result((kind, args, state, note), world, what=what))
        state, left = _sendable(state, world)
        note += f"attributes that could not travel: {', '.join(left)}"
        return Raised(as_text, pack_result((kind, args, state, note), world, what=what))
    return Raised(as_text)


def unpack_exception(raised: Raised, unpack: Callable[[Packed], Any] = unpack_result) -> BaseException:
    """On the coordinator."""
    if isinstance(raised.packed, Packed):
        with contextlib.suppress(Exception):
            kind, args, state, note = unpack(raised.packed)
            return _noted(_from_parts(kind, args, state), note)
    return raised.error


def _in_parts(error: Exception) -> tuple[type[Exception], tuple[Any, ...], Any]:
    """What a class of the user's own, with arguments of its own, can be made of again without calling it. How the class
    itself says that it is pickled counts where pickle does it."""
    kind = type(error)
    is_own = any(isinstance(way, types.FunctionType) for way in (kind.__reduce__, kind.__reduce_ex__))
    reduced: Any = _builtin_of(kind).__reduce__(error) if is_own else error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return kind, reduced[1], reduced[2] if len(reduced) > 2 else None


def _sendable(state: Any, world: World) -> tuple[Any, list[str]]:
    """The attributes that can travel, and the names of the others."""
    kept: dict[str, Any] = {}
    for name, value in state.items():
        with contextlib.suppress(NotSendableError):
            pack_result(value, world)
            kept[name] = value
    return kept, sorted(state.keys() - kept.keys())


def _from_parts(kind: type[BaseException], args: tuple[Any, ...], state: Any) -> BaseException:
    error = kind.__new__(kind, *args)
    _builtin_of(kind).__init__(error, *args)  # for those that keep their arguments in C: the user's takes others
    if state is not None:
        error.__setstate__(state)
    return error


def _builtin_of(kind: type[BaseException]) -> Any:
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _is_alike(copy: BaseException, error: BaseException) -> bool:
    """A class whose arguments are not those of `Exception` is often made again with other ones, silently."""
    return type(copy) is type(error) and str(copy) == str(error) and len(copy.args) == len(error.args)


def _noted(error: BaseException, note: str) -> BaseException:
    if hasattr(error, "add_note"):
        error.add_note(note)
    return error
