"""`ts.ShardedVariable`: what it is made of, what it says of itself, and how modules see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.harness import Case, Difference
from torchstrat.partitioners import row_offsets


def parameters(rows: Sequence[int]) -> list[torch.nn.Parameter]:
    """Shards of that many rows; the whole is ``arange(2 * rows).reshape(rows, 2)``."""
    whole = torch.arange(2.0 * sum(rows)).reshape(-1, 2)
    return [torch.nn.Parameter(part.clone()) for part in whole.split(list(rows))]


def rows_of(layout: str) -> list[int]:
    """``"13x2 over 5 (3,3,3,2,2)"``, ``"4x2 over 4"`` and ``"uneven 1,4,2"`` as the number of rows of each shard."""
    if layout.startswith("uneven "):
        return [int(rows) for rows in layout.removeprefix("uneven ").split(",")]
    total, shards = re.findall(r"\d+", layout)[0], re.findall(r"over (\d+)", layout)[0]
    return [stop - start for start, stop in row_offsets(int(total), int(shards))]


def variable_of(case: Case) -> ts.ShardedVariable:
    return ts.ShardedVariable(parameters(rows_of(case.setup["layout"])), name="emb")


def detached(variable: ts.ShardedVariable) -> list[torch.Tensor]:
    return [shard.detach() for shard in variable.variables]


def attributes(case: Case) -> dict[str, Any]:
    variable = variable_of(case)
    return {
        "shape": list(variable.shape),
        "dtype": str(variable.dtype).removeprefix("torch."),
        "name": variable.name,
        "len_variables": len(variable.variables),
        "iter_count": len(list(variable)),
        "isinstance_tf_Variable": isinstance(variable, ts.Variable),
        "value": torch.as_tensor(variable),
        "numpy_shape": list(variable.numpy().shape),
    }


def constructor_error(case: Case) -> Any:
    [left, right] = parameters([2, 2])
    arguments: dict[str, Any] = {
        "empty list": [],
        "tensor": [left.detach()],
        "dtype mismatch": [left, torch.nn.Parameter(right.detach().double())],
        "trailing shape mismatch": [left, torch.nn.Parameter(torch.zeros(2, 3))],
        "a single variable not in list": left,
    }
    return ts.ShardedVariable(arguments[case.inputs["variables"]])


def in_module(case: Case) -> dict[str, Any]:
    module, variable = torch.nn.Module(), ts.ShardedVariable(parameters(case.setup["from_rows"]))
    module.table = variable
    found = list(module.parameters())
    return {
        "len_variables": len(found),
        "len_trainable": sum(parameter.requires_grad for parameter in found),
        "is_components": all(one is other for one, other in zip(found, variable.variables, strict=True)),
    }


OPS: dict[str, Callable[[Case], Any]] = {
    "attrs": attributes,
    "ctor_error": constructor_error,
    "module_variables": in_module,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
