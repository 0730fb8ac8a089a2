"""What a block of a step sets for the whole process, swapped with the replicas' turns.

A replica may stand at a meeting in the midst of ``with parametrize.cached():`` or ``with warnings.catch_warnings():``.
What PyTorch and Python keep for such a block is a global, so the next replica would be in it as well, leave it in
another order, and find what the first one has cached.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchstrat.core._torch_private import global_module_hooks, parametrization_cache, set_by_blocks

_WARNINGS = tuple(name for name in ("filters", "showwarning", "_showwarnmsg_impl") if hasattr(warnings, name))
_NAMES = (*((module, (name,)) for module, name in set_by_blocks), (warnings, _WARNINGS))
_GETTERS = [(module, operator.attrgetter(*names)) for module, names in _NAMES]  # every turn asks
_CACHE_OWNER, _CACHE_NAME = parametrization_cache


class _State(NamedTuple):
    attributes: list[Any]
    """As of `_NAMES`."""
    cache: dict[Any, object]
    hooks: list[dict[int, Any]] | None
    """Of all modules; None for none."""


def _read() -> _State:
    attributes = [get(module) for module, get in _GETTERS]
    hooks = [dict(each) for each in global_module_hooks] if any(global_module_hooks) else None
    return _State(attributes, getattr(_CACHE_OWNER, _CACHE_NAME), hooks)


def _exchange(now: _State, wanted: _State) -> None:
    setattr(_CACHE_OWNER, _CACHE_NAME, wanted.cache)
    if now.hooks != wanted.hooks:
        for hooks, each in zip(global_module_hooks, wanted.hooks or [{}] * len(global_module_hooks), strict=True):
            hooks.clear()
            hooks.update(each)
    if now.attributes == wanted.attributes and wanted.attributes[-1][0] is warnings.filters:
        return
    for (module, names), values in zip(_NAMES, wanted.attributes, strict=True):
        for name, value in zip(names, values if len(names) > 1 else (values,), strict=True):
            setattr(module, name, value)
    with warnings.catch_warnings():  # it has Python forget what the other filters have let through
        pass


class ProcessSettings:
    """Of the replicas of one process. After a run they are as the first replica has left them."""

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self._current: int | None = None

    def begin(self, replicas: Sequence[int]) -> None:
        """A run begins; the first of its replicas is active."""
        outside = _read()
        # What was cached outside is the first replica's to use; others have variables of their own.
        self._states = {one: outside._replace(cache={}) for one in replicas}
        self._states[replicas[0]] = outside
        self._current = replicas[0]

    def activate(self, replica: int) -> None:
        if self._current is not None and replica != self._current:
            self._states[self._current] = now = _read()
            _exchange(now, self._states[replica])
            self._current = replica

    def end(self) -> None:
        """The run is over, or has failed."""
        if self._states:
            self.activate(next(iter(self._states)))
        self._states, self._current = {}, None
