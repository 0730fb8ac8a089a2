"""What the values that replicas assign to one variable in a run become, before they are written once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchstrat.core import reduction
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.reduction import ReduceOp, VariableAggregation
from torchstrat.core.variable.storage import Edit, is_python_value, to_tensor
from torchstrat.replicas.engine import ReplicaEngine


class Given:
    """What one replica passed to an assignment, wrapped so that merging arguments does not open lists in it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def merge_values(
    aggregation: VariableAggregation, edit: Edit, values: Sequence[Any], dtype: torch.dtype
) -> torch.Tensor:
    """In one process, with every replica's value at hand: the one value to write.

    The very same object on all replicas, and equal Python numbers, are one value: a mean is that value, a sum is an
    error, because nobody can tell whether it is to count once or once per replica.
    """
    call, first = edit.value, values[0]
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return to_tensor(first, dtype, call)
    if len(values) == 1:
        return to_tensor(first, dtype, call)
    if all(value is first for value in values) or all(is_python_value(value) and value == first for value in values):
        if aggregation is VariableAggregation.SUM and not (isinstance(first, np.ndarray) and not np.any(first)):
            raise same_everywhere(call, first)
        return to_tensor(first, dtype, call)
    if aggregation is VariableAggregation.SUM and is_python_value(first):
        raise same_everywhere(call, first)
    return _reduce(aggregation, call, [to_tensor(value, dtype, call) for value in values])


def exchange_values(
    engine: ReplicaEngine,
    aggregation: VariableAggregation,
    edit: Edit,
    value: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """With one replica per process: the same, by collectives that every replica of the run takes part in.

    Whether tensors are one object cannot be seen here, so they always count as each replica's own. ``device`` is the
    replica's: what collectives work on.
    """
    call = edit.value
    tensor = to_tensor(value, dtype, call).to(device)
    if is_python_value(value):
        if aggregation is VariableAggregation.SUM:
            raise same_everywhere(call, value)
        rows = engine.all_gather(tensor.unsqueeze(0), 0)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA or bool((rows == rows[0]).all()):
            return _detached(rows[0])
        return _reduce(aggregation, call, list(rows))
    if tensor.layout == torch.sparse_coo:
        return _exchange_sparse(engine, aggregation, call, tensor)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return _detached(engine.all_gather(tensor.unsqueeze(0), 0)[0])
    _require_mean_of_floats(aggregation, dtype, call)
    return _detached(engine.all_reduce(ReduceOp.from_variable_aggregation(aggregation), tensor))


def _exchange_sparse(
    engine: ReplicaEngine, aggregation: VariableAggregation, call: str, tensor: torch.Tensor
) -> torch.Tensor:
    """Indices and values travel by themselves: gathers take parts of unequal length."""
    counts = engine.all_gather(torch.tensor([tensor._nnz()], device=tensor.device), 0)
    indices = engine.all_gather(tensor._indices(), 1).split(counts.tolist(), dim=1)
    values = engine.all_gather(tensor._values(), 0).split(counts.tolist())
    parts = [
        torch.sparse_coo_tensor(where, what, tensor.shape, check_invariants=False)
        for where, what in zip(indices, values, strict=True)
    ]
    return parts[0] if aggregation is VariableAggregation.ONLY_FIRST_REPLICA else _reduce(aggregation, call, parts)


def _reduce(aggregation: VariableAggregation, call: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    _require_mean_of_floats(aggregation, tensors[0].dtype, call)
    return reduction.combine(ReduceOp.from_variable_aggregation(aggregation), tensors, call)


def _detached(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value
    return tensor.detach()


def _require_mean_of_floats(aggregation: VariableAggregation, dtype: torch.dtype, call: str) -> None:
    if aggregation is VariableAggregation.MEAN:
        require_mean_of_floats(dtype, f"{call} of different values")


def require_mean_of_floats(dtype: torch.dtype, what: str) -> None:
    if not (dtype.is_floating_point or dtype.is_complex):
        raise InvalidArgumentError(
            f"{what} with aggregation MEAN needs a floating dtype, because a mean of integers is none; the variable is "
            f"of {dtype}. Use a floating dtype, or aggregation SUM or ONLY_FIRST_REPLICA."
        )


def same_everywhere(call: str, value: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{call} got {value!r:.80} on every replica for a variable with aggregation SUM: adding up a value that is the "
        "same everywhere is ambiguous. Pass a tensor computed by each replica, assign outside of run, or use "
        "aggregation MEAN or ONLY_FIRST_REPLICA."
    )
