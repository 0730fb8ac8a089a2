"""`PerReplica`, `Mirrored` and `ReduceOp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.harness import Case, Difference, outcome

EXPRESSIONS: dict[str, Callable[[ts.PerReplica, Any], Any]] = {
    "tf.add(P, 1)": lambda per_replica, _: torch.add(per_replica, 1),  # type: ignore[call-overload]
    "M + 1": lambda _, mirrored: mirrored + 1,
    "M.numpy()": lambda _, mirrored: mirrored.numpy(),
}


def operations(case: Case) -> Any:
    one = torch.tensor(1.0)
    return EXPRESSIONS[case.inputs["expr"]](ts.PerReplica([one, torch.tensor(2.0)]), ts.Mirrored([one, one.clone()]))


def instances(_: Case) -> dict[str, Any]:
    return {
        "PerReplica is DistributedValues": issubclass(ts.PerReplica, ts.DistributedValues),
        "Mirrored is DistributedValues": issubclass(ts.Mirrored, ts.DistributedValues),
        "values attr type": type(ts.PerReplica([1, 2]).values).__name__,
    }


def reduce_op_members(_: Case) -> dict[str, Any]:
    aggregation, of = ts.VariableAggregation, ts.ReduceOp.from_variable_aggregation
    return {
        "members": [op.name for op in ts.ReduceOp],
        "values": [op.value for op in ts.ReduceOp],
        "from_aggregation_SUM": of(aggregation.SUM).name,
        "from_NONE": outcome(lambda: of(aggregation.NONE)),
        "from_FIRST": outcome(lambda: of(aggregation.ONLY_FIRST_REPLICA)),
    }


def representation(_: Case) -> dict[str, str]:
    value = ts.PerReplica([1, 2])
    return {"repr": repr(value), "str": str(value)}


OPS: dict[str, Callable[[Case], Any]] = {
    "isinstance": instances,
    "operations": operations,
    "reduce_op_members": reduce_op_members,
    "repr": representation,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
