"""Optimizers that are stepped in the place of another one: of its class and with its attributes, over other parameters
and other state. No constructor runs, and what is stepped of them is nothing of the user's unless it is given."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

State = dict[torch.Tensor, dict[str, Any]]


def stand_in_of(
    kind: type[Optimizer], attributes: Mapping[str, Any], groups: list[dict[str, Any]], state: State | None = None
) -> Optimizer:
    """``attributes``: of an optimizer of this ``kind``, as `vars` gives them. ``groups``, ``state``: in place of these
    two of its own; None: no state."""
    stand_in: Optimizer = object.__new__(kind)
    vars(stand_in).update(
        attributes, param_groups=groups, state=collections.defaultdict(dict) if state is None else state
    )
    return stand_in


def make_stand_in(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and hyperparameters whose groups hold no parameters and whose state is its own."""
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    lists: dict[int, list[Any]] = {id(group["params"]): [] for group in optimizer.param_groups}
    attributes = {name: lists.get(id(value), value) for name, value in vars(optimizer).items()}
    return stand_in_of(type(optimizer), attributes, groups)


def bare_step(optimizer: Optimizer) -> None:
    """Without hooks: those of the user's optimizer run around its own step. By the class's method, for a scheduler may
    have put another into the attributes."""
    inspect.unwrap(type(optimizer).step, stop=lambda step: not hasattr(step, "hooked"))(optimizer)
