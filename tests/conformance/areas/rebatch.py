"""How global batches are cut: `ts.data.batch_sizes_for_worker` and `rebatch` of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.harness import Case, Difference
from tests.conformance.pipelines import pipeline


def batch_sizes_for_worker(case: Case) -> dict[str, Any]:
    workers, local = case.setup["num_workers"], case.setup["replicas_per_worker"]
    rows = case.inputs["global_batch_size"]
    sizes = [ts.data.batch_sizes_for_worker(rows, workers, local, worker) for worker in range(workers)]
    return {"per_worker_cyclic_sizes": [list(cycle) for cycle in sizes]}


def rebatch(case: Case) -> list[Any]:
    dataset = pipeline(case.inputs["dataset"])
    return list(dataset.rebatch(case.inputs["sizes"], drop_remainder=case.inputs["drop_remainder"]))


OPS: dict[str, Callable[[Case], Any]] = {
    "batch_sizes_for_worker": batch_sizes_for_worker,
    "dataset.rebatch": rebatch,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
