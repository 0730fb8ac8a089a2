"""Variables that the strategy's partitioner splits: the first values of each shard."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrat.parameter_server.placement import Partitioner
from torchstrat.parameter_server.sharded_variable import ShardedVariable
from torchstrat.partitioners import row_offsets, shards_of
from torchstrat.variable.creation import initial_tensor
from torchstrat.variable.variable import Variable

_SHARD_KEYWORDS = frozenset({"partition_shape", "partition_offset"})


def create_variable(
    partitioner: Partitioner,
    initial_value: Any,
    name: str | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    make: Callable[[torch.Tensor, str | None], Variable],
) -> Variable | ShardedVariable:
    """A `Variable`, or a `ShardedVariable` whose shards are ``NAME/part_0``, ``NAME/part_1``, …

    An initial value is cut. A function is called once, or, where ``shape`` and ``dtype`` are given, once per shard,
    with ``partition_shape`` and ``partition_offset`` if it takes these, so that no process needs the whole value.

    Args:
        make: creates one variable that is not split.
    """
    label = name or "Variable"
    if callable(initial_value) and shape is not None and dtype is not None:
        whole, whole_shape, whole_dtype = None, tuple(shape), dtype
    else:
        whole = initial_tensor(initial_value, dtype, label)
        whole_shape, whole_dtype = tuple(whole.shape), whole.dtype
    count = shards_of(partitioner, whole_shape, whole_dtype) if whole_shape else 1
    if count == 1:
        return make(initial_tensor(initial_value, dtype, label) if whole is None else whole, name)
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
    if _takes_shard_keywords(initial_value):
        part = {"partition_shape": (stop - start, *shape[1:]), "partition_offset": (start, *[0] * (len(shape) - 1))}
        return initial_tensor(lambda: initial_value(**part), dtype, label)
    return initial_tensor(initial_value, dtype, label)[start:stop]


def _takes_shard_keywords(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or set(parameters) >= _SHARD_KEYWORDS
