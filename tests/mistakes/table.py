"""What a mistake is, how it is made, and what is seen then."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts
from torchstrat.testing.fake_cluster import FakeCluster

PACKAGE = str(Path(ts.__file__).parent)
LAUNCHERS = ("TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Mistake:
    """One row.

    Args:
        name: in a user's words.
        make: makes it, given its area.
        error: the class that is raised; None: nothing is.
        parts: what is given, what is needed, what is to be changed: a pattern for each, found in the message, or in the
            warnings where nothing is raised.
        because: why nothing is raised; ``make`` then asserts what happens instead.
    """

    name: str
    make: Callable[[Any], Any]
    error: type[BaseException] | None
    parts: tuple[str, ...] = ()
    because: str = ""


def raises(error: type[BaseException], given: str, needed: str, change: str) -> Any:
    """Decorates a method of an area, whose name is the mistake's."""
    return lambda make: [Mistake(_words(make), make, error, (given, needed, change))]


def each(*rows: tuple[str, Any, type[BaseException], str, str, str]) -> Any:
    """Decorates a method that makes several, with a value each: name, value, and as of `raises`."""
    return lambda make: [
        Mistake(name, lambda area, value=value: make(area, value), error, tuple(parts))
        for name, value, error, *parts in rows
    ]


def warns(given: str, needed: str, change: str) -> Any:
    return lambda make: [Mistake(_words(make), make, None, (given, needed, change))]


def right(because: str) -> Any:
    return lambda make: [Mistake(_words(make), make, None, because=because)]


def _words(make: Callable[..., Any]) -> str:
    return make.__name__.replace("_", " ")


class Area(contextlib.ExitStack):
    """The mistakes of one part of the library, made by its methods; and where one is made: in a folder, in an
    environment of its own. What is entered is left afterwards."""

    title: str

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @classmethod
    def mistakes(cls) -> list[Mistake]:
        found = [row for rows in vars(cls).values() if isinstance(rows, list) for row in rows]
        assert len({row.name for row in found}) == len(found), "a name is there twice"
        return found

    def set(self, name: str, value: Any) -> None:
        """A variable of the environment; what is not a string, as JSON."""
        os.environ[name] = value if isinstance(value, str) else json.dumps(value)

    def mirrored(self, replicas: int = 2, **options: Any) -> ts.MirroredStrategy:
        strategy = ts.MirroredStrategy([f"cpu:{index}" for index in range(replicas)], **options)
        self.callback(strategy.close)
        return strategy

    def trained(self, strategy: ts.Strategy) -> SimpleNamespace:
        """``model``, ``optimizer`` and ``step``, as a program has them."""
        with strategy.scope():
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return SimpleNamespace(model=model, optimizer=optimizer, step=step_of(model, optimizer))

    def cluster(self, workers: int = 1, **options: Any) -> SimpleNamespace:
        """A parameter-server cluster of threads, with a model and an optimizer in its scope."""
        cluster = self.enter_context(FakeCluster(workers=workers, ps=1))
        strategy = cluster.strategy(**options)
        coordinator = ts.ClusterCoordinator(strategy)
        made = self.trained(strategy)
        return SimpleNamespace(cluster=cluster, strategy=strategy, coordinator=coordinator, **vars(made))


@dataclass(frozen=True)
class Seen:
    error: BaseException | None
    message: str
    frames: int
    """Of torchstrat, in the traceback."""


def rows(count: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(count * 3.0).reshape(count, 3), torch.ones(count, 1))


def loader(batch_size: int | None = 4) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=batch_size)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(batch: Any) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def look(area: type[Area], mistake: Mistake, folder: Path) -> Seen:
    """Make the mistake, and collect what the user sees."""
    said = io.StringIO()
    logger, handler = logging.getLogger("torchstrat"), logging.StreamHandler(said)
    logger.addHandler(handler)
    error: BaseException | None = None
    with mock.patch.dict(os.environ), warnings.catch_warnings(record=True) as caught:
        for name in LAUNCHERS:
            os.environ.pop(name, None)
        warnings.simplefilter("always")
        place = area(folder)
        try:
            mistake.make(place)
        except Exception as raised:
            error = raised
        finally:
            place.close()
            logger.removeHandler(handler)
    if error is None:
        return Seen(None, "\n".join([*(str(one.message) for one in caught), said.getvalue()]).strip(), 0)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("on the worker:")]
    text = "\n".join([str(error), *notes]).replace(str(folder), "FOLDER")
    return Seen(error, text, sum(file.startswith(PACKAGE) for file in files))


def all_areas() -> Iterator[type[Area]]:
    """Every part of the table. Commands and configurations, which need processes of their own, add theirs here."""
    from tests.mistakes import checkpoints, clusters, data, devices, servers, steps, values

    yield from (devices.Devices, steps.Steps, values.Arguments, values.Results, data.Data)
    yield from (checkpoints.Checkpoints, clusters.Clusters, servers.Servers)
