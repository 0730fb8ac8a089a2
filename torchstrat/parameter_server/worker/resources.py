"""Per-worker values: built on the worker from what the coordinator sent, when a function first needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchstrat.data.marks import unmarked
from torchstrat.errors import ClosureInputError, InvalidArgumentError, OutOfRangeError, WrongTypeError
from torchstrat.parameter_server.worker import phases


@dataclass(frozen=True)
class ResourceSpec:
    """How to build per-worker value ``number``: by calling the packed ``builder``, or iterating over ``source``."""

    number: int
    what: str
    builder: Any = None
    source: int | None = None


class MisusedBuilderError(ClosureInputError, InvalidArgumentError):
    """A builder asked torchstrat for something that cannot be, such as a new variable."""


class WorkerIterator:
    """One worker's iterator over its own copy of a per-worker dataset."""

    def __init__(self, dataset: Any) -> None:
        self._batches = _iterate(dataset)

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        return unmarked(next(self._batches))

    def get_next(self) -> Any:
        """The next batch; raises `OutOfRangeError` after the last."""
        try:
            return unmarked(next(self._batches))
        except StopIteration:
            raise OutOfRangeError("the per-worker dataset has no more batches on this worker.") from None


class Resources:
    """What this worker has built so far."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call
        self._specs: dict[int, ResourceSpec] = {}
        self._built: dict[int, Any] = {}

    def learn(self, spec: ResourceSpec) -> None:
        self._specs[spec.number] = spec

    def forget(self, number: int) -> None:
        self._specs.pop(number, None)
        self._built.pop(number, None)

    def get(self, number: int) -> Any:
        """Raises `ClosureInputError`, from the original error, when it cannot be built; the next need tries again."""
        if number not in self._built:
            spec = self._specs[number]
            phases.reached(phases.BUILDING)
            try:
                self._built[number] = self._build(spec)
            except ClosureInputError:
                raise
            except Exception as error:
                kind = MisusedBuilderError if isinstance(error, InvalidArgumentError) else ClosureInputError
                raise kind(f"{spec.what} could not be built on its worker: {error!r}") from error
        return self._built[number]

    def _build(self, spec: ResourceSpec) -> Any:
        if spec.source is None:
            return self._call(spec.builder)
        return WorkerIterator(self.get(spec.source))


def _iterate(dataset: Any) -> Iterator[Any]:
    """A new pass over a dataset of batches."""
    if isinstance(dataset, list | tuple | dict | str | bytes):
        raise WrongTypeError(
            f"the dataset function returned a {type(dataset).__name__}; return a DataLoader, a Dataset of batches, or "
            "what strategy.distribute_datasets_from_function gives. Plain data may be wrapped in a DataLoader with "
            "batch_size=None."
        )
    if hasattr(dataset, "__iter__"):
        return iter(dataset)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return (dataset[index] for index in range(len(dataset)))
    raise WrongTypeError(
        f"the dataset function returned a {type(dataset).__name__}, which cannot be iterated; return a DataLoader or a "
        "Dataset of batches."
    )
