"""What goes to workers as a reference, what by value, and what not at all."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.travel.sendable import Refused, refusal, training_state_refusal, why_not

if TYPE_CHECKING:
    from torchstrat.parameter_server.travel.catalog import Catalog
    from torchstrat.parameter_server.travel.reach import Look
    from torchstrat.parameter_server.travel.world import World

Token = tuple[Any, ...]
"""What a captured object is called between processes: a small tuple of strings and numbers."""

Recipe = Callable[["World"], Any]
"""Builds a worker's object, in that worker's world."""

_NEVER_CAPTURED = frozenset({types.FunctionType, types.ModuleType, types.CellType, types.MethodType, type})


@dataclass(frozen=True, eq=False)
class Described:
    """Stands for a variable in an increment, where no module holds it."""

    spec: VariableSpec


def culprit_of(error: Exception, last: Any) -> tuple[Any, str]:
    """What could not be pickled, and why."""
    if isinstance(error, Refused):
        return error.value, error.reason
    return last, why_not(last, error)


def _is_derived(value: Any) -> bool:
    """Whether it was computed from parameters. Modules keep such tensors and renew them in their forward pass: masked
    and normalised weights."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf


def token_of_spec(spec: VariableSpec) -> Token:
    return spec.kind, spec.number


class Outgoing:
    """What goes as a reference from the coordinator to workers. ``fresh``: ids of captured objects that go themselves.

    Afterwards ``tokens`` has the references that were made and the objects that they stand for, ``described`` the
    variables whose descriptions went along.
    """

    makes_plain = False

    def __init__(self, catalog: Catalog, root: Any, fresh: frozenset[int] | None = None) -> None:
        self._catalog = catalog
        self._root = root
        self._fresh = fresh if fresh is not None else frozenset()
        self._describes = fresh is not None
        self._memo: dict[int, bool] = {}
        self.tokens: dict[Token, Any] = {}
        self.described: set[Token] = set()

    def reference_to(self, value: Any) -> tuple[Any, ...] | None:
        if id(value) in self._fresh:
            return None
        if type(value) in _NEVER_CAPTURED:
            return None
        found = self._described(value) if self._describes else None
        if found is None:
            token = self._catalog.refer_to(value)
            if token is not None:
                self.tokens[token] = value
                found = "ref", token
        if found is not None:
            return found
        reason = refusal(value) or self._mixes(value)
        if reason is None and not (self._describes and _is_derived(value)):
            reason = training_state_refusal(value)
        if reason is not None:
            raise Refused(value, reason)
        return None

    def _described(self, value: Any) -> tuple[Any, ...] | None:
        """Within an increment: what the worker makes its own object from, at whatever place it meets it first."""
        spec = value.spec if isinstance(value, Described) else None
        if isinstance(value, torch.Tensor):
            spec = self._catalog.spec_of(value)
        if spec is not None:
            self.described.add(token_of_spec(spec))
            return "tensor", spec
        found = self._catalog.recipe_of(value)
        return ("made", *found) if found is not None else None

    def _mixes(self, value: Any) -> str | None:
        from torchstrat.strategy import Strategy

        if isinstance(value, Strategy):
            return "it is another strategy than the one that schedules the function."
        return None

    def enters(self, value: Any) -> bool:
        """Whether ``value`` is sent with its contents."""
        return id(value) in self._fresh or self._catalog.token_of(value) is None

    def by_value(self, value: Any) -> bool:
        return self._catalog.reach.by_value(value, self._root, self._memo)

    def rests_on(self, value: Any) -> list[tuple[Look, list[Any]]] | None:
        """Of a function or class that goes by name: see `Reach.rests_on`."""
        return self._catalog.reach.rests_on(value)

    def names_used(self) -> frozenset[str]:
        return self._catalog.reach.names_from(self._root)
