"""What `tf.compat.v1`'s strategy has besides: iterators with `initialize` and `get_next`, and their runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import torchstrat as ts
from tests.conformance.areas.run import integer
from tests.conformance.differences import returns
from tests.conformance.harness import Case, Difference, make_strategy, outcome
from tests.conformance.pipelines import pipeline

NUMPY_INPUTS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (np.arange(4), np.arange(8).reshape(4, 2)),
    "list of arrays": lambda: [np.arange(3), np.arange(3)],
    "mismatched": lambda: (np.arange(4), np.arange(3)),
}


def attempts(call: Callable[[], Any], count: int) -> list[Any]:
    return [outcome(call) for _ in range(count)]


def numpy_dataset(case: Case) -> list[Any]:
    strategy = make_strategy(case.setup)
    return list(strategy.experimental_make_numpy_dataset(NUMPY_INPUTS[case.inputs["numpy_input"]]()))


def numpy_dataset_in_replica(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    return strategy.run(lambda: strategy.experimental_make_numpy_dataset(np.arange(4)))


def run_on_iterator(case: Case) -> list[Any]:
    strategy = make_strategy(case.setup)
    iterator = strategy.make_dataset_iterator(pipeline(case.inputs["dataset"]))
    iterator.initialize()
    return attempts(lambda: strategy.experimental_run(lambda x: x * 10, iterator), len(case.expect))


def input_fn_iterator(case: Case) -> dict[str, Any]:
    contexts: list[list[int]] = []

    def input_fn(context: ts.InputContext) -> Any:
        contexts.append([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync])
        return pipeline(case.inputs["input_fn"])

    iterator = make_strategy(case.setup).make_input_fn_iterator(input_fn)
    return {"contexts": contexts, "result": attempts(iterator.get_next, len(case.expect["result"]))}


def input_fn_returns_callable(case: Case) -> list[Any]:
    numbers = map(integer, itertools.count(1))
    iterator = make_strategy(case.setup).make_input_fn_iterator(lambda _: lambda: next(numbers))
    return attempts(iterator.get_next, len(case.expect))


def newer_methods(case: Case) -> dict[str, bool]:
    strategy = make_strategy(case.setup)
    return {
        "has_gather": hasattr(strategy, "gather"),
        "has_values_from_function": hasattr(strategy, "experimental_distribute_values_from_function"),
        "replica_context_has_all_gather": hasattr(ts.ReplicaContext, "all_gather"),
    }


def update_config(case: Case) -> dict[str, Any]:
    given = {"allow_soft_placement": True, "isolate_session_state": False, "device_filters": []}
    changed = make_strategy(case.setup).update_config_proto(given)
    return {
        **changed,
        "same_object": changed is given,
        "input_isolate_session_state": given["isolate_session_state"],
    }


def reduce_without_axis(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    return strategy.reduce(case.inputs["reduce_op"], strategy.run(lambda: torch.tensor(1.0)))


OPS: dict[str, Callable[[Case], Any]] = {
    "experimental_make_numpy_dataset": numpy_dataset,
    "experimental_run": run_on_iterator,
    "experimental_run_no_iterator": lambda case: make_strategy(case.setup).experimental_run(lambda: integer(1)),
    "gather_absent": newer_methods,
    "make_input_fn_iterator": input_fn_iterator,
    "make_input_fn_iterator_bad": lambda case: make_strategy(case.setup).make_input_fn_iterator(lambda _: 3),
    "make_input_fn_iterator_callable": input_fn_returns_callable,
    "make_numpy_in_replica_ctx": numpy_dataset_in_replica,
    "method_on_v2_strategy": lambda case: {"present": hasattr(make_strategy(case.setup), case.inputs["method"])},
    "reduce_default_axis": reduce_without_axis,
    "update_config_proto": update_config,
}
_EVERYTHING = {
    "has_gather": True,
    "has_values_from_function": True,
    "replica_context_has_all_gather": {"python": True, "type": "bool"},
}
DIFFERS: dict[str, Difference] = {
    "v1/gather_absent/002": returns(
        19, "There is no older class of strategies: every strategy has the newer methods.", _EVERYTHING, newer_methods
    ),
}
NO_COUNTERPART: dict[str, str] = {}
