"""What a worker of a parameter-server run reads. Imported on workers, which need nothing else of the application."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torchstrat.config import DataConfig
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import data


class EndlessBatches:
    """One worker's batches: its share of the training rows in an order of its own, again and again.

    Without an end because how many steps a worker takes is found out as it goes. Rows are read on the worker, and
    only those of its share where the data can be read in parts. The shares are dealt by the workers that there were
    at the start; one that joins later takes the share of another again, in another order.
    """

    def __init__(self, config: DataConfig, seed: int, index: int, workers: int) -> None:
        share = data.load(config).share(index % workers, workers)
        if not len(share.train):
            raise InvalidArgumentError(
                f"data={config.name}: the share of worker {index} has no rows; use fewer workers, or more data."
            )
        self._loader = share.train_loader(config.global_batch, seed + index, config.workers)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._loader


def with_absolute_paths(config: DataConfig) -> DataConfig:
    """The same settings for a process that may have been started in another folder."""
    paths = {entry.name for entry in fields(config)} & {"path", "test_path", "folder"}
    absolute: dict[str, Any] = {
        name: str(Path(path).expanduser().resolve()) for name in paths if (path := getattr(config, name)) is not None
    }
    return replace(config, **absolute)
