"""TensorFlow 1 calls with one replica per process: the same rows, ends that all processes reach together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import torchstrat as ts
from torchstrat.testing import Workers

STRATEGIES: dict[str, Callable[..., ts.Strategy]] = {
    "mirrored": ts.MirroredStrategy,
    "multi_worker_mirrored": ts.MultiWorkerMirroredStrategy,
    "central": ts.CentralStorageStrategy,
}


@contextmanager
def running(name: str) -> Iterator[ts.Strategy]:
    strategy = STRATEGIES[name](timeout=timedelta(seconds=240))
    try:
        yield strategy
    finally:
        strategy.close()


def steps(strategy: ts.Strategy, iterator: Any) -> list[Any]:
    """What is left in ``iterator``: this process's rows, step by step, also the steps in which it has none."""
    found = []
    while (step := iterator.get_next_as_optional()).has_value():
        [component] = strategy.local_results(step.get_value())
        found.append(component.tolist())
    return found


def read_twice(name: str) -> dict[str, Any]:
    with running(name) as strategy:
        dataset = strategy.experimental_make_numpy_dataset(np.arange(7))
        iterator = strategy.make_dataset_iterator(dataset.batch(3))
        passes = []
        for _ in range(2):
            iterator.initialize()
            passes.append(steps(strategy, iterator))
        shuffled = strategy.make_dataset_iterator(dataset.shuffle(7).batch(3))
        return {
            "passes": passes,
            "shuffled": steps(strategy, shuffled),
            "config": strategy.update_config_proto({"threads": 2}),
        }


@pytest.mark.parametrize("name", STRATEGIES)
def test_iterators_over_datasets(two_processes: Workers, name: str) -> None:
    first, second = two_processes.run(read_twice, name)
    assert first["passes"] == [[[0, 1], [3, 4], [6]]] * 2
    assert second["passes"] == [[[2], [5], []]] * 2
    shuffled = [row for found in (first, second) for step in found["shuffled"] for row in step]
    assert sorted(shuffled) == list(range(7))
    assert first["config"] == second["config"] == {"threads": 2, "isolate_session_state": False}


def run_input_fn(name: str, kind: str) -> dict[str, Any]:
    """Rank 0 has three elements, rank 1 one."""
    with running(name) as strategy:
        contexts: list[ts.InputContext] = []
        seen: list[Any] = []

        def input_fn(context: ts.InputContext) -> Any:
            contexts.append(context)
            rank = context.input_pipeline_id
            elements = torch.arange(10 * rank, 10 * rank + 3 - 2 * rank).split(1)
            if kind == "dataset":
                return list(elements)
            remaining = iter(elements)
            return lambda: next(remaining)

        def step(batch: torch.Tensor) -> torch.Tensor:
            seen.extend(batch.tolist())
            return batch.sum()

        iterator = strategy.make_input_fn_iterator(input_fn)
        iterator.initialize()
        count = 0
        while True:
            try:
                strategy.experimental_run(step, iterator)
            except ts.OutOfRangeError:
                return {"seen": seen, "steps": count, "context": contexts}
            count += 1


@pytest.mark.parametrize("kind", ["dataset", "callable"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_iterators_over_input_functions(two_processes: Workers, name: str, kind: str) -> None:
    found = two_processes.run(run_input_fn, name, kind)
    assert [one["seen"] for one in found] == [[0, 1, 2], [10]]
    assert [one["steps"] for one in found] == [3, 3]
    assert [one["context"] for one in found] == [[ts.InputContext(2, rank, 2)] for rank in range(2)]


def second_names(name: str) -> list[Any]:
    """Pairs of what a method returned under both of its names."""
    with running(name) as strategy:

        def rows(distribute: Callable[..., Any], argument: Any) -> list[Any]:
            return [strategy.local_results(batch)[0].tolist() for batch in distribute(argument)]

        def value(make: Callable[..., Any]) -> Any:
            return strategy.local_results(make(lambda context: context.replica_id_in_sync_group))

        batches, ones = list(torch.arange(4).split(2)), torch.ones(2, 3)
        results = strategy.run(lambda: torch.tensor(2.0))
        return [
            [rows(f, batches) for f in (strategy.distribute_dataset, strategy.experimental_distribute_dataset)],
            [
                rows(f, lambda context: batches)
                for f in (
                    strategy.distribute_datasets_from_function,
                    strategy.experimental_distribute_datasets_from_function,
                )
            ],
            [
                value(f)
                for f in (
                    strategy.distribute_values_from_function,
                    strategy.experimental_distribute_values_from_function,
                )
            ],
            [f(results)[0].item() for f in (strategy.local_results, strategy.experimental_local_results)],
            [
                strategy.local_results(f(lambda x: x + 1, args=(1,)))[0]
                for f in (strategy.run, strategy.experimental_run_v2)
            ],
            [
                f(ones, [1, 1]).tolist()
                for f in (strategy.split_to_logical_devices, strategy.experimental_split_to_logical_devices)
            ],
            [
                f(ones).tolist()
                for f in (strategy.replicate_to_logical_devices, strategy.experimental_replicate_to_logical_devices)
            ],
            [
                f(ones, 0).tolist()
                for f in (strategy.assign_to_logical_device, strategy.experimental_assign_to_logical_device)
            ],
        ]


@pytest.mark.parametrize("name", STRATEGIES)
def test_second_names(two_processes: Workers, name: str) -> None:
    for rank, pairs in enumerate(two_processes.run(second_names, name)):
        assert all(first == second for first, second in pairs)
        assert pairs[0][0] == [[rank], [2 + rank]]
        assert pairs[2][0] == (rank,)
