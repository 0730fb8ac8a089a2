"""Parameters, buffers, children, hooks and plain attributes of modules: workers have what the coordinator's program has
put there.

Attributes, such as a dropout's ``p``, travel once, with their object; so do those of optimizers of the program's own
classes. What the program sets afterwards, a number, a string or a tuple of such, travels with the settings of the next
function; of anything else that it sets there is one warning. What it deletes from a module, perhaps to register a
parameter or a child by that name, goes from the workers' too.

Modules travel once. What the program adds, removes or replaces afterwards (a new head, a larger table, pruning) travels
with the settings of the next function, and is put into the same module of each worker.
"""

from __future__ import annotations

import functools
import operator
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    hooks_after_accumulation,
    hooks_before_forward,
    hooks_on_gradient,
    next_hook_id,
    optimizers_without_compiler,
    own_buffers,
    own_children,
    own_parameters,
    unsaved_buffers,
    version_of,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_bytes import is_same
from torchstrat.parameter_server.messages import Gone, SetAttribute, SetAttributes, Token, VariableSpec
from torchstrat.parameter_server.serialization.captured_objects import Catalog
from torchstrat.parameter_server.serialization.functions import pack
from torchstrat.parameter_server.serialization.pack_cache import Packed
from torchstrat.parameter_server.serialization.plain import are_atoms, is_fixed
from torchstrat.parameter_server.variables import class_attributes
from torchstrat.parameter_server.variables.cached_parameter import Alias, TensorCall, let_ask

ATTRIBUTES = "attributes"
"""Of the settings' keys: (this, token of a module or an optimizer) → `SetAttributes`."""

_SET_BY_SCHEDULERS = ("step", "_opt_called")
_DEPTH, _MOST_PARTS = 3, 100
"""Of values that may change and stay the same object: how deep they are looked into, and up to what size."""
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "__overloads__"))  # which torch.jit.script sets


@functools.cache
def of_every_optimizer() -> frozenset[str]:
    with optimizers_without_compiler():
        return frozenset((*vars(Optimizer([torch.empty(0)], {})), *_SET_BY_SCHEDULERS))


def names_of(object_: nn.Module | Optimizer) -> list[str]:
    """Attributes that are not those of every module or optimizer."""
    usual = _OF_EVERY_MODULE if isinstance(object_, nn.Module) else of_every_optimizer()
    return [name for name in object_.__dict__ if name not in usual]


def fixed_attributes(object_: nn.Module | Optimizer) -> dict[str, object]:
    """Those of its attributes that are numbers, strings, or tuples of such."""
    members = object_.__dict__
    return {name: members[name] for name in names_of(object_) if is_fixed(members[name])}


def _leaves(value: Any, depth: int = 3) -> Iterator[object]:
    """What is in lists, tuples and dictionaries that are in one another, keys left out."""
    if depth and type(value) in (list, tuple, dict):
        for one in value.values() if type(value) is dict else value:
            yield from _leaves(one, depth - 1)
    else:
        yield value


def marks_of_tensors(optimizer: Optimizer) -> dict[str, list[tuple[int, int]]]:
    """By attribute, other ones when it, or a list or dictionary in it, has got another tensor, or one was changed in
    place. Parameters are left out."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name in names_of(optimizer):
        for one in _leaves(optimizer.__dict__[name]):
            if type(one) is torch.Tensor and not one.is_inference():
                found.setdefault(name, []).append((id(one), version_of(one)))
    return found


def may_be_copied(value: Any, depth: int = 3) -> bool:
    """Whether it is tensors and fixed values alone, or lists and dictionaries of such."""
    if depth and type(value) is dict:
        return all(map(is_fixed, value)) and all(may_be_copied(one, depth - 1) for one in value.values())
    if depth and type(value) in (list, tuple):
        return are_atoms(map(type, value)) or all(may_be_copied(one, depth - 1) for one in value)
    return type(value) is torch.Tensor or is_fixed(value)


class _Known(NamedTuple):
    owner: weakref.ref[nn.Module | Optimizer]
    size: int
    """Of its dictionary."""
    values_of: Callable[[dict[str, object]], object]


class PlainAttributes:
    """Of the coordinator's modules and optimizers. ``shown_by``: the variable whose memory a tensor shows."""

    def __init__(
        self, shown_by: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None, *, watches_derived: bool = True
    ) -> None:
        self._shown_by = shown_by
        self._watches_derived = watches_derived
        self._known: dict[int, _Known] = {}
        # By identity: a variable in shards is a module, and compares as its values do.
        self._sent: MutableMapping[nn.Module | Optimizer, dict[str, object]] = WeakIdKeyDictionary()
        self._set: MutableMapping[nn.Module | Optimizer, dict[str | tuple[int, str], SetAttribute]] = (
            WeakIdKeyDictionary()
        )
        self._has_warned = False

    def mark(self, owner: nn.Module | Optimizer) -> object:
        """Equal marks of an object: nothing was set. Every call of `schedule` asks for that of every module."""
        members = owner.__dict__
        known = self._known.get(id(owner))
        if known is None or known.size != len(members) or known.owner() is not owner:
            known = self._look_at(owner)
        try:
            values = known.values_of(members)
        except KeyError:  # one was deleted, and another one set
            values = self._look_at(owner).values_of(members)
        if type(values) is not tuple:
            return None  # it has none
        return values if are_atoms(map(type, values)) else tuple([mark_of(value) for value in values])

    def _look_at(self, owner: nn.Module | Optimizer) -> _Known:
        key, known = id(owner), self._known
        reference = weakref.ref(owner, lambda _: known.pop(key, None))
        always_there = next(iter(vars(owner)))  # with it there are two, or none of the object's own
        values_of = operator.itemgetter(always_there, *names_of(owner))
        found = known[key] = _Known(reference, len(vars(owner)), values_of)
        return found

    def note(self, owner: nn.Module | Optimizer) -> None:
        """It is sent now."""
        if owner not in self._sent:
            class_attributes.note(owner)
            self._watch_derived(owner)
            self._sent[owner] = {name: _kept(owner.__dict__[name]) for name in names_of(owner)}

    def changed(self, owners: Iterable[tuple[Token, nn.Module | Optimizer]]) -> Mapping[Token, SetAttributes]:
        """What was set since each of these objects, with their tokens, was here first: that is when it was sent."""
        found: dict[Token, SetAttributes] = {}
        class_attributes.look()
        for token, owner in owners:
            sent = self._sent.get(owner)
            if sent is None:
                self.note(owner)
                continue
            self._watch_derived(owner)
            for name in names_of(owner):
                value = owner.__dict__[name]
                before = sent.get(name, self)
                if before == _kept(value):
                    continue
                sent[name] = _kept(value)
                if is_fixed(value):
                    self._set.setdefault(owner, {})[name] = SetAttribute(time.time_ns(), value)
                else:
                    self._set.get(owner, {}).pop(name, None)
                    if not (_is_worked_out(owner, value) or self._follows(value, before)):
                        self._warn(owner, name)
            if isinstance(owner, nn.Module):
                for name in sent.keys() - vars(owner).keys():
                    del sent[name]
                    self._set.setdefault(owner, {})[name] = SetAttribute(time.time_ns(), Gone.GONE)
            now: dict[str | tuple[int, str], SetAttribute] = {
                **self._set.get(owner, {}),
                **class_attributes.set_on(owner),
            }
            if now or owner in self._set:
                found[ATTRIBUTES, token] = now
        return found

    def _follows(self, value: object, before: object) -> bool:
        """Whether it is a view of a variable, as it was: workers have one of theirs."""
        is_as_it_was = isinstance(before, tuple) and before[0] == id(value)
        return is_as_it_was and isinstance(value, torch.Tensor) and self._shown_by(value) is not None

    def _watch_derived(self, owner: nn.Module | Optimizer) -> None:
        if self._watches_derived and isinstance(owner, nn.Module) and hooks_before_forward(owner):
            for name in names_of(owner):
                _watch_derived(owner, name)

    def take(self, owner: Optimizer, values: Mapping[str, object]) -> None:
        """What its steps have set, on a server. What the program has set since it was last looked at stays, and goes
        there with the next function."""
        self.note(owner)
        members, sent = owner.__dict__, self._sent[owner]
        for name, value in values.items():
            if name not in members or sent.get(name) == _kept(members[name]):
                _put(members, name, value)
                sent[name] = _kept(members[name])

    def _warn(self, owner: nn.Module | Optimizer, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"attribute {name!r} of a {type(owner).__name__} was set, or changed in place, on the coordinator "
                "after it had been sent to the other tasks. Numbers, strings and tuples of such follow where they are "
                "set; this is none, and they keep what they have. Give it to the function as an argument, or set it in "
                "the function. (Further ones are not warned of.)",
                stacklevel=2,
            )


def _put(members: dict[str, Any], name: str, value: Any) -> None:
    """A list or dictionary stays the same object, as where steps write to it."""
    there = members.get(name)
    if type(value) is type(there) is list:
        there[:] = value
    elif type(value) is type(there) is dict:
        there.clear()
        there.update(value)
    else:
        members[name] = value


def _is_worked_out(owner: nn.Module | Optimizer, value: object) -> bool:
    """Whether it is what a hook makes anew in each forward pass, as pruning and older reparametrizations do."""
    return isinstance(value, torch.Tensor) and isinstance(owner, nn.Module) and bool(hooks_before_forward(owner))


def _kept(value: object) -> object:
    """To be compared with later ones: 1 is another number than 1.0."""
    return (type(value), value) if is_fixed(value) else mark_of(value)


def mark_of(value: object) -> object:
    """Another one where it is another object, or was changed in place, as far as that can be told."""
    if is_fixed(value):
        return value
    found = _contents(value, _DEPTH)
    return id(value) if found is None else (id(value), found)


def _contents(value: Any, depth: int) -> object:
    """Other ones when a container, a tensor or a record of settings was changed in place; None of what is something
    else, or has parts that are, such as parameters: who holds those tells of them."""
    kind = type(value)
    if kind is torch.Tensor:
        return None if value.is_inference() else version_of(value)
    members: Any = value if kind in _CONTAINERS else getattr(value, "__dict__", None)
    if type(members) not in _CONTAINERS or len(members) > _MOST_PARTS:
        return None
    parts = [*members, *members.values()] if type(members) is dict else [*members]
    if are_atoms(map(type, parts)):
        return parts
    found = [part if is_fixed(part) else _contents(part, depth - 1) if depth else None for part in parts]
    return None if any(one is None and part is not None for one, part in zip(found, parts, strict=True)) else found


_CONTAINERS = (list, tuple, dict, set)


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
    """Remembers what modules had when they were first sent. Weak."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[weakref.ref[nn.Module], list[object]]] = {}
        self._changed: weakref.WeakKeyDictionary[nn.Module, tuple[object, Packed | None]] = weakref.WeakKeyDictionary()
        """With the marks of its hooks, and these in a `Packed`."""
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._kinds: weakref.WeakKeyDictionary[nn.Module, type] = weakref.WeakKeyDictionary()  # when they were sent
        self._other_kind: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of another class than that, or were once

    def check(self, modules: Iterable[nn.Module]) -> None:
        """Raise `UnsupportedError` for what would not be on the workers as it is here."""
        for module in modules:
            ids = _ids(module)
            known = self._sent.get(id(module))
            is_known = known is not None and known[0]() is module
            if is_known and known is not None and known[1] == ids:
                continue
            for name, tensor in own_parameters(module).items():
                if tensor is not None:
                    check_parameter(f"{type(module).__name__}.{name}", tensor)
            if is_known:
                self._changed.setdefault(module, (None, None))
            if self._kinds.setdefault(module, type(module)) is not type(module):
                self._other_kind.add(module)
            self._sent[id(module)] = weakref.ref(module, partial(_forget, self._sent, id(module))), ids
            (self._hooked.add if any(_hook_marks(module)) else self._hooked.discard)(module)

    def mark(self) -> list[object]:
        """Equal ones: no hook was registered, or removed, on any module."""
        return [next_hook_id(), len(self._hooked), *(mark for module in self._hooked for mark in _hook_marks(module))]

    def changed(
        self, catalog: Catalog, spec_of_buffer: Callable[[nn.Module, str], VariableSpec | None]
    ) -> Iterator[tuple[Token, Members]]:
        """The modules that have changed since they were sent, with what they have now."""
        for module, (marks, hooks) in list(self._changed.items()):
            now = [type(module), _hook_marks(module)]
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


# -- what hooks before a forward pass make ----------------------------------------------------------------------------
#
# ``weight`` of a layer that `torch.nn.utils.prune` prunes, or of one with `torch.nn.utils.weight_norm`, is an
# attribute that such a hook derives from parameters. On the coordinator it is as old as the last forward pass there,
# and functions train these meanwhile. In a plain program it would be that of the last training step, which nobody has
# here. So who reads it is told, where the hook would make another value now; pruning the layer once more reads it.

_Make = Callable[[nn.Module], torch.Tensor]


def _watch_derived(module: nn.Module, name: str) -> None:
    """Functions may change what an attribute was derived from, if it is such a one."""
    value = vars(module)[name]
    make = _maker(module, name) if type(value) is torch.Tensor else None
    if make is not None:
        let_ask(value, DerivedValue(module, name, value, make))


def _maker(module: nn.Module, name: str) -> _Make | None:
    """What makes the attribute anew, and sets nothing."""
    for hook in hooks_before_forward(module).values():
        if getattr(hook, "_tensor_name", None) == name and hasattr(hook, "apply_mask"):
            return hook.apply_mask  # type: ignore[no-any-return]
        # Spectral norm goes one iteration further each time.
        if getattr(hook, "name", None) == name and not hasattr(hook, "n_power_iterations"):
            return getattr(hook, "compute_weight", None)
    return None


class DerivedValue:
    """A `Holder`, of the attribute itself. Pickles and deep copies have it as it is."""

    is_variable, hands_on = False, False

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor, make: _Make) -> None:
        self._module, self._name, self._tensor = weakref.ref(module), name, weakref.ref(tensor)
        self._make = make  # pruning takes its hook away before it reads

    @property
    def shown(self) -> str:
        return f"<{self._name}, as the last forward pass on the coordinator has made it>"

    def require_value(self) -> None:
        module, tensor = self._module(), self._tensor()
        if module is None or tensor is None:
            return
        is_in_place = vars(module).get(self._name) is tensor
        if not is_in_place:
            return  # it is nobody's any more
        with torch.no_grad():
            now = self._make(module)
        with DisableTorchFunctionSubclass():
            if is_same(tensor, now):
                return
        kind = type(module).__name__
        raise UnsupportedError(
            f"{self._name} of {kind} is what the last forward pass on the coordinator has made of its parameters, and "
            f"functions have changed these since. Call the {kind}, or the model that it is in, on the coordinator "
            f"(under torch.no_grad()) before you read {self._name} or prune it again; what is trained is "
            f"{self._name}_orig (pruning) or {self._name}_g and {self._name}_v (weight_norm)."
        )

    def call(self, call: TensorCall) -> object:
        return call.run()

    def read(self, alias: Alias) -> None:
        pass
