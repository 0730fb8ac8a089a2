"""Clusters that `ParameterServerStrategy` refuses before it connects to anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.harness import Case, Difference, opened
from torchstrat.cluster_resolver import ClusterSpec, SimpleClusterResolver


def constructor(case: Case) -> Any:
    given = case.inputs
    resolver = SimpleClusterResolver(
        ClusterSpec(given["cluster"]), task_type=given["task_type"], task_id=given["task_id"]
    )
    return opened(ts.ParameterServerStrategy(resolver))


OPS: dict[str, Callable[[Case], Any]] = {"constructor": constructor}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
