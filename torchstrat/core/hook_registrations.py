"""Hooks on the gradients of variables that a step registers itself, in the midst of a run.

They are seen when they come: what has to be called before them is put there, and in one process such a hook is the
affair of the replica that has registered it, as it is between processes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Watcher(Protocol):
    """Who is told."""

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it has hooks of its own there."""

    def turn(self) -> int | None:
        """The replica whose code runs now, where several share the tensor."""

    def notice(self, tensor: torch.Tensor) -> None:
        """A hook has been registered there."""


register_hook: Callable[..., Any] = torch.Tensor.register_hook
register_post_accumulate_grad_hook: Callable[..., Any] = torch.Tensor.register_post_accumulate_grad_hook
"""PyTorch's own."""

_watching = weakref.WeakSet[Any]()

count = 0
"""Of the hooks registered since anybody watches. As long as it is the same no tensor has another hook than before, so
that a step need not look at every tensor again."""


def watch(watcher: Watcher) -> None:
    """From now on, as long as it lives."""
    if torch.Tensor.register_hook is register_hook:
        torch.Tensor.register_hook = told_hook  # type: ignore[method-assign]
        torch.Tensor.register_post_accumulate_grad_hook = told_post_accumulate_grad_hook  # type: ignore[method-assign]
    _watching.add(watcher)


def _counting(register: Callable[..., Any]) -> Callable[..., Any]:
    def counted(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        global count
        count += 1
        return register(tensor, hook)

    return counted


untold_hook, untold_post_accumulate_grad_hook = map(_counting, (register_hook, register_post_accumulate_grad_hook))
"""For hooks of a strategy's own."""


def _telling(register: Callable[..., Any], counted: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def told(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        watchers = [one for one in tuple(_watching) if one.knows(tensor)]
        for watcher in watchers:
            hook = _for_one(watcher, hook)
        handle = counted(tensor, hook)
        for watcher in watchers:
            watcher.notice(tensor)
        return handle

    return told


def _for_one(watcher: Watcher, hook: Callable[..., Any]) -> Callable[..., Any]:
    replica = watcher.turn()
    if replica is None:
        return hook
    told = weakref.ref(watcher)

    @functools.wraps(hook, assigned=(), updated=())
    def of_one(value: Any) -> Any:
        of = told()
        now = None if of is None else of.turn()
        # Outside of runs what is there is the first replica's.
        return hook(value) if now == replica or (now is None and replica == 0) else None

    return of_one


told_hook = _telling(register_hook, untold_hook)
told_post_accumulate_grad_hook = _telling(register_post_accumulate_grad_hook, untold_post_accumulate_grad_hook)
"""What is in the place of PyTorch's own once anybody watches."""
