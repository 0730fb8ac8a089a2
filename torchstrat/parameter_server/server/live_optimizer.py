"""An optimizer of a class that may do anything, as it is in a plain program: one object, over all of its parameters.

It lives on the one server that has all of its variables, whole, and is stepped there with the gradients that a worker
sends, dense or sparse as they were made. So it may look at several parameters at once, and keep what it likes in
attributes, in ``param_groups``, in closures. ``state[parameter]`` is the server's, as of every optimizer. It may wrap
others, which are optimizers of the job, too: their state is the server's under their own numbers, and the program sets
groups that only they have as it sets those of the whole.
"""

from __future__ import annotations

import copy
import io
import itertools
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.core._torch_private import step_without_compiler
from torchstrat.core.errors import InvalidArgumentError, TorchstratError, UnsupportedError
from torchstrat.core.optimizers import Places, groups_with_wrapped, hyperparameters, keep_elements, kept_by, wrapped_by
from torchstrat.parameter_server.messages import Gone, OptimizerStep, Reader, SetAttributes, ShardKey, StateOfShard
from torchstrat.parameter_server.serialization.plain import ClassesHere, are_equal, is_fixed
from torchstrat.parameter_server.server.shard_optimizer import Options, check_supported, sparse_rows, unpickling
from torchstrat.parameter_server.server.shards import HeldShards
from torchstrat.parameter_server.variables.attributes import (
    fixed_attributes,
    mark_of,
    marks_of_tensors,
    may_be_copied,
    names_of,
    put,
    put_own,
)

StepsHaveSet = tuple[list[dict[str, object]], list[dict[str, object]]]
"""By group, entries of ``param_groups``; by optimizer, plain attributes. Of the optimizer and then those it wraps."""

Groups = Sequence[Sequence[int]]
"""By parameter group: the numbers of its variables, in order."""


class _Group:
    """A parameter group, which the program and the steps set."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self.given = {name: _apart(value) for name, value in self.options.items()}
        self.handed_out: dict[str, list[object]] = {}

    @property
    def options(self) -> dict[str, object]:
        return hyperparameters(self.group)

    def apart(self) -> _Group:
        """Another one with the same contents, for an optimizer that has had this one, too."""
        options = {name: _apart(value) for name, value in self.options.items()}
        made = _Group({**options, "params": list(self.group["params"])})
        made.given = dict(self.given)
        made.handed_out = {name: list(values) for name, values in self.handed_out.items()}
        return made

    def take(self, options: Options) -> None:
        """What the program has set since the last step, or deleted; what a step has set stays otherwise."""
        for name in self.given.keys() - options.keys():
            del self.given[name]
            self.group.pop(name, None)
        for name, value in list(self._set_by_program(options)):
            self.group[name], self.given[name] = value, _apart(value)

    def set_by_both(self, options: Options) -> Iterator[tuple[str, object]]:
        """What the program sets that steps have set, too."""
        own, given = self.group, self.given
        for name, value in self._set_by_program(options):
            is_by_steps = name in given and name in own and not are_equal(own[name], given[name])
            if is_by_steps and not are_equal(own[name], value):
                yield name, value

    def hand_out(self, options: Options, reader: Reader) -> dict[str, object]:
        own, given = self.options, self.given
        kept = {*dict(self._set_by_program(options)), *(given.keys() - options.keys())}
        lacks = {k: v for k, v in own.items() if k not in kept and not _has(options, k, v)}
        found = copy.deepcopy(lacks)
        if reader is Reader.FUNCTION:  # it sends none of it back
            return found
        if reader is Reader.AT_REST:  # the program has all of it now: what it sends otherwise, it has set
            self.given.update({k: found[k] if k in found else options[k] for k in own.keys() - kept})
            self.handed_out.clear()
            return found
        for name, value in found.items():
            is_given = name in given and are_equal(value, given[name])
            if not is_given and not _is_among(value, self.handed_out.setdefault(name, [])):
                self.handed_out[name].append(value)
        return found

    def load(self, options: Options) -> None:
        for name in set(self.group) - {"params"}:
            del self.group[name]
        self.group.update(copy.deepcopy(dict(options)))
        self.given, self.handed_out = dict(options), {}

    def _set_by_program(self, options: Options) -> Iterator[tuple[str, object]]:
        for name, value in options.items():
            is_given = name in self.given and are_equal(value, self.given[name])
            if not is_given and not _is_among(value, self.handed_out.get(name, ())):
                yield name, value


class _Member:
    """The optimizer, or one that it wraps. ``number``: of the job, which its state lies under; None: it has none."""

    def __init__(self, optimizer: Optimizer, number: int | None, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.optimizer, self.number = optimizer, number
        state = optimizer.state
        self._initial = {one: copy.deepcopy(dict(held)) for one in parameters if (held := state.get(one))}
        self._stepped: set[torch.nn.Parameter] = set()
        self._set_at: dict[str, int] = {}  # attributes, when the program has set them
        # As the program has them: marks of tensors; numbers in lists and dictionaries; marks of everything else.
        self._marks = marks_of_tensors(optimizer)
        others = {name: value for name in names_of(optimizer) if not is_fixed(value := vars(optimizer)[name])}
        plain = {name: value for name, value in others.items() if name not in self._marks and may_be_copied(value)}
        self._handed_out = copy.deepcopy(plain)
        self._sent = {name: mark_of(value) for name, value in others.items() if not may_be_copied(value)}

    def attributes(self, reader: Reader) -> dict[str, object]:
        """Those that can be handed out. To the program, of lists and dictionaries and of tensors, what has changed
        since the last time; to a function all of it, and in the place of what cannot be handed out `Gone` where it has
        changed since it was sent."""
        found = fixed_attributes(self.optimizer)
        others = {name: vars(self.optimizer)[name] for name in names_of(self.optimizer) if name not in found}
        copied = {name: value for name, value in others.items() if may_be_copied(value)}
        if reader is Reader.FUNCTION:
            lost = [name for name in others.keys() - copied.keys() if mark_of(others[name]) != self._sent.get(name)]
            return found | copy.deepcopy(copied) | dict.fromkeys(lost, Gone.GONE)
        marks = marks_of_tensors(self.optimizer)
        plain = {name: value for name, value in copied.items() if name not in marks}
        changed = {name: value for name, value in plain.items() if value != self._handed_out.get(name)}
        self._handed_out |= copy.deepcopy(changed)
        if reader is Reader.PROGRAM:
            changed |= {name: copied[name] for name in marks.keys() & copied if marks[name] != self._marks.get(name)}
            self._marks = marks
        return found | copy.deepcopy(changed)

    def take_attributes(self, attributes: SetAttributes) -> None:
        """What the program has set. What was set before the last that was taken is known, or was taken back."""
        for name, (moment, value) in put(self.optimizer, attributes):
            if moment > self._set_at.get(name, 0):
                self._set_at[name] = moment
                setattr(self.optimizer, name, value)

    def take_state(self, parameter: torch.nn.Parameter, held: StateOfShard | None) -> None:
        if held is not None:
            self.optimizer.state[parameter] = held
        elif parameter in self._stepped:  # a checkpoint from before the first step was restored
            self.optimizer.state.pop(parameter, None)
            if parameter in self._initial:
                self.optimizer.state[parameter] = copy.deepcopy(self._initial[parameter])

    def keep_state(self, parameter: torch.nn.Parameter, key: ShardKey, shards: HeldShards) -> None:
        state = self.optimizer.state.get(parameter)
        if state and self.number is not None:
            shards.put_state(key, self.number, state)
            self._stepped.add(parameter)


class LiveOptimizer:
    """For one thread at a time: that which holds the locks of all its variables.

    ``number``: of the optimizer in the job; ``wraps``: of those that it wraps.
    """

    def __init__(self, blob: bytes, number: int, groups: Groups, wraps: Sequence[int | None]) -> None:
        self.parameters = [[torch.nn.Parameter(torch.empty(0)) for _ in group] for group in groups]
        with unpickling():
            self._optimizer, tags = _Unpickler(blob, self.parameters).load()
        for (group, place), attributes in tags.items():
            vars(self.parameters[group][place]).update(attributes)
        self.cls: type[Optimizer] = type(self._optimizer)
        self._step = step_without_compiler(self.cls.step)  # hooks run on the worker
        optimizers = [self._optimizer, *wrapped_by(self._optimizer)]
        numbers = itertools.chain((number, *wraps), itertools.repeat(None))
        parameters = [parameter for _, parameter in self._keyed(groups)]
        self.members = [_Member(one, own, parameters) for one, own in zip(optimizers, numbers, strict=False)]
        self._has_stepped = self._keeps_gradients = False
        self._groups: list[_Group] = []
        self._find_groups()
        check_supported(self.cls, self.options)

    def _find_groups(self) -> None:
        groups, self._places = groups_with_wrapped(self._optimizer)
        known = {id(one.group): one for one in self._groups}
        self._groups = [known.get(id(group)) or _Group(group) for group in groups]

    @property
    def name(self) -> str:
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    @property
    def options(self) -> tuple[dict[str, object], ...]:
        return tuple(one.options for one in self._groups[: len(self._optimizer.param_groups)])

    def grow(self, other: LiveOptimizer) -> None:
        """Take in the parameters and groups that ``other``, sent later by the same program, has beyond this one's."""
        own: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for number, theirs in enumerate(other.parameters):
            if number == len(self.parameters):
                self.parameters.append([])
            mine = self.parameters[number]
            mine += theirs[len(mine) :]
            own.update(zip(theirs, mine, strict=True))
        for member, their in zip(self.members, other.members, strict=True):
            groups = member.optimizer.param_groups
            for number, group in enumerate(their.optimizer.param_groups):
                parameters = [own.get(parameter, parameter) for parameter in group["params"]]
                if number < len(groups):
                    groups[number]["params"][:] = parameters
                else:
                    groups.append({**group, "params": parameters})
        self._find_groups()

    def hand_out(self, options: Sequence[Options], places: Places, reader: Reader) -> StepsHaveSet:
        """What steps have set where the program has ``options``, which the program's own objects then have, for a
        checkpoint. It sends that back with every step, also when later steps have set something else: no wish of the
        program's. What it has set itself since, and no step has taken, stays.

        When every function has ended tensors in attributes, which may be large, are left to who asks for them. What a
        function is told it does not send back."""
        if not self._has_stepped:
            return [], []
        self._arrange(places)
        found = [one.hand_out(new, reader) for one, new in zip(self._groups, options, strict=False)]
        return found, [member.attributes(reader) for member in self.members]

    def load_options(self, options: Sequence[Options], places: Places) -> None:
        """These take the place of all that is in the groups: a checkpoint was restored."""
        self._arrange(places)
        for one, new in zip(self._groups, options, strict=True):
            one.load(new)

    def check(self, step: OptimizerStep) -> None:
        """Raise `UnsupportedError` where the program sets what the steps themselves set too, or changes in place what
        they have kept."""
        if self._keeps_gradients and step.reuses:
            raise UnsupportedError(
                f"{self.name} keeps gradients without a copy (state['before'] = p.grad), and a function changes those "
                "in place (zero_grad(set_to_none=False), or a second backward pass). Steps are made on a parameter "
                "server, where what is kept would stay as it was. Let the optimizer keep p.grad.clone(), or call "
                "zero_grad() without that argument."
            )
        groups = self._groups if step.wrapped is None else self._arranged(step.wrapped.places)
        for number, (one, new) in enumerate(zip(groups, _options_of(step), strict=True)):
            for name, value in one.set_by_both(new):
                raise UnsupportedError(
                    f"the program has set param_groups[{number}][{name!r}] of {self.name} to {value!r}, and its "
                    f"steps, which are made on a parameter server, have set it to {one.group[name]!r}. Let one of the "
                    "two set it: no scheduler for what the optimizer adapts itself."
                )

    def make(self, step: OptimizerStep, groups: Groups, shards: HeldShards) -> object:
        """One step. If it raises, parameters may be half-stepped. Returns what it has returned, or the error that says
        why the function, which reads that, does not get it."""
        gradients = _gradients_of(step, shards)
        self.members[0].take_attributes(step.attributes)
        if step.wrapped is not None:
            self._arrange(step.wrapped.places)
            for member, attributes in zip(self.members[1:], step.wrapped.attributes, strict=True):
                member.take_attributes(attributes)
        self._take_options(_options_of(step))
        keyed = list(self._keyed(groups))
        for key, parameter in keyed:
            put_own(parameter, step.tags.get(key[0], {}))
            parameter.data = shards.changing(key)
            parameter.grad = gradients.get(key)
            if parameter.grad is not None:
                parameter.requires_grad_(True)
        for member in self._with_states():
            assert member.number is not None
            for key, parameter in keyed:
                member.take_state(parameter, shards.changing_state(key, member.number))
        self._has_stepped = True
        try:
            with torch.no_grad():
                returned: object = self._step(self._optimizer)
                result = self._as_result(returned) if step.keeps_result else None
                del returned
        finally:
            for _, parameter in keyed:
                parameter.grad = None
        handed_out = [*map(weakref.ref, gradients.values())]
        del gradients
        self._keeps_gradients = any(one() is not None for one in handed_out)
        stood = []
        for key, parameter in keyed:
            shard = shards.tensor(key)
            check_is_alike(shard, parameter, self.name, shards.name(key))
            stood.append((parameter, shard))
        keep_elements(stood, partial(kept_by, self._optimizer))
        for member in self.members:
            for key, parameter in keyed:
                member.keep_state(parameter, key, shards)
        return result

    def _as_result(self, returned: object) -> object:
        if may_be_copied(returned):
            return copy.deepcopy(returned)
        return UnsupportedError(
            f"a scheduled function reads what {self.name}.step() returns, which is made on a parameter server and is "
            f"of {type(returned).__name__}. Numbers, strings, tensors, and lists and dictionaries of such come from "
            "there. Let step() return such, or do not read it."
        )

    def _keyed(self, groups: Groups) -> Iterator[tuple[ShardKey, torch.nn.Parameter]]:
        for numbers, parameters in zip(groups, self.parameters, strict=True):
            for number, parameter in zip(numbers, parameters, strict=True):
                yield (number, 0), parameter

    def _with_states(self) -> Iterator[_Member]:
        """Those whose state is the servers'. One dictionary that several have (``self.state = wrapped.state``) is the
        first one's."""
        seen: set[int] = set()
        for member in self.members:
            if member.number is not None and id(member.optimizer.state) not in seen:
                seen.add(id(member.optimizer.state))
                yield member

    def _take_options(self, options: Sequence[Options]) -> None:
        for one, new in zip(self._groups, options, strict=True):
            one.take(new)

    def _arrange(self, places: Places) -> None:
        """Groups that several optimizers have, here, are those that they have in the program: ``load_state_dict``, for
        one, gives an optimizer groups of its own."""
        if places == self._places:
            return
        self._groups = self._arranged(places)
        for member, wanted in zip(self.members, self._with_own(places), strict=True):
            groups = [self._groups[place].group for place in wanted]
            if any(one is not other for one, other in zip(member.optimizer.param_groups, groups, strict=True)):
                member.optimizer.param_groups = groups
        self._places = places

    def _arranged(self, places: Places) -> list[_Group]:
        """As `_groups` after `_arrange`."""
        if places == self._places:
            return self._groups
        if [*map(len, places)] != [*map(len, self._places)]:
            raise UnsupportedError(
                f"{self.name} wraps other optimizers than when it was sent to the parameter servers, or these have "
                "more parameter groups. Give it all of them when it is made, or call add_param_group of all in a scope."
            )
        found: dict[int, _Group] = {}
        used: set[int] = set()
        for before, after in zip(self._with_own(self._places), self._with_own(places), strict=True):
            for old, new in zip(before, after, strict=True):
                if new not in found:
                    found[new] = self._groups[old].apart() if old in used else self._groups[old]
                    used.add(old)
        return [found[place] for place in range(len(found))]

    def _with_own(self, places: Places) -> Places:
        return tuple(range(len(self.parameters))), *places


def _options_of(step: OptimizerStep) -> tuple[Options, ...]:
    return step.options if step.wrapped is None else (*step.options, *step.wrapped.options)


def check_is_alike(shard: torch.Tensor, parameter: torch.Tensor, name: str, where: str) -> None:
    """Raise `TorchstratError` where a step has made something else of the parameter that stood for ``shard``."""
    if parameter.shape != shard.shape or parameter.dtype != shard.dtype:
        raise TorchstratError(
            f"a step of {name} has made {parameter.dtype} of shape {tuple(parameter.shape)} of {where}, which is "
            f"{shard.dtype} of shape {tuple(shard.shape)}. Variables on parameter servers keep both."
        )


def _gradients_of(step: OptimizerStep, shards: HeldShards) -> dict[ShardKey, torch.Tensor]:
    """In memory of their own: what was sent is lent for this step, and the optimizer may keep it."""
    gradients = {key: gradient.clone() for key, gradient in step.dense}
    for key, ids, rows in step.rows:
        gradients[key] = sparse_rows(ids.clone(), rows.clone(), shards.tensor(key).shape[0])
    return gradients


def _apart(value: object) -> object:
    """A copy, which stays as it is when a step changes the value in place; of what cannot be told apart, itself."""
    copied = copy.deepcopy(value) if may_be_copied(value) else value
    return copied if are_equal(copied, value) else value


def _has(options: Options, name: str, value: object) -> bool:
    return name in options and are_equal(value, options[name])


def _is_among(value: object, others: Sequence[object]) -> bool:
    return any(are_equal(value, other) for other in others)


class _Unpickler(ClassesHere):
    """Undoes `pack_optimizer`: a reference to a parameter is the parameter that is here."""

    def __init__(self, blob: bytes, parameters: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        super().__init__(io.BytesIO(blob))
        self.parameters = parameters

    def persistent_load(self, reference: Any) -> object:
        if reference[0] == "id":
            return id(reference[1])
        group, place, requires_grad = reference
        if group >= len(self.parameters) or place >= len(self.parameters[group]):
            raise InvalidArgumentError(
                f"an optimizer holds a parameter (number {place} of group {group}) that is no variable of its server."
            )
        parameter: torch.nn.Parameter = self.parameters[group][place]
        parameter.requires_grad_(requires_grad)
        return parameter
