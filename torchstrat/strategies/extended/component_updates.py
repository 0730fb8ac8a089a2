"""Functions run on every component of a variable: what `StrategyExtended.update` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchstrat.core import nest
from torchstrat.core.context import enter, enter_cross
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.value_functions import local_results
from torchstrat.core.values import Mirrored, PerReplica, select_replica
from torchstrat.core.variable.assignment import updating
from torchstrat.core.variable.creation import from_first_replica
from torchstrat.core.variable.storage import VariablePlacement
from torchstrat.core.variable.variable import Variable

if TYPE_CHECKING:
    from torchstrat.strategies.strategy import Strategy


def update(
    strategy: Strategy, var: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: bool
) -> Any:
    """Call ``fn`` for each component of ``var`` in cross-replica context; see `StrategyExtended.update`."""
    one_replica = strategy._variable_placement is VariablePlacement.ONE
    if not one_replica and not strategy.extended.variable_created_in_scope(var):
        raise InvalidArgumentError(
            f"update needs a variable of {strategy!r}: a ts.Variable made in its scope, or a parameter or buffer that "
            f"it has seen; got {type(var).__name__} {var!r:.80}."
        )
    if isinstance(var, Variable) and var._components:
        components = dict(zip(var._replicas, var._components, strict=True))
        return _for_each(strategy, lambda replica, *a, **k: fn(components[replica], *a, **k), args, kwargs, group)
    if isinstance(var, Variable) and var._kind is VariablePlacement.CENTRAL:
        var = var._view(var._cells[0])
    with torch.no_grad():  # a parameter may be edited in place
        return _once(strategy, lambda *a, **k: fn(var, *a, **k), args, kwargs, group)


def update_non_slot(
    strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: bool
) -> Any:
    """Call ``fn`` where state that belongs to no single variable lives: once, or once per replica where mirrored."""
    if strategy._variable_placement is VariablePlacement.MIRRORED:
        return _for_each(strategy, lambda _, *a, **k: fn(*a, **k), args, kwargs, group)
    return _once(strategy, fn, args, kwargs, group)


def _once(
    strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: bool
) -> Any:
    central = strategy._variable_placement is VariablePlacement.CENTRAL

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica | Mirrored):
            return leaf
        value = leaf.values[0]
        return from_first_replica(strategy, value) if central and isinstance(value, torch.Tensor) else value

    with enter_cross(strategy):
        result = fn(*nest.map_structure(first, list(args)), **nest.map_structure(first, kwargs))
    return result if group else _opened(strategy, result)


def _for_each(
    strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: bool
) -> Any:
    """``fn(replica, *args, **kwargs)`` for the replicas of this process, each with its components of the arguments."""
    replicas, results = strategy._engine.local_replicas, []
    inputs = [(select_replica(replica, list(args)), select_replica(replica, kwargs)) for replica in replicas]
    for replica, (own_args, own_kwargs) in zip(replicas, inputs, strict=True):
        with enter(strategy, None), updating(replica):
            results.append(fn(replica, *own_args, **own_kwargs))
    if strategy.num_replicas_in_sync == 1:
        return results[0] if group else _opened(strategy, results[0])
    grouped = nest.map_structure(lambda *leaves: _group(leaves, replicas), results[0], *results[1:])
    return grouped if group else _opened(strategy, grouped)


def _group(leaves: tuple[Any, ...], replicas: tuple[int, ...]) -> Any:
    """One leaf of what the calls returned: the variable whose components these are, one object, or `Mirrored`."""
    first = leaves[0]
    if isinstance(first, Variable) and first._container is not None:
        container = first._container
        if all(leaf is component for leaf, component in zip(leaves, container._components, strict=True)):
            return container
    if len(leaves) > 1 and all(leaf is first for leaf in leaves):
        return first
    return Mirrored(leaves, replica_ids=replicas)


def _opened(strategy: Strategy, result: Any) -> Any:
    replicas = strategy._engine.local_replicas
    return nest.map_structure(lambda leaf: local_results(leaf, replicas), result)
