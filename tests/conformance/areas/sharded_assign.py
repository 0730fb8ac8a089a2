"""`ts.ShardedVariable`: assignments of whole values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.areas.sharded_variable import detached, variable_of
from tests.conformance.harness import Case, Difference


def edit(name: str) -> Callable[[Case], Any]:
    def operation(case: Case) -> Any:
        variable = variable_of(case)
        returned = getattr(variable, name)(0.5 * torch.as_tensor(variable) + 1)
        return {"returns_self": returned is variable, "shards": detached(variable)}

    return operation


def too_few_rows(case: Case) -> Any:
    variable = variable_of(case)
    return variable.assign(torch.as_tensor(variable)[:-1])


OPS: dict[str, Callable[[Case], Any]] = {
    "assign": edit("assign"),
    "assign_add": edit("assign_add"),
    "assign_scalar": lambda case: variable_of(case).assign(case.inputs["value"]),
    "assign_sub": edit("assign_sub"),
    "assign_wrong_shape": too_few_rows,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
