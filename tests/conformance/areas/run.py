"""`Strategy.run`: what replicas are given, in which order they run, and how their results come back."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.differences import returns
from tests.conformance.harness import Case, Difference, make_strategy

Pair = namedtuple("Pair", ["x", "y"])
SEVEN = torch.tensor(7.0)


def replica_id() -> int:
    context = ts.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def integer(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


RETURNED: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "python_int": lambda: 3,
    "python_distinct": lambda: 1000.5 + replica_id(),
    "same_tensor_object": lambda: SEVEN,
    "fresh_tensor": lambda: torch.tensor(1.0),
    "replica_id": replica_id,
    "dict": lambda: {"a": torch.tensor(1.0), "n": None},
    "list": lambda: [integer(1), integer(2)],
    "tuple": lambda: (integer(1), None, "s"),
    "namedtuple": lambda: Pair(integer(1), integer(2)),
    "empty_tuple": lambda: (),
    "empty_dict": dict,
}
MISMATCHED: dict[str, Callable[[], Any]] = {
    "list_vs_tuple": lambda: [integer(1)] if replica_id() == 0 else (integer(1),),
    "tensor_vs_list": lambda: integer(1) if replica_id() == 0 else [integer(1)],
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "plain_tensor": (torch.tensor(5.0),),
    "none": (None, ts.PerReplica([torch.tensor(10.0), torch.tensor(20.0)])),
    "no_args": (),
}


def run_args(case: Case) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []

    def record(*args: Any, **kwargs: Any) -> None:
        plain = [value.item() if isinstance(value, torch.Tensor) else value for value in args]
        calls.append({"replica": replica_id(), "args": plain, "kwargs": kwargs})

    make_strategy(case.setup).run(record, args=ARGUMENTS[case.inputs["args"]])
    return {"calls": calls}


def run_call_order(case: Case) -> list[int]:
    order: list[int] = []
    make_strategy(case.setup).run(lambda: order.append(replica_id()))
    return order


def run_options(case: Case) -> Any:
    options = ts.RunOptions(experimental_enable_dynamic_batch_size=False)
    return make_strategy(case.setup).run(lambda: torch.tensor(1.0), options=options)


def run_replica_raises(case: Case) -> Any:
    def step() -> None:
        if replica_id() == 1:
            raise KeyError("replica 1")

    return make_strategy(case.setup).run(step)


def nested_run(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    return strategy.run(lambda: strategy.run(lambda: torch.tensor(1.0)))


def run_return(case: Case) -> Any:
    return make_strategy(case.setup).run(RETURNED[case.inputs["fn"]])


OPS: dict[str, Callable[[Case], Any]] = {
    "nested_run": nested_run,
    "run_args": run_args,
    "run_call_order": run_call_order,
    "run_options_ignored": run_options,
    "run_replica_raises": run_replica_raises,
    "run_return": run_return,
    "run_return_mismatch": lambda case: make_strategy(case.setup).run(MISMATCHED[case.inputs["fn"]]),
}


def _integers(*ids: int) -> Difference:
    """Number 13: a replica's id is a Python int."""
    plain = [{"python": index, "type": "int"} for index in ids]
    expect = plain[0] if len(plain) == 1 else {"per_replica": plain}
    return returns(13, "The id is a Python int.", expect, run_return)


DIFFERS: dict[str, Difference] = {
    "run/run_return/006": _integers(0),
    "run/run_return/057": _integers(0, 1),
}
_TRACED = "tf.function turns a Python number into a tensor; nothing is traced here"
NO_COUNTERPART: dict[str, str] = {
    "run/run_return/014": _TRACED,
    "run/run_return/048": _TRACED,
    "run/run_return/065": _TRACED,
    "run/run_return/099": _TRACED,
}
