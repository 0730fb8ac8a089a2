"""`ts.ShardedVariable` in expressions, and what it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import torchstrat as ts
from tests.conformance.areas.sharded_variable import variable_of
from tests.conformance.harness import Case, Difference, check

EXPRESSIONS: dict[str, Callable[[ts.ShardedVariable], Any]] = {
    "1 - v": lambda v: 1 - v,
    "v * v": lambda v: v * v,
    "-v": lambda v: -v,
    "tf.reduce_sum(v)": torch.sum,
    "convert float64": lambda v: torch.as_tensor(v, dtype=torch.float64),
    "numpy()": lambda v: v.numpy(),
    "len(v)": lambda v: len(v),  # type: ignore[arg-type]
    "bool": lambda v: bool(v),
    "v.device": lambda v: v.device,
    "np.asarray shape": lambda v: list(np.asarray(v).shape),
}


def expression(case: Case) -> Any:
    return EXPRESSIONS[case.inputs["expr"]](variable_of(case))


def converted(case: Case) -> None:
    """torch.as_tensor(v, dtype=…) converts, as it does for everything that torch reads."""
    whole = {"dtype": "float64", "shape": [4, 2], "data": np.arange(8.0).reshape(4, 2).tolist()}
    check(replace(case, expect=whole), expression(case))


OPS: dict[str, Callable[[Case], Any]] = {"operator": expression}
DIFFERS: dict[str, Difference] = {"sharded_ops/operator/010": Difference(5, converted)}
NO_COUNTERPART: dict[str, str] = {}
