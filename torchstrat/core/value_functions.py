"""Values made and opened per replica outside of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchstrat.core import nest
from torchstrat.core.values import DistributedValues, PerReplica, require_callable


@dataclass(frozen=True)
class ValueContext:
    """What the function of `distribute_values_from_function` is told: which replica it makes a value for."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f" total replicas in sync: {self.num_replicas_in_sync})"
        )


def distribute_values(
    value_fn: Callable[[ValueContext], Any], num_replicas: int, local_replicas: tuple[int, ...], wrap: bool
) -> Any:
    """One call per local replica, in order. ``wrap``: always `PerReplica` leaves; else the one replica's bare value."""
    require_callable(value_fn, "distribute_values_from_function")
    values = [value_fn(ValueContext(replica, num_replicas)) for replica in local_replicas]
    if not wrap:
        return values[0]
    return nest.map_structure(lambda *leaves: PerReplica(leaves, replica_ids=local_replicas), values[0], *values[1:])


def local_results(value: Any, local_replicas: tuple[int, ...]) -> tuple[Any, ...]:
    """The local components of a value or, of a nest, one nest per local component."""
    if isinstance(value, DistributedValues):
        return value.values
    components = getattr(value, "_local_components", None)
    if components is not None:
        return tuple(components())
    if not nest.is_nested(value):
        return (value,)
    count = len(local_replicas)

    def pick(index: int) -> Any:
        def open_leaf(leaf: Any) -> Any:
            if isinstance(leaf, DistributedValues):
                return leaf.values[index]
            parts = getattr(leaf, "_local_components", None)
            if parts is None:
                return leaf
            components = tuple(parts())
            return components[index] if len(components) > 1 else components[0]

        return nest.map_structure(open_leaf, value)

    lengths = {len(leaf.values) for leaf in nest.leaves(value) if isinstance(leaf, DistributedValues)}
    return tuple(pick(index) for index in range(min(lengths) if lengths else count))
