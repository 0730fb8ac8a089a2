"""An optimizer of a class that may do anything, as it is in a plain program: one object, over all of its parameters.

It lives on the one server that has all of its variables, whole, and is stepped there with the gradients that a worker
sends, dense or sparse as they were made. So it may look at several parameters at once, and keep what it likes in
attributes, in ``param_groups``, in closures. ``state[parameter]`` is the server's, as of every optimizer.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.core._torch_private import step_without_compiler
from torchstrat.core.errors import InvalidArgumentError, TorchstratError, UnsupportedError
from torchstrat.core.optimizers import keep_elements, kept_by
from torchstrat.parameter_server.messages import OptimizerStep, SetAttributes, ShardKey, StateOfShard
from torchstrat.parameter_server.serialization.plain import ClassesHere, are_equal
from torchstrat.parameter_server.server.shard_optimizer import Options, check_supported, sparse_rows, unpickling
from torchstrat.parameter_server.server.shards import HeldShards
from torchstrat.parameter_server.variables.module_structure import fixed_attributes

StepsHaveSet = tuple[list[dict[str, Any]], dict[str, Any]]
"""By group, entries of ``param_groups``; plain attributes."""

Groups = Sequence[Sequence[int]]
"""By parameter group: the numbers of its variables, in order."""


class LiveOptimizer:
    """For one thread at a time: that which holds the locks of all its variables."""

    def __init__(self, blob: bytes, groups: Groups) -> None:
        self._parameters = [[torch.nn.Parameter(torch.empty(0)) for _ in group] for group in groups]
        with unpickling():
            self._optimizer, tags = _Unpickler(blob, self._parameters).load()
        for (group, place), attributes in tags.items():
            vars(self._parameters[group][place]).update(attributes)
        self.cls: type[Optimizer] = type(self._optimizer)
        self._step = step_without_compiler(self.cls.step)  # hooks run on the worker
        self._given: list[dict[str, Any]] = [dict(options) for options in self.options]
        self._initial = {
            place: copy.deepcopy(dict(state))
            for place, parameter in self._places()
            if (state := self._optimizer.state.get(parameter))
        }
        self._handed_out: list[dict[str, list[Any]]] = [{} for _ in self._given]
        self._set_at: dict[str, int] = {}  # attributes, when the program has set them
        self._stepped: set[tuple[int, int]] = set()
        check_supported(self.cls, self.options)

    @property
    def name(self) -> str:
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    @property
    def options(self) -> tuple[dict[str, Any], ...]:
        return tuple({k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups)

    def grow(self, other: LiveOptimizer) -> None:
        """Take in the parameters and groups that ``other``, sent later by the same program, has beyond this one's."""
        for number, more in enumerate(other._parameters):
            if number < len(self._parameters):
                added = more[len(self._parameters[number]) :]
                self._parameters[number] += added
                self._optimizer.param_groups[number]["params"] += added
            else:
                self._parameters.append(more)
                self._optimizer.param_groups.append({**other._optimizer.param_groups[number], "params": list(more)})
                self._given.append(dict(other._given[number]))
                self._handed_out.append({})

    def hand_out(self, options: Sequence[Options]) -> StepsHaveSet:
        """What steps have set where the program has ``options``, which the program's own object then has, for a
        checkpoint. It sends that back with every step, also when later steps have set something else: no wish of the
        program's. What it has set itself since, and no step has taken, stays."""
        found = []
        for number, (own, new) in enumerate(zip(self.options, options, strict=False)):
            given, handed_out = self._given[number], self._handed_out[number]
            kept = dict(self._set_by_program(number, new))
            lacks = {k: v for k, v in own.items() if k not in kept and (k not in new or not are_equal(v, new[k]))}
            found.append(copy.deepcopy(lacks))
            for name, value in found[number].items():
                is_given = name in given and are_equal(value, given[name])
                if not is_given and not _is_among(value, handed_out.setdefault(name, [])):
                    handed_out[name].append(value)
        return found, fixed_attributes(self._optimizer)

    def load_options(self, options: Sequence[Options]) -> None:
        """These take the place of all that is in the groups: a checkpoint was restored."""
        for number, (group, new) in enumerate(zip(self._optimizer.param_groups, options, strict=True)):
            for name in set(group) - {"params"}:
                del group[name]
            group.update(copy.deepcopy(dict(new)))
            self._given[number], self._handed_out[number] = dict(new), {}

    def check(self, step: OptimizerStep) -> None:
        """Raise `UnsupportedError` where the program sets what the steps themselves set too."""
        for number, (own, given, new) in enumerate(zip(self.options, self._given, step.options, strict=True)):
            for name, value in self._set_by_program(number, new):
                if (
                    name in given
                    and name in own
                    and not are_equal(own[name], given[name])
                    and not are_equal(own[name], value)
                ):
                    raise UnsupportedError(
                        f"the program has set param_groups[{number}][{name!r}] of {self.name} to {value!r}, and its "
                        f"steps, which are made on a parameter server, have set it to {own[name]!r}. Let one of the "
                        "two set it: no scheduler for what the optimizer adapts itself."
                    )

    def make(self, step: OptimizerStep, number: int, groups: Groups, shards: HeldShards) -> None:
        """One step, of the optimizer ``number``. If it raises, parameters may be half-stepped."""
        gradients = _gradients_of(step, shards)
        self._take_options(step.options)
        self._take_attributes(step.attributes)
        keys = {place: (groups[place[0]][place[1]], 0) for place, _ in self._places()}
        for place, parameter in self._places():
            parameter.data = shards.changing(keys[place])
            parameter.grad = gradients.get(keys[place])
            if parameter.grad is not None:
                parameter.requires_grad_(True)
            self._take_state(place, parameter, shards.changing_state(keys[place], number))
        try:
            with torch.no_grad():
                self._step(self._optimizer)
        finally:
            for _, parameter in self._places():
                parameter.grad = None
        stood = []
        for place, parameter in self._places():
            shard = shards.tensor(keys[place])
            check_is_alike(shard, parameter, self.name, shards.name(keys[place]))
            stood.append((parameter, shard))
        keep_elements(stood, partial(kept_by, self._optimizer))
        for place, parameter in self._places():
            self._keep(place, parameter, keys[place], number, shards)

    def _places(self) -> Iterator[tuple[tuple[int, int], torch.nn.Parameter]]:
        for number, group in enumerate(self._parameters):
            for place, parameter in enumerate(group):
                yield (number, place), parameter

    def _take_options(self, options: Sequence[Options]) -> None:
        """What the program has set since the last step; what a step has set stays otherwise."""
        for number, (group, new) in enumerate(zip(self._optimizer.param_groups, options, strict=True)):
            for name, value in list(self._set_by_program(number, new)):
                group[name] = self._given[number][name] = value

    def _take_attributes(self, attributes: SetAttributes) -> None:
        """The same of attributes. What was set before the last that was taken is known, or was taken back."""
        for name, (moment, value) in attributes.items():
            if moment > self._set_at.get(name, 0):
                self._set_at[name] = moment
                setattr(self._optimizer, name, value)

    def _set_by_program(self, number: int, options: Options) -> Iterator[tuple[str, Any]]:
        given, handed_out = self._given[number], self._handed_out[number]
        for name, value in options.items():
            if (name not in given or not are_equal(value, given[name])) and not _is_among(
                value, handed_out.get(name, ())
            ):
                yield name, value

    def _take_state(self, place: tuple[int, int], parameter: torch.Tensor, held: StateOfShard | None) -> None:
        if held is not None:
            self._optimizer.state[parameter] = held
        elif place in self._stepped:  # a checkpoint from before the first step was restored
            self._optimizer.state.pop(parameter, None)
            if place in self._initial:
                self._optimizer.state[parameter] = copy.deepcopy(self._initial[place])

    def _keep(
        self, place: tuple[int, int], parameter: torch.Tensor, key: ShardKey, number: int, shards: HeldShards
    ) -> None:
        state = self._optimizer.state.get(parameter)
        if state:
            shards.put_state(key, number, state)
            self._stepped.add(place)


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


def _is_among(value: Any, others: Sequence[Any]) -> bool:
    return any(are_equal(value, other) for other in others)


class _Unpickler(ClassesHere):
    """Undoes `pack_optimizer`: a reference to a parameter is the parameter that is here."""

    def __init__(self, blob: bytes, parameters: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        super().__init__(io.BytesIO(blob))
        self._parameters = parameters

    def persistent_load(self, reference: Any) -> torch.nn.Parameter:
        group, place, requires_grad = reference
        if group >= len(self._parameters) or place >= len(self._parameters[group]):
            raise InvalidArgumentError(
                f"an optimizer holds a parameter (number {place} of group {group}) that is no variable of its server."
            )
        parameter: torch.nn.Parameter = self._parameters[group][place]
        parameter.requires_grad_(requires_grad)
        return parameter
