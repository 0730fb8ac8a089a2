"""`scope`, `get_strategy` and its friends: which context a thread is in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.harness import Case, Difference, make_strategy, opened


def describe(strategy: ts.Strategy | None) -> dict[str, Any]:
    """Where this thread is, and whether that is ``strategy``'s; None where no strategy is expected."""
    context = ts.get_replica_context()
    found: dict[str, Any] = {
        "has_strategy": ts.has_strategy(),
        "in_cross_replica_context": ts.in_cross_replica_context(),
        "replica_context_is_none": context is None,
    }
    if strategy is not None:
        found["get_strategy_is_s"] = ts.get_strategy() is strategy
    if context is not None:
        found["replica_id"] = context.replica_id_in_sync_group
        found["num_replicas_in_sync"] = context.num_replicas_in_sync
        found["rc_strategy_is_s"] = None if strategy is None else context.strategy is strategy
    return found


def other_strategy() -> ts.Strategy:
    return opened(ts.MirroredStrategy(devices=["cpu:0", "cpu:1"]))


def merged(function: Callable[[ts.Strategy], Any]) -> Any:
    context = ts.get_replica_context()
    assert context is not None
    return context.merge_call(function)


def assign_in_other_scope(case: Case) -> dict[str, Any]:
    with make_strategy(case.setup).scope():
        variable = ts.Variable(1.0)
    with other_strategy().scope():
        return {"ok": type(variable.assign(5.0)).__name__}


def enter_scope_in_merge_call(case: Case) -> Any:
    def merge(strategy: ts.Strategy) -> torch.Tensor:
        with strategy.scope():
            return torch.tensor(1, dtype=torch.int32)

    return make_strategy(case.setup).run(lambda: merged(merge))


def enter_scope_in_replica_context(case: Case) -> Any:
    strategy = make_strategy(case.setup)

    def step() -> None:
        with strategy.scope():
            pass

    return strategy.run(step)


def exception_leaves_scope(case: Case) -> dict[str, Any]:
    try:
        with make_strategy(case.setup).scope():
            raise KeyError("leaves the block")
    except KeyError:
        return describe(None)


def set_strategy_in_scope(_: Case) -> None:
    with other_strategy().scope():
        ts.experimental_set_strategy(other_strategy())


def in_merge_call(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    inside: list[dict[str, Any]] = []
    strategy.run(lambda: merged(lambda _: inside.append(describe(strategy))))
    [found] = inside
    return found


def in_run(case: Case) -> list[dict[str, Any]]:
    strategy = make_strategy(case.setup)
    inside: list[dict[str, Any]] = []
    strategy.run(lambda: inside.append(describe(strategy)))
    return inside


def in_scope(case: Case) -> dict[str, Any]:
    strategy = make_strategy(case.setup)
    with strategy.scope():
        return describe(strategy)


def in_update(case: Case) -> dict[str, Any]:
    strategy = make_strategy(case.setup)
    with strategy.scope():
        variable = ts.Variable(1.0)
    inside: list[dict[str, Any]] = []

    def update(component: ts.Variable, amount: float) -> Any:
        inside.append(describe(strategy))
        return component.assign_add(amount)

    with strategy.scope():
        strategy.extended.update(variable, update, args=(1.0,))
    [found] = inside
    return {"inside": found, "var": variable.read_value().item()}


def nest_same_scope(case: Case) -> list[dict[str, Any]]:
    strategy = make_strategy(case.setup)
    with strategy.scope():
        with strategy.scope():
            inner = describe(strategy)
        outer = describe(strategy)
    return [inner, outer, describe(None)]


def other_thread(case: Case) -> list[dict[str, Any]]:
    strategy = make_strategy(case.setup)
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(describe(strategy)))
    with strategy.scope():
        thread.start()
        thread.join()
    return found


def in_other_scope(call: Callable[[ts.Strategy], Any]) -> Callable[[Case], Any]:
    def operation(case: Case) -> Any:
        strategy = make_strategy(case.setup)
        with other_strategy().scope():
            return call(strategy)

    return operation


def reenter_same_object(case: Case) -> list[bool]:
    scope = make_strategy(case.setup).scope()
    with scope:
        pass
    with scope, scope:
        inside = ts.has_strategy()
    return [inside, ts.has_strategy()]


def scope_as_value(case: Case) -> dict[str, bool]:
    strategy = make_strategy(case.setup)
    with strategy.scope() as value:
        return {"as_value_is_strategy": value is strategy}


OPS: dict[str, Callable[[Case], Any]] = {
    "assign_in_other_scope": assign_in_other_scope,
    "default_strategy_devices": lambda case: getattr(ts.get_strategy().extended, case.inputs["attr"]),
    "enter_scope_in_merge_call": enter_scope_in_merge_call,
    "enter_scope_in_replica_ctx": enter_scope_in_replica_context,
    "exception_leaves_scope": exception_leaves_scope,
    "experimental_set_strategy_in_scope": set_strategy_in_scope,
    "in_merge_call": in_merge_call,
    "in_run": in_run,
    "in_scope": in_scope,
    "in_update": in_update,
    "nest_same_scope": nest_same_scope,
    "other_thread": other_thread,
    "reduce_of_other_strategy_in_scope": in_other_scope(lambda s: s.reduce("sum", torch.tensor(1.0), axis=None)),
    "reenter_same_object": reenter_same_object,
    "run_of_other_strategy_in_scope": in_other_scope(lambda s: s.run(lambda: torch.tensor(1.0))),
    "scope_as_value": scope_as_value,
}


def _assigned(case: Case) -> None:
    """Is allowed: one replica's variable is no distributed value. What it returns has no TensorFlow class name."""
    with make_strategy(case.setup).scope():
        variable = ts.Variable(1.0)
    with other_strategy().scope():
        variable.assign(5.0)
    assert variable.read_value().item() == 5.0


DIFFERS: dict[str, Difference] = {
    "context/assign_in_other_scope/002": Difference(19, _assigned),
    "context/assign_in_other_scope/004": Difference(19, _assigned),
}
NO_COUNTERPART: dict[str, str] = {}
FIELDS_WITHOUT_COUNTERPART = {
    "arg_type": "is the name of one of TensorFlow's variable classes",
    "result_type": "is the name of one of TensorFlow's variable classes",
}
