"""Plain attributes of modules and optimizers: workers and servers have what the coordinator's program has set there.

Attributes, such as a dropout's ``p``, travel once, with their object; so do those of optimizers of the program's own
classes. What the program sets afterwards, a number, a string or a tuple of such, travels with the settings of the next
function; of anything else that it sets there is one warning. What it deletes from a module, perhaps to register a
parameter or a child by that name, goes from the workers' too.

So does what it sets on their classes (``MyOptimizer.factor = 2``) after the first object of the class was sent: under
the place of the class among its bases and the name. It is set on the same class of the other process, until its job
ends.
"""

from __future__ import annotations

import functools
import operator
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    hooks_before_forward,
    optimizers_without_compiler,
    version_of,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_bytes import is_same
from torchstrat.parameter_server.messages import Gone, SetAttribute, SetAttributes, Token
from torchstrat.parameter_server.serialization.closure_walk import is_own
from torchstrat.parameter_server.serialization.plain import are_atoms, contents_of, is_fixed
from torchstrat.parameter_server.variables.cached_parameter import Alias, TensorCall, let_ask

ATTRIBUTES = "attributes"
"""Of the settings' keys: (this, token of a module, an optimizer or a variable) → `SetAttributes`."""

Owner = nn.Module | Optimizer | torch.Tensor

_SET_BY_SCHEDULERS = ("step", "_opt_called")
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "__overloads__"))  # which torch.jit.script sets


@functools.cache
def of_every_optimizer() -> frozenset[str]:
    with optimizers_without_compiler():
        return frozenset((*vars(Optimizer([torch.empty(0)], {})), *_SET_BY_SCHEDULERS))


def names_of(object_: Owner) -> list[str]:
    """Attributes that are not those of every module or optimizer. All of a tensor's are the program's."""
    if isinstance(object_, torch.Tensor):
        return list(object_.__dict__)
    usual = _OF_EVERY_MODULE if isinstance(object_, nn.Module) else of_every_optimizer()
    return [name for name in object_.__dict__ if name not in usual]


def fixed_attributes(object_: Owner) -> dict[str, object]:
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
    owner: weakref.ref[Owner]
    size: int
    """Of its dictionary."""
    values_of: Callable[[dict[str, object]], object]


class PlainAttributes:
    """Of the coordinator's modules, optimizers and variables. ``shown_by``: the variable that a tensor shows."""

    def __init__(self, shown_by: Callable[[torch.Tensor], torch.Tensor | None], *, watches_derived: bool) -> None:
        self._shown_by = shown_by
        self._watches_derived = watches_derived
        self._known: dict[int, _Known] = {}
        # By identity: a variable in shards is a module, and compares as its values do.
        self._sent: MutableMapping[Owner, dict[str, object]] = WeakIdKeyDictionary()
        self._set: MutableMapping[Owner, dict[str | tuple[int, str], SetAttribute]] = WeakIdKeyDictionary()
        self._has_warned = False

    def mark(self, owner: Owner) -> object:
        """Equal marks of an object: nothing was set. Every call of `schedule` asks for that of every module."""
        members = owner.__dict__
        known = self._known.get(id(owner))
        if known is None or known.size != len(members) or known.owner() is not owner:
            known = self._look_at(owner)
        try:
            values = known.values_of(members)
        except KeyError:  # one was deleted, and another one set, perhaps to the same value
            known = self._look_at(owner)
            values = known.values_of(members)
        if type(values) is not tuple:
            return None  # it has none
        kinds = tuple(map(type, values))
        return (known.values_of, kinds, values if are_atoms(kinds) else [mark_of(value) for value in values])

    def _look_at(self, owner: Owner) -> _Known:
        key, known = id(owner), self._known
        reference = weakref.ref(owner, lambda _: known.pop(key, None))
        always_there = next(iter(vars(owner)))  # with it there are two, or none of the object's own
        values_of = operator.itemgetter(always_there, *names_of(owner))
        found = known[key] = _Known(reference, len(vars(owner)), values_of)
        return found

    def note(self, owner: Owner) -> None:
        """It is sent now."""
        if owner not in self._sent:
            _note_classes(owner)
            self._watch_derived(owner)
            self._sent[owner] = {name: mark_of(owner.__dict__[name]) for name in names_of(owner)}

    def changed(self, owners: Iterable[tuple[Token, Owner]]) -> Mapping[Token, SetAttributes]:
        """What was set since each of these objects, with their tokens, was here first: that is when it was sent. Of
        variables, which are sent without, all that was set."""
        found: dict[Token, SetAttributes] = {}
        _look_at_classes()
        for token, owner in owners:
            sent = self._sent.get(owner)
            if isinstance(owner, torch.Tensor):
                if sent is None and not owner.__dict__:
                    continue
                sent = self._sent.setdefault(owner, {})
            if sent is None:
                self.note(owner)
                continue
            self._watch_derived(owner)
            for name in names_of(owner):
                value = owner.__dict__[name]
                before = sent.get(name, self)
                if before == mark_of(value):
                    continue
                sent[name] = mark_of(value)
                if is_fixed(value):
                    self._set.setdefault(owner, {})[name] = SetAttribute(time.time_ns(), value)
                else:
                    self._set.get(owner, {}).pop(name, None)
                    if not (_is_worked_out(owner, value) or self._follows(value, before)):
                        self._warn(owner, name)
            if isinstance(owner, nn.Module | torch.Tensor):
                for name in sent.keys() - vars(owner).keys():
                    del sent[name]
                    self._set.setdefault(owner, {})[name] = SetAttribute(time.time_ns(), Gone.GONE)
            now: dict[str | tuple[int, str], SetAttribute] = {
                **self._set.get(owner, {}),
                **set_on_classes(owner),
            }
            if now or owner in self._set:
                found[ATTRIBUTES, token] = now
        return found

    def _follows(self, value: object, before: object) -> bool:
        """Whether it is a view of a variable, as it was: workers have one of theirs."""
        is_as_it_was = isinstance(before, tuple) and before[0] == id(value)
        return is_as_it_was and isinstance(value, torch.Tensor) and self._shown_by(value) is not None

    def _watch_derived(self, owner: Owner) -> None:
        if self._watches_derived and isinstance(owner, nn.Module) and hooks_before_forward(owner):
            for name in names_of(owner):
                _watch_derived(owner, name)

    def take(self, owner: Optimizer, values: Mapping[str, object]) -> None:
        """What its steps have set, on a server. What the program has set since it was last looked at stays, and goes
        there with the next function."""
        self.note(owner)
        members, sent = owner.__dict__, self._sent[owner]
        for name, value in values.items():
            if name not in members or sent.get(name) == mark_of(members[name]):
                _put(members, name, value)
                sent[name] = mark_of(members[name])

    def _warn(self, owner: Owner, name: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        kind = "variable" if isinstance(owner, torch.Tensor) else type(owner).__name__
        sent = "" if isinstance(owner, torch.Tensor) else "after it had been sent to the other tasks"
        warnings.warn(
            f"attribute {name!r} of a {kind} was set, or changed in place, on the coordinator {sent}. Numbers, strings "
            "and tuples of such follow where they are set; this is none, and the other tasks keep what they have. Give "
            "it to the function as an argument, or set it in the function. (Further ones are not warned of.)",
            stacklevel=2,
        )


def _put(members: dict[str, Any], name: str, value: object) -> None:
    """A list or dictionary stays the same object, as where steps write to it."""
    there = members.get(name)
    if type(value) is type(there) is list:
        there[:] = value
    elif type(value) is type(there) is dict:
        there.clear()
        there.update(value)
    else:
        members[name] = value


def _is_worked_out(owner: Owner, value: object) -> bool:
    """Whether it is what a hook makes anew in each forward pass, as pruning and older reparametrizations do."""
    return isinstance(value, torch.Tensor) and isinstance(owner, nn.Module) and bool(hooks_before_forward(owner))


def mark_of(value: object) -> object:
    """Another one where it is another object, or was changed in place, as far as that can be told. 1 is another number
    than 1.0."""
    if is_fixed(value):
        return (type(value), value) if type(value) is not tuple else (tuple(map(type, value)), value)
    found = contents_of(value)
    return id(value) if found is None else (id(value), found)


# -- of classes, on the coordinator ------------------------------------------------------------------------------------


class KnownNamespace:
    """A class, or a file, and what it had when it was looked at last."""

    def __init__(self, owner: type | types.ModuleType) -> None:
        self.owner = weakref.ref(owner)
        _known_here.add(owner)
        self._values = self.sent_of(vars(owner))
        self.set: dict[str, SetAttribute] = {}
        self.size = -1
        self.values_of: Callable[[Mapping[str, object]], tuple[object, ...]] | None = None
        self._names: list[str] = []  # of these values
        self.last: tuple[object, ...] = ()
        self.count = 0

    def is_watched(self, name: str, value: object) -> bool:
        return not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")

    def sent_of(self, members: Mapping[str, object]) -> dict[str, object]:
        """Those of its members that travel when they are set."""
        return {name: value for name, value in members.items() if is_fixed(value) and not name.startswith("__")}

    def changes(self, members: Mapping[str, object]) -> int:
        """Another number when an attribute was set since, added or deleted. ``members``: of the class, or the file."""
        try:
            values = self.values_of(members) if self.values_of is not None and len(members) == self.size else None
        except KeyError:  # one was deleted, and another one set
            values = None
        if values is None:
            values = self._learn(members)
        if len(values) != len(self.last) or not all(map(operator.is_, values, self.last)):
            self.last = values
            self.count += 1
        return self.count

    def _learn(self, members: Mapping[str, object]) -> tuple[object, ...]:
        names = [name for name, value in members.items() if self.is_watched(name, value)]
        self.count += names != self._names  # others may have the same values
        self._names, self.size = names, len(members)
        always_there = next(iter(members), "")
        self.values_of = operator.itemgetter(always_there, *names) if names else None  # of two at least: a tuple
        return () if self.values_of is None else self.values_of(members)

    def look(self) -> None:
        owner = self.owner()
        now = {} if owner is None else self.sent_of(vars(owner))
        for name in self._values.keys() | now.keys():
            value = now.get(name, Gone.GONE)
            if name not in self._values or repr(self._values[name]) != repr(value):  # 1 is another number than 1.0
                self.set[name] = SetAttribute(time.time_ns(), value)
        self._values = now


_known_here: weakref.WeakSet[type | types.ModuleType] = weakref.WeakSet()
"""Where the coordinator looks: a worker in this process leaves these as they are."""
_NOTHING: Mapping[str, object] = {}
_known_classes: dict[int, KnownNamespace] = {}
"""By the ``id`` of the class. Of the process: another job's workers are to have what was set in this one."""


def _note_classes(owner: object) -> None:
    """It is sent now."""
    for kind in type(owner).__mro__:
        if id(kind) not in _known_classes and is_own(kind.__module__):
            _known_classes[id(kind)] = KnownNamespace(kind)
            weakref.finalize(kind, _known_classes.pop, id(kind), None).atexit = False


def marks_of_classes() -> list[int]:
    """Equal ones: nothing was set on any class. Every call of `schedule` asks."""
    found = []
    for one in list(_known_classes.values()):
        members = getattr(one.owner(), "__dict__", _NOTHING)
        # Most classes have none.
        if one.values_of is not None or len(members) != one.size:
            found.append(one.changes(members))
    return found


def _look_at_classes() -> None:
    """What `set_on_classes` says is that of now."""
    for one in list(_known_classes.values()):
        one.look()


def set_on_classes(owner: object) -> SetAttributes:
    """What was set on its classes since they were sent first."""
    return {
        (place, name): one
        for place, kind in enumerate(type(owner).__mro__)
        if (known := _known_classes.get(id(kind))) is not None
        for name, one in known.set.items()
    }


# -- of classes, on workers and servers --------------------------------------------------------------------------------


_taken: MutableMapping[type | types.ModuleType, dict[str, tuple[int, object]]] = weakref.WeakKeyDictionary()
"""When what was set here was set on the coordinator, and what there was before."""


def put(owner: object, attributes: SetAttributes) -> Iterator[tuple[str, SetAttribute]]:
    """Set what was set on the classes of ``owner``; gives the rest, which is its own."""
    for key, one in attributes.items():
        if isinstance(key, str):
            yield key, one
            continue
        place, name = key
        set_there(type(owner).__mro__[place], name, one)


def set_there(owner: type | types.ModuleType, name: str, one: SetAttribute) -> None:
    """Set what was set on a class, or in a file, until the job ends."""
    if owner in _known_here:
        return  # a coordinator is in this process, and it is the program's
    taken = _taken.setdefault(owner, {})
    moment, before = taken.get(name, (0, vars(owner).get(name, Gone.GONE)))
    if moment < one.moment:
        taken[name] = one.moment, dict(before) if type(before) is dict else before
        _set(owner, name, one.value)


def put_own(owner: object, attributes: SetAttributes) -> None:
    """The same, and set on ``owner``, past its class, what is its own."""
    for name, one in put(owner, attributes):
        if one.value is Gone.GONE:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = one.value


def put_back() -> None:
    """Another job begins, whose program may have set nothing."""
    for kind, taken in list(_taken.items()):
        for name, (_, before) in taken.items():
            _set(kind, name, before)
    _taken.clear()


def _set(owner: type | types.ModuleType, name: str, value: object) -> None:
    there = vars(owner).get(name)
    if type(value) is type(there) is dict:  # others may have it, by another name
        there.clear()
        there.update(value)
    elif value is not Gone.GONE:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


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
