"""Optimizers that are stepped in the place of another one: of its class and with its attributes, over other parameters
and other state. No constructor runs, and what is stepped of them is nothing of the user's unless it is given."""

from __future__ import annotations

import collections
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat._torch_private import step_without_compiler

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


def make_stand_in(optimizer: Optimizer, made: dict[int, Any] | None = None) -> Optimizer:
    """An optimizer of the same class and hyperparameters whose groups hold no parameters and whose state is its own.
    Optimizers that it wraps are stand-ins too.

    ``made``: what has been made in the place of what, by ``id``.
    """
    made = {} if made is None else made
    if id(optimizer) in made:
        stand_in: Optimizer = made[id(optimizer)]
        return stand_in
    made[id(optimizer)] = stand_in = object.__new__(type(optimizer))
    attributes = vars(optimizer)
    for group in optimizer.param_groups:
        made.setdefault(id(group["params"]), [])
    for name in ("param_groups", "state"):
        if id(attributes.get(name)) in made:  # the same object as another optimizer's
            continue
        if name == "state":
            made[id(optimizer.state)] = collections.defaultdict(dict)
        else:
            made[id(optimizer.param_groups)] = [{**group, "params": []} for group in optimizer.param_groups]
    replaced = made.get if _wraps_none(type(optimizer)) else lambda _, value: _in_place_of(value, made)
    vars(stand_in).update({name: replaced(id(value), value) for name, value in attributes.items()})
    return stand_in


# Of classes: every step asks.
_wraps_none: Callable[[type], bool] = functools.lru_cache(1024)(lambda kind: kind.__module__.startswith("torch.optim."))


def _in_place_of(value: Any, made: dict[int, Any]) -> Any:
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, Optimizer):
        return make_stand_in(value, made)
    if type(value) in (list, tuple) and any(isinstance(member, Optimizer) for member in value):
        return type(value)(_in_place_of(member, made) for member in value)
    if type(value) is dict and any(isinstance(member, Optimizer) for member in value.values()):
        return {name: _in_place_of(member, made) for name, member in value.items()}
    return value


def stepped_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """What a step of ``optimizer`` may change: its own parameters, and those of optimizers that it wraps."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if _wraps_none(type(optimizer)):
        return tensors
    known = {id(tensor) for tensor in tensors}
    for inner in wrapped_by(optimizer):
        for group in inner.param_groups:
            tensors += [tensor for tensor in group["params"] if id(tensor) not in known]
            known.update(map(id, group["params"]))
    return tensors


def wrapped_among(optimizers: Iterable[Optimizer]) -> frozenset[int]:
    """``id`` of the optimizers that these wrap: what steps them is, or may be, a step of another one."""
    return frozenset(id(inner) for one in optimizers for inner in wrapped_by(one))


def wrapped_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Those in its attributes, and in theirs."""
    return iter(()) if _wraps_none(type(optimizer)) else _wrapped_by(optimizer, {id(optimizer)})


def _wrapped_by(optimizer: Optimizer, seen: set[int]) -> Iterator[Optimizer]:
    for value in vars(optimizer).values():
        members = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        for member in members:
            if isinstance(member, Optimizer) and id(member) not in seen:
                seen.add(id(member))
                yield member
                yield from _wrapped_by(member, seen)


def take_over_steps(kind: type[Optimizer], *, without_compiler: bool = False) -> None:
    """From now on a step of this class asks the hooks of this process, and that of a stand-in made to `be_idle` does
    nothing: what a class of the user's own does with no parameters at all is not known.

    PyTorch puts its hooks around a class when the first of its objects is made; a class that has come from another
    process has none, or those of the other process. ``without_compiler``: see `step_without_compiler`.
    """
    if getattr(kind.step, _TAKEN_OVER, None) is _HERE:
        return
    inner = step_without_compiler(kind.step) if without_compiler else _without_hooks(kind)
    if not hasattr(inner, _CAN_IDLE):
        inner = _idling(inner)
    kind.step = Optimizer.profile_hook_step(inner)  # type: ignore[method-assign,assignment]
    kind.step.hooked = True  # type: ignore[attr-defined]
    setattr(kind.step, _TAKEN_OVER, _HERE)


def be_idle(stand_in: Optimizer, result: Any = None) -> Optimizer:
    """``result``: what its step returns."""
    vars(stand_in)[_IS_IDLE] = result
    return stand_in


def _idling(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def idling(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = vars(optimizer)
        return found[_IS_IDLE] if _IS_IDLE in found else step(optimizer, *args, **kwargs)

    setattr(idling, _CAN_IDLE, True)
    return idling


_IS_IDLE, _CAN_IDLE, _TAKEN_OVER = "_torchstrat_is_idle", "_torchstrat_can_idle", "_torchstrat_taken_over"
_HERE = object()
"""In a function that came by value it is another object, of the process that sent it."""


def bare_step(optimizer: Optimizer) -> None:
    """Without hooks: those of the user's optimizer run around its own step. By the class's method, for a scheduler may
    have put another into the attributes."""
    _without_hooks(type(optimizer))(optimizer)


def _without_hooks(kind: type[Optimizer]) -> Callable[..., Any]:
    step = kind.step
    bare: Callable[..., Any] | None = _bare.get(step)
    if bare is None:
        bare = inspect.unwrap(step, stop=lambda step: not hasattr(step, "hooked"))
        if bare is not step:  # it would keep itself
            _bare[step] = bare
    return bare


_bare: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()
"""Kept because every step that is shared out asks."""
