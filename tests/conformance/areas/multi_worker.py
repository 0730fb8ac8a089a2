"""`MultiWorkerMirroredStrategy` in worlds of two and three processes; see `tests.conformance.worlds`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import torchstrat as ts
from tests.conformance.areas.merge_call import context
from tests.conformance.areas.run import integer, replica_id
from tests.conformance.harness import Case, Difference
from tests.conformance.worlds import world

WorkerOperation = Callable[[ts.Strategy, Case], Any]
ONE_TWO = torch.tensor([1.0, 2.0])


@contextmanager
def strategy(environ: dict[str, str]) -> Iterator[ts.Strategy]:
    """This process's strategy, from its ``TF_CONFIG``."""
    resolver = ts.cluster_resolver.TFConfigClusterResolver(environ=environ)
    made = ts.MultiWorkerMirroredStrategy(resolver, timeout=timedelta(seconds=240), gradient_reduce_op="sum")
    try:
        yield made
    finally:
        made.close()


def scaled() -> torch.Tensor:
    return (replica_id() + 1) * ONE_TWO


def of_run(step: Callable[[], Any]) -> WorkerOperation:
    """What this worker's one replica returned."""
    return lambda running, _: running.local_results(running.run(step))[0]


def assign_add(running: ts.Strategy, _: Case) -> float:
    with running.scope():
        variable = ts.Variable(10.0, aggregation=ts.VariableAggregation.MEAN)
    running.run(lambda: variable.assign_add(torch.tensor(replica_id() + 1.0)))
    return variable.read_value().item()


def attributes(running: ts.Strategy, _: Case) -> dict[str, Any]:
    assert running.cluster_resolver is not None
    return {
        "num_replicas_in_sync": running.num_replicas_in_sync,
        "worker_devices": len(running.extended.worker_devices),
        "is_chief": running.is_chief,
        "should_checkpoint": running.extended.should_checkpoint,
        "task_type": running.cluster_resolver.task_type,
    }


def steps(running: ts.Strategy, dataset: Any) -> dict[str, Any]:
    """Everything this worker gets: the local components of every step, and how the iteration ends."""
    found, iterator = [], iter(dataset)
    while True:
        try:
            found.append(list(running.local_results(next(iterator))))
        except StopIteration as end:
            return {"steps": found, "end": type(end).__name__}


def number_batches(text: str) -> DataLoader[Any]:
    """``range(8).batch(4)``"""
    [(rows, size)] = re.findall(r"range\((\d+)\)\.batch\((\d+)\)", text)
    return DataLoader(range(int(rows)), batch_size=int(size))  # type: ignore[arg-type]


def line_batches(text: str, folder: str) -> DataLoader[Any]:
    """``4 text files of 3 lines, batch 2``"""
    [(files, lines, size)] = re.findall(r"(\d+) text files of (\d+) lines, batch (\d+)", text)
    paths = [Path(folder, f"{index}.txt") for index in range(int(files))]
    for index, path in enumerate(paths):
        path.write_text("".join(f"f{index}-{line}\n" for line in range(int(lines))), encoding="utf-8")
    return DataLoader(ts.data.TextLineDataset([str(path) for path in paths]), batch_size=int(size))


def dataset(running: ts.Strategy, case: Case) -> dict[str, Any]:
    return steps(running, running.distribute_dataset(number_batches(case.inputs["what"])))


def policy(running: ts.Strategy, case: Case) -> dict[str, Any]:
    text = case.inputs["what"]
    options = ts.InputOptions(auto_shard_policy=ts.AutoShardPolicy[text.split()[1]])
    with tempfile.TemporaryDirectory() as folder:
        source = line_batches(text, folder) if "text files" in text else number_batches(text)
        return steps(running, running.distribute_dataset(source, options))


def from_function(running: ts.Strategy, _: Case) -> dict[str, Any]:
    contexts: list[list[int]] = []

    def dataset_fn(pipeline: ts.InputContext) -> list[torch.Tensor]:
        contexts.append(
            [
                pipeline.num_input_pipelines,
                pipeline.input_pipeline_id,
                pipeline.num_replicas_in_sync,
                pipeline.get_per_replica_batch_size(4),
            ]
        )
        batches = list(torch.arange(6).split(2))
        return batches[pipeline.input_pipeline_id :: pipeline.num_input_pipelines]

    return {"r": steps(running, running.distribute_datasets_from_function(dataset_fn)), "ctx": contexts}


def reduce(running: ts.Strategy, case: Case) -> torch.Tensor:
    [axis] = re.findall(r"axis (\w+)", case.inputs["what"])
    return running.reduce("MEAN", running.run(scaled), axis=None if axis == "None" else int(axis))


IN_WORKER: dict[str, WorkerOperation] = {
    "all_gather": of_run(lambda: context().all_gather(scaled(), 0)),
    "all_reduce": of_run(lambda: context().all_reduce("MEAN", scaled())),
    "assign_add": assign_add,
    "attrs": attributes,
    "dataset": dataset,
    "from_function": from_function,
    "gather": lambda running, _: running.gather(running.run(scaled), axis=0),
    "local_results": lambda running, _: list(running.local_results(running.run(lambda: integer(replica_id())))),
    "policy": policy,
    "reduce": reduce,
}


def in_world(case: Case) -> dict[str, list[Any]]:
    return {"per_worker": [results[case.id] for results in world(case.setup["workers"])]}


OPS: dict[str, Callable[[Case], Any]] = dict.fromkeys(IN_WORKER, in_world)
DIFFERS: dict[str, Difference] = {}
_TRACED = "fails because a tf.function's argument has no device; nothing is traced here"
NO_COUNTERPART: dict[str, str] = {
    "multi_worker/all_reduce/002": _TRACED,
    "multi_worker/all_reduce/005": _TRACED,
}
FIELDS_WITHOUT_COUNTERPART = {"in_multi_worker_mode": "is private to TensorFlow's Keras; see num_replicas_in_sync"}
