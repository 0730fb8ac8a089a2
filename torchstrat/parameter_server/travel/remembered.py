"""Functions that were packed before and are the same still: found again in a microsecond or two."""

from __future__ import annotations

import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchstrat.parameter_server.travel.outgoing import Outgoing
from torchstrat.parameter_server.travel.sendable import Refused
from torchstrat.parameter_server.travel.stable import (
    Survey,
    Unstable,
    function_parts,
    keep,
    same_parts,
)

if TYPE_CHECKING:
    from torchstrat.parameter_server.travel.catalog import Catalog
    from torchstrat.parameter_server.travel.closures import Packed

_MAX_CODES = 256
_MAX_VARIANTS = 8  # of one code: a closure over each of some models
_MAX_FAILURES = 3


class Remembered:
    """By the code of functions, which stays the same where they are defined again and again (lambdas, closures).

    What a function rests on is compared part by part with what it was (see `stable`), so that it is packed anew in
    every case in which that could make a difference. Keeps no captured object alive. Thread-safe.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: OrderedDict[int, _OfOneCode] = OrderedDict()

    def find(self, fn: Any) -> Packed | None:
        """What `keep` was given for this function, or for one that is equal to it in all its parts."""
        code = _code_of(fn)
        known = self._known.get(id(code))
        if known is None:
            return None
        for entry in known.entries:
            packed = entry.packed_again(fn, self._catalog)
            if packed is not None:
                return packed
        return None

    def keep(self, fn: Any, packed: Packed, references: Outgoing) -> None:
        """``packed`` has just been made of ``fn``, with ``references``."""
        code = _code_of(fn)
        if code is None or packed.tensors:
            return
        known = self._known.get(id(code))
        if known is None:
            known = self._known[id(code)] = _OfOneCode(code)
            if len(self._known) > _MAX_CODES:
                self._known.popitem(last=False)
        elif known.failures >= _MAX_FAILURES:  # it reaches what cannot be told to be the same
            return
        try:
            entry = _Entry(fn, packed, references, self._catalog)
        except (Unstable, Refused):
            known.failures += 1
            return
        known.entries = [entry, *known.entries[: _MAX_VARIANTS - 1]]


class _OfOneCode:
    def __init__(self, code: Any) -> None:
        self.code = code  # kept alive: it is known by its id
        self.entries: list[_Entry] = []
        self.failures = 0


def _code_of(fn: Any) -> Any:
    """The code that a callable is known by; its class for a callable object; None for others."""
    kind = type(fn)
    if kind is types.FunctionType:
        return fn.__code__
    if kind is types.MethodType:
        return fn.__func__.__code__ if type(fn.__func__) is types.FunctionType else None
    return None if isinstance(fn, type) else kind


class _Entry:
    """One function as it was packed, and all that this rests on."""

    def __init__(self, fn: Any, packed: Packed, references: Outgoing, catalog: Catalog) -> None:
        from torchstrat.parameter_server.travel.pickling import modules_sent_by_value

        self._sent_by_value = modules_sent_by_value
        self._circumstances = _circumstances(catalog, modules_sent_by_value)
        survey = Survey(references)
        self._names: tuple[str, ...] | None = None
        self._is_method = type(fn) is types.MethodType
        if type(fn) is types.FunctionType and not survey.goes_by_name(fn):
            self._names = survey.names_of(fn)
        parts = self._parts_of(fn)
        if type(fn) is types.FunctionType and self._names is None:
            survey.note_name(fn)
        else:
            for part in parts:
                survey.visit(part)
        self._kept = list(map(keep, parts))
        self._guards = survey.guards
        packed.digest  # noqa: B018  # computed once
        self._fields = {**vars(packed), "alive": ()}
        self._alive = [_weakly(value) for value in packed.alive]
        self._packed = (lambda: packed) if not self._alive else weakref.ref(packed)
        self._kind = type(packed)

    def _parts_of(self, fn: Any) -> list[Any]:
        if self._names is not None:
            return function_parts(fn, self._names)
        if self._is_method:
            return [fn.__func__, fn.__self__]
        if type(fn) is types.FunctionType:
            return [fn, fn.__code__, fn.__module__, fn.__qualname__]
        return [fn]

    def packed_again(self, fn: Any, catalog: Catalog) -> Packed | None:
        """For ``fn``, if it is the same."""
        if self._is_method is not (type(fn) is types.MethodType):
            return None
        try:
            if not same_parts(self._parts_of(fn), self._kept):
                return None
            if self._circumstances != _circumstances(catalog, self._sent_by_value):
                return None
            if not self._guards.are_same():
                return None
        except Unstable:
            return None
        return self._packed() or self._anew()

    def _anew(self) -> Packed | None:
        """The same once more, since the last one was let go, and with it what it kept alive."""
        alive = tuple([reference() for reference in self._alive])
        if any(value is None for value in alive):
            return None
        packed = object.__new__(self._kind)
        vars(packed).update(self._fields, alive=alive)
        self._packed = weakref.ref(packed)
        return packed


def _weakly(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value  # the catalog holds it as well


def _circumstances(catalog: Catalog, sent_by_value: Callable[[], set[str]]) -> tuple[Any, ...]:
    """What decides how things travel, besides the things themselves: what is captured; which modules there are, for a
    function that names a package travels with its submodules; and which of them cloudpickle was told to send."""
    return catalog.captures, len(sys.modules), sent_by_value()
