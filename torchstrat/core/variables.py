"""What a strategy takes care of: modules, leaf tensors, optimizers and helpers made in its scope or reached by a step.

Registration hooks alone see only part of a model (deep copies and bare parameters register nothing), so three sources
are joined: hooks that last while a scope is open or a run goes on, the constructors of optimizers, schedulers and
gradient scalers in that time, and a walk over what the step function can reach (see `reachable`).
Everything is held weakly: a model that the user drops is forgotten.
"""

from __future__ import annotations

import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.core._torch_private import (
    is_compiler_at_work,
    is_view,
    own_buffer,
    own_buffers,
    own_children,
    own_parameters,
)
from torchstrat.core.buffer_rules import BufferRules
from torchstrat.core.errors import ReplicaDivergenceError
from torchstrat.core.optimizers import Tier, give_hook_tables, kind_of_class, take_over_steps
from torchstrat.core.reachable import (
    CreationWatch,
    Reached,
    Start,
    Watcher,
    address_of,
    has_address,
    helpers_held_by,
    may_hold_helpers,
    own_code,
    walk_behind,
)
from torchstrat.core.registration_order import FirstPlaces, Place, WeakOrdered

_MOST_OBJECTS = 64  # that a step reaches: the nearest ones; further away lie data
_MOST_PLAIN = 200
_REMEMBERED_STEPS = 256
_KINDS = ("module", "tensor", "optimizer")


class BufferSlot(NamedTuple):
    """One entry of a module's buffers. The entry, not the tensor: modules may replace the tensor by assignment."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return own_buffer(self.module, self.name)

    @property
    def has_values(self) -> bool:
        """By now."""
        tensor = self.tensor
        return tensor is not None and not is_lazy(tensor) and not tensor.is_meta


class Members(NamedTuple):
    """What there is at one moment, found in one walk."""

    modules: list[nn.Module]
    tensors: list[torch.Tensor]
    """As of `VariableRegistry.tensors`."""
    places: list[int | str]
    """Modules, by id, and the names of their parameters: what `VariableRegistry.named_tensors` has its names from."""
    buffer_slots: list[BufferSlot]
    helpers: list[Any]
    changes: int
    """`VariableRegistry.changes` of that moment."""
    vectors: list[torch.Tensor]
    """Tensors that steps reach, which share memory with variables or their gradients."""
    views: list[torch.Tensor]
    """Tensors that steps reach, which share memory with buffers."""


def _forget(kept: dict[int, Any], address: int, _: object) -> None:
    kept.pop(address, None)


def _is_part(tensor: torch.Tensor) -> bool:
    return has_address(tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes


class VariableRegistry:
    """The variables of one strategy, in order of creation (the same order on every process of an SPMD program).

    ``is_current()`` tells whether the calling thread works for this strategy; what other threads create meanwhile is
    none of its business.
    """

    def __init__(self, is_current: Callable[[], bool] = lambda: True) -> None:
        self._modules = WeakOrdered()
        self._tensors = WeakOrdered()
        self._helpers = WeakOrdered()
        self._places = FirstPlaces(self._modules, self._tensors, self._helpers)
        self._vectors, self._views, self._plain = WeakOrdered(), WeakOrdered(), WeakOrdered()
        self._thread_locals, self._arrays = WeakOrdered(), WeakOrdered()
        self.objects: list[weakref.ref[object]] = []
        """Those of the program's own classes that the step of this run reaches, the nearest first."""
        self.reached: Sequence[object] = ()
        """In the first run of a step: it, and all that it reaches. For who takes it to let it go."""
        self.variables = WeakOrdered()
        """The `Variable` objects that every process creates."""
        self._given_up = WeakOrdered()
        self._released = WeakOrdered()
        self._lone = WeakOrdered()  # optimizers that steps have made over tensors in no module
        self._lone_tensors = WeakOrdered()
        self._holders: tuple[tuple[int, int], list[weakref.ref[nn.Module]]] = ((0, 0), [])
        self._copied = WeakOrdered()  # modules that the current run has copied
        self._lone_before = 0  # how many of them there had been when the current run began
        self.is_in_step = False
        """Whether replicas run a step now."""
        self.looks_for_flat = False
        """Whether variables and gradients that share memory have to be told, and `reached`: for replicas of one
        process."""
        self._flat_seen: set[int] = set()
        self._stands_for: dict[int, tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = {}
        self._watch = CreationWatch(Watcher(is_current, self._on_member, self._on_copy, self._on_helper))
        self._opened: list[bool] = []  # whether each watches classes
        self._walked: dict[object, Start] = {}  # of the last so many steps
        self.buffer_rules = BufferRules()
        self.on_member: Callable[[nn.Module, str, object], None] | None = None
        """Called for every parameter, buffer and child registered in a module while recording. For the engine's use
        during a run."""
        self.on_copy: Callable[[nn.Module], None] | None = None
        """Called for every module made by a deep copy, or unpickled, while recording."""
        self.changes = 0
        """Counts what was added, so that a run can tell at no cost that nothing was."""
        self.may_create = False
        """Whether the step that `adopt` saw last may well make helpers: it starts from other objects than before, so
        this may be its first run."""
        self.new_code: Sequence[types.CodeType] = ()
        """Of the step that has been adopted, where it is a new one."""

    # -- while a scope is open, or a run goes on ----------------------------------------------------------------------

    def open(self, *, classes: bool = True) -> None:
        """Start recording what is created. Calls nest. ``classes``: also helpers that are made before the first deep
        copy of a module."""
        if not self._opened:
            self._watch.begin()
        if classes:
            self._watch.begin_classes()
        self._opened.append(classes)

    def close(self) -> None:
        if self._opened.pop():
            self._watch.end_classes()
        if self._opened:
            return
        self._watch.end()
        if self._has_unknown_children():
            for module in list(self._modules):
                self._add_tree(module)

    def _on_member(self, module: nn.Module, name: str, member: object) -> None:
        if is_compiler_at_work():
            return  # its graphs keep parameters and an optimizer's state as members of modules that nobody else has
        self.changes += 1
        self._modules.add(module)
        if isinstance(member, nn.Parameter):
            number, index = self._modules.number_of(module), len(own_parameters(module))
            self._places.note_new(member, Place(0, number, index, name))
        if self.on_member is not None:
            self.on_member(module, name, member)

    def _on_copy(self, module: nn.Module) -> None:
        self.changes += 1
        self._modules.add(module)
        if self.is_in_step:
            self._copied.add(module)
        if self.on_copy is not None:
            self.on_copy(module)

    def _on_helper(self, helper: Any) -> None:
        if self.is_in_step and self._is_lone(helper):
            self._add_lone(helper)
            return
        self.add_helper(helper)

    def _is_lone(self, helper: object) -> bool:
        """Whether it is an optimizer over tensors that are nobody's, or of deep copies: not over those of all replicas,
        then, but over something that each makes for its own rows and is done with at the end of the run."""
        tensors = _tensors_of(helper)
        known = {id(tensor) for tensor in self.tensors()} if tensors else set()
        known -= self.copied()
        return bool(tensors) and not any(id(tensor) in known for tensor in tensors)

    def is_copy(self, module: nn.Module) -> bool:
        """Whether the current run has made it by a deep copy: each replica's own, whatever becomes a member of it."""
        return bool(self._copied.count) and module in self._copied

    def copied(self) -> set[int]:
        """``id`` of parameters in deep copies that the current run has made: each replica's own."""
        return {id(tensor) for module in self._copied for tensor in own_parameters(module).values()}

    def note_step_of(self, optimizer: Optimizer) -> None:
        """A step in a process of its own is about to step one. Raises where an earlier run has made it like that: its
        first steps were each replica's own."""
        if optimizer in self._helpers:
            return
        number = self._lone.number_of(optimizer)
        if 0 <= number < self._lone_before:
            raise ReplicaDivergenceError(
                f"a step has made this {type(optimizer).__name__} over tensors that are no variables of the strategy "
                "(in no module, or in a deep copy), and a later one goes on with it: every replica has made steps of "
                "its own. Make variables that replicas share, and their optimizer, within `with strategy.scope():`."
            )
        if number < 0 and self._is_lone(optimizer):
            self._add_lone(optimizer)

    def _add_lone(self, optimizer: Optimizer) -> None:
        self._lone.add(optimizer)
        for tensor in _tensors_of(optimizer):
            self._lone_tensors.add(tensor)

    # -- at each run ------------------------------------------------------------------------------------------------

    def adopt(self, fn: Callable[..., object], arguments: Iterable[object]) -> list[str]:
        """Record what a step reaches. Returns descriptions of the trainable state among it that no scope had seen."""
        self._grow()
        self._lone_before = self._lone.count
        if self._copied.count:
            self._copied = WeakOrdered()
        start = Start(fn, arguments)
        step = getattr(fn, "__code__", None) or type(fn)
        before = self._walked.get(step)
        is_new = before is None or not start.is_same(before) or (self.looks_for_flat and self._has_new_flat_memory())
        self.may_create = is_new
        self.objects, self.new_code, self.reached = [], (), ()
        if start.is_closed and not is_new:
            self._adopt_held()
            return []
        found = start.walk(again=not is_new)
        adopted = self._record(found)
        if is_new:
            self._record_behind(walk_behind(found), found)
        self.objects = [weakref.ref(one) for one in found.objects[:_MOST_OBJECTS]]
        for tensor in found.plain[:_MOST_PLAIN]:
            self._plain.add(tensor)
        for local in found.locals:
            self._thread_locals.add(local)
        for array in found.arrays[:_MOST_PLAIN]:
            self._arrays.add(array)
        if is_new:
            self._note_vectors(found.plain)
            self.new_code = own_code([fn, *self._modules])
            if self.looks_for_flat:
                self.reached = (fn, *found.classes, *found.seen.values())
        start.forget_objects()
        self._remember(step, start)
        return adopted if is_new else []  # else it may have been made by an earlier run of the step

    def _adopt_held(self) -> None:
        """Optimizers and the like that known modules have been given since: nothing tells of attributes."""
        modules = self._modules
        if self._holders[0] != (modules.count, len(modules.ids())):
            found = [weakref.ref(one) for one in modules if may_hold_helpers(one)]
            self._holders = (modules.count, len(modules.ids())), found
        for module in [one for reference in self._holders[1] if (one := reference()) is not None]:
            for helper in helpers_held_by(module):
                if helper not in self._helpers and helper not in self._lone:
                    self.add_helper(helper)

    def _remember(self, step: object, start: Start) -> None:
        self._walked.pop(step, None)
        self._walked[step] = start
        if len(self._walked) > _REMEMBERED_STEPS:  # a notebook makes a new one each time that a cell is run
            del self._walked[next(iter(self._walked))]

    def _record(self, found: Reached) -> list[str]:
        adopted: list[str] = []
        for helper in found.helpers:
            if helper not in self._lone:
                self.add_helper(helper)
        owned = {id(tensor) for tensor in self._optimizer_tensors()}
        for module in found.modules:
            is_new = module not in self._modules
            self._add_tree(module)
            is_seen = self._opened or isinstance(module, torch.jit.ScriptModule)  # whose making no scope sees
            if is_new and not is_seen and _is_trainable(module) and module not in self._given_up:
                how = "that was released" if module in self._released else "made outside of it"
                adopted.append(f"a {type(module).__name__} {how}")
        if not found.tensors:
            return adopted
        members = {id(tensor) for module in self._modules for tensor in own_parameters(module).values()}
        for tensor in found.tensors:
            if id(tensor) in members or tensor in self._lone_tensors:
                continue
            is_known = id(tensor) in owned or tensor in self._given_up or not tensor.requires_grad
            if self._tensors.add(tensor) and not self._opened and not is_known:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "leaf tensor"
                adopted.append(f"a bare {kind} of shape {tuple(tensor.shape)}, in no module and no optimizer")
        return adopted

    def _record_behind(self, behind: Reached, found: Reached) -> None:
        """Of what the step may not use, what it can only change by hand: frozen, or stepped by an optimizer that is
        known. What else it trains is met where it is used. ``found`` gets what is looked at alike."""
        owned = {id(tensor) for tensor in self._optimizer_tensors()}
        for module in behind.modules:
            is_known = all(id(one) in owned or not one.requires_grad for one in module.parameters())
            if is_known and module not in self._given_up:
                self._add_tree(module)
        members = {id(tensor) for module in self._modules for tensor in own_parameters(module).values()}
        for tensor in behind.tensors:
            if not tensor.requires_grad and id(tensor) not in members:
                self._tensors.add(tensor)
        found.plain += behind.plain
        found.locals += behind.locals
        found.objects += behind.objects

    def _note_vectors(self, plain: Iterable[torch.Tensor]) -> None:
        members = self.members()
        variables = [tensor for tensor in members.tensors if has_address(tensor)]
        gradients = [tensor.grad for tensor in variables if tensor.grad is not None and has_address(tensor.grad)]
        addresses = {address_of(tensor) for tensor in (*variables, *gradients)}
        buffers = {id(slot.tensor): slot.tensor for slot in members.buffer_slots if slot.tensor is not None}
        of_buffers = {address_of(tensor) for tensor in buffers.values() if has_address(tensor)}
        for tensor in (*plain, *buffers.values()):
            if type(tensor) is not torch.Tensor or not has_address(tensor) or not tensor.numel():
                continue
            if address_of(tensor) in addresses:
                self._vectors.add(tensor)
            elif id(tensor) not in buffers and address_of(tensor) in of_buffers:
                self._views.add(tensor)
        if self.looks_for_flat:
            self._note_shared(variables)
            self._note_shared([gradient for gradient in gradients if _is_part(gradient)])

    def _note_shared(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory that several variables, or their gradients, have in common, though no tensor that a step reaches is
        all of it: a tensor that stands for it, as long as the first of them lives."""
        first: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            address = address_of(tensor)
            other = first.setdefault(address, tensor)
            if other is not tensor and address not in self._stands_for and tensor.numel():
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                gone = functools.partial(_forget, self._stands_for, address)
                self._stands_for[address] = whole, weakref.ref(other, gone)
                self._vectors.add(whole)

    def _has_new_flat_memory(self) -> bool:
        """Whether there are variables or gradients that are parts of a larger memory which the last walk has not seen:
        a flat buffer that was made between runs, or in one."""
        variables = [tensor for helper in self._helpers for tensor in _tensors_of(helper)]
        gradients = [tensor.grad for tensor in variables]
        found = {address_of(one) for one in variables if _is_part(one)}
        found |= {address_of(one) for one in gradients if one is not None and is_view(one) and _is_part(one)}
        seen, self._flat_seen = self._flat_seen, found
        return not found <= seen

    def _grow(self) -> None:
        """Children that were put into known modules since: a new head, a parametrization."""
        if self._has_unknown_children():
            for module in self._modules:
                for child in own_children(module).values():
                    if child is not None and child not in self._modules:
                        self._add_tree(child)

    def _has_unknown_children(self) -> bool:
        """Asked at both ends of every run. A module's children are in a plain dictionary, so nothing tells."""
        known = self._modules.ids()
        for module in self._modules.alive():
            if children := own_children(module):
                for child in children.values():
                    if child is not None and id(child) not in known:
                        return True
        return False

    def _add_tree(self, module: nn.Module) -> None:
        if self._modules.add(module):
            self.changes += 1
        for child in own_children(module).values():
            if child is not None:
                self._add_tree(child)

    def modules_since(self, count: int) -> list[nn.Module]:
        """Those recorded since so many had ever been, and what is a child of any by now."""
        self._grow()
        return [module for number, module in self._modules.numbered() if number >= count]

    # -- what there is ----------------------------------------------------------------------------------------------

    def __contains__(self, value: object) -> bool:
        if isinstance(value, nn.Module):
            return value in self._modules
        return any(value is tensor for tensor in self.tensors()) or any(
            value is slot.tensor for slot in self.buffer_slots()
        )

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    def tensors(self) -> list[torch.Tensor]:
        """Parameters of the modules, leaf tensors, and what optimizers hold; each once. Looked up anew at every call,
        since parameters may be replaced (``load_state_dict(assign=True)``, ``.to()``, pruning)."""
        return self.members().tensors

    def members(self) -> Members:
        """Modules, tensors, buffers and helpers. Looked up anew at every call, for the reason given at `tensors`."""
        modules, helpers = self._modules.alive(), self._helpers.alive()
        found: dict[int, torch.Tensor] = {}
        places: list[int | str] = []
        slots: list[BufferSlot] = []
        for module in modules:
            if parameters := own_parameters(module):
                places.append(id(module))
                places += parameters.keys()
                for parameter in parameters.values():
                    if parameter is not None:
                        found[id(parameter)] = parameter
            if buffers := own_buffers(module):
                slots += [BufferSlot(module, name) for name, _ in buffers.items()]
        for tensor in self._tensors.alive() if self._tensors.count else ():
            found[id(tensor)] = tensor
        for helper in helpers:
            for tensor in _tensors_of(helper):
                found[id(tensor)] = tensor
        if self._places.left():
            found = {id(tensor): tensor for tensor in self.named_tensors().values()}
        vectors = self._vectors.alive() if self._vectors.count else []
        views = self._views.alive() if self._views.count else []
        return Members(modules, list(found.values()), places, slots, helpers, self.changes, vectors, views)

    def plain_tensors(self) -> list[torch.Tensor]:
        """What steps reach that is no parameter, nor a leaf with a gradient: the nearest, further away lie data."""
        return self._plain.alive()

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """NumPy's, that steps reach: the nearest, further away lie data."""
        return self._arrays.alive() if self._arrays.count else []

    def thread_locals(self) -> list[threading.local]:
        """What steps have reached that has other attributes on each thread."""
        return self._thread_locals.alive() if self._thread_locals.count else []

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """`tensors`, by names that are the same on every process of an SPMD program."""
        found: dict[int, tuple[Place, torch.Tensor]] = {}
        for place, tensor in self._members():
            found.setdefault(id(tensor), (place, tensor))
        if left := self._places.left():
            for key in left.keys() & found.keys():
                found[key] = left[key], found[key][1]
        for place, tensor in found.values():
            self._places.note(tensor, place)
        named = sorted(found.values(), key=operator.itemgetter(0)) if left else found.values()
        return {f"{place.name} of {_KINDS[place.kind]} {place.number}": tensor for place, tensor in named}

    def _members(self) -> Iterator[tuple[Place, torch.Tensor]]:
        for number, module in self._modules.numbered():
            for index, (name, parameter) in enumerate(own_parameters(module).items()):
                if parameter is not None:
                    yield Place(0, number, index, name), parameter
        for number, tensor in self._tensors.numbered():
            yield Place(1, number, 0, "value"), tensor
        for number, helper in self._helpers.numbered():
            for index, tensor in enumerate(_tensors_of(helper)):
                yield Place(2, number, index, str(index)), tensor

    def buffer_slots(self) -> list[BufferSlot]:
        return list(self.named_buffer_slots().values())

    def named_buffer_slots(self) -> dict[str, BufferSlot]:
        """`buffer_slots`, named as in `named_tensors`."""
        return {
            f"{name} of module {number}": BufferSlot(module, name)
            for number, module in self._modules.numbered()
            for name, _ in own_buffers(module).items()
        }

    def number_of(self, module: nn.Module) -> int:
        """The number that `named_tensors` gives a module; -1 for one that is not recorded."""
        return self._modules.number_of(module)

    def outermost_names(self) -> dict[int, str]:
        """``id`` of each parameter → the name that it has in the outermost recorded module: what sharding rules
        go by."""
        modules = list(self.modules())
        inner = {id(child) for module in modules for child in module.modules() if child is not module}
        found: dict[int, str] = {}
        for module in modules:
            if id(module) not in inner:
                for name, parameter in module.named_parameters(remove_duplicate=False):
                    found.setdefault(id(parameter), name)
        return found

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many modules, tensors and helpers have ever been recorded: what the next ones' numbers follow from."""
        return self._modules.count, self._tensors.count, self._helpers.count

    @property
    def population(self) -> tuple[int, ...]:
        """Of modules, tensors and helpers: how many were ever recorded, and how many of these are there still. Other
        numbers whenever anything has been recorded since, or dropped by the program."""
        modules, tensors, helpers = self._modules, self._tensors, self._helpers
        return (
            *(modules.count, len(modules.ids()), tensors.count, len(tensors.ids())),
            *(helpers.count, len(helpers.ids())),
        )

    def catch_up_with(self, counts: tuple[int, int, int]) -> None:
        """Go on numbering where another process is, which ran a step that this one did not."""
        for ordered, count in zip((self._modules, self._tensors, self._helpers), counts, strict=True):
            ordered.count = max(ordered.count, count)

    def let_go(self, values: Iterable[object]) -> None:
        """Forget these, though the program has them still."""
        for value in values:
            if isinstance(value, nn.Module):
                self._released.add(value)
            for ordered in (self._modules, self._tensors, self._helpers):
                ordered.discard(value)
        self._places.clear()
        self._walked.clear()

    def give_up(self, counts: tuple[int, int, int]) -> None:
        """Forget what was recorded since these were the `counts`: the strategy has refused it. What a step reaches of
        it is recorded again, to be refused again, or not without the rest."""
        for value in self.forget_since(counts):
            self._given_up.add(value)

    def forget_since(self, counts: tuple[int, int, int]) -> list[object]:
        """Forget what was recorded since these were the `counts`, and give it."""
        forgotten = []
        for ordered, count in zip((self._modules, self._tensors, self._helpers), counts, strict=True):
            for number, value in list(ordered.numbered()):
                if number >= count:
                    ordered.discard(value)
                    forgotten.append(value)
        self._places.clear()
        self._walked.clear()
        self.changes += 1
        return forgotten

    def forget_held_since(self, count: int) -> None:
        """Schedulers and scalers recorded since, which modules hold: the next run records them, on every process, also
        where the step did not run that has made them."""
        for module in self._modules:
            for helper in helpers_held_by(module):
                if self._helpers.number_of(helper) >= count and not isinstance(helper, Optimizer):
                    self._helpers.discard(helper)

    def helpers(self) -> list[object]:
        """Optimizers, schedulers and gradient scalers."""
        return list(self._helpers)

    def named_helpers(self) -> dict[int, object]:
        """`helpers`, by numbers that are the same on every process of an SPMD program."""
        return dict(self._helpers.numbered())

    def optimizers(self) -> list[Optimizer]:
        return [helper for helper in self._helpers if isinstance(helper, Optimizer)]

    def add_helper(self, helper: object) -> None:
        if self._helpers.add(helper):
            self.changes += 1
        if isinstance(helper, Optimizer):
            give_hook_tables(helper)
            if kind_of_class(type(helper)).tier is Tier.ALL and hasattr(helper, "_optimizer_step_pre_hooks"):
                take_over_steps(type(helper))

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for helper in self._helpers:
            yield from _tensors_of(helper)

    def describe(self, tensor: torch.Tensor) -> str:
        """A name for error messages: the owning module's class, the parameter's name and shape."""
        for module in self._modules:
            for name, parameter in own_parameters(module).items():
                if parameter is tensor:
                    return f"{type(module).__name__}.{name} {tuple(tensor.shape)}"
        return f"tensor {tuple(tensor.shape)}"


def _tensors_of(helper: object) -> list[torch.Tensor]:
    if not isinstance(helper, Optimizer):
        return []
    return [tensor for group in getattr(helper, "param_groups", ()) for tensor in group["params"]]


def _is_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
