"""`ts.ShardedVariable`: changes of single rows, given as sparse COO tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.areas.sharded_variable import detached, variable_of
from tests.conformance.harness import Case, Difference, sparse_rows


def scatter(name: str) -> Callable[[Case], Any]:
    def operation(case: Case) -> Any:
        variable = variable_of(case)
        rows = torch.tensor(case.inputs["values"], dtype=variable.dtype)
        returned = getattr(variable, name)(sparse_rows(case.inputs["indices"], rows, variable.shape))
        return {"returns_self": returned is variable, "shards": detached(variable)}

    return operation


def two_dimensional(case: Case) -> Any:
    """An index of two dimensions is a sparse tensor with two sparse dimensions."""
    variable = variable_of(case)
    [[row]] = case.inputs["indices"]
    value = torch.sparse_coo_tensor([[row], [0]], [1.0], tuple(variable.shape), check_invariants=True)
    return variable.scatter_add(value)


OPS: dict[str, Callable[[Case], Any]] = {
    "batch_scatter_update": scatter("batch_scatter_update"),
    "scatter_2d_indices": two_dimensional,
    "scatter_add": scatter("scatter_add"),
    "scatter_add_duplicates": scatter("scatter_add"),
    "scatter_mul": scatter("scatter_mul"),
    "scatter_sub": scatter("scatter_sub"),
    "scatter_update": scatter("scatter_update"),
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
