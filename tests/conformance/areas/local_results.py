"""`Strategy.local_results`, under its ``experimental_`` name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.areas.run import integer, replica_id
from tests.conformance.harness import Case, Difference, make_strategy

RUN_RESULTS: dict[str, Callable[[], Any]] = {
    "run_result": lambda: integer(replica_id()),
    "dict_result": lambda: {"a": torch.tensor(1.0), "b": (integer(2), 3)},
    "list_result": lambda: [torch.tensor(1.0)],
}
PLAIN: dict[str, Any] = {
    "python_list": [1, 2],
    "python_dict": {"k": 1},
    "python_int": 5,
    "plain_tensor": torch.tensor(4.0),
    "none": None,
    "empty_list": [],
}


def local_results(case: Case) -> Any:
    strategy, name = make_strategy(case.setup), case.inputs["value"]
    if name == "variable created in scope":
        with strategy.scope():
            return strategy.experimental_local_results(ts.Variable(2.0))
    value = strategy.run(RUN_RESULTS[name]) if name in RUN_RESULTS else PLAIN[name]
    return strategy.experimental_local_results(value)


def local_results_in_replica_context(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    return strategy.run(lambda: strategy.experimental_local_results(torch.tensor(1.0)))


OPS: dict[str, Callable[[Case], Any]] = {
    "experimental_local_results": local_results,
    "local_results_in_replica_ctx": local_results_in_replica_context,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
