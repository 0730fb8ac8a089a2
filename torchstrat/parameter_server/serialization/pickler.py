"""How objects are turned into bytes for another process: cloudpickle, with references and with tensors apart.

The only importer of cloudpickle, which pickles what Python's own pickle does not: functions and classes defined in a
script, a notebook or another function. Three kinds of things leave the pickle:

* what the other process has, as a reference (a *persistent id* of pickle): ``("ref", token)``,
  ``("tensor", VariableSpec)``;
* plain tensors, as ``("data", index, on an accelerator)``: they travel beside the pickle, which would copy them;
* big buffers of arrays, likewise, as tensors of bytes.

Captured objects whose own code raises while a worker makes them get a stand-in, and all others arrive. An increment is
one pickle, and what comes after it builds on it. Where unpickling fails, it is done again by Python's own unpickler
written in Python, whose steps can be watched.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import importlib
import io
import pickle
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchstrat.core import _torch_private
from torchstrat.core.errors import ContextError, FunctionError
from torchstrat.core.optimizers import own_step
from torchstrat.parameter_server.serialization.closure_walk import (
    CachedFunction,
    is_library,
    members_used,
)
from torchstrat.parameter_server.serialization.path_errors import (
    COMPILED,
    MissingModule,
    NotHere,
    Refused,
    StaysHere,
    class_for,
    is_compiled,
    missing_error,
)
from torchstrat.parameter_server.serialization.plain import (
    ClassesHere,
    from_parts,
    in_parts,
    is_dense,
    pickles_itself,
    snapshot,
)


class StepsOnCoordinator:
    """Takes the place of a scheduler's ``step`` in a worker's copy."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ContextError(
            f"{self._scheduler}.step() was called in a scheduled function. Every worker would step a copy of its own; "
            "call scheduler.step() on the coordinator, between schedule calls: the rate that is in force when a "
            "function is sent travels with it."
        )


_PLAIN = frozenset(
    {str, bytes, int, float, complex, bool, type(None), tuple, list, dict, set, frozenset, types.CodeType}
)
_IMPORTS_A_MODULE = (cloudpickle.subimport.__module__, cloudpickle.subimport.__name__)
_BIG_BUFFER_BYTES = 64 * 1024  # below, a message of its own costs more than the copy


class References(Protocol):
    """What goes as a reference, from the view of the process that sends."""

    makes_plain: bool
    """Whether parameters become plain tensors."""

    def reference_to(self, value: object) -> tuple[object, ...] | None:
        """The persistent id of ``value``; None sends it by value. Raises `Refused` where neither may be."""

    def address(self, value: int) -> tuple[str, object] | None:
        """The persistent id of an integer that is the `id` of an object; None for others."""

    def by_value(self, value: object) -> bool:
        """Whether a function, class or module must be sent by value although it can be imported."""

    def note_name(self, value: object) -> None:
        """A function, class or module is sent by name."""

    def names_used(self) -> frozenset[str]:
        """The names that the functions use which are sent: the part of a module that goes by value."""


def can_go_by_name(value: object) -> bool:
    """Whether another process that imports the same modules finds this function or class in one of them."""
    return bool(cloudpickle.cloudpickle._should_pickle_by_reference(value))


def globals_named(code: types.CodeType) -> tuple[str, ...]:
    """The globals that travel with a function by value."""
    return tuple(cloudpickle.cloudpickle._extract_code_globals(code))


modules_sent_by_value: Callable[[], set[str]] = cloudpickle.list_registry_pickle_by_value
"""Modules that the program has registered to be sent by value."""


def _reduce_cell(cell: types.CellType) -> object:
    """Empty first, since it may hold the function that it belongs to."""
    try:
        contents = cell.cell_contents
    except ValueError:  # a name that is assigned later
        return types.CellType, ()
    return types.CellType, (), (contents,), None, None, _set_cell  # None would be no state


def _set_cell(cell: types.CellType, contents: tuple[object]) -> None:
    (cell.cell_contents,) = contents


def _reduce_cached_property(found: functools.cached_property[object]) -> object:
    """Without the lock that it has before Python 3.12."""
    return copyreg.__newobj__, (type(found),), (found.func, found.attrname), None, None, _set_cached_property  # type: ignore[attr-defined]


def _set_cached_property(made: functools.cached_property[object], state: tuple[Callable[..., object], str]) -> None:
    functools.cached_property.__init__(made, state[0])
    made.attrname = state[1]


def _reduce_cached_function(cached: CachedFunction[object]) -> object:
    """Python pickles it by its name alone, which other processes do not find in a script. Its cache stays here."""
    name: object = getattr(cached, "__qualname__", None)
    return name if _is_found_by_name(cached) else _reduce_cached_function_by_value(cached)


def _reduce_cached_function_by_value(cached: CachedFunction[object]) -> object:
    own = {name: value for name, value in vars(cached).items() if name != "__wrapped__"}
    return _cached_function, (cached.__wrapped__, *cached.cache_parameters().values()), own or None


def _cached_function(fn: Callable[..., object], maxsize: int | None, typed: bool) -> object:
    return functools.lru_cache(maxsize, typed)(fn)


def _is_found_by_name(value: object) -> bool:
    """As `can_go_by_name`, of what is neither a function nor a class."""
    found = cloudpickle.cloudpickle._lookup_module_and_qualname(value)
    return found is not None and not cloudpickle.cloudpickle._is_registered_pickle_by_value(found[0])


def _reduce_class(kind: type) -> object:
    """A class by value. cloudpickle's own way to force it is to name whole modules, for the whole process; and it makes
    a class with slots without any, whose objects have another form than those of the class that they come home to."""
    reduced = cloudpickle.cloudpickle._dynamic_class_reduce(kind)
    if not _has_slots(kind):
        return reduced
    make, (metaclass, name, bases, members, *rest), (space, others), *setters = reduced
    members = {**members, "__slots__": vars(kind)["__slots__"]}
    space = {
        key: one
        for key, one in space.items()
        if key != "__slots__" and not isinstance(one, types.MemberDescriptorType)  # which the slots make
    }
    return make, (metaclass, name, bases, members, *rest), (space, others), *setters


def _has_slots(kind: type) -> bool:
    """Of its own, with values: a `typing.NamedTuple` or an enumeration may say that there are none."""
    return "__slots__" in vars(kind) and any(isinstance(one, types.MemberDescriptorType) for one in vars(kind).values())


_DISPATCHING = functools.singledispatch(lambda _: None).__code__  # type: ignore[attr-defined]
"""That of every function that `functools.singledispatch` has made."""


def _reduce_single_dispatch(fn: types.FunctionType) -> object:
    """From what is registered: it keeps that in its closure, beside a cache of weak references. Empty first, since the
    functions that are registered may call it."""
    made_by_python = vars(_empty_single_dispatch(fn.__name__)).keys()
    own = {name: value for name, value in vars(fn).items() if name not in made_by_python}
    named = {name: getattr(fn, name) for name in functools.WRAPPER_ASSIGNMENTS}
    registered = dict(vars(fn)["registry"])
    return _empty_single_dispatch, (fn.__name__,), (registered, named, own), None, None, _set_single_dispatch


def _empty_single_dispatch(name: str) -> types.FunctionType:
    def nothing_yet(_: object) -> None: ...

    nothing_yet.__name__ = name  # its errors say it
    made = functools.singledispatch(nothing_yet)
    del vars(made)["__wrapped__"]
    return made  # type: ignore[return-value]


def _set_single_dispatch(
    fn: types.FunctionType, state: tuple[dict[type, object], dict[str, object], dict[str, object]]
) -> None:
    registered, named, own = state
    for kind, one in registered.items():
        vars(fn)["register"](kind, one)
    for name, value in named.items():
        setattr(fn, name, value)
    vars(fn).update(own)


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with three differences.

    A library's wrapper around a function of the program stays the library's. cloudpickle takes it, which has the
    function's name, for the program's own and copies the globals that it uses. PyTorch's wrapper around ``step`` of an
    optimizer would then ask a copy of the dictionary of global hooks, and no hook of the other process would be called.

    Functions that share a variable of a function around them share it in the other process, too: two methods of a
    class, one of which counts and the other reads. cloudpickle gives each a variable of its own.

    What `functools` makes of the program's functions and keeps locks or weak references in is made again.
    """

    dispatch_table: ClassVar[object] = collections.ChainMap(
        {
            types.CellType: _reduce_cell,
            functools.cached_property: _reduce_cached_property,
            CachedFunction: _reduce_cached_function,
        },
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, value: object) -> object:
        if isinstance(value, type) and _has_slots(value) and not can_go_by_name(value):
            return _reduce_class(value)
        return super().reducer_override(value)

    def _dynamic_function_reduce(self, fn: types.FunctionType) -> object:
        if fn.__code__ is _DISPATCHING:
            return _reduce_single_dispatch(fn)
        make, (code, space, name, defaults, _), (attributes, slots), *others = super()._dynamic_function_reduce(fn)
        slots = {**slots, "__closure__": None}
        module = sys.modules.get(fn.__globals__.get("__name__", ""))
        if module is None or vars(module) is not fn.__globals__ or not is_library(module.__name__):
            return make, (code, space, name, defaults, fn.__closure__), (attributes, slots), *others
        slots["__globals__"] = {}
        arguments = module.__name__, code, name, defaults, fn.__closure__
        return _function_in, arguments, (attributes, slots), *others


def _function_in(module: str, code: types.CodeType, *rest: Any) -> types.FunctionType:
    return types.FunctionType(code, vars(importlib.import_module(module)), *rest)


class ObjectPickler(ValuePickler):
    """One pickle. Afterwards ``tensors`` has what travels beside it; the last ``buffers`` of these are bytes."""

    def __init__(self, references: References) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, protocol=5, buffer_callback=self._on_buffer)
        self._references = references
        self._indices: dict[int, int] = {}
        self._keep: list[torch.Tensor] = []  # temporaries must outlive the pickle, or others could get their ids
        self._data: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self.last: object = None
        """What was looked at last: the culprit, when pickling fails."""

    def pickle(self, value: object) -> bytes:
        self.dump(value)
        return self._bytes.getvalue()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self._data, *self._buffers)

    @property
    def buffers(self) -> int:
        return len(self._buffers)

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if type(value) in _PLAIN:
            return self._references.address(value) if type(value) is int else None
        self.last = value
        reference = self._references.reference_to(value)
        if reference is None and isinstance(value, torch.Tensor) and self._goes_beside(value):
            return self._beside(value)
        return reference

    def _goes_beside(self, tensor: torch.Tensor) -> bool:
        is_plain = type(tensor) is torch.Tensor or (self._references.makes_plain and isinstance(tensor, nn.Parameter))
        return is_plain and is_dense(tensor)

    def _beside(self, tensor: torch.Tensor) -> tuple[str, int, bool]:
        index = self._indices.get(id(tensor))
        if index is None:
            index = self._indices[id(tensor)] = len(self._data)
            self._keep.append(tensor)
            self._data.append(snapshot(tensor))
        return "data", index, tensor.device.type != "cpu"

    def _on_buffer(self, buffer: Any) -> bool:
        """Whether the buffer stays in the pickle."""
        with buffer.raw() as view:
            if view.nbytes < _BIG_BUFFER_BYTES:
                return True
            self._buffers.append(torch.frombuffer(bytearray(view), dtype=torch.uint8))
            return False

    def _dynamic_function_reduce(self, func: types.FunctionType) -> object:
        if is_compiled(func):
            raise Refused(func, COMPILED)
        return super()._dynamic_function_reduce(func)

    def reducer_override(self, value: object) -> object:
        path = _torch_private.path_of_operator(value)
        if path is not None:
            return _torch_private.operator_at, (path,)
        if isinstance(value, CachedFunction):
            if self._references.by_value(value):
                return _reduce_cached_function_by_value(value)
            if _is_found_by_name(value):
                self._references.note_name(value)
            return NotImplemented
        if isinstance(value, types.FunctionType | type | types.ModuleType):
            if not self._references.by_value(value):
                if can_go_by_name(value):
                    self._references.note_name(value)
                return super().reducer_override(value)
            if isinstance(value, types.FunctionType):
                return self._dynamic_function_reduce(value)
            if isinstance(value, type):
                return _reduce_class(value)
            return PartOfModule, (value.__name__,), members_used(value, self._references.names_used())
        if isinstance(value, BaseException) and not (is_library(type(value).__module__) or pickles_itself(type(value))):
            kind, args, state = in_parts(value)
            return from_parts, (kind, args), state
        if isinstance(value, Optimizer):
            return _reduce_optimizer(value)
        if isinstance(value, LRScheduler | ReduceLROnPlateau):
            return _reduce_scheduler(value)
        if isinstance(value, nn.Module) and is_parametrized(value):
            # Its class refuses to be pickled, since it is made on the fly. It travels as any class of a user's does.
            return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]
        return NotImplemented


class ObjectUnpickler(pickle.Unpickler):
    """Undoes `ObjectPickler`. ``resolve`` gives what the references stand for.

    Tensors that were on an accelerator arrive on ``device``.
    """

    def __init__(
        self,
        blob: bytes,
        tensors: Sequence[torch.Tensor],
        buffers: int,
        resolve: Callable[[tuple[object, ...]], object],
        device: torch.device,
    ) -> None:
        data = len(tensors) - buffers
        super().__init__(io.BytesIO(blob), buffers=[tensor.numpy() for tensor in tensors[data:]])
        self._data = list(tensors[:data])
        self._resolve = resolve
        self._device = device

    def persistent_load(self, reference: Any) -> object:
        if reference[0] == "id":
            return id(reference[1])
        if reference[0] != "data":
            return self._resolve(reference)
        _, index, on_accelerator = reference
        if on_accelerator and self._data[index].device != self._device:
            self._data[index] = self._data[index].to(self._device)
        return self._data[index]


class IncrementUnpickler(ObjectUnpickler):
    """For captured objects. What cannot be imported has a stand-in."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == _IMPORTS_A_MODULE:
            return _import_or_stand_in
        try:
            return super().find_class(module, name)
        except Exception as error:
            return class_for(name, missing_error(error, f"{module}.{name}"))


def _import_or_stand_in(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        return MissingModule(name, missing_error(error, name))


class ResultUnpickler(ClassesHere, ObjectUnpickler):
    """For what comes back. A class of the user's program comes home."""


class PartOfModule(types.ModuleType):
    """The part of an importable module that the functions use which travel with it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"module {self.__name__!r} holds captured objects, so the functions that use it travelled with the part "
            f"of it that they name, and {name!r} is not in that part. Name it in the function as "
            f"{self.__name__}.{name}, or import it inside the function."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return importlib.import_module, (self.__name__,)


def _reduce_optimizer(optimizer: Optimizer) -> object:
    """Its class and all that is set on it, without state: that is made where the variables are."""
    get_state = getattr(optimizer, "__getstate__", None)
    state = dict(get_state() if get_state is not None else vars(optimizer))
    state["state"] = defaultdict(dict)
    # torch leaves out what subclasses set on themselves. Schedulers wrap `step`, in a way that cannot be pickled.
    own = {name: value for name, value in vars(optimizer).items() if name not in (*state, "step")}
    step = own_step(optimizer)
    if step is not None and not isinstance(step, StaysHere):
        own["step"] = step
    return copyreg.__newobj__, (type(optimizer),), (state, own), None, None, set_optimizer_state  # type: ignore[attr-defined]


def set_optimizer_state(optimizer: Optimizer, states: tuple[dict[str, object], dict[str, object]]) -> None:
    state, own = states
    vars(optimizer).update(own)  # what properties of its class read, of which param_groups may be one
    optimizer.__setstate__(state)
    vars(optimizer).update(own)


def _reduce_scheduler(scheduler: object) -> object:
    """As it is; its ``step`` raises in the other process."""
    reduced = scheduler.__reduce_ex__(2)
    if len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    guarded = {**reduced[2], "step": StepsOnCoordinator(type(scheduler).__name__)}
    return (*reduced[:2], guarded, *reduced[3:])


_Step = Callable[["_Salvaging"], None]


def load_increment(
    blob: bytes,
    tensors: Sequence[torch.Tensor],
    buffers: int,
    resolve: Callable[[tuple[object, ...]], object],
    device: torch.device,
) -> Any:
    """As `IncrementUnpickler` loads it, if need be without what raises."""
    try:
        return IncrementUnpickler(blob, tensors, buffers, resolve, device).load()
    except Exception:
        arrays = [tensor.numpy() for tensor in tensors[len(tensors) - buffers :]]
        return _Salvaging(IncrementUnpickler(blob, tensors, buffers, resolve, device), blob, arrays).load()


class _Salvaging(pickle._Unpickler):
    stack: list[Any]
    metastack: list[list[object]]
    memo: dict[int, object]
    dispatch: ClassVar[Any] = dict(pickle._Unpickler.dispatch)

    def __init__(self, plain: IncrementUnpickler, blob: bytes, arrays: Sequence[object]) -> None:
        super().__init__(io.BytesIO(blob), buffers=arrays)
        self._plain = plain

    def find_class(self, module: str, name: str) -> object:
        return self._plain.find_class(module, name)

    def persistent_load(self, reference: Any) -> object:
        try:
            return self._plain.persistent_load(reference)
        except Exception as error:
            return _stand_in(str(reference[1]), error)

    def replace(self, old: object, new: NotHere) -> None:
        """In the place of what is half made, wherever it is looked for from now on."""
        for stack in (self.stack, *self.metastack):
            stack[:] = [new if one is old else one for one in stack]
        self.memo.update({key: new for key, one in self.memo.items() if one is old})


def _stand_in(name: str, error: Exception) -> NotHere:
    why = FunctionError(
        f"{name} could not be made on this worker: its own code raised {type(error).__name__}: {error}. Correct what "
        "makes it when it is unpickled (__setstate__, __reduce__, its constructor), or make it in the function."
    )
    why.__cause__ = error
    return class_for(name, why)()


def _making(step: _Step, taken: int) -> _Step:
    """A step that takes so many things from the stack, first of all what makes an object, and puts the object there."""

    def guarded(self: _Salvaging) -> None:
        maker, *rest = self.stack[-taken:]
        below = len(self.stack) - taken
        try:
            step(self)
        except Exception as error:
            made = _stand_in(getattr(maker, "__qualname__", str(maker)), error)
            del self.stack[below:]
            self.stack.append(made)
            if maker is set_optimizer_state:
                optimizer = rest[0][0]
                self.replace(optimizer, _stand_in(type(optimizer).__qualname__, error))

    return guarded


def _filling(step: _Step) -> _Step:
    """A step that gives the object on the stack what comes after it there."""

    def guarded(self: _Salvaging) -> None:
        try:
            step(self)
        except Exception as error:
            half_made = self.stack[-1]
            self.replace(half_made, _stand_in(type(half_made).__qualname__, error))

    return guarded


for _code, _taken in ((pickle.REDUCE, 2), (pickle.NEWOBJ, 2), (pickle.NEWOBJ_EX, 3)):
    _Salvaging.dispatch[_code[0]] = _making(_Salvaging.dispatch[_code[0]], _taken)
for _code in (pickle.BUILD, pickle.SETITEM, pickle.SETITEMS, pickle.APPEND, pickle.APPENDS, pickle.ADDITEMS):
    _Salvaging.dispatch[_code[0]] = _filling(_Salvaging.dispatch[_code[0]])
