"""The worker's side of leases: its own copy of the dataset, and batches out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_collate

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.data.marks import unmarked
from torchstrat.parameter_server.leases.order import RowNumbers
from torchstrat.parameter_server.worker.executor import current_worker_index


class ReaderBuilder:
    """Builds a worker's `Reader`; travels to the workers with the user's functions.

    Args:
        rows: how many the coordinator counts on.
    """

    def __init__(self, dataset_fn: Callable[[], Any], rows: int, collate_fn: Callable[[Any], Any] | None) -> None:
        self.dataset_fn = dataset_fn
        self._rows = rows
        self._collate_fn = collate_fn

    def __call__(self) -> Reader:
        dataset = self.dataset_fn()
        worker = current_worker_index()
        found = number_of_rows(dataset, f" on worker {worker}")
        if found != self._rows:
            raise InvalidArgumentError(
                f"the dataset has {found} rows on worker {worker}, and {self._rows} on the coordinator; leases need "
                "the same rows everywhere. Look at the files that this worker reads, and build no part of the dataset: "
                "leases share the rows out."
            )
        return Reader(dataset, default_collate if self._collate_fn is None else self._collate_fn)


class Reader:
    """One worker's copy of a leased dataset."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def read(self, rows: RowNumbers) -> Any:
        """The rows as a batch, read and collated as a `DataLoader` does."""
        indices = rows.tolist()
        if getattr(self._dataset, "__getitems__", None) is not None:
            return unmarked(self._collate(self._dataset.__getitems__(indices)))
        return unmarked(self._collate([self._dataset[index] for index in indices]))


def read_batch(reader: Reader, rows: bytes) -> Any:
    """What a lease is unpickled with, on a worker. ``rows``: their numbers, int64."""
    return reader.read(np.frombuffer(rows, dtype=np.int64))


def number_of_rows(dataset: Any, where: str = "") -> int:
    """The length of a dataset whose rows have numbers. Raises `InvalidArgumentError` for another kind."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise InvalidArgumentError(
            f"the dataset function gives a DataLoader{where}; leases make the batches themselves. Return its dataset, "
            "and give batch_size, shuffle and collate_fn to create_leased_dataset."
        )
    has_numbers = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset | dict | str | bytes)
    if not has_numbers:
        raise InvalidArgumentError(
            f"the dataset function gives {kind}{where}, whose rows have no numbers, so they cannot be leased. Return "
            "one with __getitem__ and __len__; or use coordinator.create_per_worker_dataset, with which each worker "
            "goes through a copy of its own and an epoch is not exact."
        )
    try:
        return len(dataset)
    except TypeError:
        raise InvalidArgumentError(
            f"the dataset function gives {kind}{where}, which has no __len__; an epoch of leases needs to know how "
            "many rows there are."
        ) from None
