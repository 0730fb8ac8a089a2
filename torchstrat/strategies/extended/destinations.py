"""Values combined or copied to chosen places: what `StrategyExtended.reduce_to` and its like do.

A destination is a device name, a variable, or a distributed value; the last two mean "wherever that one lives".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchstrat.core.communicator import within
from torchstrat.core.context import StrategyLike, engine_of, home_of, wraps_values
from torchstrat.core.devices import canonical, torch_device
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.values import DistributedValues, Mirrored
from torchstrat.core.variable.variable import Variable, components_of, reduced, storage_of
from torchstrat.parameter_server.variables.sharded_variable import ShardedVariable

Places = str | list[tuple[int, str]]
"""One device, or a device for each of several replicas."""


def reduce_to(strategy: StrategyLike, reduce_op: ReduceOp | str, value: object, destinations: object) -> Any:
    """``value`` combined over replicas: a tensor where there is one destination, `Mirrored` where there are several."""
    op = ReduceOp.parse(reduce_op)
    places = _places(strategy, destinations)
    if not wraps_values(strategy):
        return value  # one replica: it is where it has to be
    if isinstance(value, Variable):
        value = reduced(value, op, None)
    elif not isinstance(value, Mirrored) or op is not ReduceOp.MEAN:
        with within("reduce_to"):
            value = engine_of(strategy).reduce(op, value, None)
    return _put(value, places)


def batch_reduce_to(
    strategy: StrategyLike, reduce_op: ReduceOp | str, pairs: Sequence[tuple[object, object]]
) -> list[Any]:
    """`reduce_to` for each ``(value, destinations)`` pair, in order."""
    op = ReduceOp.parse(reduce_op)
    if not pairs and wraps_values(strategy):
        raise InvalidArgumentError("batch_reduce_to got no (value, destinations) pairs; give at least one.")
    return [reduce_to(strategy, op, value, destinations) for value, destinations in pairs]


def broadcast_to(strategy: StrategyLike, tensor: object, destinations: object) -> Any:
    """A copy of ``tensor`` at each destination. A Python number is everywhere already."""
    if isinstance(tensor, bool | int | float):
        return tensor
    places = _places(strategy, destinations)
    return _put(tensor, places) if wraps_values(strategy) else tensor


def _put(value: object, places: Places) -> Any:
    if isinstance(value, Variable):
        value = value.read_value()
    if isinstance(value, DistributedValues):
        value = value.values[0]
    if isinstance(places, str):
        return _copy(value, places)
    copies = [_copy(value, device) for _, device in places]
    return Mirrored(copies, replica_ids=tuple(replica for replica, _ in places))


def _copy(value: object, device: str) -> object:
    return value.to(torch_device(device), copy=True) if isinstance(value, torch.Tensor) else value


def _places(strategy: StrategyLike, destinations: object) -> Places:
    if isinstance(destinations, str | torch.device):
        if destinations == "":
            raise InvalidArgumentError("destinations is an empty string; name a device, or pass a variable or a value.")
        return home_of(strategy).device_named(destinations)
    if isinstance(destinations, ShardedVariable):
        place: str = strategy.extended.device_of(destinations)
        return place
    if isinstance(destinations, Variable):
        components = components_of(destinations)
        return _of_replicas(strategy, tuple(components)) if components else storage_of(destinations).device
    if isinstance(destinations, DistributedValues):
        return _of_replicas(strategy, destinations.replica_ids)
    if isinstance(destinations, torch.Tensor):
        known = strategy.extended.variable_created_in_scope(destinations)
        return strategy.extended.device_of(destinations) if known else canonical(destinations.device)
    raise InvalidArgumentError(
        f"destinations must be a device name, a variable or a distributed value; got {type(destinations).__name__} "
        f"{destinations!r:.80}."
    )


def _of_replicas(strategy: StrategyLike, replicas: tuple[int, ...]) -> Places:
    places = [(replica, engine_of(strategy).device_of_replica(replica)) for replica in replicas]
    return places[0][1] if strategy.num_replicas_in_sync == 1 else places
