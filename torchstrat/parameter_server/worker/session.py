"""What the coordinator owns and a function may change for itself: modes, `requires_grad`, hyperparameters, plain
attributes, the default dtype. And what PyTorch keeps for a thread: gradient mode, autocast, the default device.

What it gives modules of the coordinator besides is this worker's alone: parameters are refused, and of buffers and
layers there is a warning. Members that it takes out or replaces are put back, and it is refused.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    own_buffer,
    own_buffers,
    own_children,
    own_parameters,
    unsaved_buffers,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.optimizers import is_listed
from torchstrat.parameter_server.dispatch import (
    AGGREGATIONS,
    DEFAULT_DTYPE,
    NUM_WORKERS,
    SAME_AS,
    SHARED,
    SURROUNDINGS,
    Modes,
    Options,
)
from torchstrat.parameter_server.messages import SetAttributes, Token
from torchstrat.parameter_server.serialization.functions import World, unpack
from torchstrat.parameter_server.serialization.pack_cache import Packed
from torchstrat.parameter_server.serialization.plain import are_equal, is_fixed
from torchstrat.parameter_server.variables.attributes import ATTRIBUTES, fixed_attributes, put_own
from torchstrat.parameter_server.variables.module_structure import MEMBERS, STEP_HOOKS, Members, fill
from torchstrat.parameter_server.variables.program_files import GLOBALS, put_globals
from torchstrat.parameter_server.worker.local_variables import Copies
from torchstrat.parameter_server.worker.stepped_optimizers import StepGroup
from torchstrat.replicas.thread_state import AS_A_THREAD_BEGINS, leave_plain


class Settings:
    """In force on this worker: those of the function that runs, as they were when it was scheduled.

    What the function itself changes holds until it ends and is then put back, so that the next one does not depend on
    which functions ran on the same worker before.

    Args:
        owns_process: what PyTorch keeps for the whole process is this worker's to set; else a coordinator shares it,
            and has set it.
    """

    def __init__(self, world: World, copies: Copies, *, owns_process: bool = True) -> None:
        self._copies = copies
        self._world = world
        self._modules: list[tuple[nn.Module, bool]] = []
        self._parameters: list[tuple[torch.Tensor, bool]] = []
        self._groups: dict[int, list[_Group]] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._owns_process = owns_process
        self._default_dtype: torch.dtype | None = None
        self._surroundings = AS_A_THREAD_BEGINS
        self._attributes: dict[Token, SetAttributes] = {}
        self._own_attributes: dict[int, dict[str, object]] = {}  # of optimizers of the program's own classes
        self._members: dict[object, Members] = {}
        self._step_hooks: dict[object, bytes] = {}
        self._warned: set[str] = set()

    def set_options(self, options: Options) -> None:
        made: dict[object, _Group] = {}
        known = (self._world.resolve(("helper", one)) for one in options if self._world.knows(("helper", one)))
        has_own = any(not is_listed(type(optimizer)) for optimizer in known)
        for number, groups in options.items():
            if self._world.knows(("helper", number)):
                optimizer = self._optimizers[number] = self._world.resolve(("helper", number))
                while len(optimizer.param_groups) < len(groups):
                    optimizer.param_groups.append({"params": []})
                taken = {id(one.group) for one in made.values()}
                for place, (group, values) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
                    if has_own and type(group) is dict:
                        group = optimizer.param_groups[place] = StepGroup(group)
                    one = made.get(values.get(SAME_AS))
                    if one is None:
                        # Of another optimizer, too, and in the program not any more.
                        own = StepGroup() if id(group) in taken else group
                        own["params"] = [self._copies.tensor_of(number) for number in values["params"]]
                        one = _Group(own, values)
                    made[number, place] = one
                self._groups[number] = [made[number, place] for place in range(len(groups))]
                kept = [one.group for one in self._groups[number]]
                if any(one is not other for one, other in zip(optimizer.param_groups, kept, strict=True)):
                    optimizer.param_groups = kept
                if not is_listed(type(optimizer)):
                    self._own_attributes[number] = fixed_attributes(optimizer)
        for gone in self._groups.keys() - options.keys():
            self._forget(gone)

    def set_modes(self, modes: Modes) -> None:
        self._modules, self._parameters = [], []
        self._surroundings = modes.get(SURROUNDINGS, AS_A_THREAD_BEGINS)
        if self._owns_process:
            self._default_dtype = modes.get(DEFAULT_DTYPE)
            self._put_back_default_dtype()
        self._copies.buffer_edits.aggregations = modes.get(AGGREGATIONS, {})
        self._copies.buffer_edits.shared = modes.get(SHARED, {})
        for token, flag in modes.items():
            if token in (AGGREGATIONS, SHARED):
                continue
            if token == NUM_WORKERS:
                self._world.resolve(("coordinator",)).workers = flag
                continue
            if token[0] == MEMBERS:
                self._set_members(token[1], flag)
            elif token[0] == ATTRIBUTES:
                self._set_attributes(token[1], flag)
            elif token[0] == STEP_HOOKS:
                self._set_step_hooks(token[1], flag)
            elif token[0] == GLOBALS:
                put_globals(token[1], flag)
            elif self._world.knows(token):
                captured = self._world.resolve(token)
                if isinstance(captured, nn.Module):
                    self._modules.append((captured, flag))
                else:
                    self._parameters.append((captured, flag))
        self._put_back_modes()

    def _forget(self, optimizer: int) -> None:
        for kept in (self._groups, self._optimizers, self._own_attributes):
            kept.pop(optimizer, None)

    def attributes_of(self, token: Token) -> SetAttributes:
        """What the program has set on an optimizer of a class of its own, or on a variable, as of the function that
        runs."""
        return self._attributes.get(token, {})

    def _set_attributes(self, token: Token, values: SetAttributes) -> None:
        """What was set on the coordinator since the last time. What a function sets on a module is this worker's own
        until then."""
        if self._attributes.get(token) != values and self._world.knows(token):
            owner = self._world.resolve(token)
            put_own(owner, values)
            self._attributes[token] = values
            if isinstance(owner, Optimizer):
                self._own_attributes[token[1]] = fixed_attributes(owner)

    def _set_members(self, token: Token, members: Members) -> None:
        """What was added, removed or replaced on the coordinator. The module itself stays the same object."""
        if self._members.get(token) == members or not self._world.knows(token):
            return
        module: nn.Module = self._world.resolve(token)
        resolve, make = self._world.resolve, self._world.tensor_of
        fill(own_parameters(module), _made(make, members.parameters))
        fill(own_children(module), _made(resolve, members.children))
        buffers = _made(make, members.buffers)
        for name, one in own_buffers(module).items():
            if one is not None and buffers.get(name) is not None:
                buffers[name] = one  # another tensor by now, perhaps, which a function has put in its place
        fill(own_buffers(module), buffers)
        for name in (*members.parameters, *members.children, *members.buffers):
            vars(module).pop(name, None)  # a function has set it: Python would find that first
        unsaved = unsaved_buffers(module)
        unsaved.clear()
        unsaved.update(members.not_saved)
        kind, tables = unpack(members.hooks, self._world)
        if kind is not None:
            module.__class__ = kind
        for name, hooks in tables.items():
            fill(vars(module)[name], hooks)
        self._copies.note_modules(one for _, one in self._world.modules())
        self._members[token] = members  # now: what has come half-way comes again

    def _set_step_hooks(self, token: Token, packed: Packed) -> None:
        """What was registered or removed on the coordinator. What they count stays while they are the same."""
        if self._step_hooks.get(token) != packed.digest and self._world.knows(token):
            optimizer = self._world.resolve(token)
            tables, step = unpack(packed, self._world)
            for name, hooks in tables.items():
                fill(vars(optimizer)[name], hooks)
            vars(optimizer).pop("step", None)
            if step is not None:
                vars(optimizer)["step"] = step
            self._step_hooks[token] = packed.digest

    def release(self, tokens: Collection[Token]) -> None:
        """Of these nothing is in force any more: the coordinator has dropped them."""
        gone = {id(self._world.resolve(token)) for token in tokens if self._world.knows(token)}
        self._modules = [(module, flag) for module, flag in self._modules if id(module) not in gone]
        self._parameters = [(tensor, flag) for tensor, flag in self._parameters if id(tensor) not in gone]
        for token in tokens:
            self._attributes.pop(token, None)
            self._members.pop(token, None)
            self._step_hooks.pop(token, None)
            if token[0] == "helper":
                self._forget(token[1])

    def surround(self, fn: Callable[..., object]) -> Callable[..., object]:
        """``fn`` within the blocks (``torch.no_grad()``, autocast) that the coordinator has scheduled it in."""
        surroundings = self._surroundings
        if surroundings == AS_A_THREAD_BEGINS:
            return fn

        def call(*args: object, **kwargs: object) -> object:
            with surroundings.in_force():
                return fn(*args, **kwargs)

        return call

    def put_back(self) -> None:
        """After a function, whether it returned or raised. Of what it had set is warned when all is put back: where
        warnings are errors, the rest would stay."""
        self._put_back_default_dtype()
        set_here = [("thread", left)] if (left := leave_plain()) else []
        if takes_gradients := self._put_back_modes():
            set_here.append(("requires_grad", f"{takes_gradients} parameters to take gradients, or not to"))
        for number, optimizer in self._optimizers.items():
            set_here += self._put_back_groups(optimizer, self._groups[number])
        for number, kept in self._own_attributes.items():
            set_here += self._put_back_attributes(self._optimizers[number], kept)
        for kind, what in set_here:
            self._warn(kind, what)

    def _put_back_default_dtype(self) -> None:
        if self._default_dtype is not None and torch.get_default_dtype() is not self._default_dtype:
            torch.set_default_dtype(self._default_dtype)

    def _put_back_modes(self) -> int:
        """How many parameters had changed."""
        for module, flag in self._modules:
            if module.training is not flag:
                module.training = flag
        with DisableTorchFunctionSubclass():  # which some of them would ask
            changed = [(tensor, flag) for tensor, flag in self._parameters if tensor.requires_grad is not flag]
            for tensor, flag in changed:
                tensor.requires_grad_(flag)
        return len(changed)

    def _put_back_groups(self, optimizer: Optimizer, kept: list[_Group]) -> list[tuple[str, str]]:
        """What to warn of, as `_warn` takes it."""
        groups = optimizer.param_groups
        if len(groups) == len(kept) and all(map(_Group.is_as_scheduled, kept, groups)):
            return []
        found = [
            ("rate", f"{name} of group {place} of {type(optimizer).__name__} from {was!r} to {now!r}")
            for place, (own, group) in enumerate(zip(kept, groups, strict=False))
            for name, was, now in own.changes(group)
        ]
        groups[:] = [own.put_back() for own in kept]
        return found

    def _put_back_attributes(self, optimizer: Optimizer, kept: dict[str, object]) -> list[tuple[str, str]]:
        """What to warn of, as `_warn` takes it."""
        now = fixed_attributes(optimizer)
        if now == kept:
            return []
        members = vars(optimizer)
        name = next(name for name in (*kept, *now) if name not in kept or name not in now or now[name] != kept[name])
        what = (
            f"{name} of {type(optimizer).__name__} from {kept.get(name)!r} to {members.get(name)!r:.80} (steps are "
            "made on the servers, which do not see it)"
        )
        for name in now.keys() - kept.keys():
            del members[name]
        members.update(kept)
        return [("attribute", what)]

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"a scheduled function set {what}. That holds until the function ends: the next one has what the "
                "coordinator's objects had when it was scheduled. Set it on the coordinator, before "
                "coordinator.schedule, or in each function. (Further changes are not warned of.)",
                stacklevel=2,
            )


def _made(make: Callable[[Any], object], members: Mapping[str, object]) -> dict[str, object]:
    return {name: None if one is None else make(one) for name, one in members.items()}


class _Group:
    """One parameter group of this worker's optimizer, and what the coordinator wants in it."""

    def __init__(self, group: dict[str, Any], values: Mapping[str, object]) -> None:
        self.group = group
        self._params = list(group["params"])
        self._values = {name: value for name, value in values.items() if name not in ("params", SAME_AS)}
        self._fixed = {name: value for name, value in self._values.items() if is_fixed(value)}
        self._written = self._values.keys() - self._fixed.keys()
        """What a function can write to without putting another object there: copies of it are in force."""
        self.put_back()

    def is_as_scheduled(self, group: Mapping[str, object]) -> bool:
        if group is not self.group or len(group) != len(self._values) + 1:  # load_state_dict() makes new ones
            return False
        for name, value in self._fixed.items():
            if group.get(name) is not value:
                return False
        return len(group["params"]) == len(self._params) and not (self._written and self.changes(group))

    def changes(self, group: Mapping[str, object]) -> list[tuple[str, object, object]]:
        """Name, value as scheduled, and value now."""
        now = {name: group.get(name) for name in self._values}
        return [(name, was, now[name]) for name, was in self._values.items() if not are_equal(was, now[name])]

    def put_back(self) -> dict[str, object]:
        group = self.group
        group.clear()
        group["params"] = list(self._params)
        for name, value in self._values.items():
            group[name] = copy.deepcopy(value) if name in self._written else value
        return group


# -- what a function makes -------------------------------------------------------------------------------------------


class _MadeHere(threading.local):
    noted: list[tuple[nn.Module, str]] | None = None


_made_here = _MadeHere()


def notice_members() -> tuple[Any, ...]:
    """Have PyTorch tell of parameters and buffers that modules are given, until the handles are removed."""
    return register_module_parameter_registration_hook(_note), register_module_buffer_registration_hook(_note)


def _note(module: nn.Module, name: str, tensor: object) -> None:
    if _made_here.noted is not None and tensor is not None:
        _made_here.noted.append((module, name))


class ChangedMembers:
    """``with``: around one function, on its thread: what it changes in the members of the coordinator's modules does
    not outlive it. ``is_captured``: whether a module is one of these."""

    def __init__(self, is_captured: Callable[[object], bool], copies: Copies) -> None:
        self._is_captured, self._copies = is_captured, copies
        self._warned: set[tuple[type, str]] = set()

    def __enter__(self) -> None:
        _made_here.noted = []

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _made_here.noted = None
        if kind is not None:
            self._copies.members.put_back()

    def check(self) -> None:
        """Raise `UnsupportedError` for parameters that were made and are still there, and for members that were taken
        out or replaced; warn of buffers and of layers that were added."""
        for module, name in _made_here.noted or ():
            if not self._is_captured(module):
                continue
            if own_buffer(module, name) is not None and not self._copies.has_buffer(module, name):
                self._warn(module, f"a buffer, {name!r}", "no server has it, nor state_dict() there")
            if (parameter := own_parameters(module).get(name)) is not None:
                self._require_known(module, name, parameter)
        for module, words, added in self._copies.members.changed():
            if words:
                raise UnsupportedError(
                    f"a scheduled function has changed what a {type(module).__name__} consists of: {', '.join(words)}. "
                    "That was undone: it would be so on this worker alone. Change the module on the coordinator, "
                    "between functions, and workers follow; or put it back within the function."
                )
            for layer in added:
                for name, parameter in layer.named_parameters():
                    self._require_known(layer, name, parameter)
                self._warn(module, f"a layer, a {type(layer).__name__}", "state_dict() there has it not")

    def _require_known(self, module: nn.Module, name: str, parameter: torch.Tensor) -> None:
        if self._copies.spec_of(parameter) is None:
            raise UnsupportedError(
                f"a scheduled function has made a parameter, {name!r} of a {type(module).__name__}. It is this "
                "worker's alone: no server has it, and no other worker. Make it on the coordinator, within "
                "`with strategy.scope():`, for example by calling the module there once."
            )

    def _warn(self, module: nn.Module, what: str, missing: str) -> None:
        kind = type(module)
        if (kind, what) not in self._warned:
            self._warned.add((kind, what))
            warnings.warn(
                f"a scheduled function has given a {kind.__name__} {what}, which it has not on the "
                f"coordinator. It is this worker's alone: {missing}, nor another worker. "
                "That is right for what each works out anew (a mask); make what is to be kept within `with "
                "strategy.scope():`.",
                stacklevel=2,
            )
