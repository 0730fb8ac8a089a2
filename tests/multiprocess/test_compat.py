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


def read_twice(name: str) -> tuple[list[Any], list[Any], Any]:
    """Two passes of this process's rows, step by step, also the steps in which it has none; one that is shuffled."""
    with running(name) as strategy:

        def steps(iterator: Any) -> list[Any]:
            found = []
            while (step := iterator.get_next_as_optional()).has_value():
                [component] = strategy.local_results(step.get_value())
                found.append(component.tolist())
            return found

        dataset = strategy.experimental_make_numpy_dataset(np.arange(7))
        iterator = strategy.make_dataset_iterator(dataset.batch(3))
        passes = [steps(iterator) for _ in range(2) if iterator.initialize() == []]
        shuffled = steps(strategy.make_dataset_iterator(dataset.shuffle(7).batch(3)))
        if strategy.is_chief:  # no other process is asked
            strategy.update_config_proto({})
        return passes, shuffled, strategy.update_config_proto({"threads": 2})


@pytest.mark.parametrize("name", STRATEGIES)
def test_iterators_over_datasets(two_processes: Workers, name: str) -> None:
    passes, shuffled, configs = zip(*two_processes.run(read_twice, name), strict=True)
    assert passes == ([[[0, 1], [3, 4], [6]]] * 2, [[[2], [5], []]] * 2)
    assert sorted(row for found in shuffled for step in found for row in step) == list(range(7))
    assert configs == ({"threads": 2, "isolate_session_state": False},) * 2


def run_input_fn(name: str, kind: str) -> tuple[list[int], int, list[ts.InputContext]]:
    """Rank 0 has three elements, rank 1 one. The rows this process has seen, steps, and what its function was given."""
    with running(name) as strategy:
        contexts: list[ts.InputContext] = []
        seen: list[Any] = []

        def input_fn(context: ts.InputContext) -> Any:
            contexts.append(context)
            rank = context.input_pipeline_id
            elements = torch.arange(10 * rank, 10 * rank + 3 - 2 * rank).split(1)
            remaining = iter(elements)
            return list(elements) if kind == "dataset" else lambda: next(remaining)

        iterator = strategy.make_input_fn_iterator(input_fn)
        iterator.initialize()
        count = 0
        while True:
            try:
                strategy.experimental_run(lambda batch: seen.extend(batch.tolist()), iterator)
            except ts.OutOfRangeError:
                return seen, count, contexts
            count += 1


@pytest.mark.parametrize("kind", ["dataset", "callable"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_iterators_over_input_functions(two_processes: Workers, name: str, kind: str) -> None:
    seen, steps, contexts = zip(*two_processes.run(run_input_fn, name, kind), strict=True)
    assert seen == ([0, 1, 2], [10])
    assert steps == (3, 3)
    assert contexts == tuple([ts.InputContext(2, rank, 2)] for rank in range(2))
