"""`ts.cluster_resolver.UnionResolver`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.harness import Case, Difference
from torchstrat.cluster_resolver import ClusterSpec, SimpleClusterResolver, UnionResolver


def merge(case: Case) -> dict[str, Any]:
    clusters = [ClusterSpec(cluster) for cluster in case.inputs["specs"]]
    merged = UnionResolver(*map(SimpleClusterResolver, clusters)).cluster_spec()
    return {"as_dict": merged.as_dict(), "jobs": merged.jobs, "bool": bool(merged), "repr": repr(merged)}


OPS: dict[str, Callable[[Case], Any]] = {"merge": merge}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
