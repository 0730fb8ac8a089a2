"""Variables that the strategy's partitioner splits: the first values of each shard."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchstrat.parameter_server.variables.placement import Partitioner
from torchstrat.parameter_server.variables.sharded_variable import ShardedVariable
from torchstrat.partitioners import row_offsets, shards_of
from torchstrat.variable.creation import initial_tensor
from torchstrat.variable.storage import parse_shape
from torchstrat.variable.variable import Variable


class ShardInfo(NamedTuple):
    """What one call of an initial value's function is to make: ``shape`` at ``offset`` of the whole, per dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def create_variable(
    partitioner: Partitioner,
    initial_value: Any,
    name: str | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    make: Callable[[torch.Tensor, str | None], Variable],
) -> Variable | ShardedVariable:
    """A `Variable`, or a `ShardedVariable` whose shards are ``NAME/part_0``, ``NAME/part_1``, …

    An initial value is cut. A function is called once, or, where ``shape`` and ``dtype`` are given, once per shard:
    with ``partition_shape`` and ``partition_offset``, or a `ShardInfo` as ``shard_info``, if it takes these, so that no
    process needs the whole value.

    Args:
        make: creates one variable that is not split.
    """
    label = name or "Variable"
    whole: torch.Tensor | None = None
    if callable(initial_value) and shape is not None and None not in shape and dtype is not None:
        whole_shape, whole_dtype = tuple(int(size) for size in shape), dtype
    else:
        whole = initial_tensor(initial_value, dtype, label)
        parse_shape(shape, whole)
        whole_shape, whole_dtype = tuple(whole.shape), whole.dtype
    count = shards_of(partitioner, whole_shape, whole_dtype) if whole_shape else 1
    if count == 1:
        if whole is None:
            whole = initial_tensor(initial_value, dtype, label)
            parse_shape(whole_shape, whole)
        return make(whole, name)
    parts = []
    for number, (start, stop) in enumerate(row_offsets(whole_shape[0], count)):
        value = _of_shard(initial_value, whole_shape, dtype, start, stop, label) if whole is None else whole[start:stop]
        parts.append(make(value, None if name is None else f"{name}/part_{number}"))
    return ShardedVariable(parts)


def _of_shard(
    initial_value: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    start: int,
    stop: int,
    label: str,
) -> torch.Tensor:
    """A function's value for rows ``start`` to ``stop``, cut where the function gives the whole value."""
    info = ShardInfo((stop - start, *shape[1:]), (start, *[0] * (len(shape) - 1)))
    part = {"partition_shape": info.shape, "partition_offset": info.offset}
    value = None
    parameters = _parameters_of(initial_value)
    if "shard_info" in parameters:
        value = initial_tensor(lambda: initial_value(shard_info=info), dtype, label)
    elif parameters.keys() >= part.keys():
        value = initial_tensor(lambda: initial_value(**part), dtype, label)
    elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        # A function that hands its keywords on to one that does not take these says so by an error.
        with contextlib.suppress(TypeError, ValueError):
            value = initial_tensor(lambda: initial_value(**part), dtype, label)
    if value is None:
        value = initial_tensor(initial_value, dtype, label)
    elif value.shape == info.shape:
        return value
    parse_shape(shape, value)
    return value[start:stop]


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
