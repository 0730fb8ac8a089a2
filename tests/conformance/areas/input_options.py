"""`ts.InputOptions`, `ts.InputReplicationMode` and `ts.AutoShardPolicy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.differences import returns
from tests.conformance.harness import Case, Difference, make_strategy, outcome
from tests.conformance.pipelines import pipeline, read

PER_REPLICA = ts.InputReplicationMode.PER_REPLICA
OPTIONS: dict[str, Callable[[], ts.InputOptions]] = {
    "InputOptions()": ts.InputOptions,
    "fetch_to_device=True": lambda: ts.InputOptions(experimental_fetch_to_device=True),
    "fetch_to_device=False": lambda: ts.InputOptions(experimental_fetch_to_device=False),
    "PER_REPLICA": lambda: ts.InputOptions(experimental_replication_mode=PER_REPLICA),
    "PER_REPLICA+no fetch": lambda: ts.InputOptions(
        experimental_fetch_to_device=False, experimental_replication_mode=PER_REPLICA
    ),
    "place_dataset_on_device=True": lambda: ts.InputOptions(experimental_place_dataset_on_device=True),
    "per_replica_buffer_size=3": lambda: ts.InputOptions(experimental_per_replica_buffer_size=3),
}


def distribute_dataset(case: Case) -> dict[str, Any]:
    strategy = make_strategy(case.setup)
    options = OPTIONS[case.inputs["options"]]()
    return read(strategy.experimental_distribute_dataset(pipeline(case.inputs["dataset"]), options))


def from_function(case: Case) -> dict[str, Any]:
    strategy = make_strategy(case.setup)
    options = OPTIONS[case.inputs["options"]]()
    return read(
        strategy.distribute_datasets_from_function(lambda context: pipeline(case.inputs["dataset_fn"]), options)
    )


def is_tuple(_: Case) -> dict[str, Any]:
    options = ts.InputOptions()
    assert isinstance(options, tuple)
    return {
        "namedtuple_fields": [name for name in options._fields if name.startswith("experimental_")],
        "immutable": outcome(lambda: setattr(options, "experimental_fetch_to_device", False)),
    }


OPS: dict[str, Callable[[Case], Any]] = {
    "None fetch becomes True": lambda case: {
        "experimental_fetch_to_device": ts.InputOptions(**case.inputs).experimental_fetch_to_device
    },
    "auto_shard_policy_members": lambda case: {policy.name: policy.value for policy in ts.AutoShardPolicy},
    "distribute_datasets_from_function": from_function,
    "experimental_distribute_dataset": distribute_dataset,
    "is_tuple": is_tuple,
}


def _step(first: int) -> dict[str, Any]:
    return {"per_replica": [_row(first), _row(first + 1)]}


def _row(index: int) -> dict[str, Any]:
    return {"dtype": "int64", "shape": [1], "data": [index]}


DIFFERS: dict[str, Difference] = {
    "input_options/experimental_distribute_dataset/014": returns(
        2,
        "Options work on central storage; TensorFlow fails on a misspelled field.",
        {"steps": [_step(0), _step(2)], "end": "StopIteration"},
        distribute_dataset,
    ),
    "input_options/distribute_datasets_from_function/011": returns(
        2,
        "PER_REPLICA makes a pipeline for each replica on central storage too; TensorFlow ignores it.",
        {"steps": [{"per_replica": [_row(index), _row(index)]} for index in range(4)], "end": "StopIteration"},
        from_function,
    ),
}
NO_COUNTERPART: dict[str, str] = {
    "input_options/component_devices/001": "torch tells no virtual CPUs apart: every host tensor is on 'cpu'",
}
