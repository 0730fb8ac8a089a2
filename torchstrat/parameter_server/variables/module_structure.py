"""Members and hooks of modules, and hooks around steps of optimizers: workers have those of the coordinator's program.

Modules travel once. What the program adds, removes or replaces afterwards (a new head, a larger table, pruning) travels
with the settings of the next function, and is put into the same module of each worker.

Hooks on steps (`Optimizer.register_step_pre_hook` and the like) travel with their optimizer and run where a function
calls ``step()``, before what it pushes and after that. What the program registers or removes later travels with the
settings of the next function. So does a ``step`` that it puts into the object itself, which is then the function's own
code.

The step itself is made on a server. So what PyTorch calls in the middle of one cannot be called: hooks of an optimizer
that another one wraps, and those of an optimizer whose class calls ``super().step()``, which hooks see as a step of its
own as soon as the process has made an optimizer of that base class. A function that makes such a step is refused.

Hooks on all optimizers, or on all modules, are those of one process. While the program's has any, nothing is scheduled.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchstrat.core._torch_private import (
    global_module_hooks,
    hooks_after_accumulation,
    hooks_on_gradient,
    next_hook_id,
    optimizer_post_hooks,
    optimizer_pre_hooks,
    own_buffers,
    own_children,
    own_parameters,
    unsaved_buffers,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.optimizers import is_listed, own_step, wrapped_by
from torchstrat.parameter_server.messages import Token, VariableSpec
from torchstrat.parameter_server.serialization.captured_objects import Catalog
from torchstrat.parameter_server.serialization.closure_walk import functions_of, names_in
from torchstrat.parameter_server.serialization.functions import pack
from torchstrat.parameter_server.serialization.pack_cache import Packed
from torchstrat.parameter_server.variables.program_files import CodeOfClasses, ProgramFiles

MEMBERS = "members"
"""Of the settings' keys: (this, token of a module) → `Members`."""


class Members(NamedTuple):
    """What a module has, by name and in order: variables, tokens of children, None for what is registered as None.
    ``not_saved``: names of buffers that are not in ``state_dict()``. ``hooks``: a `Packed` of its class, where that has
    changed, as parametrizations do it, and of its tables of hooks."""

    parameters: Mapping[str, VariableSpec | None]
    buffers: Mapping[str, VariableSpec | None]
    children: Mapping[str, object]
    not_saved: frozenset[str]
    hooks: Packed


class ModuleStructure:
    """Remembers what modules had when they were first sent. Weak. ``named_files``: as of `Reach`."""

    def __init__(self, named_files: Collection[str]) -> None:
        self._sent: dict[int, tuple[weakref.ref[nn.Module], list[object]]] = {}
        self._changed: weakref.WeakKeyDictionary[nn.Module, tuple[object, Packed | None]] = weakref.WeakKeyDictionary()
        """With the marks of its hooks, and these in a `Packed`."""
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._kinds: weakref.WeakKeyDictionary[nn.Module, type] = weakref.WeakKeyDictionary()  # when they were sent
        self._other_kind: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of another class than that, or were once
        self._code = CodeOfClasses()
        self._files = ProgramFiles(named_files)

    def check(self, modules: Iterable[nn.Module]) -> None:
        """Raise `UnsupportedError` for what would not be on the workers as it is here."""
        for module in modules:
            revision = self._code.revision(type(module))
            ids = [*_ids(module), revision]
            known = self._sent.get(id(module))
            is_known = known is not None and known[0]() is module
            if is_known and known is not None and known[1] == ids:
                continue
            for name, tensor in own_parameters(module).items():
                if tensor is not None:
                    check_parameter(f"{type(module).__name__}.{name}", tensor)
            if is_known:
                self._changed.setdefault(module, (None, None))
            if revision or self._kinds.setdefault(module, type(module)) is not type(module):
                self._other_kind.add(module)
            self._sent[id(module)] = weakref.ref(module, partial(_forget, self._sent, id(module))), ids
            (self._hooked.add if any(_hook_marks(module)) else self._hooked.discard)(module)

    def mark(self) -> list[object]:
        """Equal ones: no hook was registered, or removed, on any module, and no class or file has changed."""
        hooks = [mark for module in self._hooked for mark in _hook_marks(module)]
        return [next_hook_id(), len(self._hooked), *hooks, *self._code.marks(), *self._files.marks()]

    def changed(
        self, catalog: Catalog, spec_of_buffer: Callable[[nn.Module, str], VariableSpec | None]
    ) -> Iterator[tuple[Token, object]]:
        """The modules that have changed since they were sent, with what they have now; and the program's files."""
        yield from self._files.changed()
        for module, (marks, hooks) in list(self._changed.items()):
            now = [type(module), self._code.revision(type(module)), _hook_marks(module)]
            if hooks is None or marks != now:
                tables = {name: dict(vars(module)[name]) for name in _hook_tables(module)}
                kind = type(module) if module in self._other_kind else None
                hooks = pack((kind, tables), catalog, what=f"the hooks of {type(module).__name__}")
                self._changed[module] = now, hooks
            members = Members(
                {name: None if one is None else catalog.spec_of(one) for name, one in own_parameters(module).items()},
                {
                    name: one if one is None else spec_of_buffer(module, name)
                    for name, one in own_buffers(module).items()
                },
                {name: None if one is None else catalog.refer_to(one) for name, one in own_children(module).items()},
                frozenset(unsaved_buffers(module)),
                hooks,
            )
            yield (MEMBERS, catalog.token_of(module)), members


class _Known(NamedTuple):
    """What one module has."""

    module: nn.Module
    parameters: Mapping[str, torch.Tensor | None]
    children: Mapping[str, nn.Module | None]
    ids: tuple[tuple[int, ...], tuple[int, ...]]


class KnownMembers:
    """What modules have on a worker, as the coordinator has it: what a function changes is told from that. Not weak."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def note(self, modules: Iterable[nn.Module]) -> None:
        """These are all that there are, and each is as it should be."""
        self._known = [_known(module) for module in modules if isinstance(own_children(module), dict)]

    def changed(self) -> Iterator[tuple[nn.Module, list[str], list[nn.Module]]]:
        """Modules that have other members now: words for each that was replaced or taken out, and children that were
        added. All are known from then on."""
        for place, known in enumerate(self._known):
            if known.ids == _ids_of_members(known.module):
                continue
            parameters, children = own_parameters(known.module), own_children(known.module)
            words = [*_differences("parameter", known.parameters, parameters)]
            words += _differences("layer", known.children, children)
            if not words and [name for name in children if name in known.children] != [*known.children]:
                words.append("its layers are in another order")
            added = [one for name, one in children.items() if one is not None and known.children.get(name) is None]
            yield known.module, words, added
            self._known[place] = _known(known.module)  # unless that was an error for who asked

    def put_back(self) -> None:
        """Have every module as it was."""
        for known in self._known:
            if known.ids != _ids_of_members(known.module):
                fill(own_parameters(known.module), known.parameters)
                fill(own_children(known.module), known.children)


def _known(module: nn.Module) -> _Known:
    return _Known(module, dict(own_parameters(module)), dict(own_children(module)), _ids_of_members(module))


def _ids_of_members(module: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(id, own_parameters(module).values())), tuple(map(id, own_children(module).values()))


def _differences(kind: str, had: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    for name, before in had.items():
        if before is not None and now.get(name) is not before:
            where = "another one" if now.get(name) is not None else "None" if name in now else "gone"
            yield f"its {kind} {name!r} is {where}"


def fill(members: dict[str, Any], now: Mapping[str, object]) -> None:
    """The same dictionary, with other contents."""
    members.clear()
    members.update(now)


def _forget(known: dict[int, tuple[weakref.ref[nn.Module], list[object]]], key: int, _: object) -> None:
    known.pop(key, None)


def check_parameter(name: str, tensor: torch.Tensor) -> None:
    """Raise `UnsupportedError` for a parameter that has no values yet, or hooks that would not be there on workers."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise UnsupportedError(
            f"{name} has no shape yet: its module is lazy. Call the model once on a small batch inside "
            "`with strategy.scope():`, so that it can be placed on the parameter servers."
        )
    if hooks_on_gradient(tensor) or hooks_after_accumulation(tensor):
        raise UnsupportedError(
            f"{name} has a gradient hook, which would not run on the workers: they have parameters of their own. "
            "Change the gradients between backward() and step() in the function instead."
        )


def _ids(module: nn.Module) -> list[object]:
    """Other ones when a parameter, a child or the name of a buffer was added, removed or replaced."""
    members = [(name, id(one)) for each in (own_parameters(module), own_children(module)) for name, one in each.items()]
    return [
        *members,
        *((name, one is None) for name, one in own_buffers(module).items()),
        _hook_marks(module),
        id(type(module)),
    ]


def _hook_tables(module: nn.Module) -> list[str]:
    """Names of its dictionaries of hooks around forward and backward passes, and of what belongs to these."""
    return [name for name in vars(module) if name.startswith(("_forward_", "_backward_")) and "hooks" in name]


def _hook_marks(module: nn.Module) -> list[object]:
    return [
        (name, [*table], list(map(id, table.values())))
        for name in _hook_tables(module)
        if (table := vars(module)[name])
    ]


# -- around steps of optimizers ----------------------------------------------------------------------------------------


STEP_HOOKS = "step hooks"
"""Of the settings' keys: (this, token of an optimizer) → `Packed` of `tables_of` it and its `own_step`."""

_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def tables_of(optimizer: Optimizer) -> dict[str, dict[int, object]]:
    """Of hooks, by name. A wrapper that does without PyTorch's constructor has none; its step is a function's own."""
    return {name: table for name in _TABLES if (table := vars(optimizer).get(name)) is not None}


def has_hooks(optimizer: Optimizer) -> bool:
    return any(tables_of(optimizer).values())


def marks_of_hooks(optimizers: Sequence[Optimizer]) -> list[object]:
    """Equal ones, as long as no hook was registered anywhere: nothing has changed. Every `schedule` asks."""
    counts = [len(table) for one in optimizers for name in _TABLES if (table := one.__dict__.get(name))]
    steps: list[object] = [id(one.__dict__.get("step")) for one in optimizers]
    return [counts, steps, *map(called_within, optimizers)] if counts else steps


def called_within(optimizer: Optimizer) -> str:
    """Whose hooks PyTorch calls in the middle of a step of ``optimizer``, for errors; "" if there are none."""
    if is_listed(type(optimizer)) or not tables_of(optimizer):
        return ""
    for inner in wrapped_by(optimizer):
        if has_hooks(inner):
            return f"those of the {type(inner).__name__} that it wraps"
    base = _stepped_within(type(optimizer)) if has_hooks(optimizer) else None
    return "" if base is None else f"its own, to which {base.__name__}.step, called within it, is a step as well"


def _stepped_within(kind: type[Optimizer]) -> type | None:
    """The base class whose ``step`` the class's own may call, if hooks see that."""
    for base in kind.__mro__[1 : kind.__mro__.index(Optimizer)]:
        # PyTorch puts its hooks around the step of a class when the first of its objects is made.
        if hasattr(vars(base).get("step"), "hooked") and _may_step(kind, base):
            return base
    return None


def _look_for_step(kind: type, base: type) -> bool:
    """Whether code of ``kind``, or of classes between it and ``base``, names a ``step``."""
    between = kind.__mro__[: kind.__mro__.index(base)]
    members = [one for each in between for member in vars(each).values() for one in functions_of(member)]
    codes = (getattr(inspect.unwrap(one), "__code__", None) for one in members if callable(one))
    return any("step" in names_in(code) for code in codes if code is not None)


_may_step: Callable[[object, object], bool] = functools.lru_cache(1024)(_look_for_step)


class _Refusing(NamedTuple):
    """A hook before a step that is not to be made in a function."""

    what: str

    def __call__(self, optimizer: Optimizer, *_: object) -> NoReturn:
        raise UnsupportedError(
            f"a scheduled function steps {type(optimizer).__name__}, and PyTorch calls hooks in the middle of its "
            f"step: {self.what}. Steps are made on parameter servers, where no hook runs. Do what the hook does in the "
            "function, before or after step(), and remove it (handle.remove())."
        )


_OF_TORCH = ("torch.", "torchstrat.")
_found_none: object = None  # when the tables were looked at last; every `schedule` asks


def require_no_global_hooks() -> None:
    """Raise `UnsupportedError` where the program has registered hooks on all modules or optimizers of this process."""
    global _found_none
    now = next_hook_id(), len(optimizer_pre_hooks), len(optimizer_post_hooks)
    if now == _found_none:
        return
    tables = [("optimizers", table) for table in (optimizer_pre_hooks, optimizer_post_hooks)]
    tables += [("modules", table) for table in global_module_hooks]
    for what, table in tables:
        for hook in list(table.values()):
            if not str(getattr(hook, "__module__", "")).startswith(_OF_TORCH):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise UnsupportedError(
                    f"a function was scheduled while {name} is registered as a hook on all {what} of this process. "
                    "Workers are other processes, where it would not be called. Register it on those that it is meant "
                    "for, or remove it (handle.remove())."
                )
    _found_none = now


class StepHooks:
    """Remembers what hooks optimizers had when they were sent. Weak."""

    def __init__(self) -> None:
        self._sent: MutableMapping[Optimizer, object] = WeakIdKeyDictionary()
        self._changed: MutableMapping[Optimizer, tuple[object, Packed]] = WeakIdKeyDictionary()

    def changed(self, catalog: Catalog, optimizers: Iterable[Optimizer]) -> Iterator[tuple[Token, Packed]]:
        """Of those whose hooks are others than when they were here first, which is when they are sent, or that must
        not be stepped: what they have now."""
        for optimizer in optimizers:
            within, tables, step = called_within(optimizer), tables_of(optimizer), own_step(optimizer)
            own: list[object] = [(name, [*table], list(map(id, table.values()))) for name, table in tables.items()]
            own.append(id(getattr(step, "__func__", step)))
            sent = self._sent.setdefault(optimizer, own)
            before, packed = self._changed.get(optimizer, (None, None))
            if before is None and sent == own and not within:
                continue
            if packed is None or before != (own, within):
                found = _with(tables, within), step
                packed = pack(found, catalog, what=f"what {type(optimizer).__name__} does around steps")
                self._changed[optimizer] = (own, within), packed
            yield (STEP_HOOKS, catalog.token_of(optimizer)), packed


def _with(tables: Mapping[str, Mapping[int, object]], within: str) -> dict[str, dict[int, object]]:
    found = {name: dict(table) for name, table in tables.items()}
    if within:
        found[_TABLES[0]] = {-1: _Refusing(within), **found[_TABLES[0]]}
    return found
