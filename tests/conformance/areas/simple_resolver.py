"""`ts.cluster_resolver.SimpleClusterResolver` and its abstract base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.harness import Case, Difference
from torchstrat.cluster_resolver import ClusterResolver, ClusterSpec, SimpleClusterResolver


def attributes(case: Case) -> dict[str, Any]:
    resolver = SimpleClusterResolver(ClusterSpec(case.setup["cluster"]), **case.inputs)
    return {
        "cluster": resolver.cluster_spec().as_dict(),
        "task_type": resolver.task_type,
        "task_id": resolver.task_id,
        "rpc_layer": resolver.rpc_layer,
        "environment": resolver.environment,
        "master": resolver.master(),
        "num_accelerators": resolver.num_accelerators(),
    }


def error(case: Case) -> Any:
    arguments: dict[str, tuple[Any, ...]] = {
        "None": (None,),
        "master not a string": (ClusterSpec({"worker": ["w0:1"]}), 3),
    }
    return SimpleClusterResolver(*arguments[case.inputs["what"]])


def master(case: Case) -> str:
    return SimpleClusterResolver(ClusterSpec(case.setup["cluster"]), **case.setup["ctor"]).master(**case.inputs)


OPS: dict[str, Callable[[Case], Any]] = {
    "abstract_base": lambda case: ClusterResolver(),  # type: ignore[abstract]
    "attributes": attributes,
    "error": error,
    "master": master,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
