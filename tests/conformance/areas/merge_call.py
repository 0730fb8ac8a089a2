"""`ReplicaContext.merge_call`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.areas.run import integer, replica_id
from tests.conformance.harness import Case, Difference, make_strategy


def context() -> ts.ReplicaContext:
    current = ts.get_replica_context()
    assert current is not None
    return current


def merge(function: Callable[..., Any], *args: Any) -> Any:
    return context().merge_call(function, args=args)


def in_run(step: Callable[[], Any]) -> Callable[[Case], Any]:
    return lambda case: make_strategy(case.setup).run(step)


def identity(case: Case) -> dict[str, Any]:
    calls: list[Any] = []

    def merged(_: ts.Strategy, value: Any) -> Any:
        calls.append(value)
        return value

    result = make_strategy(case.setup).run(lambda: merge(merged, integer(replica_id())))
    return {"result": result, "merge_fn_calls": len(calls)}


def raises(_: ts.Strategy) -> None:
    raise IndexError("from the merge function")


def stale(call: Callable[[ts.ReplicaContext], Any]) -> Callable[[Case], Any]:
    def operation(case: Case) -> Any:
        saved: list[ts.ReplicaContext] = []
        make_strategy(case.setup).run(lambda: saved.append(context()))
        return call(saved[0])

    return operation


def summed(case: Case) -> dict[str, Any]:
    strategy = make_strategy(case.setup)
    inside: list[dict[str, Any]] = []

    def merged(current: ts.Strategy, value: Any) -> Any:
        inside.append(
            {
                "strategy_is": current is strategy,
                "cross": ts.in_cross_replica_context(),
                "type": "EagerTensor" if isinstance(value, torch.Tensor) else type(value).__name__,
                "replica_ctx_none": ts.get_replica_context() is None,
            }
        )
        return current.reduce("SUM", value, axis=None)

    result = strategy.run(lambda: merge(merged, torch.tensor(replica_id() + 1.0)))
    [once] = inside
    return {"result": result, "inside": once}


def twice() -> Any:
    total = merge(lambda strategy, value: strategy.reduce("SUM", value, axis=None), torch.tensor(1.0))
    return merge(lambda strategy, value: strategy.reduce("MEAN", value, axis=None), total + replica_id())


def uneven() -> None:
    if replica_id() == 0:
        merge(lambda _: None)


OPS: dict[str, Callable[[Case], Any]] = {
    "all_reduce_stale_context": stale(lambda saved: saved.all_reduce("sum", torch.tensor(1.0))),
    "merge_call_identity": identity,
    "merge_call_none": in_run(lambda: merge(lambda _: None)),
    "merge_call_python_arg": in_run(lambda: merge(lambda _, value: type(value).__name__, 3)),
    "merge_call_raises": in_run(lambda: merge(raises)),
    "merge_call_stale_context": stale(lambda saved: saved.merge_call(lambda _: None)),
    "merge_call_sum": summed,
    "merge_call_twice": in_run(twice),
    "merge_call_uneven": in_run(uneven),
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {
    "merge_call/merge_call_in_cond/002": "tf.cond is a branch of a traced graph; nothing is traced",
}
