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
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts
from torchstrat import context
from torchstrat.testing.fake_cluster import FakeCluster

PACKAGE = str(Path(ts.__file__).parent)
LAUNCHERS = ("TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Mistake:
    """One row.

    Args:
        name: in a user's words.
        make: makes it, in a `Place`.
        error: the class that is raised; None: nothing is.
        parts: what is given, what is needed, what is to be changed: a pattern for each, found in the message, or in the
            warnings where nothing is raised.
        because: why nothing is raised; ``make`` then asserts what happens instead.
    """

    name: str
    make: Callable[[Place], Any]
    error: type[BaseException] | None
    parts: dict[str, str]
    because: str = ""


class Area(list[Mistake]):
    """The mistakes of one part of the library, in the order of their definition."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def raises(self, name: str, error: type[BaseException], *, given: str, needed: str, change: str) -> Any:
        return self._row(name, error, {"given": given, "needed": needed, "change": change})

    def warns(self, name: str, *, given: str, needed: str, change: str) -> Any:
        return self._row(name, None, {"given": given, "needed": needed, "change": change})

    def right(self, name: str, because: str) -> Any:
        return self._row(name, None, {}, because)

    def _row(self, name: str, error: type[BaseException] | None, parts: dict[str, str], because: str = "") -> Any:
        def add(make: Callable[[Place], Any]) -> Callable[[Place], Any]:
            self.append(Mistake(name, make, error, parts, because))
            return make

        return add


@dataclass
class Place:
    """Where a mistake is made: a folder, an environment, and what is closed afterwards."""

    folder: Path
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def set(self, name: str, value: Any) -> None:
        """A variable of the environment; what is not a string, as JSON."""
        os.environ[name] = value if isinstance(value, str) else json.dumps(value)

    def mirrored(self, replicas: int = 2) -> ts.MirroredStrategy:
        return ts.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])

    def trained(self, strategy: ts.Strategy) -> SimpleNamespace:
        """``model``, ``optimizer`` and ``step``, as a program has them."""
        with strategy.scope():
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return SimpleNamespace(model=model, optimizer=optimizer, step=step_of(model, optimizer))

    def cluster(self, workers: int = 1, **options: Any) -> SimpleNamespace:
        """A parameter-server cluster of threads, with a model and an optimizer in its scope."""
        cluster = self._stack.enter_context(FakeCluster(workers=workers, ps=1))
        strategy = cluster.strategy(**options)
        coordinator = ts.ClusterCoordinator(strategy)
        made = self.trained(strategy)
        return SimpleNamespace(cluster=cluster, strategy=strategy, coordinator=coordinator, **vars(made))

    def callback(self, function: Callable[[], Any]) -> None:
        """Called afterwards."""
        self._stack.callback(function)

    def enter(self, manager: Any) -> Any:
        """Left afterwards."""
        return self._stack.enter_context(manager)


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


def look(mistake: Mistake, folder: Path) -> Seen:
    """Make the mistake, and collect what the user sees."""
    said = io.StringIO()
    logger, handler = logging.getLogger("torchstrat"), logging.StreamHandler(said)
    before = dict(os.environ)
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    logger.addHandler(handler)
    place = Place(folder)
    error: BaseException | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mistake.make(place)
        except Exception as raised:
            error = raised
        finally:
            place._stack.close()
            with contextlib.suppress(Exception):
                _close_strategies()
            logger.removeHandler(handler)
            os.environ.clear()
            os.environ.update(before)
    if error is None:
        return Seen(None, "\n".join([*(str(one.message) for one in caught), said.getvalue()]).strip(), 0)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("on the worker:")]
    text = "\n".join([str(error), *notes]).replace(str(folder), "FOLDER")
    return Seen(error, text, sum(file.startswith(PACKAGE) for file in files))


def _close_strategies() -> None:
    for strategy in list(context.strategies):
        strategy.close()


def all_areas() -> Iterator[Area]:
    """Every part of the table. Commands and configurations, which need processes of their own, add theirs here."""
    from tests.mistakes import checkpoints, clusters, data, devices, servers, steps, values

    for module in (devices, steps, values, data, checkpoints, clusters, servers):
        yield module.area
