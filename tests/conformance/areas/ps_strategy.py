"""What `ParameterServerStrategy` says and does on the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.clusters import cluster_of
from tests.conformance.harness import Case, Difference


def attributes(case: Case) -> dict[str, Any]:
    strategy = cluster_of(case).strategy()
    return {
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
        "worker_devices": list(strategy.extended.worker_devices),
        "parameter_devices": list(strategy.extended.parameter_devices),
        "cluster_resolver_is_none": strategy.cluster_resolver is None,
    }


def iterate_directly(case: Case) -> Any:
    strategy = cluster_of(case).strategy()
    return iter(strategy.distribute_datasets_from_function(lambda _: [torch.zeros(2)]))


def _attributes(case: Case) -> None:
    """``cluster_resolver`` is the resolver that the strategy was made with; devices have PyTorch's names."""
    strategy = cluster_of(case).strategy()
    assert strategy.cluster_resolver is not None
    assert strategy.cluster_resolver.cluster_spec().num_tasks("worker") == case.setup["workers"]
    assert attributes(case) == {
        "num_replicas_in_sync": 1,
        "worker_devices": ["cpu:0"],
        "parameter_devices": ["cpu:0"],
        "cluster_resolver_is_none": False,
    }


OPS: dict[str, Callable[[Case], Any]] = {
    "attributes": attributes,
    "iterate_dataset_from_function_directly": iterate_directly,
    "reduce_none": lambda case: cluster_of(case).strategy().reduce("sum", case.inputs["value"], axis=None),
}
DIFFERS: dict[str, Difference] = {"ps_strategy/attributes/001": Difference(3, _attributes)}
NO_COUNTERPART: dict[str, str] = {}
FIELDS_WITHOUT_COUNTERPART = {"in_multi_worker_mode": "is private to TensorFlow's Keras"}
