"""`ClusterCoordinator.create_per_worker_dataset` and its iterators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import torchstrat as ts
from tests.conformance.clusters import coordinated, one
from tests.conformance.harness import Case, Difference, outcome


def batches_of_two() -> DataLoader[Any]:
    """``range(6).batch(2)``"""
    return DataLoader(torch.arange(6), batch_size=2)  # type: ignore[arg-type]


def sum_of_next(iterator: Iterator[torch.Tensor]) -> torch.Tensor:
    return next(iterator).sum()


def first_of_next(iterator: Iterator[torch.Tensor]) -> int:
    return int(next(iterator)[0])


def scheduled_next(case: Case, dataset_fn: Any, times: int = 1) -> Any:
    """`join` after that many calls of ``next``."""
    coordinator = coordinated(case)
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    for _ in range(times):
        coordinator.schedule(sum_of_next, args=(iterator,))
    coordinator.join()


class Quotients(IterableDataset[torch.Tensor]):
    """``1 // x`` for 0, 1, 2."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(1) // torch.tensor(x) for x in range(3))


def fails() -> DataLoader[Any]:
    raise AssertionError("the dataset function fails on the worker")


def exhausted(case: Case) -> dict[str, Any]:
    coordinator = coordinated(case)
    iterator = iter(coordinator.create_per_worker_dataset(batches_of_two))

    def take_too_many() -> None:
        """`join` raises the error, or a `schedule` before it, where a worker had taken all of its batches by then."""
        for _ in range(case.inputs["schedules"]):
            coordinator.schedule(sum_of_next, args=(iterator,))
        coordinator.join()

    return {"join": outcome(take_too_many), "then": coordinator.schedule(one).fetch()}


def from_dataset_object(case: Case) -> Any:
    coordinator = coordinated(case)
    dataset = DataLoader(torch.arange(1, 4), batch_size=None)  # type: ignore[arg-type]
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    return coordinator.schedule(next, args=(iterator,)).fetch()


def from_function(case: Case) -> dict[str, Any]:
    coordinator = coordinated(case)
    dataset = coordinator.create_per_worker_dataset(batches_of_two)
    iterator = iter(dataset)
    values = [coordinator.schedule(sum_of_next, args=(iterator,)) for _ in range(case.inputs["schedules"])]
    return {
        "element_spec_shape": list(dataset.element_spec.shape),
        "join": outcome(coordinator.join),
        "each_value_from_stream_1_5_9": {int(value) for value in coordinator.fetch(values)} <= {1, 5, 9},
    }


def input_context(case: Case) -> list[Any]:
    """The numbers of the context that the dataset function is given on the worker, read as its only batch."""
    coordinator = coordinated(case)
    strategy = coordinator.strategy

    def dataset_fn(context: ts.InputContext) -> list[torch.Tensor]:
        seen = [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]
        return [torch.tensor([seen])]

    def make() -> Any:
        return strategy.distribute_datasets_from_function(dataset_fn)

    iterator = iter(coordinator.create_per_worker_dataset(make))
    contexts: list[Any] = coordinator.schedule(next, args=(iterator,)).get().tolist()
    return contexts


def next_on_coordinator(case: Case) -> Any:
    return next(iter(coordinated(case).create_per_worker_dataset(batches_of_two)))


def second_iterator(case: Case) -> list[int]:
    coordinator = coordinated(case)
    dataset = coordinator.create_per_worker_dataset(batches_of_two)
    return [coordinator.schedule(first_of_next, args=(iter(dataset),)).fetch() for _ in range(2)]


def error_in_pipeline(case: Case) -> dict[str, Any]:
    return {"join": outcome(lambda: scheduled_next(case, Quotients))}


def _division(case: Case) -> None:
    """`join` raises what PyTorch raises for an integer division by zero: a RuntimeError."""
    error = error_in_pipeline(case)["join"]
    assert type(error) is RuntimeError, repr(error)
    assert str(error) == str(outcome(lambda: next(iter(Quotients()))))


OPS: dict[str, Callable[[Case], Any]] = {
    "dataset_fn_returns_list": lambda case: scheduled_next(case, lambda: [1, 2]),
    "dataset_fn_with_argument": lambda case: scheduled_next(case, lambda context: batches_of_two()),
    "error_in_pipeline": error_in_pipeline,
    "error_when_creating_on_worker": lambda case: {"join": outcome(lambda: scheduled_next(case, fails))},
    "exhausted": exhausted,
    "from_dataset_object": from_dataset_object,
    "from_function": from_function,
    "input_context": input_context,
    "next_on_coordinator": next_on_coordinator,
    "second_iterator_restarts": second_iterator,
}
DIFFERS: dict[str, Difference] = {"per_worker_dataset/error_in_pipeline/001": Difference(20, _division)}
NO_COUNTERPART: dict[str, str] = {}
FIELDS_WITHOUT_COUNTERPART = {
    "dataset_type": "is the name of one of TensorFlow's dataset classes",
    "iterator_type": "is the name of one of TensorFlow's iterator classes",
}
