"""What a step function can reach: its closure, the globals it names, defaults, bound ``self``, and its arguments; where
the memory of a tensor is, by which variables are found that share theirs with what is reached; and what comes into
reach while it is watched: modules, optimizers and helpers as they are created."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import dis
import functools
import itertools
import pathlib
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchstrat.core import nest
from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    hooks_after_accumulation,
    hooks_on_gradient,
    is_of_transform,
    loader_iterator,
    new_hook_key,
    own_buffer,
    own_children,
    own_parameters,
    registration_hooks,
)
from torchstrat.core.values import DistributedValues
from torchstrat.core.variable.tensor_like import TensorLike

GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
HELPER_TYPES = (Optimizer, LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler)
_ATOMS: tuple[type, ...] = (
    TensorLike,
    DistributedValues,
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    torch.dtype,
    torch.device,
    types.BuiltinFunctionType,
)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_WHOLES: tuple[type, ...] = (torch.Tensor, nn.Module, types.ModuleType, *HELPER_TYPES)  # looked at in any case

# Of types: every run asks.
_is_atom: Callable[[object], bool] = functools.lru_cache(1024)(lambda kind: issubclass(kind, _ATOMS))
_is_whole: Callable[[object], bool] = functools.lru_cache(1024)(lambda kind: issubclass(kind, _WHOLES))


def _find_slots(kind: type) -> tuple[str, ...]:
    """The names in its ``__slots__`` and those of its bases, as its instances know them."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        for name in names:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


slots_of: Callable[[object], tuple[str, ...]] = functools.lru_cache(1024)(_find_slots)

_LIBRARIES = frozenset(
    {"torch", "torchstrat", "numpy", "hydra", "omegaconf", "tqdm", "matplotlib", "tensorboard", "_pytest", "pytest"}
)
_MAX_OBJECTS, _MAX_OBJECTS_AGAIN = 20_000, 1_000
_MAX_MEMBERS = 1_000  # of one container: longer ones hold data


@dataclasses.dataclass
class Reached:
    """In the order in which they were met, without repetitions."""

    modules: list[nn.Module] = dataclasses.field(default_factory=list)
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    helpers: list[Any] = dataclasses.field(default_factory=list)
    generators: list[Any] = dataclasses.field(default_factory=list)
    locals: list[threading.local] = dataclasses.field(default_factory=list)
    plain: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """Tensors that are no parameters, nor leaves with a gradient."""
    arrays: list[np.ndarray[Any, Any]] = dataclasses.field(default_factory=list)
    objects: list[object] = dataclasses.field(default_factory=list)
    """Of classes of the program's own, and iterators of loaders."""
    seen: dict[int, object] = dataclasses.field(default_factory=dict)
    """Everything that was met, by `id`: temporaries must outlive the walk, or another object could get theirs."""
    classes: list[type] = dataclasses.field(default_factory=list)
    """Of the program's own, which were named."""


class Start:
    """Where the walk from a step function begins: what it names, and its arguments. Without one: these objects alone.

    Two equal starts mean an equal walk where ``is_closed``. Elsewhere the step reaches containers or objects of the
    user's own, whose contents may have changed. What the program's own functions name belongs to the start of a step
    that names them.
    """

    def __init__(self, fn: Callable[..., object] | None, arguments: Iterable[object]) -> None:
        begin = [*_from_callable(fn), *arguments]
        self._objects = [one for one in begin if not _is_atom(type(one))]
        self._classes = [one for one in begin if isinstance(one, type)]
        self.references: list[weakref.ref[object] | None] = []  # to the same; None where there is no such thing
        self.is_closed = True
        self._named = list(self._objects)
        known: set[int] = set()
        for one in self._named:  # which grows
            if _is_whole(type(one)) or _is_library_function(one):
                continue
            # Beside a method there is its object, which keeps things where no name tells of them.
            if isinstance(fn, types.MethodType) or not isinstance(one, types.FunctionType):
                self.is_closed = False
                break
            known = known or set(map(id, self._named))
            named = [each for each in _from_function(one) if not _is_atom(type(each)) and id(each) not in known]
            known.update(map(id, named))
            self._named += named
        self.ids = [id(one) for one in self._named if not _is_data(one)]

    def is_same(self, earlier: Start) -> bool:
        """Whether it starts from the very same objects as one that has forgotten its objects."""
        if self.ids != earlier.ids:
            return False
        # An id alone may have been given to another object since.
        return all(reference is None or reference() is not None for reference in earlier.references)

    def walk(self, *, again: bool = False) -> Reached:
        """What is reached. The nearest first, so that a step that reaches a whole data set still shows its model.

        ``again``: not the first walk from these objects, so only their surroundings are looked at.
        """
        limit = _MAX_OBJECTS_AGAIN if again else _MAX_OBJECTS
        reached = Reached(classes=[*self._classes])
        seen = reached.seen
        pending = collections.deque(self._objects)
        while pending and len(seen) < limit:
            value = pending.popleft()
            if isinstance(value, _ATOMS) or id(value) in seen:
                if isinstance(value, type):
                    reached.classes.append(value)
                continue
            seen[id(value)] = value
            pending.extend(_open(value, reached))
        return reached

    def forget_objects(self) -> None:
        """Keep only what `is_same` needs, which holds nothing alive."""
        self.references = [_reference_to(one) for one in self._named if not _is_data(one)]
        self._objects, self._classes, self._named = [], [], []


def walk_behind(front: Reached) -> Reached:
    """What lies behind what a walk has reached: what the methods of the program's own classes name, and what classes,
    hooks, keys and weak references hold. A step may use it, or may not: other methods of a trainer name it, too."""
    behind = Reached(seen=front.seen)
    known: set[int] = set()
    pending = collections.deque(inner for one in list(front.seen.values()) for inner in _behind(one))
    pending.extend(front.classes)
    while pending and len(behind.seen) < _MAX_OBJECTS:
        value = pending.popleft()
        if isinstance(value, type):
            if id(value) not in known and _is_of_program(value.__module__):
                known.add(id(value))
                pending.extend(itertools.chain.from_iterable(_in_class(kind) for kind in value.__mro__))
        elif not isinstance(value, _ATOMS) and id(value) not in behind.seen:
            behind.seen[id(value)] = value
            pending.extend((*_open(value, behind), *_behind(value)))
    return behind


def _behind(value: object) -> Iterator[object]:
    if isinstance(value, torch.Tensor):
        if _is_variable(value):
            with DisableTorchFunctionSubclass():  # one that a step has kept on a TPU answers no question
                hooks = [*(hooks_on_gradient(value) or {}).values(), *(hooks_after_accumulation(value) or {}).values()]
            yield from hooks
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, Mapping) and nest.is_nested(value):
        yield from itertools.islice((key for key in value if not isinstance(key, str | int)), _MAX_MEMBERS)
    else:
        yield type(value)
        if isinstance(value, HELPER_TYPES):
            yield from (member for name, member in vars(value).items() if name not in ("state", "param_groups"))


def _in_class(kind: type) -> Iterator[object]:
    if _is_of_program(kind.__module__):
        for member in itertools.islice(vars(kind).values(), _MAX_MEMBERS):
            if isinstance(member, property):
                yield from (member.fget, member.fset)
            else:
                yield member.__func__ if isinstance(member, staticmethod | classmethod) else member


@functools.lru_cache(maxsize=1024)
def _is_of_program(module_name: str | None) -> bool:
    """No library, and no other package that is installed: these name nothing of the program's."""
    if is_library(module_name):
        return False
    file = getattr(sys.modules.get(module_name or ""), "__file__", None) or ""
    return not any(part in ("site-packages", "dist-packages") for part in pathlib.PurePath(file).parts)


def _reference_to(value: object) -> weakref.ref[object] | None:
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def _is_data(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not _is_variable(value)


def _is_variable(tensor: torch.Tensor) -> bool:
    """Whether nobody has to have said so: a frozen parameter is one that steps write to, as they do to a target's."""
    return tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, nn.Parameter))


def _is_library_function(value: object) -> bool:
    return isinstance(value, types.FunctionType) and is_library(value.__module__)


@functools.lru_cache(maxsize=1024)
def is_library(module_name: str | None) -> bool:
    root = (module_name or "").partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names


def _open(value: object, reached: Reached) -> Iterator[object]:
    """Record ``value`` if it is of a kind that is looked for, and yield what to look at next."""
    if isinstance(value, torch.Tensor):
        if _is_variable(value):
            reached.tensors.append(value)
        else:
            reached.plain.append(value)
    elif isinstance(value, nn.Module):
        reached.modules.append(value)
        yield from _attributes(value, skip=("_parameters", "_buffers", "_modules"))
        for child in own_children(value).values():
            if child is not None:
                yield from _attributes(child, skip=("_parameters", "_buffers"))
    elif isinstance(value, HELPER_TYPES):
        reached.helpers.append(value)
        for name, member in vars(value).items():
            is_plain = type(member) is torch.Tensor and not member.requires_grad
            is_opened = isinstance(member, (list, tuple, *HELPER_TYPES, *GENERATOR_TYPES)) or (
                type(member) is dict and name != "state"
            )
            if is_plain or is_opened:
                yield member
    elif isinstance(value, types.GeneratorType):
        yield from [] if value.gi_frame is None else [*value.gi_frame.f_locals.values(), value.gi_yieldfrom]
    elif isinstance(value, GENERATOR_TYPES):
        reached.generators.append(value)
    elif isinstance(value, threading.local):
        reached.locals.append(value)
        yield from vars(value).values()
    elif isinstance(value, np.ndarray):
        reached.arrays.append(value)
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        yield from itertools.islice(value, _MAX_MEMBERS)
    elif isinstance(value, Mapping) and nest.is_nested(value):  # which OmegaConf's are not: they hold no tensors
        yield from itertools.islice(value.values(), _MAX_MEMBERS)
    elif not isinstance(value, types.ModuleType):
        if isinstance(value, loader_iterator) or (
            _member(value, "__dict__") is not None
            and hasattr(type(value), "__weakref__")
            and not isinstance(value, _FUNCTIONS)
            and not is_library(type(value).__module__)
        ):
            reached.objects.append(value)
        yield from _from_callable(value) if callable(value) else _attributes(value)


_OF_MODULES = frozenset(vars(nn.Module()))
_PLAIN = frozenset({int, float, bool, str, type(None)})


def may_hold_helpers(module: nn.Module) -> bool:
    """Whether it is of no class of PyTorch's, or of the base of all: a trainer, say."""
    return type(module) is nn.Module or not type(module).__module__.startswith("torch.")


def helpers_held_by(module: nn.Module) -> list[object]:
    """Optimizers, schedulers and scalers in its attributes, or in lists and the like there. Every run asks."""
    members = vars(module).items()
    found: list[object] = [one for name, one in members if type(one) not in _PLAIN and name not in _OF_MODULES]
    for value in tuple(found):
        if isinstance(value, (list, tuple, dict)) and len(value) <= _MAX_MEMBERS:
            found += value.values() if isinstance(value, dict) else value
    return [one for one in found if isinstance(one, HELPER_TYPES)] if found else found


def _attributes(value: object, skip: tuple[str, ...] = ()) -> Iterator[object]:
    if (
        isinstance(value, nn.Module)
        or not is_library(type(value).__module__)
        or isinstance(value, types.SimpleNamespace | argparse.Namespace)
    ):
        members = list((_member(value, "__dict__") or {}).items())
        for name, member in members[:_MAX_MEMBERS]:
            if name not in skip:
                yield member
        for name in slots_of(type(value)):
            yield _member(value, name)


def _member(value: object, name: str) -> Any:
    """None where there is none, also of a class whose ``__getattr__`` raises what is no AttributeError."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _from_callable(fn: object) -> list[object]:
    if isinstance(fn, types.FunctionType):
        return _from_function(fn)
    if isinstance(fn, functools.partial):
        return [fn.func, *fn.args, *fn.keywords.values()]
    if isinstance(fn, types.MethodType):
        return [fn.__self__, fn.__func__]
    if isinstance(fn, (nn.Module, *HELPER_TYPES)):
        return [fn]
    if not callable(fn):
        return []
    wrapped = _member(fn, "__wrapped__")  # `functools.lru_cache` and its like
    call = vars(type(fn)).get("__call__")
    called = _from_function(call) if isinstance(call, types.FunctionType) else []
    return [*([] if wrapped is None else [wrapped]), *_attributes(fn), *called]


def in_cell(cell: types.CellType) -> object:
    """What a name of the function around has; None where it is assigned later."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _from_function(fn: types.FunctionType) -> list[object]:
    wrapped = getattr(fn, "__wrapped__", None)
    found = [] if wrapped is None else [wrapped]
    is_of_library = is_library(fn.__module__)
    if is_of_library and fn.__closure__ is None:
        return found
    found += map(in_cell, fn.__closure__ or ())
    if fn.__defaults__:
        found += fn.__defaults__
    if fn.__kwdefaults__:
        found += fn.__kwdefaults__.values()
    if is_of_library:
        return found
    names = _names(fn.__code__)
    for name in names.of_globals:
        value = fn.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            if not is_library(value.__name__):
                found += [member for key, member in list(vars(value).items()) if key in names.of_attributes]
        elif value is not None:
            found.append(value)
    return found


def own_code(objects: Iterable[object]) -> list[types.CodeType]:
    """Of these functions and of what they name, of the methods of these objects' classes, and of what is defined in
    any of it: the program's own."""
    found: list[types.CodeType] = []
    pending = collections.deque(objects)
    seen: set[int] = set()
    while pending and len(seen) < _MAX_OBJECTS:
        value = pending.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            pending += _from_function(value)
            found += [] if is_library(value.__module__) else [value.__code__]
        elif isinstance(value, types.MethodType | functools.partial):
            pending += _from_callable(value)
        else:
            for kind in (value if isinstance(value, type) else type(value)).__mro__:
                if not is_library(kind.__module__):
                    pending += [one for one in vars(kind).values() if isinstance(one, types.FunctionType)]
    for code in found:  # which grows
        found += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return found


class _Names(NamedTuple):
    """That a function uses, and the functions defined in it, in order."""

    of_globals: dict[str, None]
    of_attributes: dict[str, None]


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> _Names:
    names = _Names({}, {})
    for one in dis.get_instructions(code):
        is_import = one.opname.startswith("IMPORT_")
        if is_import or "GLOBAL" in one.opname or one.opname == "LOAD_NAME":  # the last: in the body of a class
            names.of_globals.setdefault(one.argval)
        if is_import or "ATTR" in one.opname or "METHOD" in one.opname:
            names.of_attributes.setdefault(one.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for own, inner in zip(names, _names(constant), strict=True):
                own.update(inner)
    return names


def has_address(tensor: torch.Tensor) -> bool:
    """Whether it is plain memory, which can be shared."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.layout == torch.strided and (tensor.is_cpu or tensor.is_cuda)
    with DisableTorchFunctionSubclass():  # a variable that is cut over logical devices says where its pieces are
        is_plain = tensor.layout == torch.strided and not is_lazy(tensor) and not is_of_transform(tensor)
        return is_plain and tensor.device.type in ("cpu", "cuda")


def address_of(tensor: torch.Tensor) -> int:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.untyped_storage().data_ptr()
    with DisableTorchFunctionSubclass():  # one of parameter servers would bring its values, and keep them in mind
        return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, eq=False)
class Watcher:
    """Callbacks; they are called on the creating thread, and only where ``is_current()``."""

    is_current: Callable[[], bool]
    on_member: Callable[[nn.Module, str, object], None]
    """A parameter, buffer or child is about to be registered in a module under a name."""
    on_copy: Callable[[nn.Module], None]
    """A module has been made by a deep copy, or unpickled."""
    on_helper: Callable[[object], None]
    """An optimizer, scheduler or gradient scaler has been made."""


def is_made(module: nn.Module, name: str, member: object) -> bool:
    """Whether a member that is about to be registered is a new one: no buffer that only gets another value (``self.seen
    += 1``), nor what the module has under that name already."""
    is_there = any(members(module).get(name) is member for members in (own_parameters, own_children))
    return not is_there and own_buffer(module, name) is None


class MembersWatch:
    """Reports members from `begin` to `end`."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._key = new_hook_key()
        self._hook = self._on_member

    def begin(self) -> None:
        for hooks in registration_hooks:
            hooks[self._key] = self._hook

    def end(self) -> None:
        for hooks in registration_hooks:
            hooks.pop(self._key, None)

    def _on_member(self, module: nn.Module, name: str, member: object) -> None:
        if self._watcher.is_current():
            self._watcher.on_member(module, name, member)


class CreationWatch(MembersWatch):
    """Reports copies and helpers, too: between `begin_classes` and `end_classes`, and else from the first time on that
    a module is deep-copied.

    torch's registration hooks are global dictionaries and cost nothing to enter and leave. They miss deep copies and
    all that is no module; for these, methods of torch's classes are wrapped. Not in every run: each change of a class
    makes Python forget what it has cached about all its subclasses, and from 3.13 on it stops caching for a class that
    was changed a thousand times.
    """

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(watcher)
        self._has_seen_copy = False
        _copiers_by_class[nn.Parameter] = _copiers_by_class[torch.Tensor] = _copy_tensor

    def begin_classes(self) -> None:
        """Calls nest."""
        _wraps.add(self._watcher)

    def end_classes(self) -> None:
        _wraps.remove(self._watcher)

    def end(self) -> None:
        super().end()
        if self._has_seen_copy:
            self._has_seen_copy = False
            self.end_classes()

    def note_copy(self) -> None:
        """A module is about to be deep-copied."""
        if self._watcher.is_current() and not _wraps.has(self._watcher):
            self._has_seen_copy = True
            self.begin_classes()


def _copy_tensor(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """What `copy.deepcopy` calls from the first strategy on. A module is made from its copied members, so it is not
    there yet when the first of these is copied."""
    if isinstance(tensor, nn.Parameter) or isinstance(next(iter(memo.values()), None), nn.Module):
        for hook in tuple(registration_hooks[0].values()):
            watch = getattr(hook, "__self__", None)
            if isinstance(watch, CreationWatch):
                watch.note_copy()
    return tensor.__deepcopy__(memo)


_copiers_by_class: dict[type, Callable[[Any, dict[int, Any]], Any]] = copy._deepcopy_dispatch  # type: ignore[attr-defined]  # noqa: SLF001


class _Wraps:
    """The wrapped methods: there once, however many watch, in whichever threads and order they begin and end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: list[Watcher] = []
        self._undo: list[Callable[[], None]] = []

    def add(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers.append(watcher)
            if not self._undo:
                self._wrap(nn.Module, "__setstate__", lambda watcher, made: watcher.on_copy(made))
                for helper_type in HELPER_TYPES:
                    self._wrap(helper_type, "__init__", lambda watcher, made: watcher.on_helper(made))

    def remove(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers.remove(watcher)
            if not self._watchers:
                while self._undo:
                    self._undo.pop()()

    def has(self, watcher: Watcher) -> bool:
        return watcher in self._watchers

    def _wrap(self, owner: type, name: str, report: Callable[[Watcher, Any], None]) -> None:
        original = vars(owner).get(name)
        if original is None:
            return

        def wrapped(instance: object, *args: object, **kwargs: object) -> object:
            result = original(instance, *args, **kwargs)
            for watcher in tuple(self._watchers):
                if watcher.is_current():
                    report(watcher, instance)
            return result

        wrapped.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)
        self._undo.append(lambda: _unwrap(owner, name, wrapped, original))


_wraps = _Wraps()


def _unwrap(owner: type, name: str, wrapped: object, original: object) -> None:
    # Someone may have wrapped the method again in the meantime; theirs then keeps calling ours, which does no harm.
    if vars(owner).get(name) is wrapped:
        setattr(owner, name, original)
