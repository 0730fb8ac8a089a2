"""`Strategy.gather`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.differences import raises
from tests.conformance.harness import Case, Difference, decode, make_strategy, sparse_rows
from torchstrat.errors import InvalidArgumentError

AXIS_KINDS: dict[str, Any] = {"int32 tensor 0": torch.tensor(0, dtype=torch.int32), "tuple (0,)": (0,)}


def gather(case: Case) -> Any:
    return make_strategy(case.setup).gather(decode(case.inputs["value"]), axis=case.inputs["axis"])


def gather_axis_kind(case: Case) -> Any:
    axis = AXIS_KINDS[case.inputs["axis_kind"]]
    return make_strategy(case.setup).gather(decode(case.inputs["value"]), axis=axis)


def gather_sparse(case: Case) -> Any:
    value = ts.PerReplica(
        [
            sparse_rows([1], torch.tensor([[1.0]]), (4, 1)),
            sparse_rows([1, 3], torch.tensor([[2.0], [3.0]]), (4, 1)),
        ]
    )
    return make_strategy(case.setup).gather(value, axis=case.inputs["axis"])


OPS: dict[str, Callable[[Case], Any]] = {
    "gather": gather,
    "gather_axis_kind": gather_axis_kind,
    "gather_indexed_slices": gather_sparse,
    "gather_plain": gather,
}
_SCALARS = raises(6, InvalidArgumentError, "scalars", gather)
_AXIS = raises(6, InvalidArgumentError, "axis=7", gather)
DIFFERS: dict[str, Difference] = {
    "gather/gather/083": _SCALARS,
    "gather/gather/094": _SCALARS,
    "gather/gather_plain/002": _SCALARS,
    "gather/gather_plain/003": _AXIS,
    "gather/gather_plain/006": _SCALARS,
    "gather/gather_plain/007": _AXIS,
    "gather/gather_plain/011": _AXIS,
    "gather/gather_plain/014": _SCALARS,
    "gather/gather_plain/015": _AXIS,
    "gather/gather_plain/018": _SCALARS,
}
NO_COUNTERPART: dict[str, str] = {}
