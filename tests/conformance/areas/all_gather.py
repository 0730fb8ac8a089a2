"""`ReplicaContext.all_gather`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.areas.merge_call import context
from tests.conformance.differences import raises
from tests.conformance.harness import Case, Difference, decode, make_strategy
from torchstrat.errors import InvalidArgumentError


def all_gather(case: Case) -> Any:
    def step(value: torch.Tensor) -> Any:
        return context().all_gather(value, case.inputs["axis"])

    return make_strategy(case.setup).run(step, args=(decode(case.inputs["value"]),))


def all_gather_scalar(case: Case) -> Any:
    def step() -> Any:
        return context().all_gather(torch.tensor(1, dtype=torch.int32), case.inputs["axis"])

    return make_strategy(case.setup).run(step)


OPS: dict[str, Callable[[Case], Any]] = {"all_gather": all_gather, "all_gather_scalar": all_gather_scalar}
_AXIS = raises(6, InvalidArgumentError, "axis=2", all_gather)
_SCALARS = raises(6, InvalidArgumentError, "scalars", all_gather_scalar)
DIFFERS: dict[str, Difference] = {
    "all_gather/all_gather/007": _AXIS,
    "all_gather/all_gather/047": _AXIS,
    "all_gather/all_gather_scalar/001": _SCALARS,
    "all_gather/all_gather_scalar/006": _SCALARS,
}
NO_COUNTERPART: dict[str, str] = {}
