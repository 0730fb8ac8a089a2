"""`Strategy.distribute_datasets_from_function`: whole elements of the function's dataset, one per replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.areas.input_context import described
from tests.conformance.harness import Case, Difference, make_strategy
from tests.conformance.losses import keeps_every_row
from tests.conformance.pipelines import pipeline, read


def from_function(case: Case) -> Any:
    contexts: list[dict[str, Any]] = []

    def dataset_fn(context: ts.InputContext) -> Any:
        contexts.append(described(context) | {"per_replica_of_12": context.get_per_replica_batch_size(12)})
        return pipeline(case.inputs["dataset_fn"])

    distributed = make_strategy(case.setup).distribute_datasets_from_function(dataset_fn)
    result = read(distributed)
    if "contexts" not in case.expect:
        return result
    return {"contexts": contexts, "result": result | {"element_spec": distributed.element_spec}}


def raise_key_error(_: ts.InputContext) -> None:
    raise KeyError("in dataset_fn")


BAD_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "returns list": lambda context: [1, 2, 3],
    "returns None": lambda context: None,
    "takes no argument": lambda: pipeline("range(4).batch(2)"),
    "raises KeyError": raise_key_error,
}


def bad_function(case: Case) -> Any:
    return make_strategy(case.setup).distribute_datasets_from_function(BAD_FUNCTIONS[case.inputs["dataset_fn"]])


def old_name(case: Case) -> dict[str, Any]:
    distribute = getattr(make_strategy(case.setup), case.inputs["method"])
    return read(distribute(lambda context: pipeline("range(4).batch(1)")))


OPS: dict[str, Callable[[Case], Any]] = {
    "bad_fn": bad_function,
    "distribute_datasets_from_function": from_function,
    "drop_remainder": from_function,
    "old_name": old_name,
    "unbatched": from_function,
}

_LOSSY = keeps_every_row(from_function)
DIFFERS: dict[str, Difference] = {
    "dataset_from_function/distribute_datasets_from_function/043": _LOSSY,
    "dataset_from_function/distribute_datasets_from_function/048": _LOSSY,
    "dataset_from_function/drop_remainder/007": _LOSSY,
    "dataset_from_function/drop_remainder/008": _LOSSY,
    "dataset_from_function/unbatched/002": _LOSSY,
    "dataset_from_function/unbatched/003": _LOSSY,
    "dataset_from_function/unbatched/004": _LOSSY,
    "dataset_from_function/unbatched/008": _LOSSY,
}
NO_COUNTERPART: dict[str, str] = {}
