"""`Strategy.distribute_values_from_function`, under its ``experimental_`` name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import torchstrat as ts
from tests.conformance.harness import Case, Difference, make_strategy

SEVEN = torch.tensor(7.0)
FUNCTIONS: dict[str, Callable[[ts.ValueContext], Any]] = {
    "constant": lambda _: torch.tensor(1.0),
    "replica_id": lambda context: context.replica_id_in_sync_group,
    "num_replicas": lambda context: context.num_replicas_in_sync,
    "none": lambda _: None,
    "string": lambda context: f"r{context.replica_id_in_sync_group}",
    "dict": lambda context: {"i": context.replica_id_in_sync_group},
    "array_by_id": lambda context: np.array([3.0, 2.0, 1.0])[context.replica_id_in_sync_group],
    "same_object": lambda _: SEVEN,
}


def context_texts(case: Case) -> list[str]:
    texts: list[str] = []
    make_strategy(case.setup).experimental_distribute_values_from_function(
        lambda context: texts.append(str(context.replica_id_in_sync_group))
    )
    return texts


def distribute(case: Case) -> Any:
    return make_strategy(case.setup).experimental_distribute_values_from_function(FUNCTIONS[case.inputs["value_fn"]])


OPS: dict[str, Callable[[Case], Any]] = {
    "ctx_str": context_texts,
    "experimental_distribute_values_from_function": distribute,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
