"""`ts.InputContext`: what a function that makes a dataset is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.harness import Case, Difference


def described(context: ts.InputContext) -> dict[str, Any]:
    return {
        "num_input_pipelines": context.num_input_pipelines,
        "input_pipeline_id": context.input_pipeline_id,
        "num_replicas_in_sync": context.num_replicas_in_sync,
        "str": str(context),
    }


def get_per_replica_batch_size(case: Case) -> Any:
    context = ts.InputContext(num_replicas_in_sync=case.setup["num_replicas_in_sync"])
    return context.get_per_replica_batch_size(case.inputs["global_batch_size"])


def read_only(_: Case) -> None:
    ts.InputContext().num_replicas_in_sync = 3  # type: ignore[misc]


OPS: dict[str, Callable[[Case], Any]] = {
    "defaults": lambda case: described(ts.InputContext()),
    "get_per_replica_batch_size": get_per_replica_batch_size,
    "get_per_replica_batch_size_kind": get_per_replica_batch_size,
    "read_only": read_only,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
