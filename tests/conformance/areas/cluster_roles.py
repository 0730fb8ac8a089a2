"""`ts.cluster_resolver.is_chief`, `id_in_cluster` and `worker_count`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.harness import Case, Difference, outcome
from torchstrat.cluster_resolver import id_in_cluster, is_chief, worker_count


def roles(case: Case) -> dict[str, Any]:
    cluster, (task_type, task_id) = case.setup["cluster"], (case.inputs["task_type"], case.inputs["task_id"])
    return {
        "is_chief": outcome(lambda: is_chief(cluster, task_type, task_id)),
        "id_in_cluster": outcome(lambda: id_in_cluster(cluster, task_type, task_id)),
        "worker_count": outcome(lambda: worker_count(cluster, task_type)),
    }


OPS: dict[str, Callable[[Case], Any]] = {"roles": roles}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
FIELDS_WITHOUT_COUNTERPART = {
    "collective_leader": "names the device that TensorFlow's collective runtime starts from",
    "coordination_leader": "names the device of TensorFlow's coordination service",
}
