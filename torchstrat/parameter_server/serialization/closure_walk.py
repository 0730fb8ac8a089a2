"""Which functions, classes and modules must travel by value, because they reach captured objects.

A function of an importable module is normally sent as its name: the worker imports the module. If the function reaches
the user's model, directly or through other functions, that goes wrong without a word: the import runs the module anew,
builds another model, and the function trains that one. So such functions are sent by value, and what they reach by
reference. The same goes for all functions of a module that holds captured objects itself: importing it would build
them again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from torchstrat.core.reachable import HELPER_TYPES
from torchstrat.core.variable.tensor_like import TensorLike


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Global and attribute names used by a function and by the functions defined in it, each once, in order.

    The two kinds are not told apart: ``lib.model`` uses both ``lib`` and ``model``.
    """
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_in(constant)))
    return tuple(names)


_LIBRARIES = frozenset({"torch", "torchstrat", "numpy", "cloudpickle", "pytest", "_pytest"})
_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    types.BuiltinFunctionType,
    types.CodeType,
)
_CODE = (types.FunctionType, types.ModuleType, type)
CachedFunction = functools._lru_cache_wrapper  # noqa: SLF001
"""What `functools.lru_cache` and `functools.cache` make of a function."""
_MAX_OBJECTS = 20_000
_MAX_KNOWN = 4_096
_MAX_MEMBERS = 1_000  # of one container: longer ones hold data
_OF_EVERY_MODULE = frozenset({"__builtins__", "__loader__", "__spec__"})
_MAX_LOOKS, _MAX_SEEN = 200, 2_000  # beyond, packing anew does not take much longer

Look = Callable[[], Collection[object]]


@dataclass(frozen=True)
class _Footprint:
    """What a negative answer rests on: as long as it is the same, so is the answer."""

    names: list[tuple[dict[str, object], tuple[str, ...], tuple[object, ...]]] = field(default_factory=list)
    """Namespaces, the names used of them, and what these meant."""
    functions: list[tuple[types.FunctionType, tuple[object, ...]]] = field(default_factory=list)
    """Functions that were passed through, the root first, and their `_extras`."""
    spaces: dict[int, dict[str, object]] = field(default_factory=dict)
    """Namespaces of all modules that were passed through, by id."""

    def is_same(self, root: object) -> bool:
        """``root``: the function that the answer is wanted for now, of the same code, or the same class."""
        functions = self.functions
        if functions and isinstance(root, types.FunctionType):
            functions = [(root, functions[0][1]), *functions[1:]]
        return all(
            all(map(operator.is_, map(space.get, names), values)) for space, names, values in self.names
        ) and all(_are_same(_extras(fn), extras) for fn, extras in functions)


class Reach:
    """Looks for captured objects behind functions, classes and modules.

    ``is_captured`` tells what is looked for; ``holds_captured`` whether one of a namespace's values is (the same, but
    only directly and fast).

    A negative answer is remembered per code and globals, and used again while every name that the analysis went
    through means the same object. Analyses that went through cells, containers, classes or objects of the user's are
    made again each time, since their contents may have changed unseen.
    """

    def __init__(
        self, is_captured: Callable[[object], bool], holds_captured: Callable[[dict[str, object]], bool]
    ) -> None:
        self._is_captured = is_captured
        self._holds_captured = holds_captured
        self._known: dict[tuple[object, int], _Footprint] = {}
        self.named_files: dict[str, None] = {}
        """Modules of the program's own that something was sent by name of."""

    def note_name(self, value: object) -> None:
        """A function, a class or a module is sent by name."""
        name = _module_of(value)
        if name not in self.named_files and is_own_file(name):
            self.named_files[name] = None

    def by_value(self, value: object, root: object, memo: dict[int, bool]) -> bool:
        """Whether a function, a class or a module that could be imported must be sent by value.

        ``root``: what is being sent, for the names that its functions use of a module. ``memo``: answers found while
        the same root is sent, by id of functions, classes, modules and namespaces.
        """
        answer = memo.get(id(value))
        if answer is None:
            answer = memo[id(value)] = self._by_value(value, root, memo)
            module = sys.modules.get(_module_of(value))
            if answer and module is not None:
                # Its module imports what it reaches, so nothing else of that module may be sent by name.
                memo[id(vars(module))] = True
        return answer

    def _by_value(self, value: object, root: object, memo: dict[int, bool]) -> bool:
        if is_library(_module_of(value)):
            # A decorator's wrapper may be a library's code in the name of the user's function, never the reverse.
            return False
        if isinstance(value, types.ModuleType):
            return self._holds(vars(value), memo) or any(
                self._reaches(member, memo) for member in members_used(value, self.names_from(root)).values()
            )
        return self._reaches(value, memo)

    def rests_on(self, root: object) -> list[tuple[Look, list[object]]] | None:
        """What the answer "no" for a function or a class rests on: things to look at, and what was seen. It stands as
        long as each of them shows the very same objects, and nothing else has been captured; None where that is too
        much to look at.

        Keeps what it names alive, which is of modules, and reaches nothing captured.
        """
        looks: list[Look] = []
        spaces: dict[int, dict[str, object]] = {}
        is_fixed = is_installed(_module_of(root))  # installed code stays as it is
        for value in _walk(root, None):
            if isinstance(value, _CODE):
                module = sys.modules.get(_module_of(value))
                if module is not None and module.__name__ != "__main__":
                    spaces[id(vars(module))] = vars(module)
            if not is_fixed:
                looks += self._looks_at(value)
        for space in spaces.values():
            looks.append(space.values)
            name = space.get("__name__", "")
            if is_own(name):
                data = _data_of(space)
                for value in _walk(data, None, only_data=True) if data else ():
                    if value is not data:
                        looks += self._looks_at(value)
        if len(looks) > _MAX_LOOKS:
            return None
        seen = [(look, list(look())) for look in looks]
        return seen if sum(len(parts) for _, parts in seen) <= _MAX_SEEN else None

    def _looks_at(self, value: object) -> Iterator[Look]:
        """How to see whether the walk would go on from ``value`` as it did."""
        if isinstance(value, types.FunctionType):
            yield functools.partial(_look_at_function, value, names_in(value.__code__))
        elif isinstance(value, (torch.Tensor, nn.Module, *HELPER_TYPES, TensorLike)):
            yield lambda: (self._is_captured(value),)
        if isinstance(value, type):
            if not is_library(value.__module__):
                yield functools.partial(_look_at_class, value)
        elif _stays_as_it_is(value):
            return
        elif isinstance(value, functools.partial | Mapping | list | set) or not is_library(type(value).__module__):
            yield _look_at_parts(value)

    def names_from(self, root: object) -> frozenset[str]:
        """All names that functions reached from ``root`` use."""
        names: set[str] = set()
        for value in _walk(root, None):
            if isinstance(value, types.FunctionType):
                names.update(names_in(value.__code__))
        return frozenset(names)

    def _reaches(self, root: object, memo: dict[int, bool]) -> bool:
        key = _key_of(root)
        known = self._known.get(key) if key is not None else None
        if (
            known is not None
            and known.is_same(root)
            and not any(self._holds(space, memo) for space in known.spaces.values())
        ):
            return False
        footprint, is_closed = _Footprint(), True
        for value in _walk(root, footprint):
            if isinstance(value, _CODE):
                if self._enters(value, footprint, memo):
                    return True
                is_closed = is_closed and _is_constant(value)
            elif self._is_captured(value):
                return True
            else:
                is_closed = False
        if key is not None and (is_closed or is_installed(root.__module__)):
            if len(self._known) >= _MAX_KNOWN:  # notebooks define functions again and again
                self._known.clear()
            self._known[key] = footprint
        return False

    def _enters(self, value: object, footprint: _Footprint, memo: dict[int, bool]) -> bool:
        """Whether importing the module of ``value`` would build captured objects again."""
        module = sys.modules.get(_module_of(value))
        if module is None or module.__name__ == "__main__" or id(vars(module)) in footprint.spaces:
            return False
        footprint.spaces[id(vars(module))] = vars(module)
        return self._holds(vars(module), memo)

    def _holds(self, space: dict[str, object], memo: dict[int, bool]) -> bool:
        """Whether a module's globals are captured objects, or hold some: in containers, in objects of its own."""
        answer = memo.get(id(space))
        if answer is None:
            answer = memo[id(space)] = self._looks_into(space)
        return answer

    def _looks_into(self, space: dict[str, object]) -> bool:
        if self._holds_captured(space):
            return True
        name = space.get("__name__", "")
        if not is_own(name):
            return False
        return any(map(self._is_captured, _walk(_data_of(space), None, only_data=True)))


def _data_of(space: dict[str, object]) -> list[object]:
    """What a module's globals hold, but for code and what Python itself puts there."""
    return [
        value
        for name, value in list(space.items())
        if not isinstance(value, (*_ATOMS, *_CODE)) and name not in _OF_EVERY_MODULE
    ]


def members_used(module: types.ModuleType, names: frozenset[str]) -> dict[str, object]:
    """The part of a module that functions use which use these names."""
    return {name: value for name, value in list(vars(module).items()) if name in names}


def _walk(root: object, footprint: _Footprint | None, *, only_data: bool = False) -> Iterator[object]:
    """Everything that ``root`` reaches, each once, ``root`` first. Libraries are left out; installed packages are
    looked at from within, but not entered from outside: they do not know the user's program. ``only_data``: not what
    functions, classes and modules reach."""
    package = _package_of(root)
    seen: set[tuple[int, frozenset[str]]] = set()
    keep: list[object] = []  # temporaries must outlive the walk, or others could get their ids
    pending = [(root, frozenset[str]())]
    while pending and len(seen) < _MAX_OBJECTS:
        value, names = pending.pop()
        if isinstance(value, _ATOMS) or (only_data and isinstance(value, _CODE)):
            continue
        key = (id(value), names if isinstance(value, types.ModuleType) else frozenset[str]())
        if key in seen:
            continue
        seen.add(key)
        keep.append(value)
        if isinstance(value, _CODE):
            module = _module_of(value)
            if is_library(module) and not getattr(value, "__closure__", None):
                continue
            yield value
            if is_installed(module) and _package_of(value) != package:
                continue
        else:
            yield value
        if isinstance(value, types.FunctionType):
            pending.extend(_from_function(value, footprint))
        elif isinstance(value, types.ModuleType):
            pending.extend((member, names) for member in members_used(value, names).values())
        else:
            pending.extend((part, frozenset[str]()) for part in _parts(value))


def _from_function(fn: types.FunctionType, footprint: _Footprint | None) -> Iterator[tuple[object, frozenset[str]]]:
    nothing: frozenset[str] = frozenset()
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents, nothing
        except ValueError:  # a name that is assigned later
            continue
    for part in _extras(fn):
        yield part, nothing
    space = fn.__globals__
    if is_library(space.get("__name__", "")):
        return
    names = names_in(fn.__code__)
    values = tuple(map(space.get, names))
    if footprint is not None and not is_installed(fn.__module__):  # installed code stays as it is
        footprint.names.append((space, names, values))
        footprint.functions.append((fn, _extras(fn)))
    used = frozenset(names)
    for value in values:
        if value is not None:
            yield value, used


def _extras(fn: types.FunctionType) -> tuple[object, ...]:
    """What a function reaches besides its cells and globals."""
    return *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), *vars(fn).values()


def _are_same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _look_at_function(fn: types.FunctionType, names: tuple[str, ...]) -> list[object]:
    """What `_from_function` goes on to; an empty cell as nothing at all."""
    parts = [fn.__code__, *map(fn.__globals__.get, names)]
    if fn.__closure__ is not None:
        for cell in fn.__closure__:
            with contextlib.suppress(ValueError):  # a name that is assigned later
                parts.append(cell.cell_contents)
    if fn.__defaults__ is not None or fn.__kwdefaults__ is not None or fn.__dict__:
        parts += _extras(fn)
    return parts


def _look_at_class(cls: type) -> list[object]:
    return [*cls.__bases__, *vars(cls).values()]


def _look_at_parts(value: object) -> Look:
    """`_parts`, made for being called again and again."""
    if type(value) is dict and len(value) < _MAX_MEMBERS:
        return value.values
    if type(value) is list and len(value) < _MAX_MEMBERS:
        return value.copy
    if isinstance(value, functools.partial | Mapping | list | set):
        return lambda: list(_parts(value))
    if not hasattr(value, "__dict__"):
        return lambda: (type(value),)
    if len(value.__dict__) < _MAX_MEMBERS:
        return functools.partial(_look_at_object, value)
    return lambda: [type(value), *itertools.islice(value.__dict__.values(), _MAX_MEMBERS)]


def _look_at_object(value: object) -> tuple[object, ...]:
    return type(value), *value.__dict__.values()


def _stays_as_it_is(value: object) -> bool:
    """A frozen dataclass of nothing that changes, as settings are. A program with many of them would otherwise look at
    little else."""
    if type(value) is tuple:
        return all(map(_stays_as_it_is, value))
    how = vars(type(value)).get("__dataclass_params__")  # not of a base: a class derived from a frozen one takes more
    if how is None or not how.frozen:
        return isinstance(value, _ATOMS)
    return all(map(_stays_as_it_is, getattr(value, "__dict__", {}).values()))


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, type):
        if not is_library(value.__module__):
            yield from value.__bases__
            for part in list(vars(value).values()):
                yield from functions_of(part)
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, CachedFunction):
        yield value.__wrapped__
    elif isinstance(value, Mapping):
        yield from itertools.islice(list(value.values()), _MAX_MEMBERS)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from itertools.islice(list(value), _MAX_MEMBERS)
    elif not is_library(type(value).__module__) or isinstance(value, types.SimpleNamespace):
        yield type(value)
        yield from itertools.islice(list(getattr(value, "__dict__", {}).values()), _MAX_MEMBERS)


def functions_of(member: object) -> Iterator[object]:
    """What stands in a class's body: behind descriptors there are functions."""
    if isinstance(member, staticmethod | classmethod):
        yield from functions_of(member.__func__)
    elif isinstance(member, CachedFunction):
        yield member.__wrapped__
    elif isinstance(member, property):
        yield from (part for part in (member.fget, member.fset, member.fdel) if part is not None)
    else:
        yield member


def _module_of(value: object) -> str:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _is_constant(value: object) -> bool:
    """Whether what it reaches changes only with the globals that it names."""
    return is_installed(_module_of(value)) or (isinstance(value, types.FunctionType) and not value.__closure__)


def _key_of(value: object) -> tuple[object, int] | None:
    """What an answer is remembered by; None where it is not."""
    if isinstance(value, types.FunctionType):
        return value.__code__, id(value.__globals__)
    if isinstance(value, type) and is_installed(value.__module__):
        return value, 0
    return None


def _package_of(value: object) -> str:
    return _module_of(value).partition(".")[0]


@functools.lru_cache(maxsize=4096)
def is_installed(module_name: str) -> bool:
    """Whether it lies where packages are installed, unlike a program's own files."""
    origin = getattr(sys.modules.get(module_name), "__file__", None) or ""
    import sysconfig  # reads the environment when it is imported

    return origin.startswith((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))


def is_own(module_name: Hashable) -> bool:
    """Whether it is the program's: no library and no installed package."""
    return not is_library(module_name) and not is_installed(module_name)


def is_own_file(module_name: str) -> bool:
    """Whether it is a file of the program's that other processes import."""
    return module_name not in ("", "__main__") and is_own(module_name)


@functools.lru_cache(maxsize=4096)
def is_library(module_name: str | None) -> bool:
    """Whether it belongs to what every process has, and nobody's program changes: Python, torch, torchstrat."""
    root = (module_name or "").partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names
