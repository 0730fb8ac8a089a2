"""Gradients that functions have left under ``no_sync``: added up here until a step of any function takes them.

They lie with the variables, behind their locks, as ``.grad`` lies with a parameter: whichever optimizer steps takes
them. They are in no checkpoint, as ``.grad`` is in none, and one that is restored empties them: they were computed with
values that are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from torchstrat.errors import InvalidArgumentError
from torchstrat.host_memory import check_fits
from torchstrat.parameter_server.messages import Accumulation, OptimizerStep, ShardKey
from torchstrat.parameter_server.server.advice import MORE_SERVERS
from torchstrat.parameter_server.server.held import Gradient, HeldShards, check_rows


def check_accumulation(left: Accumulation, shards: HeldShards) -> None:
    """Raise for what `accumulate` could not do, before anything has changed."""
    there = shards.gradients
    for key, (ids, values) in _gradients_in(left):
        shard = shards.tensor(key)
        shape = tuple(shard.shape)
        if ids is not None:
            if shard.dim() == 0:
                raise InvalidArgumentError(f"{shards.name(key)} is a scalar and has no rows to add gradients of.")
            check_rows(ids, shard.shape[0], shards.name(key), sorted_and_unique=True)
            shape = (len(ids), *shape[1:])
        check_gradient(values, shards, key, shape)
        if ids is None and key not in there:
            check_fits(values.nbytes, f"gradients of {shards.name(key)} that no_sync has left", MORE_SERVERS)


def check_gradient(gradient: object, shards: HeldShards, key: ShardKey, shape: tuple[int, ...]) -> None:
    dtype = shards.tensor(key).dtype
    if not isinstance(gradient, torch.Tensor) or gradient.layout != torch.strided or gradient.device.type != "cpu":
        raise InvalidArgumentError(f"the gradient of {shards.name(key)} must be a dense tensor on the CPU.")
    if tuple(gradient.shape) != shape or gradient.dtype != dtype:
        raise InvalidArgumentError(
            f"the gradient of {shards.name(key)} must be {dtype} of shape {shape}; got {gradient.dtype} of shape "
            f"{tuple(gradient.shape)}."
        )
    if not (dtype.is_floating_point or dtype.is_complex):
        raise InvalidArgumentError(f"{shards.name(key)} is {dtype}, which no optimizer steps.")


def accumulate(left: Accumulation, shards: HeldShards) -> None:
    """Add gradients to those that are here. The sender's memory is lent for this call."""
    there = shards.gradients
    for key, gradient in _gradients_in(left):
        shards.put_gradient(key, _sum(there[key], gradient) if key in there else _copy(gradient))


def with_accumulated(step: OptimizerStep, variables: Collection[int], shards: HeldShards) -> OptimizerStep:
    """The step with what is here of these variables, which are those of its optimizer, added to its gradients. A
    variable of which it brings none is stepped as well. What is here stays, until `HeldShards.drop_gradients`."""
    found = {key: gradient for key, gradient in shards.gradients.items() if key[0] in variables}
    if not found:
        return step
    for key, gradient in _gradients_in(step):
        found[key] = _sum(found[key], gradient) if key in found else gradient
    dense = tuple((key, values) for key, (ids, values) in found.items() if ids is None)
    rows = tuple((key, ids, values) for key, (ids, values) in found.items() if ids is not None)
    return replace(step, dense=dense, rows=rows)


def _gradients_in(sent: Accumulation | OptimizerStep) -> Iterator[tuple[ShardKey, Gradient]]:
    for key, values in sent.dense:
        yield key, (None, values)
    for key, ids, rows in sent.rows:
        yield key, (ids, rows)


def _copy(gradient: Gradient) -> Gradient:
    ids, values = gradient
    return None if ids is None else ids.clone(), values.clone()


def _sum(there: Gradient, more: Gradient) -> Gradient:
    """In memory of its own. Dense where either is, as PyTorch's own sum of the two."""
    (old_ids, old), (new_ids, new) = there, more
    if old_ids is None:
        return None, old + new if new_ids is None else old.index_add(0, new_ids, new)
    if new_ids is None:
        return None, new.index_add(0, old_ids, old)
    ids, places = torch.unique(torch.cat([old_ids, new_ids]), return_inverse=True)
    return ids, old.new_zeros(len(ids), *old.shape[1:]).index_add_(0, places, torch.cat([old, new]))
