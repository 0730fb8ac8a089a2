"""Classes of a script: workers have their methods, and the globals that these name, as the coordinator's program has.

A class that workers find in no file travels by value, once, with its methods and a copy of what they name outside of
it: globals and variables of a function around it (``ALPHA``, ``settings["alpha"]``, a helper function). When the
program changes any of these afterwards, the class is another one, and travels again.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.parameter_server.serialization.closure_walk import functions_of, names_in
from torchstrat.parameter_server.serialization.plain import is_fixed
from torchstrat.parameter_server.variables.attributes import contents_of

_Look = Callable[[], tuple[object, ...]]
_ALONE = (nn.Module, Optimizer, torch.Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
"""Which of these it is matters, and not what is in it: others tell of that."""


class CodeOfClasses:
    """Of classes that travel by value. Weak."""

    def __init__(self) -> None:
        self._known: dict[int, _Code] = {}

    def revision(self, kind: type) -> int:
        """Another number whenever its code has changed since it was asked for first, which is when it is sent."""
        known = self._known.get(id(kind))
        if known is None:
            known = self._known[id(kind)] = _Code(kind)
            weakref.finalize(kind, self._known.pop, id(kind), None).atexit = False
        return known.revision

    def marks(self) -> list[int]:
        """Equal ones: nothing has changed. Every call of `schedule` asks."""
        return [known.look() for known in list(self._known.values()) if known.is_by_value]


class _Code:
    """Of one class, and what it reaches of the script: its bases, helper functions and classes."""

    def __init__(self, kind: type) -> None:
        # cloudpickle is loaded when it is needed
        from torchstrat.parameter_server.serialization.pickler import can_go_by_name

        self._can_go_by_name = can_go_by_name
        self._kind = weakref.ref(kind)
        self.is_by_value = not can_go_by_name(kind)
        self.revision = 0
        self._looks: list[_Look] = []
        self._seen: list[object] = []
        self._meant: list[object] = []
        if self.is_by_value:
            self._learn(kind)

    def look(self) -> int:
        """The revision of now."""
        seen = [*itertools.chain.from_iterable(look() for look in self._looks)]
        is_same = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if not (is_same and self._changing == [*map(contents_of, filter(_may_change, seen))]):
            kind, before = self._kind(), self._meant
            if kind is not None:
                self._learn(kind)
                self.revision += self._meant != before
        return self.revision

    def _learn(self, kind: type) -> None:
        self._looks = [*self._walk(kind)]
        self._seen = [*itertools.chain.from_iterable(look() for look in self._looks)]
        self._changing = [*map(contents_of, filter(_may_change, self._seen))]
        self._meant = [*map(meaning_of, self._seen)]

    def _walk(self, kind: type) -> Iterator[_Look]:
        pending: list[object] = [*kind.__mro__]
        met: set[int] = set()
        while pending:
            value = pending.pop()
            if id(value) in met or not isinstance(value, type | types.FunctionType) or self._can_go_by_name(value):
                continue
            met.add(id(value))
            if isinstance(value, type):
                code = {name: one for name, one in vars(value).items() if any(map(_is_function, functions_of(one)))}
                yield partial(_of_class, value, [*code])
                pending += [fn for one in code.values() for fn in functions_of(one)]
                pending += value.__mro__
            else:
                space = value.__globals__
                names = [name for name in names_in(value.__code__) if name in space and not _is_module(space[name])]
                yield partial(_of_globals, space, names)
                pending += map(space.get, names)
                if value.__closure__:
                    yield partial(_of_cells, value.__closure__)
                    pending += _of_cells(value.__closure__)


def _of_class(kind: type, names: Sequence[str]) -> tuple[object, ...]:
    members = vars(kind)
    return len(members), *map(members.get, names)


def _of_globals(space: Mapping[str, object], names: Sequence[str]) -> tuple[object, ...]:
    return tuple(map(space.get, names))


def _of_cells(cells: Sequence[types.CellType]) -> tuple[object, ...]:
    found: list[object] = []
    for cell in cells:
        with contextlib.suppress(ValueError):  # a name that is assigned later
            found.append(cell.cell_contents)
    return tuple(found)


def _is_function(value: object) -> bool:
    return isinstance(value, types.FunctionType)


def _is_module(value: object) -> bool:
    return isinstance(value, types.ModuleType)


def _may_change(value: object) -> bool:
    """And stay the same object."""
    return not is_fixed(value) and not isinstance(value, _ALONE)


def meaning_of(value: object) -> object:
    """Equal ones where it does not matter which of two it is: also in copies that came from another task."""
    functions = [one for one in functions_of(value) if isinstance(one, types.FunctionType)]
    if functions:
        return [(one.__code__, one.__defaults__) for one in functions]
    if is_fixed(value):
        return type(value), value
    found = contents_of(value) if _may_change(value) else None
    return id(value) if found is None else found
