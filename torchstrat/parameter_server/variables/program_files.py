"""A program's own code: workers have what the program has set in its files and in classes of a script.

Functions and classes of a file travel by name. Workers run the file anew, and have what stands in it; what the program
has set since (``settings.ALPHA = 0.5``, ``settings.CONFIG["alpha"] = 0.5``, ``Head.alpha = 0.5``) is set on them too,
until the job ends: numbers, strings, tuples, and dictionaries of such. What it has set before the file was first named
is what differs from a number, a string or the like that stands in the file. A function that the program puts in the
place of another one (``layers.act = other``) is warned of.

A class that workers find in no file travels by value, once, with its methods and a copy of what they name outside of
it: globals and variables of a function around it (``ALPHA``, ``settings["alpha"]``, a helper function). When the
program changes any of these afterwards, or a list, a dictionary or a record of settings in the class, the class is
another one, and travels again.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import inspect
import itertools
import operator
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from torch.optim import Optimizer

from torchstrat.parameter_server.messages import SetAttribute
from torchstrat.parameter_server.serialization.closure_walk import (
    CachedFunction,
    functions_of,
    is_library,
    is_own_file,
    names_in,
)
from torchstrat.parameter_server.serialization.plain import ALONE, contents_of, is_fixed, is_plain
from torchstrat.parameter_server.variables.attributes import KnownNamespace, set_there

GLOBALS = "globals"
"""Of the settings' keys: (this, name of a module) → what was set in it, by name; ``Head.alpha`` of a class."""

_MOST_PARTS = 100  # of a dictionary: larger ones hold data
_OFTEN = 32  # code is looked at in so many calls of `schedule`, and then in one of so many

# -- on the coordinator -----------------------------------------------------------------------------------------------


class _Space(KnownNamespace):
    """A file, or a class in it. ``written``: what it assigns itself."""

    def __init__(self, owner: type | types.ModuleType, written: Mapping[str, object]) -> None:
        super().__init__(owner)
        self._values = {name: written.get(name, value) for name, value in self._values.items()}
        self._contents: list[object] = []
        self._callables = _callables_of(owner)

    def changes(self, members: Mapping[str, object]) -> int:
        super().changes(members)
        contents = [contents_of(one) for one in self.last if type(one) is dict and len(one) <= _MOST_PARTS]
        if contents != self._contents:
            self._contents = contents
            self.count += 1
        return self.count

    def sent_of(self, members: Mapping[str, object]) -> dict[str, object]:
        plain = {name: one for name, one in members.items() if type(one) is dict and len(one) <= _MOST_PARTS}
        plain = {name: one for name, one in plain.items() if is_plain(one) and not name.startswith("__")}
        return super().sent_of(members) | copy.deepcopy(plain)

    def replaced(self) -> str | None:
        """A function or class in whose place there is another one since the last time."""
        before, now = self._callables, _callables_of(self.owner())
        self._callables = now
        others = [name for name, one in now.items() if before.get(name, one) is not one]
        return next((name for name in others if meaning_of(before[name]) != meaning_of(now[name])), None)


def _callables_of(owner: object) -> dict[str, object]:
    wrapped = "step" if isinstance(owner, type) and issubclass(owner, Optimizer) else ""  # by PyTorch, at first use
    members = getattr(owner, "__dict__", {})
    return {k: v for k, v in list(members.items()) if callable(v) and not k.startswith("__") and k != wrapped}


_known_files: dict[str, dict[str, _Space]] = {}
"""Of the process: another job's workers are to have what was set in this one."""


class ProgramFiles:
    """Those that something was sent by name of in a job, and what these import of the program's. ``named``: the
    former."""

    def __init__(self, named: Collection[str]) -> None:
        self._named, self._noted = named, 0
        self._known: dict[str, dict[str, _Space]] = {}
        self._calls = 0
        self._has_warned = False

    def marks(self) -> list[int]:
        """Equal ones: nothing was set. Every call of `schedule` asks."""
        if len(self._named) != self._noted:
            self._noted = len(self._named)
            for name in list(self._named):
                self._note(name)
        if not self._known:
            return []
        self._calls += 1
        if not self._has_warned and (self._calls < _OFTEN or self._calls % _OFTEN == 0):
            self._look_at_code()
        spaces = (space for spaces in self._known.values() for space in spaces.values())
        return [space.changes(getattr(space.owner(), "__dict__", {})) for space in spaces]

    def _look_at_code(self) -> None:
        for name, spaces in self._known.items():
            for prefix, space in spaces.items():
                replaced = space.replaced()
                if replaced is not None:
                    self._warn(f"{name}.{prefix}{replaced}")

    def changed(self) -> Iterator[tuple[tuple[str, str], dict[str, SetAttribute]]]:
        """What was set in each, and when."""
        self.marks()
        for name, spaces in self._known.items():
            found: dict[str, SetAttribute] = {}
            for prefix, space in spaces.items():
                space.look()
                found |= {prefix + key: one for key, one in space.set.items()}
            if found:
                yield (GLOBALS, name), found

    def _note(self, name: str) -> None:
        module = sys.modules.get(name)
        if name in self._known or module is None or not is_own_file(name):
            return
        known = _known_files.get(name)
        if known is None or known[""].owner() is not module:
            known = _known_files[name] = _spaces_of(module)
        for space in known.values():
            space.replaced()  # before this job
        self._known[name] = known
        for value in list(vars(module).values()):
            home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if isinstance(home, str) and isinstance(value, types.ModuleType | types.FunctionType | type):
                self._note(home)

    def _warn(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{name} was replaced on the coordinator. Workers import the file that it is of and have what stands "
                "there; numbers, strings, tuples and dictionaries of such follow where they are set, and this is none. "
                "Give it to the function as an argument, or replace it in the function. (Further ones are not warned "
                "of.)",
                stacklevel=2,
            )


def _spaces_of(module: types.ModuleType) -> dict[str, _Space]:
    written = _written_in(module)
    spaces = {"": _Space(module, written.get("", {}))}
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            spaces[f"{value.__qualname__}."] = _Space(value, written.get(value.__qualname__, {}))
    return spaces


def _written_in(module: types.ModuleType) -> dict[str, dict[str, object]]:
    """What a file assigns by numbers, strings and the like, once each, and its classes; "" is the file itself."""
    with contextlib.suppress(Exception):  # it may have no source
        tree = ast.parse(inspect.getsource(module))
        bodies = {"": tree.body} | {one.name: one.body for one in tree.body if isinstance(one, ast.ClassDef)}
        return {name: dict(_assigned_in(body)) for name, body in bodies.items()}
    return {}


def _assigned_in(body: list[ast.stmt]) -> Iterator[tuple[str, object]]:
    found: dict[str, object] = {}
    several = set(_assigned_in_blocks(body))
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and (value := getattr(statement, "value", None)) is not None:
                several |= {target.id} & found.keys()
                found[target.id] = None
                with contextlib.suppress(ValueError, TypeError, SyntaxError):
                    found[target.id] = ast.literal_eval(value)
                    continue
                several.add(target.id)
    yield from ((name, value) for name, value in found.items() if name not in several)


def _assigned_in_blocks(body: list[ast.stmt]) -> Iterator[str]:
    """Names whose value may depend on where the file is imported: ``if torch.cuda.is_available(): DEVICE = "cuda"``."""
    for statement in body:
        if not isinstance(statement, _NO_BLOCKS):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id


_NO_BLOCKS = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


# -- on workers --------------------------------------------------------------------------------------------------------


def put_globals(name: str, values: Mapping[str, SetAttribute]) -> None:
    """Set what the program has set in a file."""
    try:
        module = importlib.import_module(name)
    except Exception:  # the function that names it says so
        return
    for key, one in values.items():
        *path, last = key.split(".")
        owner: object = module
        for part in path:
            owner = getattr(owner, part, None)
        if isinstance(owner, type | types.ModuleType):
            set_there(owner, last, one)


# -- classes of a script -----------------------------------------------------------------------------------------------


_Look = Callable[[], tuple[object, ...]]


class CodeOfClasses:
    """Of classes that travel by value. Weak."""

    def __init__(self) -> None:
        self._known: dict[int, _Code] = {}
        self._by_value: dict[int, _Code] = {}

    def revision(self, kind: type) -> int:
        """Another number whenever its code has changed since it was asked for first, which is when it is sent."""
        known = self._known.get(id(kind))
        if known is None:
            known = self._known[id(kind)] = _Code(kind)
            weakref.finalize(kind, self._known.pop, id(kind), None).atexit = False
            if known.is_by_value:
                self._by_value[id(kind)] = known
                weakref.finalize(kind, self._by_value.pop, id(kind), None).atexit = False
        return known.revision

    def marks(self) -> list[int]:
        """Equal ones: nothing has changed. Every call of `schedule` asks."""
        return [known.look() for known in list(self._by_value.values())] if self._by_value else []


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
            if isinstance(value, CachedFunction):
                value = value.__wrapped__
            if id(value) in met or not isinstance(value, type | types.FunctionType) or self._can_go_by_name(value):
                continue
            met.add(id(value))
            if isinstance(value, type):
                if is_library(value.__module__):  # made by a function of PyTorch's (a parametrization's)
                    continue
                members = vars(value).items()
                code = {name: one for name, one in members if any(map(_is_function, functions_of(one)))}
                data = [name for name, one in members if not name.startswith("__") and _is_data(one)]
                yield partial(_of_class, value, [*code, *data])
                pending += [fn for one in code.values() for fn in functions_of(one)]
                pending += value.__mro__
            else:
                space = value.__globals__
                if not is_library(space.get("__name__")):  # a wrapper of PyTorch's has the program's function in a cell
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
    return not is_fixed(value) and not isinstance(value, ALONE)


def _is_data(value: object) -> bool:
    """That is told of when it changes. Numbers, strings and the like are set on the class that is there."""
    return _may_change(value) and contents_of(value) is not None


def meaning_of(value: object) -> object:
    """Equal ones where it does not matter which of two it is: also in copies that came from another task."""
    functions = [one for one in functions_of(value) if isinstance(one, types.FunctionType)]
    if functions:
        return [(one.__code__, one.__defaults__) for one in functions]
    if is_fixed(value):
        return type(value), value
    found = contents_of(value) if _may_change(value) else None
    return id(value) if found is None else found
