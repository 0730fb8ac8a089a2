"""Tells who wants to know about modules, optimizers and helpers as they are created. Nothing stays when nobody does.

torch's registration hooks are global dictionaries and cost nothing to enter and leave. They miss deep copies and all
that is no module; for these, methods of torch's classes are wrapped, which is done while a scope is open and in a
step's first run, and not in every run: each change of a class makes Python forget what it has cached about all its
subclasses, and from 3.13 on it stops caching for a class that was changed a thousand times. In other runs the first
deep copy of a module makes it necessary, which a dictionary of Python's tells of.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchstrat.core._torch_private import new_hook_key, registration_hooks
from torchstrat.core.reachable import HELPER_TYPES


@dataclass(frozen=True, eq=False)
class Watcher:
    """Callbacks; they are called on the creating thread, and only where ``is_current()``."""

    is_current: Callable[[], bool]
    on_member: Callable[[nn.Module, str, Any], None]
    """A parameter, buffer or child is about to be registered in a module under a name."""
    on_copy: Callable[[nn.Module], None]
    """A module has been made by a deep copy, or unpickled."""
    on_helper: Callable[[Any], None]
    """An optimizer, scheduler or gradient scaler has been made."""


class MembersWatch:
    """Reports members from `begin` to `end`."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._key = new_hook_key()
        self._hook = self._on_member

    def begin(self) -> None:
        for hooks in registration_hooks:
            hooks[self._key] = self._hook

    def end(self) -> None:
        for hooks in registration_hooks:
            hooks.pop(self._key, None)

    def _on_member(self, module: nn.Module, name: str, member: object) -> None:
        if self._watcher.is_current():
            self._watcher.on_member(module, name, member)


def watch_classes(watcher: Watcher) -> Callable[[], None]:
    """Report copies and helpers; returns what ends it."""
    _wraps.add(watcher)
    return lambda: _wraps.remove(watcher)


def watch_first_copy(watcher: Watcher) -> Callable[[], None]:
    """Report copies and helpers from the first time that a module is deep-copied; returns what ends it."""
    ends: list[Callable[[], None]] = []

    def begin() -> None:
        if not ends and watcher.is_current():
            ends.append(watch_classes(watcher))

    _copiers.add(begin)

    def end() -> None:
        _copiers.remove(begin)
        for one in ends:
            one()

    return end


class _Copiers:
    """Entries in the dictionary where `copy.deepcopy` looks for what copies an object: there as long as any watches. A
    module is made from its copied members, so it is not there yet when the first of these is copied."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watching: list[Callable[[], None]] = []

    def add(self, begin: Callable[[], None]) -> None:
        with self._lock:
            if not self._watching:
                _copiers_by_class[nn.Parameter] = _copiers_by_class[torch.Tensor] = self._copy
            self._watching.append(begin)

    def remove(self, begin: Callable[[], None]) -> None:
        with self._lock:
            self._watching.remove(begin)
            if not self._watching:
                del _copiers_by_class[nn.Parameter], _copiers_by_class[torch.Tensor]

    def _copy(self, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if isinstance(tensor, nn.Parameter) or isinstance(next(iter(memo.values()), None), nn.Module):
            for begin in tuple(self._watching):
                begin()
        return tensor.__deepcopy__(memo)


_copiers_by_class: dict[type, Callable[[Any, dict[int, Any]], Any]] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
_copiers = _Copiers()


class _Wraps:
    """The wrapped methods: there once, however many watch, in whichever threads and order they begin and end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: list[Watcher] = []
        self._undo: list[Callable[[], None]] = []

    def add(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers.append(watcher)
            if not self._undo:
                self._wrap(nn.Module, "__setstate__", lambda watcher, made: watcher.on_copy(made))
                for helper_type in HELPER_TYPES:
                    self._wrap(helper_type, "__init__", lambda watcher, made: watcher.on_helper(made))

    def remove(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers.remove(watcher)
            if not self._watchers:
                while self._undo:
                    self._undo.pop()()

    def _wrap(self, owner: type, name: str, report: Callable[[Watcher, Any], None]) -> None:
        original = vars(owner).get(name)
        if original is None:
            return

        def wrapped(instance: object, *args: object, **kwargs: object) -> object:
            result = original(instance, *args, **kwargs)
            for watcher in tuple(self._watchers):
                if watcher.is_current():
                    report(watcher, instance)
            return result

        wrapped.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)
        self._undo.append(lambda: _unwrap(owner, name, wrapped, original))


_wraps = _Wraps()


def _unwrap(owner: type, name: str, wrapped: object, original: object) -> None:
    # Someone may have wrapped the method again in the meantime; theirs then keeps calling ours, which does no harm.
    if vars(owner).get(name) is wrapped:
        setattr(owner, name, original)
