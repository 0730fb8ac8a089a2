"""`ts.cluster_resolver.ClusterSpec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.harness import Case, Difference
from torchstrat.cluster_resolver import ClusterSpec

NOT_JSON = {"list": ["w0:1"]}
"""Clusters that the case names and JSON's recording left out."""


def construct(case: Case) -> Any:
    spec = ClusterSpec(NOT_JSON[case.inputs["name"]] if "cluster" not in case.inputs else case.inputs["cluster"])
    return {"as_dict": spec.as_dict(), "jobs": spec.jobs, "bool": bool(spec), "repr": repr(spec)}


def method(name: str) -> Callable[[Case], Any]:
    return lambda case: getattr(ClusterSpec(case.setup["cluster"]), name)(*case.inputs["args"])


OPS: dict[str, Callable[[Case], Any]] = {
    "construct": construct,
    "job_tasks": method("job_tasks"),
    "job_tasks_empty_job": lambda case: ClusterSpec(case.setup["cluster"]).job_tasks("worker"),
    "num_tasks": method("num_tasks"),
    "task_address": method("task_address"),
    "task_indices": method("task_indices"),
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
