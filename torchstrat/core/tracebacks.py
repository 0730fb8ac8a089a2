"""Tracebacks that show a user's own code: at most five frames of torchstrat's in each.

An exception that leaves torchstrat keeps all frames of the user's program and of other libraries. Of torchstrat's it
keeps the call that the user made, what that called first, and the innermost ones. ``TORCHSTRAT_FULL_TRACEBACK=1`` in
the environment shows all of them; set it before ``pdb.post_mortem``, which can go to the frames of a traceback only.

Every exception passes here, whoever raised it: `short_tracebacks` is put on a public class, `shorten` is called by what
is too hot for a frame more. Nothing is done until there is an exception.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import FunctionType, TracebackType
from typing import Any, TypeVar

MOST_FRAMES = 5
"""Of torchstrat's, in one traceback."""

FULL_VARIABLE = "TORCHSTRAT_FULL_TRACEBACK"

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_PROTOCOLS = ("__init__", "__enter__", "__exit__", "__iter__", "__next__")

_Class = TypeVar("_Class", bound=type)


def shorten(error: BaseException) -> None:
    """To be called by the function of torchstrat that has caught ``error`` and raises it again.

    Frames are left out of ``error.__traceback__`` and of the tracebacks of what it was raised from. Traceback objects
    that somebody else holds stay as they are, but for the one that belongs to the calling function's own frame.
    """
    outermost = error.__traceback__
    if outermost is None or os.environ.get(FULL_VARIABLE, "0") not in ("", "0"):
        return
    inner = list(_entries(outermost.tb_next))
    kept = _kept(inner, MOST_FRAMES - 1)
    if len(kept) < len(inner):
        outermost.tb_next = _linked(kept)  # in place: raising it again goes on from this very object
    for reason in _reasons(error):
        entries = list(_entries(reason.__traceback__))
        kept = _kept(entries, MOST_FRAMES)
        if len(kept) < len(entries):
            reason.__traceback__ = _linked(kept)


def short_tracebacks(public: _Class, *, but: tuple[str, ...] = ()) -> _Class:
    """A decorator of public classes: what leaves their public methods is shortened.

    ``but``: names of methods that stay as they are.
    """
    for name, method in list(vars(public).items()):
        is_public = not name.startswith("_") or name in _PROTOCOLS
        if isinstance(method, FunctionType) and is_public and name not in but:
            setattr(public, name, shortening(method))
    if "__new__" in vars(public):
        setattr(public, "__new__", staticmethod(shortening(public.__new__)))  # noqa: B010  # no method of instances
    return public


def shortening(function: Callable[..., object]) -> Any:
    """``function``, public, with exceptions that are shortened on their way out."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        try:
            return function(*args, **kwargs)
        except StopIteration:
            raise
        except BaseException as error:
            shorten(error)
            raise

    return call


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _kept(entries: list[TracebackType], most: int) -> list[TracebackType]:
    """Without frames of this file, and with ``most`` of torchstrat's: the first one and the last."""
    wrapped = [entry for entry in entries if entry.tb_frame.f_code.co_filename != __file__]
    ours = [entry for entry in wrapped if entry.tb_frame.f_code.co_filename.startswith(_PACKAGE)]
    left_out = set(map(id, ours[1 : len(ours) - most + 1]))
    return [entry for entry in wrapped if id(entry) not in left_out]


def _linked(entries: list[TracebackType]) -> TracebackType | None:
    """New traceback objects: those that are there may be somebody else's too."""
    following: TracebackType | None = None
    for entry in reversed(entries):
        following = TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return following


def _reasons(error: BaseException) -> Iterator[BaseException]:
    """What ``error`` was raised from, or while it was handled, as far as Python shows it."""
    seen = {id(error)}
    reason: BaseException | None = error
    while reason is not None:
        reason = reason.__cause__ or (None if reason.__suppress_context__ else reason.__context__)
        if reason is None or id(reason) in seen:
            return
        seen.add(id(reason))
        yield reason
