"""`Strategy.distribute_dataset`: how global batches are split, how iteration ends, what iterators can do."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.differences import returns
from tests.conformance.harness import Case, Difference, load_cases, make_strategy, outcome
from tests.conformance.losses import keeps_every_row
from tests.conformance.pipelines import limit, pipeline, read

DATASET = "range(4).batch(2)"


def distributed(case: Case, text: str = DATASET, options: ts.InputOptions | None = None) -> Any:
    return make_strategy(case.setup).experimental_distribute_dataset(pipeline(text), options)


def distribute(case: Case) -> dict[str, Any]:
    text = case.inputs["dataset"]
    found = distributed(case, text)
    result = read(found, limit(text))
    return result | {"element_spec": found.element_spec} if "element_spec" in case.expect else result


def with_policy(case: Case) -> dict[str, Any]:
    policy = case.inputs.get("auto_shard_policy", "OFF")
    return read(
        distributed(case, case.inputs["dataset"], ts.InputOptions(auto_shard_policy=ts.AutoShardPolicy[policy]))
    )


def text_files(case: Case) -> dict[str, Any]:
    [(files, lines, rows)] = re.findall(r"(\d+) text file\(s\) of (\d+) lines, batch\((\d+)\)", case.inputs["dataset"])
    policy = ts.AutoShardPolicy[case.inputs["auto_shard_policy"]]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{index}.txt") for index in range(int(files))]
        for index, path in enumerate(paths):
            path.write_text("".join(f"f{index}-{line}\n" for line in range(int(lines))), encoding="utf-8")
        dataset = ts.data.TextLineDataset(paths).batch(int(rows))
        options = ts.InputOptions(auto_shard_policy=policy)
        return read(make_strategy(case.setup).experimental_distribute_dataset(dataset, options))


def get_next_as_optional(case: Case) -> list[dict[str, Any]]:
    iterator, found = iter(distributed(case, case.inputs["dataset"])), []
    for _ in case.expect:
        element = iterator.get_next_as_optional()
        value = element.get_value() if element.has_value() else None
        found.append({"has_value": element.has_value(), "value": value})
    return found


def iterate_twice(case: Case) -> list[dict[str, Any]]:
    dataset = distributed(case, case.inputs["dataset"])
    return [read(dataset), read(dataset)]


def iter_is_own_iterator(case: Case) -> dict[str, bool]:
    iterator = iter(distributed(case))
    return {"iter(it) is it": iter(iterator) is iterator}


def next_after_end(case: Case) -> list[Any]:
    iterator = iter(distributed(case))
    list(iterator)
    return [outcome(lambda: next(iterator)), outcome(lambda: next(iterator)), outcome(iterator.get_next)]


def next_in_other_scope(case: Case) -> Any:
    iterator = iter(distributed(case))
    with make_strategy(case.setup).scope():
        return next(iterator)


def next_in_replica(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    iterator = iter(strategy.experimental_distribute_dataset(pipeline(DATASET)))
    return strategy.run(lambda: next(iterator))


def loop_and_reduce(case: Case) -> torch.Tensor:
    """``for x in dataset: total += strategy.reduce("SUM", x, axis=0)``"""
    strategy = make_strategy(case.setup)
    total = torch.tensor(0)
    for batch in strategy.experimental_distribute_dataset(pipeline("range(5).batch(2)")):
        total = total + strategy.reduce("SUM", batch, axis=0)
    return total


def reduce_dataset(case: Case) -> torch.Tensor:
    strategy = make_strategy(case.setup)

    def add(state: torch.Tensor, batch: Any) -> torch.Tensor:
        return state + strategy.reduce("SUM", strategy.run(torch.sum, args=(batch,)), axis=None)

    return strategy.experimental_distribute_dataset(pipeline(DATASET)).reduce(torch.tensor(0), add)


OPS: dict[str, Callable[[Case], Any]] = {
    "autoshard_off_unbatched": with_policy,
    "autoshard_off_variable_batches": with_policy,
    "autoshard_policy": with_policy,
    "autoshard_text_files": text_files,
    "cardinality": lambda case: distributed(case, case.inputs["dataset"]).cardinality,
    "experimental_distribute_dataset": distribute,
    "for_in_tf_function": loop_and_reduce,
    "get_next_as_optional": get_next_as_optional,
    "iter_is_own_iterator": iter_is_own_iterator,
    "iterate_twice": iterate_twice,
    "len": lambda case: len(distributed(case)),
    "next_after_end": next_after_end,
    "next_in_other_scope": next_in_other_scope,
    "next_in_replica_fn": next_in_replica,
    "not_a_dataset": lambda case: distributed(case, case.inputs["dataset"]),
    "reduce": reduce_dataset,
    "transform_not_allowed": lambda case: distributed(case).map(lambda batch: batch),
}


def _expectation(name: str) -> Any:
    return next(case.expect for case in load_cases(["dataset"]) if case.id == name)


def _spec(*shape: int | None) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": "int64"}


def _other_spec(name: str, number: int, doc: str, spec: dict[str, Any]) -> dict[str, Difference]:
    """The recorded steps with another element spec on both replicas."""
    expect = _expectation(name) | {"element_spec": {"per_replica_spec": [spec, spec]}}
    return {name: returns(number, doc, expect, distribute)}


_DISTRIBUTE = "dataset/experimental_distribute_dataset"
_LOSSY = keeps_every_row(with_policy)
_LOSSY_FILES = keeps_every_row(text_files)
DIFFERS: dict[str, Difference] = {
    "dataset/autoshard_policy/057": _LOSSY,
    "dataset/autoshard_policy/063": _LOSSY,
    "dataset/autoshard_policy/068": _LOSSY,
    "dataset/autoshard_policy/088": _LOSSY,
    "dataset/autoshard_policy/089": _LOSSY,
    "dataset/autoshard_policy/093": _LOSSY,
    "dataset/autoshard_policy/106": _LOSSY,
    "dataset/autoshard_policy/111": _LOSSY,
    "dataset/autoshard_policy/112": _LOSSY,
    "dataset/autoshard_policy/113": _LOSSY,
    "dataset/autoshard_text_files/011": _LOSSY_FILES,
    "dataset/autoshard_text_files/012": _LOSSY_FILES,
    "dataset/autoshard_text_files/015": _LOSSY_FILES,
    "dataset/autoshard_text_files/016": _LOSSY_FILES,
    **_other_spec(
        f"{_DISTRIBUTE}/198",
        19,
        "The rank of a tensor is never unknown in PyTorch: the element spec has one unknown size.",
        _spec(None),
    ),
    **_other_spec(
        f"{_DISTRIBUTE}/219",
        19,
        "Without tracing the mapped function nobody knows that it leaves two rows: their number is unknown.",
        _spec(None),
    ),
}
NO_COUNTERPART: dict[str, str] = dict.fromkeys(
    ("dataset/component_devices/001", "dataset/component_devices/002"),
    "torch tells no virtual CPUs apart: a tensor of replica cpu:1 is on 'cpu'",
)
