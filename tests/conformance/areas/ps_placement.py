"""Which server holds which variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.clusters import cluster_of, task_of
from tests.conformance.harness import Case, Difference


def name_in_tensorflow(place: str) -> str:
    """What TensorFlow calls the same task: ``"ps:2"`` is server 2, and a device of this process is the chief's."""
    task = "job:chief/replica:0/task:0" if place == "cpu:0" else f"job:ps/replica:0/{task_of(place)}"
    return f"/{task}/device:CPU:0"


def round_robin(case: Case) -> dict[str, Any]:
    strategy = cluster_of(case).strategy()
    with strategy.scope():
        inside = [ts.Variable(float(number)) for number in range(case.inputs["variables"])]
    outside = ts.Variable(0.0)
    place = strategy.extended.device_of
    return {
        "outside": name_in_tensorflow(place(outside)),
        "inside": [name_in_tensorflow(place(variable)) for variable in inside],
        "isinstance_tf_Variable": all(isinstance(variable, ts.Variable) for variable in inside),
    }


def counter_is_per_strategy(case: Case) -> str:
    """An earlier strategy has made one variable on the same servers."""
    cluster = cluster_of(case)
    first = cluster.strategy()
    with first.scope():
        ts.Variable(0.0)
    first.close()
    second = cluster.strategy()
    with second.scope():
        variable = ts.Variable(0.0)
    return name_in_tensorflow(second.extended.device_of(variable))


OPS: dict[str, Callable[[Case], Any]] = {
    "counter_is_per_strategy": counter_is_per_strategy,
    "round_robin": round_robin,
}
DIFFERS: dict[str, Difference] = {}
_CLASS_NAME = "is the name of one of TensorFlow's variable classes and nothing else"
NO_COUNTERPART: dict[str, str] = {
    "ps_placement/variable_type/001": _CLASS_NAME,
    "ps_placement/variable_type/002": _CLASS_NAME,
}
FIELDS_WITHOUT_COUNTERPART = {"type": "is the name of one of TensorFlow's variable classes"}
