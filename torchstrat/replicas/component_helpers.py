"""Each replica's own attributes of optimizers, schedulers and gradient scalers.

Every replica's code steps a scheduler, updates a scaler or sets a learning rate; what the leader's does is what lasts.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class ComponentHelpers:
    """The helpers of one run after the other. The leader works on the user's own objects, the others on copies."""

    def __init__(self) -> None:
        self.helpers: list[tuple[Any, dict[int, dict[str, Any]], int]] = []  # helper, attributes, whose last
        self._known: set[int] = set()
        self._replicas: list[int] = []

    def begin(self, helpers: list[Any], replicas: list[int]) -> None:
        self._replicas, self.helpers, self._known = replicas, [], set()
        self.add(helpers, replicas[0])

    def add(self, helpers: list[Any], owner: int) -> None:
        """``owner``, whose turn it is or was, has their attributes as they are; the others get copies of these."""
        for helper in helpers:
            if id(helper) not in self._known:
                self._known.add(id(helper))
                own = vars(helper)
                share = not isinstance(helper, Optimizer) or _torch_steps(helper)
                attributes = {r: own if r == owner else _private(own, share_state=share) for r in self._replicas}
                self.helpers.append((helper, attributes, owner))

    def copy_again(self) -> None:
        """Give the others copies of what their owner's attributes have become, while all replicas stand still."""
        kept = [(helper, owner, attributes[owner]) for helper, attributes, owner in self.helpers]
        self.helpers, self._known = [], set()
        for helper, owner, own in kept:
            helper.__dict__ = own
            self.add([helper], owner)

    def park(self, replica: int) -> None:
        for helper, attributes, _ in self.helpers:
            attributes[replica] = helper.__dict__

    def install(self, replica: int) -> None:
        for helper, attributes, _ in self.helpers:
            helper.__dict__ = attributes[replica]

    def end(self) -> None:
        for helper, attributes, owner in self.helpers:
            helper.__dict__ = attributes[owner]
        self.helpers, self._known, self._replicas = [], set(), []


def _torch_steps(optimizer: Optimizer) -> bool:
    """Whether torch's step hooks see this optimizer, so that the leader alone steps it. Not so for wrappers around
    another one that do without ``super().__init__()``: these run on every replica."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _private(attributes: dict[str, Any], *, share_state: bool) -> dict[str, Any]:
    """A replica's own copy of a helper's attributes: containers and plain tensors copied, objects shared.

    An optimizer's state and its lists of parameters stay shared: they are central, and only the leader steps.
    """
    return {
        name: (value if share_state else _private_state(value)) if name == "state" else _private_value(value)
        for name, value in attributes.items()
    }


def _private_state(state: Any) -> Any:
    """``state`` maps parameters to dictionaries of tensors and numbers."""
    if not isinstance(state, dict):
        return state
    copies = state.copy()
    copies.update((key, _private_value(value)) for key, value in state.items())
    return copies


def _private_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else value.clone()
    if isinstance(value, collections.defaultdict):
        return collections.defaultdict(
            value.default_factory, {key: _private_value(member) for key, member in value.items()}
        )
    if type(value) in (dict, collections.OrderedDict):
        return type(value)(
            (key, member if key == "params" else _private_value(member)) for key, member in value.items()
        )
    if type(value) is list:
        if value and all(isinstance(member, nn.Parameter) for member in value):
            return value
        return [_private_value(member) for member in value]
    if type(value) is tuple:
        return tuple(_private_value(member) for member in value)
    if type(value) is set:
        return set(value)
    return value
