"""`ClusterCoordinator`: what it takes, what it gives back, and where functions run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

import torchstrat as ts
from tests.conformance.clusters import (
    DEADLINE_SECONDS,
    call_meeting,
    cluster_of,
    coordinated,
    counter_of,
    meet,
    one,
)
from tests.conformance.differences import returns
from tests.conformance.harness import Case, Difference, outcome
from tests.support.gates import close_gate, pass_gate
from torchstrat.core.context import home_of
from torchstrat.parameter_server import coordinator as coordinator_module


def integer(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


def with_default(a: Any, b: int = 10) -> torch.Tensor:
    return torch.as_tensor(a, dtype=torch.int32) + b


def length(text: str | None) -> torch.Tensor:
    return integer(1 if text is None else len(text))


def all_reduce(case: Case) -> Any:
    coordinator = coordinated(case)
    strategy = coordinator.strategy

    def replica() -> Any:
        context = ts.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", torch.tensor(3.0))

    return coordinator.schedule(lambda: strategy.run(replica)).fetch()


def all_run_before_join_returns(case: Case) -> float:
    coordinator = coordinated(case)
    counter, increment = counter_of(coordinator)
    for _ in range(case.inputs["schedules"]):
        coordinator.schedule(increment)
    coordinator.join()
    return counter.read_value().item()


def fetch_of_a_nest(case: Case) -> Any:
    coordinator = coordinated(case)
    nested = {"a": torch.tensor([1, 2], dtype=torch.int32), "b": (torch.tensor(3.0), b"s")}
    first, second = coordinator.schedule(one), coordinator.schedule(lambda: nested)
    return coordinator.fetch([first, {"k": second}, 5, "x", None, integer(2)])


def created_by_scope(case: Case) -> dict[str, bool]:
    """Nothing public tells whether a strategy has a coordinator, here as in TensorFlow."""
    strategy = cluster_of(case).strategy()
    before = home_of(strategy).coordinator
    with strategy.scope():
        pass
    return {"before_scope_none": before is None, "after_scope_none": home_of(strategy).coordinator is None}


def none_in_output(case: Case) -> dict[str, Any]:
    coordinator = coordinated(case)
    value = coordinator.schedule(lambda: {"a": torch.tensor(1.0), "b": None})
    return {"join": outcome(coordinator.join), "fetch": outcome(value.fetch)}


def per_worker_resources(case: Case) -> dict[str, Any]:
    """One value per worker: as many functions as there are workers, which meet, run on one each."""
    coordinator = coordinated(case)
    made = coordinator.create_per_worker_resource(lambda: integer(3))
    call_meeting("resources", case.setup["workers"])

    def read(value: torch.Tensor) -> torch.Tensor:
        meet("resources")
        return value

    values = [coordinator.schedule(read, args=(made,)) for _ in range(case.setup["workers"])]
    return {"type": type(made).__name__, "values": coordinator.fetch(values)}


def accepts(case: Case) -> Any:
    functions = {"tf.function": one, "concrete function": functools.partial(torch.full, (), 1.0)}
    return coordinated(case).schedule(functions[case.inputs["fn"]]).fetch()


def rejects(case: Case) -> Any:
    return coordinated(case).schedule({"None": None, "int": 3}[case.inputs["fn"]])  # type: ignore[arg-type]


def arguments(case: Case) -> Any:
    given: dict[str, tuple[Any, ...]] = {
        "tensor": (integer(1),),
        "python int": (1,),
        "numpy": (np.array(1, dtype=np.int32),),
        "missing arg": (),
        "extra arg": (integer(1), integer(2), integer(3)),
    }
    return coordinated(case).schedule(with_default, args=given[case.inputs["args"]]).fetch()


def python_arguments(case: Case) -> dict[str, Any]:
    given: dict[str, tuple[Callable[..., Any], Any]] = {
        "f(a), python string": (length, "abc"),
        "f(a), None": (length, None),
        "f(a, b=10), python int, default left out": (with_default, 1),
    }
    fn, argument = given[case.inputs["fn_and_args"]]
    coordinator = coordinated(case)
    value = coordinator.schedule(fn, args=(argument,))
    return {"fetch": outcome(value.fetch), "join": outcome(coordinator.join)}


def blocks_when_full(case: Case) -> dict[str, Any]:
    """Ten functions that wait, on two workers, with room for two: the thread that schedules them comes to a stop."""
    default = coordinator_module.QUEUE_SIZE
    with mock.patch.object(coordinator_module, "QUEUE_SIZE", case.setup["queue_size"]):
        coordinator = coordinated(case)
    gate = close_gate("queue")
    scheduled = threading.Semaphore(0)

    def schedule() -> None:
        for _ in range(10):
            coordinator.schedule(functools.partial(pass_gate, "queue"))
            scheduled.release()

    thread = threading.Thread(target=schedule)
    thread.start()
    for _ in range(case.setup["queue_size"]):
        assert scheduled.acquire(timeout=DEADLINE_SECONDS)
    blocked = not scheduled.acquire(timeout=0.2)
    gate.set()
    thread.join(DEADLINE_SECONDS)
    coordinator.join()
    return {"schedule_of_10_blocked": blocked, "default_max_size": default}


def singleton(case: Case) -> dict[str, bool]:
    cluster = cluster_of(case)
    strategy, scoped = cluster.strategy(), cluster.strategy()
    coordinator = ts.ClusterCoordinator(strategy)
    found = {"same": ts.ClusterCoordinator(strategy) is coordinator, "strategy_is": coordinator.strategy is strategy}
    strategy.close()
    with scoped.scope():
        of_scope = home_of(scoped).coordinator
    return found | {"scope_creates_one": of_scope is not None and ts.ClusterCoordinator(scoped) is of_scope}


def run_and_reduce(case: Case) -> Any:
    coordinator = coordinated(case)
    strategy = coordinator.strategy

    def replica(x: torch.Tensor) -> torch.Tensor:
        context = ts.get_replica_context()
        assert context is not None
        return x + context.replica_id_in_sync_group + context.num_replicas_in_sync

    def function() -> Any:
        value = strategy.run(replica, args=(torch.tensor(5.0),))
        return value, strategy.reduce("sum", value, axis=None)

    return coordinator.schedule(function).fetch()


def variable_as_argument(case: Case) -> Any:
    coordinator = coordinated(case)
    with coordinator.strategy.scope():
        variable = ts.Variable(3.0)
    return coordinator.schedule(lambda given: given.read_value(), args=(variable,)).fetch()


OPS: dict[str, Callable[[Case], Any]] = {
    "all_reduce_in_scheduled_fn": all_reduce,
    "all_scheduled_run_before_join_returns": all_run_before_join_returns,
    "coordinator_fetch": fetch_of_a_nest,
    "created_by_scope": created_by_scope,
    "current_worker_index_outside": lambda case: coordinated(case).get_current_worker_index(),
    "fetch_none": lambda case: coordinated(case).schedule(lambda: None).fetch(),
    "none_nested_in_output": none_in_output,
    "per_worker_resources_private": per_worker_resources,
    "schedule_accepts": accepts,
    "schedule_args": arguments,
    "schedule_blocks_when_queue_full": blocks_when_full,
    "schedule_python_args": python_arguments,
    "schedule_rejects": rejects,
    "singleton_per_strategy": singleton,
    "strategy_run_and_reduce_in_scheduled_fn": run_and_reduce,
    "variable_as_arg": variable_as_argument,
}
_ELEVEN = {"dtype": "int32", "shape": [], "data": 11, "numpy": True}
_DEFAULTS = "Defaults work with every kind of argument; a function need not be a tf.function."
DIFFERS: dict[str, Difference] = {
    "coordinator/none_nested_in_output/001": returns(
        7,
        "None inside a returned structure comes back as it is.",
        {
            "join": None,
            "fetch": {"dict": {"a": {"dtype": "float32", "shape": [], "data": 1.0, "numpy": True}, "b": None}},
        },
        none_in_output,
    ),
    "coordinator/schedule_args/002": returns(7, _DEFAULTS, _ELEVEN, arguments),
    "coordinator/schedule_args/003": returns(7, _DEFAULTS, _ELEVEN, arguments),
    "coordinator/schedule_python_args/006": returns(7, _DEFAULTS, {"fetch": _ELEVEN, "join": None}, python_arguments),
}
NO_COUNTERPART: dict[str, str] = {
    "coordinator/tracing_error_surfaces_in_schedule/001": "functions are not traced: what they raise, they raise then",
}
