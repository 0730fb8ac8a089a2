"""`ReplicaContext.all_reduce`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.areas.merge_call import context
from tests.conformance.areas.run import replica_id
from tests.conformance.differences import integer_mean
from tests.conformance.harness import Case, Difference, decode, make_strategy

STRUCTURES: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda value: [value, value * 2],
    "dict": lambda value: {"a": value, "b": {"c": value + 1}},
    "tuple_scalar": lambda value: (value[0], value[1]),
}


def all_reduce(case: Case) -> Any:
    def step(value: torch.Tensor) -> Any:
        return context().all_reduce(case.inputs["reduce_op"], value)

    return make_strategy(case.setup).run(step, args=(decode(case.inputs["value"]),))


def gradient(case: Case) -> Any:
    def step() -> torch.Tensor:
        x = torch.tensor(replica_id() + 1.0, requires_grad=True)
        y = context().all_reduce(case.inputs["reduce_op"], x * x)
        z = (replica_id() + 1) * y
        return torch.autograd.grad(z, x)[0]

    return make_strategy(case.setup).run(step)


def nested(case: Case) -> Any:
    def step(value: torch.Tensor) -> Any:
        return context().all_reduce("SUM", STRUCTURES[case.inputs["structure"]](value))

    return make_strategy(case.setup).run(step, args=(decode(case.inputs["value"]),))


OPS: dict[str, Callable[[Case], Any]] = {
    "all_reduce": all_reduce,
    "all_reduce_gradient": gradient,
    "all_reduce_nested": nested,
}
DIFFERS: dict[str, Difference] = {
    "all_reduce/all_reduce/058": integer_mean(all_reduce, number=6),
    "all_reduce/all_reduce/070": integer_mean(all_reduce, number=6),
}
NO_COUNTERPART: dict[str, str] = {}
