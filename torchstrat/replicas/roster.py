"""The variables that take part in a run, under names that are equal on all ranks; and modules that are made in it.

These are lazy ones at their first call, those first built or copied in a step. What every replica of one process makes
anew in the place of the first one's is the same variable, as it is between processes. It begins with the first one's
values, and gradients are combined.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchstrat.core._torch_private import (
    hooks_before_forward,
    own_buffers,
    own_children,
    own_parameters,
    unsaved_buffers,
)
from torchstrat.core.engine import Communicator
from torchstrat.core.errors import ReplicaDivergenceError
from torchstrat.core.reachable import is_made
from torchstrat.core.variables import Members, VariableRegistry
from torchstrat.distributed.collectives.agreement import code

Signature = tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]


class Layout:
    """What is known of the variables of a roster without holding them. It stays the same object while they stay the
    same, so what follows from them need not be found out in every run."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self.names = tuple(named)
        self.index = {id(tensor): place for place, tensor in enumerate(named.values())}
        self.signature: Signature = tuple((name, t.shape, t.dtype, t.device) for name, t in named.items())
        self._known = [(weakref.ref(tensor), tensor.shape, tensor.dtype, tensor.device) for tensor in named.values()]

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are its variables."""
        return [id(known[0]()) for known in self._known] == list(map(id, tensors))

    def describes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """The same, with the shapes and dtypes, and on the devices, that they had."""
        if len(tensors) != len(self._known):
            return False
        for tensor, (reference, shape, dtype, device) in zip(tensors, self._known, strict=True):
            if reference() is not tensor or tensor.dtype is not dtype:
                return False
            if tensor.shape != shape or tensor.device != device:
                return False
        return True

    @functools.cached_property
    def digest(self) -> float:
        return code(repr([(name, tuple(shape), str(dtype)) for name, shape, dtype, _ in self.signature]))


class Roster:
    """Tensors in one order on all ranks: what an index into them means is what ranks tell each other about.

    Ranks may hold different ones for a while: a model that the program dropped lives on where Python has not yet
    collected it. ``digest`` tells whether they do, and `in_common` leaves what all of them hold.
    """

    def __init__(self, tensors: list[torch.Tensor], layout: Layout) -> None:
        self.tensors, self.layout = tensors, layout

    @staticmethod
    def of(named: Mapping[str, torch.Tensor]) -> Roster:
        return Roster(list(named.values()), Layout(named))

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def signature(self) -> Signature:
        return self.layout.signature

    @property
    def digest(self) -> float:
        """Equal on all ranks that hold the same variables."""
        return self.layout.digest

    def only(self, names: Container[str]) -> Roster:
        return Roster.of({name: tensor for name, tensor in self.items() if name in names})

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self.names, self.tensors, strict=True))

    def in_common(self, communicator: Communicator, call: str) -> Roster:
        """Those that every rank has. All ranks call it, when digests differ."""
        own = {name: (tuple(shape), str(dtype)) for name, shape, dtype, _ in self.signature}
        everyone = communicator.all_gather_object(own, call)
        for name in own:
            kinds = [other.get(name) for other in everyone]
            if None not in kinds and any(kind != kinds[0] for kind in kinds):
                each = ", ".join(f"{kind} on replica {r}" for r, kind in zip(communicator.ranks, kinds, strict=True))
                raise ReplicaDivergenceError(
                    f"{name} is not the same variable on all replicas: {each} (noticed in {call}). Every replica has "
                    "to create the same modules in the same order, and give lazy ones inputs of the same size."
                )
        return self.only({name for name in own if all(name in other for other in everyone)})


class Rosters:
    """Calls the roll of a registry. ``is_only``: no other process has variables that could be of other kinds."""

    def __init__(self, registry: VariableRegistry, *, is_only: bool = False) -> None:
        self._registry = registry
        self.describe = registry.describe
        self._is_only = is_only
        self._latest = Layout({})
        self._counts = (0, 0, 0)
        self._places: list[int | str] = []

    def now(self, members: Members | None = None) -> Roster:
        """All variables that have values by now. ``members``: of the registry, if they have just been looked up."""
        members = self._registry.members() if members is None else members
        tensors = members.tensors
        # A tensor that an optimizer has brought may get another name once a step reaches it.
        is_known = self._latest.is_of if self._is_only else self._latest.describes
        # The same tensors in the same order may have other names: pruning makes of ``weight`` a ``weight_orig``.
        is_same = self._counts == self._registry.counts and self._places == members.places
        if not is_same or not is_known(tensors):
            self._counts, self._places = self._registry.counts, members.places
            named = {
                name: tensor
                for name, tensor in self._registry.named_tensors().items()
                if not is_lazy(tensor) and not tensor.is_meta
            }
            self._latest = Layout(named)
            tensors = list(named.values())
        return Roster(tensors, self._latest)


class Newborn:
    """Watches for such modules in one run after the other.

    ``ready(module)`` is called right before the first forward pass that uses the values of its variables; on a lazy
    module this comes after its own hook, which makes the values. ``used(module)`` is called before this and every other
    forward pass, ``named(module, name, member)`` before a parameter or buffer is registered in any module;
    ``on_new`` likewise, of tensors under a name that a module which was there when the run began does not have yet.
    """

    def __init__(
        self,
        registry: VariableRegistry,
        ready: Callable[[nn.Module], None],
        used: Callable[[nn.Module], None] | None = None,
        named: Callable[[nn.Module, str, torch.Tensor | nn.Module], None] | None = None,
        on_new: Callable[[nn.Module, str, torch.Tensor], None] | None = None,
    ) -> None:
        self._registry = registry
        self._ready = ready
        self._used = used
        self._named = named
        self._on_new = on_new
        self._modules: Sequence[nn.Module] = ()
        self._watched: set[int] = set()
        self._handles: list[Any] = []

    def begin(self, modules: Sequence[nn.Module], *, has_lazy: bool) -> None:
        """A run begins. ``has_lazy``: some of the ``modules`` have lazy parameters."""
        self._modules = modules
        for module in modules if has_lazy else ():
            if any(is_lazy(parameter) for parameter in own_parameters(module).values() if parameter is not None):
                self.watch(module)
        self._registry.open(classes=self._registry.may_create)
        self._registry.on_member, self._registry.is_in_step = self._on_member, True

    def end(self) -> None:
        """Also of a run that failed before it began."""
        if self._registry.is_in_step:
            self._registry.close()
        self._registry.on_member, self._registry.is_in_step = None, False
        self._modules = ()
        if self._watched:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._watched.clear()

    def _on_member(self, module: nn.Module, name: str, member: object) -> None:
        if not isinstance(member, torch.Tensor | nn.Module) or self._registry.is_copy(module):
            return
        if self._named is not None:
            self._named(module, name, member)
        if isinstance(member, torch.Tensor):
            is_new = name not in own_buffers(module) and name not in own_parameters(module)
            if self._on_new is not None and is_new and any(module is one for one in self._modules):
                self._on_new(module, name, member)
            if is_made(module, name, member) and (member.requires_grad or self._named is not None):
                self.watch(module)

    def watch(self, module: nn.Module) -> None:
        if id(module) not in self._watched:
            self._watched.add(id(module))
            self._handles.append(module.register_forward_pre_hook(_BeforeForward(self)))

    def before_forward(self, module: nn.Module, *, is_first: bool) -> bool:
        """Whether the module's variables have their values by now."""
        if not self._handles or any(is_lazy(p) for p in own_parameters(module).values() if p is not None):
            return False
        if is_first:
            self._ready(module)
        if self._used is not None:
            self._used(module)
        return True


class _BeforeForward:
    """The hook. A deep copy of its module gets one that does nothing: the run knows of the copy otherwise."""

    def __init__(self, newborn: Newborn | None) -> None:
        self._newborn = (lambda: None) if newborn is None else weakref.ref(newborn)
        self._is_done = False

    def __call__(self, module: nn.Module, inputs: object) -> None:
        newborn = self._newborn()
        if newborn is not None:
            self._is_done = newborn.before_forward(module, is_first=not self._is_done) or self._is_done

    def __deepcopy__(self, memo: object) -> _BeforeForward:
        return _BeforeForward(None)


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """The module's own parameters, without those of its children."""
    return [parameter for parameter in own_parameters(module).values() if parameter is not None]


class _Use(NamedTuple):
    module: weakref.ref[nn.Module]
    kind: type
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    """As they were before."""


class Twins:
    """Of one run. Modules are told apart by when a replica uses them first: the first one's third new module and
    another's third are twins, unless they are one and the same."""

    def __init__(self) -> None:
        self._uses: dict[int, list[_Use]] = {}
        self._first_of: dict[int, torch.Tensor] = {}  # by `id` of another replica's

    def begin(self, replicas: Sequence[int]) -> None:
        self._uses = {replica: [] for replica in replicas}

    def end(self) -> None:
        self._uses, self._first_of = {}, {}

    def note_use(self, module: nn.Module, replica: int) -> None:
        """``replica`` uses a module that has been made in this run, or given a member."""
        uses = self._uses[replica]
        if not any(use.module() is module for use in uses):
            is_first = uses is next(iter(self._uses.values()))
            buffers = [buffer.detach().clone() for buffer in _buffers_of(module)] if is_first else []
            uses.append(_Use(weakref.ref(module), type(module), parameters_of(module), buffers))

    def pair(self, module: nn.Module, replica: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``replica`` has made a module and is about to use it. It gets the first one's buffers; the result has its
        parameters, and the first replica's like them."""
        first = next(iter(self._uses.values()))
        number, own = len(self._uses[replica]), parameters_of(module)
        if first is self._uses[replica] or number >= len(first):
            return []
        _, kind, theirs, buffers = first[number]
        if first[number].module() is module and all(map(operator.is_, own, theirs)):
            return []
        if kind is not type(module) or _kinds(own) != _kinds(theirs):
            return []
        pairs = list(zip(own, theirs, strict=True))
        self._first_of.update((id(one), other) for one, other in pairs)
        if _kinds(_buffers_of(module)) == _kinds(buffers):
            for buffer, found in zip(_buffers_of(module), buffers, strict=True):
                buffer.data.copy_(found)
        return pairs

    def are_of_first(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether each of these is a twin of one of the first replica's."""
        return all(id(tensor) in self._first_of for tensor in tensors)

    def renamed(self, roster: Roster, hidden: set[int]) -> Roster:
        """Without the ``hidden`` ones; twins under the names, and in the places, that the first replica's have."""
        names = {id(tensor): name for name, tensor in roster.items()}
        own = {}
        for name, tensor in roster.items():
            if id(tensor) not in hidden:
                first = self._first_of.get(id(tensor))
                own[name if first is None else names.get(id(first), name)] = tensor
        return Roster.of({name: own[name] for name in roster.names if name in own})


def _buffers_of(module: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in own_buffers(module).values() if buffer is not None and not is_lazy(buffer)]


def _kinds(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


# -- ranks without rows -----------------------------------------------------------------------------------------------
#
# Parameters, buffers and children that a step gives to modules, puts in each other's place or takes away are handed
# over to them, by the places that they had when the run began. What has come up in the step is made there, too, if it
# is a parameter or a buffer, with values to come. A new module is not: nobody can tell how it is made.

_Member = TypeVar("_Member")
_MemberName = tuple[int, str]
"""A module's number, and a name in it."""


class _New(NamedTuple):
    number: int
    """Among those that the step has made: one may stand in several places."""
    shape: torch.Size
    dtype: torch.dtype
    trains: bool


class _Told(NamedTuple):
    """Of one module, members by name, in order."""

    parameters: dict[str, _MemberName | _New | None]
    children: dict[str, int | None]
    """By number; None: there is none."""
    buffers: list[str]
    passing: list[str]
    """Names of buffers that are no part of the state dictionary."""


MembersTold = dict[int, _Told]


class _Members(NamedTuple):
    kind: type
    parameters: dict[str, nn.Parameter | None]
    children: dict[str, nn.Module | None]
    buffers: list[str]
    hooks: list[int]
    """Before the forward pass, as pruning has one."""


class MembersOfStep:
    """Of one run that some ranks sit out. Every rank makes one when it begins."""

    def __init__(self, registry: VariableRegistry) -> None:
        self._modules = {
            registry.number_of(module): module
            for module in registry.modules()
            if not isinstance(module, torch.jit.ScriptModule)
        }
        self._before = {number: _members_of(module) for number, module in self._modules.items()}
        self._places: dict[int, _MemberName] = {
            id(one): (number, name)
            for number, members in self._before.items()
            for name, one in members.parameters.items()
            if one is not None
        }
        self._made: dict[int, int] = {}

    def changes(self) -> MembersTold | str:
        """By the number of the module. A text: why they cannot be handed over."""
        told = {}
        numbers = {id(module): number for number, module in self._modules.items()}
        for number, module in self._modules.items():
            before, now = self._before[number], _members_of(module)
            if _are_same(before, now):
                continue
            children = {name: None if one is None else numbers.get(id(one), -1) for name, one in now.children.items()}
            new = [name for name, child in children.items() if child == -1]
            odd = [name for name, one in now.parameters.items() if one is not None and self._is_odd(one)]
            if new or odd or before.kind is not now.kind or before.hooks != now.hooks:
                what = f"a new {(new or odd)[0]!r}" if new or odd else "other hooks or another class"
                return f"a step has given {before.kind.__name__} {what}"
            parameters = {name: self._refer_to(one) for name, one in now.parameters.items()}
            told[number] = _Told(parameters, children, now.buffers, sorted(unsaved_buffers(module)))
        return told

    def _is_odd(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._places and (is_lazy(parameter) or type(parameter) is not nn.Parameter)

    def _refer_to(self, parameter: nn.Parameter | None) -> _MemberName | _New | None:
        if parameter is None or id(parameter) in self._places:
            return None if parameter is None else self._places[id(parameter)]
        number = self._made.setdefault(id(parameter), len(self._made))
        return _New(number, parameter.shape, parameter.dtype, parameter.requires_grad)

    def put(self, told: MembersTold, device: torch.device) -> None:
        """On a rank without rows. New ones have no values yet."""
        made: dict[int, nn.Parameter] = {}
        for number, (parameters, children, buffers, passing) in told.items():
            module = self._modules.get(number)
            if module is None:
                continue
            modules = {name: None if one is None else self._modules[one] for name, one in children.items()}
            refill(own_parameters(module), {name: self._find(one, made, device) for name, one in parameters.items()})
            refill(own_children(module), modules)
            refill(own_buffers(module), {name: own_buffers(module).get(name) for name in buffers})
            unsaved_buffers(module).clear()
            unsaved_buffers(module).update(passing)

    def _find(
        self, told: _MemberName | _New | None, made: dict[int, nn.Parameter], device: torch.device
    ) -> nn.Parameter | None:
        if told is None:
            return None
        if not isinstance(told, _New):
            number, name = told
            return self._before[number].parameters[name]
        if told.number not in made:
            made[told.number] = nn.Parameter(torch.empty(told.shape, dtype=told.dtype, device=device), told.trains)
        return made[told.number]


def _members_of(module: nn.Module) -> _Members:
    members = dict(own_parameters(module)), dict(own_children(module)), list(own_buffers(module))
    return _Members(type(module), *members, list(hooks_before_forward(module)))


def _are_same(before: _Members, now: _Members) -> bool:
    if before.buffers != now.buffers:
        return False
    tables = (before.parameters, now.parameters), (before.children, now.children)
    return all(
        list(was) == list(found) and all(one is found[name] for name, one in was.items()) for was, found in tables
    )


def refill(table: dict[str, _Member], members: Mapping[str, _Member]) -> None:
    """The dictionary stays the one that it is."""
    table.clear()
    table.update(members)


def refuse_members(why: str, idle: list[int]) -> ReplicaDivergenceError:
    """The error, for all ranks."""
    ranks = ", ".join(map(str, idle))
    return ReplicaDivergenceError(
        f"{why}, and replica {ranks} had no rows in that step, so that it does not have it. Do this outside of "
        "Strategy.run, where every process does it, or in a step in which every replica has rows."
    )
