"""torchstrat: the coordinator of a cluster of real processes. ``python ps_torchstrat.py WORKLOAD …``

One scheduled function per step. Seconds per step of a worker are those of the whole run, times the workers, over the
functions: it has many functions in flight, and ends with the last.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import ps_stage
import torch
from ps_contenders import resident_bytes
from ps_workloads import Batch, Clicks, Workload, do_nothing, from_arguments, train_step

import torchstrat as ts
from torchstrat.launch import LocalCluster


def main(workload: Workload) -> None:
    torch.set_num_threads(1)
    with LocalCluster(workers=workload.workers, ps=workload.servers, restart=False) as cluster:
        cluster.wait_until_listening()
        pids = {
            job: [cluster.process(job, index).pid for index in range(number)]
            for job, number in (("worker", workload.workers), ("ps", workload.servers))
        }
        strategy = ts.ParameterServerStrategy(cluster.resolver, partitioner_of(workload))
        coordinator = ts.ClusterCoordinator(strategy)  # connected, but nothing is on the servers yet
        facts = {"pids": pids, "idle_bytes": sum(map(resident_bytes, pids["ps"]))}
        if workload.problem is None:
            call(workload, coordinator, facts)
        else:
            train(workload, coordinator, facts)
        strategy.close()


def train(workload: Workload, coordinator: ts.ClusterCoordinator, facts: dict[str, Any]) -> None:
    problem = workload.problem
    assert problem is not None
    strategy = coordinator.strategy
    with strategy.scope():
        model, optimizer = workload.make()
    batches = iter(
        coordinator.create_per_worker_dataset(lambda: Repeated(workload, coordinator.get_current_worker_index()))
    )

    def worker_step(iterator: Iterator[tuple[Batch, Batch]]) -> Any:
        def replica_step(batch: Batch, following: Batch) -> torch.Tensor:
            def prefetch() -> None:
                ts.prefetch_rows(model.table, following[0][0])

            return train_step(problem, model, optimizer, batch, prefetch if workload.prefetch else None)

        return strategy.run(replica_step, args=next(iterator))

    def steps_of(each: int) -> list[ts.RemoteValue]:
        scheduled = [coordinator.schedule(worker_step, args=(batches,)) for _ in range(each * workload.workers)]
        coordinator.join()
        return scheduled

    steps_of(workload.warm_up_steps)
    ps_stage.ready(**facts)
    began = time.perf_counter()
    results = steps_of(workload.steps)
    wall = (time.perf_counter() - began) / workload.steps
    ps_stage.finished(wall=wall, losses=[float(loss) for loss in coordinator.fetch(results)])


class Repeated:
    """A worker's own batches, again and again, each with the one after it."""

    def __init__(self, workload: Workload, worker_index: int) -> None:
        self._batches = workload.batches(worker_index)

    def __iter__(self) -> Iterator[tuple[Batch, Batch]]:
        return itertools.pairwise(itertools.cycle(self._batches))


def partitioner_of(workload: Workload) -> Callable[..., Any] | None:
    """Cuts the table, or else every layer, over all servers."""
    shards = ts.partitioners.FixedShardsPartitioner(workload.servers)
    if not isinstance(workload.problem, Clicks):
        return shards if workload.servers > 1 else None
    table_rows = workload.problem.table_rows

    def split(shape: Any, dtype: Any) -> Any:
        return shards(shape, dtype) if shape[0] == table_rows else [1] * len(shape)

    return split


def call(workload: Workload, coordinator: ts.ClusterCoordinator, facts: dict[str, Any]) -> None:
    calls = workload.steps * workload.workers

    def run(number: int) -> None:
        for _ in range(number):
            value = coordinator.schedule(do_nothing)
            if workload.one_by_one:
                value.fetch()
        coordinator.join()

    run(workload.warm_up_steps * workload.workers)
    ps_stage.ready(**facts)
    began = time.perf_counter()
    run(calls)
    ps_stage.finished(wall=(time.perf_counter() - began) / calls)


if __name__ == "__main__":
    main(from_arguments(sys.argv[1:]))
