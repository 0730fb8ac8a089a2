"""``state_dict()`` of modules and optimizers with variables that are cut: whole, and the same in every layout.

Putting a variable together involves all logical devices of the replica, so all processes have to call ``state_dict()``
and ``load_state_dict()``, as they do `Checkpoint.save` and ``restore``, which call these. The whole variables of one
module at a time are in memory then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchstrat.core.errors import ContextError
from torchstrat.core.optimizers import Tier, tier_of
from torchstrat.sharding.dtensor.parameters import CutVariables


def hook_modules(modules: Iterator[nn.Module], variables: CutVariables, hooked: Any) -> None:
    """``hooked``: a set of those that have been."""
    if not len(variables):
        return
    for module in modules:
        if module not in hooked and _cut_members(module, variables):
            hooked.add(module)
            states = _OfModule(variables)
            module.register_state_dict_post_hook(_PutTogether(variables))
            module.register_load_state_dict_pre_hook(states.take_apart)


def _cut_members(module: nn.Module, variables: CutVariables) -> dict[str, torch.Tensor]:
    return {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and variables.find(parameter) is not None
    }


class _Hooks:
    """A deep copy of a module or an optimizer has the same hooks, which find none of its variables."""

    def __init__(self, variables: CutVariables) -> None:
        self._variables = variables

    def __deepcopy__(self, memo: Any) -> _Hooks:
        return self


class _PutTogether(_Hooks):
    """An object of its own: torch writes on it that it was registered."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self._variables.is_inside:
            raise ContextError("state_dict() of a module whose parameters are cut was called in run; call it outside.")
        for name, parameter in _cut_members(module, self._variables).items():
            if state.get(prefix + name) is parameter:  # keep_vars=True: the parameter itself, for who knows it by that
                continue
            state[prefix + name] = self._variables.whole(parameter)


class _OfModule(_Hooks):
    def take_apart(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ContextError(
                f"load_state_dict(…, assign=True) of a {type(module).__name__} whose parameters are cut over logical "
                "devices would put whole tensors in their place; leave assign out: their values are taken in pieces."
            )
        for name, parameter in _cut_members(module, self._variables).items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                self._variables.assign(parameter, value)
                state[prefix + name] = parameter.detach()  # which changes nothing when it is written to the parameter


def hook_optimizer(optimizer: torch.optim.Optimizer, variables: CutVariables) -> None:
    states = _OfOptimizer(variables)
    optimizer.register_state_dict_post_hook(states.put_together)
    optimizer.register_load_state_dict_pre_hook(states.keep)
    optimizer.register_load_state_dict_post_hook(states.take_apart)


class _OfOptimizer(_Hooks):
    def __init__(self, variables: CutVariables) -> None:
        super().__init__(variables)
        self._kept: dict[int, dict[str, Any]] = {}

    def put_together(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if not _is_cut(optimizer):
            return state
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        found = dict(state["state"])
        for number, parameter in enumerate(parameters):
            if self._variables.find(parameter) is not None and number in found:
                entries = found[number]
                found[number] = {name: self._variables.whole_state(parameter, value) for name, value in entries.items()}
        return {**state, "state": found}

    def keep(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """The optimizer would move the states to where it sees its parameters: nowhere."""
        self._kept = state["state"]

    def take_apart(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        kept, self._kept = self._kept, {}
        for number, parameter in enumerate(parameters):
            if self._variables.find(parameter) is None or number not in kept:
                continue
            optimizer.state[parameter] = {
                name: self._variables.piece_of_state(parameter, value) if _is_cut(optimizer) else value
                for name, value in kept[number].items()
            }


def _is_cut(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is in pieces like its parameters. Others look at whole parameters, and refuse to step pieces:
    what of their state has the shape of a piece is something else, such as Adafactor's means over rows."""
    return tier_of(optimizer) is Tier.ELEMENTS
