"""`ts.cluster_resolver.TFConfigClusterResolver`.

The variable is given as a mapping, except where the case is about when the process's own environment is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.conformance.harness import Case, Difference, outcome
from torchstrat.cluster_resolver import TFConfigClusterResolver
from torchstrat.errors import ClusterConfigError


def resolver(case: Case, **arguments: Any) -> TFConfigClusterResolver:
    return TFConfigClusterResolver(**arguments, environ={"TF_CONFIG": case.setup["TF_CONFIG"]})


def everything(resolver: TFConfigClusterResolver) -> dict[str, Any]:
    return {
        "cluster": outcome(lambda: resolver.cluster_spec().as_dict()),
        "task_type": outcome(lambda: resolver.task_type),
        "task_id": outcome(lambda: resolver.task_id),
        "rpc_layer": outcome(lambda: resolver.rpc_layer),
        "environment": resolver.environment,
        "master": outcome(resolver.master),
    }


def read_lazily(_: Case) -> list[Any]:
    with mock.patch.dict(os.environ):
        os.environ.pop("TF_CONFIG", None)
        lazy = TFConfigClusterResolver()
        os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        index = lazy.task_id
        os.environ["TF_CONFIG"] = '{"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}'
        return [index, lazy.task_type]


def setters(case: Case) -> dict[str, Any]:
    changed = resolver(case)
    for name, value in case.inputs["set"].items():
        setattr(changed, name, value)
    return everything(changed)


def rejects(key: str, value: str) -> Difference:
    """Number 11: the variable is checked whole when the resolver is built."""

    def promise(case: Case) -> None:
        """Raises one class, a ValueError, that names the key and the value."""
        error = outcome(lambda: resolver(case))
        assert isinstance(error, ClusterConfigError), error
        assert isinstance(error, ValueError)
        assert key in str(error), error
        assert value in str(error), error

    return Difference(11, promise)


OPS: dict[str, Callable[[Case], Any]] = {
    "TFConfigClusterResolver": lambda case: everything(resolver(case)),
    "master_args": lambda case: resolver(case).master(**case.inputs),
    "num_accelerators": lambda case: resolver(case).num_accelerators(),
    "override": lambda case: everything(resolver(case, **case.inputs)),
    "read_lazily": read_lazily,
    "setters": setters,
}
DIFFERS: dict[str, Difference] = {
    "tf_config/TFConfigClusterResolver/002": rejects("TF_CONFIG", "''"),
    "tf_config/TFConfigClusterResolver/007": rejects("TF_CONFIG", "3"),
    "tf_config/TFConfigClusterResolver/013": rejects("task.index", "1.7"),
    "tf_config/TFConfigClusterResolver/014": rejects("task.index", "None"),
    "tf_config/TFConfigClusterResolver/015": rejects("task.index", "-1"),
    "tf_config/TFConfigClusterResolver/016": rejects("task.index", "9"),
    "tf_config/TFConfigClusterResolver/022": rejects("task", "None"),
    "tf_config/TFConfigClusterResolver/024": rejects("task", "'worker'"),
    "tf_config/TFConfigClusterResolver/027": rejects("cluster", "['a']"),
    "tf_config/TFConfigClusterResolver/028": rejects("cluster", "'w0:1'"),
}
NO_COUNTERPART: dict[str, str] = {}
