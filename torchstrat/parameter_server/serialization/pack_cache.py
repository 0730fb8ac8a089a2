"""Functions that were packed before and are the same still: found again in a microsecond or two.

A pickle of a function stays right as long as everything that was read for it is the same: the function's own parts, the
values of its cells and of the globals that it names, and behind these whatever is not an atom, or captured and sent as
a reference. All of this is noted by identity, part by part. What may change unseen (arrays, tensors, objects with a
pickling of their own) is not noted; a function that reaches such things is `Unstable`, and is packed anew each time.

Nothing that may lead to captured objects is kept alive by this: functions, classes and objects are noted weakly.
"""

from __future__ import annotations

import copyreg
import hashlib
import operator
import sys
import types
import typing
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, Generic, TypeVar

import torch

from torchstrat.core.tensor_bytes import bytes_of
from torchstrat.parameter_server.messages import Token
from torchstrat.parameter_server.serialization.captured_objects import Catalog, Outgoing
from torchstrat.parameter_server.serialization.closure_walk import is_library
from torchstrat.parameter_server.serialization.path_errors import Refused
from torchstrat.parameter_server.serialization.plain import ATOMS, is_plain

_MAX_PARTS = 500
_MISSING = object()  # in place of a name that has no value
_OF_MODULES = ("__name__", "__package__", "__path__", "__file__")  # globals that go with every function by value
_FUNCTIONS_OWN = operator.attrgetter("__code__", "__name__", "__qualname__", "__module__", "__doc__")
_CONSTANTS = (
    *(torch.dtype, torch.device, types.CodeType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.UnionType),
)
_Look = Callable[[], Collection[object]]
_Container = list[object] | set[object] | dict[object, object]
_call = operator.methodcaller("__call__")


@dataclass(frozen=True, eq=False)
class Packed:
    """Something on its way: ``blob``, a pickle, and ``tensors`` beside it, contiguous and on the CPU.

    The last ``buffers`` of the tensors are bytes of arrays. ``tokens``: the captured objects that it refers to;
    ``alive`` holds these, so that they exist as long as it may still be sent, and does not travel itself.
    """

    blob: bytes = field(repr=False)
    tensors: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    buffers: int = 0
    tokens: frozenset[Token] = frozenset()
    what: str = "the function"
    alive: tuple[object, ...] = field(default=(), repr=False)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal for equal contents only, tensors included: a name for what a worker already has.

        Reads all the tensors, about 1 ms per MiB; without tensors some microseconds.
        """
        digest = hashlib.blake2b(self.blob, digest_size=16)
        for tensor in self.tensors:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(bytes_of(tensor.contiguous()).numpy().data)
        return digest.digest()

    @property
    def nbytes(self) -> int:
        return len(self.blob) + sum(tensor.nbytes for tensor in self.tensors)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "alive": ()}


class Unstable(Exception):  # noqa: N818  # never leaves the package
    """Raised for what may change unseen."""


class _Weak(weakref.ref):  # type: ignore[type-arg]
    """Of a class of its own: a program may have weak references too."""

    __slots__ = ()


class Parts:
    """What several things consisted of when they were looked at: identities, with what is needed to know that they
    hold."""

    def __init__(self) -> None:
        self._looks: list[_Look] = []
        self._counts: list[int] = []
        self._kept: list[object] = []

    def add(self, look: _Look, kept: Iterable[object]) -> None:
        parts = list(kept)
        self._looks.append(look)
        self._counts.append(len(parts))
        self._kept += parts

    def are_same(self) -> bool:
        now: list[Collection[object]] = list(map(_call, self._looks))
        if list(map(len, now)) != self._counts:
            return False
        # The quick question first: whether they are the same where nothing is kept weakly.
        kept = self._kept
        return all(map(operator.is_, chain.from_iterable(now), kept)) or same_parts([*chain(*now)], kept)


def same_parts(now: list[object], kept: list[object]) -> bool:
    """Whether these are the very objects that were there when ``kept`` was made of them by `keep`."""
    if len(now) != len(kept):
        return False
    for value, known in zip(now, kept):  # noqa: B905  # of equal length, and this is the inner loop
        if value is not known and (type(known) is not _Weak or known() is not value):
            return False
    return True


def keep(value: object) -> object:
    """``value``, or a weak reference to it, where it could hold captured objects."""
    if type(value) in ATOMS or value is _MISSING or isinstance(value, _CONSTANTS):
        return value
    try:
        return _Weak(value)
    except TypeError:
        if is_plain(value) or type(value) is types.BuiltinFunctionType or is_harmless_set(value):
            return value
        raise Unstable from None


def is_harmless_set(value: object) -> bool:
    return (type(value) is set or type(value) is frozenset) and ATOMS.issuperset(map(type, value))


def function_parts(fn: types.FunctionType, names: tuple[str, ...]) -> list[object]:
    """All that a function consists of. ``names``: of the globals that count.

    Raises `Unstable` where a cell is empty: the name is assigned later.
    """
    parts = [*_FUNCTIONS_OWN(fn)]
    space = fn.__globals__
    for name in names:
        parts.append(space.get(name, _MISSING))
    try:
        for cell in fn.__closure__ or ():
            parts.append(cell.cell_contents)
    except ValueError:
        raise Unstable from None
    if fn.__defaults__:
        parts += fn.__defaults__
    for mapping in (fn.__kwdefaults__, fn.__dict__, fn.__annotations__):
        if mapping:
            parts += mapping
            parts += mapping.values()
    return parts


def object_parts(value: object) -> list[object]:
    """All that an object of an ordinary class consists of."""
    members = vars(value)
    return [type(value), *members, *members.values()]


def class_parts(cls: type) -> list[object]:
    members = vars(cls)
    return [*cls.__bases__, *members, *members.values()]


def _of_weak(parts: Callable[..., list[object]], reference: _Weak, *args: object) -> list[object]:
    value = reference()
    return [] if value is None else parts(value, *args)


class Survey:
    """Goes through what was pickled for a root, as the pickler does, and notes it. ``guards``: what there is to look at
    again, but for the root's own parts. ``references``: those that the root was pickled with."""

    def __init__(self, references: Outgoing) -> None:
        self._references = references
        self._seen: dict[int, object] = {}
        self._looked: set[_Look] = set()  # of those that are equal for the same thing: methods of namespaces
        self.guards = Parts()

    def visit(self, value: object) -> None:
        """Note ``value`` and all behind it. Raises `Unstable`."""
        if type(value) in ATOMS or value is _MISSING or id(value) in self._seen:
            return
        if len(self._seen) >= _MAX_PARTS:
            raise Unstable
        self._seen[id(value)] = value
        if type(value) is types.FunctionType:
            self._function(value)
        elif type(value) is types.MethodType:
            self.visit(value.__func__)
            self.visit(value.__self__)
        elif isinstance(value, type):
            self._class(value)
        elif type(value) is types.ModuleType:
            if not is_library(value.__name__) or sys.modules.get(value.__name__) is not value:
                raise Unstable
        elif type(value) is types.BuiltinFunctionType:
            if not isinstance(value.__self__, types.ModuleType | type | None):
                raise Unstable  # a method of an object
        elif typing.get_origin(value) is not None:  # list[int], in an annotation
            self._visit_all((typing.get_origin(value), *typing.get_args(value)))
        elif type(value) is tuple or type(value) is frozenset:
            self._visit_all(value)
        elif type(value) is list or type(value) is dict or type(value) is set:
            self._container(value)
        elif not isinstance(value, _CONSTANTS) and self._references.reference_to(value) is None:
            self._object(value)

    def _visit_all(self, values: Iterable[object]) -> None:
        for value in values:
            self.visit(value)

    def _note(self, look: _Look) -> None:
        parts = list(look())
        self._visit_all(parts)
        self.guards.add(look, map(keep, parts))

    def _container(self, value: _Container) -> None:
        """Of atoms alone, however deep; of others nobody can tell weakly whether they are the same."""
        if len(value) > _MAX_PARTS or not (is_plain(value) or is_harmless_set(value)):
            raise Unstable
        self._note(partial(_contents, value))

    def names_of(self, fn: types.FunctionType) -> tuple[str, ...]:
        """The globals that travel with a function by value."""
        from torchstrat.parameter_server.serialization.pickler import globals_named

        return *globals_named(fn.__code__), *_OF_MODULES

    def goes_by_name(self, value: object) -> bool:
        from torchstrat.parameter_server.serialization.pickler import can_go_by_name

        return not self._references.by_value(value) and can_go_by_name(value)

    def _function(self, fn: types.FunctionType) -> None:
        if self.goes_by_name(fn):
            self.note_name(fn)
        else:
            self._note(partial(_of_weak, function_parts, _Weak(fn), self.names_of(fn)))

    def _class(self, cls: type) -> None:
        if is_library(cls.__module__):
            return
        if type(cls) is not type:
            raise Unstable
        if self.goes_by_name(cls):
            self.note_name(cls)
        else:
            self._note(partial(_of_weak, class_parts, _Weak(cls)))

    def note_name(self, value: types.FunctionType | type) -> None:
        """A function or class that goes by name: that it still has it, and that it still reaches nothing captured."""
        if is_library(value.__module__):
            return
        found = self._references.rests_on(value)
        if found is None:
            raise Unstable
        holder: object = sys.modules[value.__module__]
        for name in value.__qualname__.split("."):
            named = getattr(holder, name)
            self.guards.add(partial(_named, holder, name), (named,))
            holder = named
        for look, parts in found:
            if look not in self._looked:
                self._looked.add(look)
                self.guards.add(look, parts)

    def _object(self, value: object) -> None:
        """An object of a program's own class, pickled as objects are."""
        kind: Any = type(value)
        ordinary = (
            all(not is_library(each.__module__) and "__slots__" not in vars(each) for each in kind.__mro__[:-1])
            and kind.__reduce_ex__ is object.__reduce_ex__
            and kind.__reduce__ is object.__reduce__
            and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
            and not hasattr(kind, "__getnewargs__")
            and not hasattr(kind, "__getnewargs_ex__")
            and kind not in copyreg.dispatch_table
        )
        if not ordinary:
            raise Unstable
        self._note(partial(_of_weak, object_parts, _Weak(value)))


def _named(holder: object, name: str) -> tuple[object, ...]:
    return (getattr(holder, name, _MISSING),)


def _contents(container: _Container) -> list[object]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


_MAX_CODES = 256
_MAX_VARIANTS = 8  # of one code: a closure over each of some models
_MAX_FAILURES = 3


class Remembered:
    """By the code of functions, which stays the same where they are defined again and again (lambdas, closures).

    What a function rests on is compared part by part with what it was (see `same_parts`), so that it is packed anew in
    every case in which that could make a difference. Keeps no captured object alive. Thread-safe.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: OrderedDict[int, _OfOneCode] = OrderedDict()

    def find(self, fn: object) -> Packed | None:
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

    def keep(self, fn: object, packed: Packed, references: Outgoing) -> None:
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
    def __init__(self, code: object) -> None:
        self.code = code  # kept alive: it is known by its id
        self.entries: list[_Entry] = []
        self.failures = 0


def _code_of(fn: object) -> object:
    """The code that a callable is known by; its class for a callable object; None for others."""
    if type(fn) is types.FunctionType:
        return fn.__code__
    if type(fn) is types.MethodType:
        return fn.__func__.__code__ if type(fn.__func__) is types.FunctionType else None
    return None if isinstance(fn, type) else type(fn)


class _Entry:
    """One function as it was packed, and all that this rests on."""

    def __init__(self, fn: object, packed: Packed, references: Outgoing, catalog: Catalog) -> None:
        from torchstrat.parameter_server.serialization.pickler import modules_sent_by_value

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

    def _parts_of(self, fn: Any) -> list[object]:
        if self._names is not None:
            return function_parts(fn, self._names)
        if self._is_method:
            return [fn.__func__, fn.__self__]
        if type(fn) is types.FunctionType:
            return [fn, fn.__code__, fn.__module__, fn.__qualname__]
        return [fn]

    def packed_again(self, fn: object, catalog: Catalog) -> Packed | None:
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


def _weakly(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value  # the catalog holds it as well


def _circumstances(catalog: Catalog, sent_by_value: Callable[[], set[str]]) -> tuple[object, ...]:
    """What decides how things travel, besides the things themselves: what is captured; which modules there are, for a
    function that names a package travels with its submodules; and which of them cloudpickle was told to send."""
    return catalog.captures, len(sys.modules), sent_by_value()


_Kept = TypeVar("_Kept")

KEPT_CODES = 256
"""How many functions a worker keeps unpickled. The coordinator keeps the same account of it."""


class Recent(Generic[_Kept]):
    """The most recently used entries. Two of them that see the same calls hold the same keys."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Hashable, _Kept] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def values(self) -> Iterable[_Kept]:
        return self._entries.values()

    def use(self, key: Hashable) -> _Kept:
        self._entries.move_to_end(key)
        return self._entries[key]

    def add(self, key: Hashable, value: _Kept) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def drop(self, is_gone: Callable[[_Kept], bool]) -> None:
        """Those whose values are."""
        for key in [key for key, value in self._entries.items() if is_gone(value)]:
            del self._entries[key]
