"""The things whose lifetimes are looked at, on strategies whose replicas are in step: how each is made and used."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchstrat as ts
from tests.matrix.lifetime_measures import Tracked

ROWS, COLUMNS = 1024, 1024  # 4 MB, of each thing but for processes and threads


class FailedError(Exception):
    """What fails on purpose."""


Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What is run in the place of a function."""


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def failing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Does what the function does, and raises."""

    def fails(*args: Any) -> None:
        kept = function(*args)
        raise FailedError(f"after {type(kept).__name__}")

    return fails


_count = itertools.count()


def anew(function: Any) -> Callable[..., Any]:
    """The same once more as another one, as a notebook's cell makes it each time that it is run."""
    if not isinstance(function, types.FunctionType):
        return function  # type: ignore[no-any-return]
    number = next(_count)
    code = function.__code__.replace(co_name=f"function_{number}", co_firstlineno=number + 1)
    made = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    made.__qualname__ = code.co_name
    return made


class Row:
    """A thing. ``kept`` has it as its ``thing``, and is what a step reaches it through."""

    height = ROWS
    """Of what it is made of; less where it is made once."""
    name: ClassVar[str]
    turns: ClassVar[int] = 6
    """How often it is made before it is measured, and after that."""
    turns_failed: ClassVar[int | None] = None
    """Where it fails, if not `turns`."""
    fails_by_data: ClassVar[bool] = False
    """Whether what fails is the data of its `home`, and not a function."""

    def home(self, strategy: Any, *, fails: bool = False) -> Any:
        """What lives longer than the thing. ``fails``: using it does."""
        return None

    def kept(self, strategy: Any) -> Any:
        return SimpleNamespace(thing=None)

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        raise NotImplementedError

    def use(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        raise NotImplementedError

    def use_again(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        """As often as one likes."""
        self.use(strategy, home, kept, around)


class _Modules(Row):
    def kept(self, strategy: Any) -> Any:
        with strategy.scope():
            return nn.Module()


class Models(_Modules):
    name = "models"

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        with strategy.scope():
            made = nn.Sequential(nn.Linear(COLUMNS, self.height), nn.BatchNorm1d(self.height))
        tracked(made[0].weight)
        tracked(made[1].running_mean)
        return tracked(made)

    def use(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        def step() -> torch.Tensor:
            loss = kept.thing(torch.arange(2.0 * COLUMNS).view(2, COLUMNS)).sum()
            loss.backward()
            kept.thing.zero_grad()
            return loss.detach()

        strategy.run(around(step))


class Optimizers(Row):
    name = "optimizers"

    def home(self, strategy: Any, *, fails: bool = False) -> Any:
        with strategy.scope():
            return nn.Linear(COLUMNS, self.height // 2)

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        with strategy.scope():
            return tracked(torch.optim.Adam(home.parameters()))

    def use(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        def step() -> None:
            home(torch.ones(2, COLUMNS)).sum().backward()
            kept.thing.step()
            kept.thing.zero_grad()

        strategy.run(around(step))


class Tables(_Modules):
    name = "tables"

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        with strategy.scope():
            made = nn.Embedding(self.height, COLUMNS, max_norm=1.0, sparse=True)
        tracked(made.weight)
        return tracked(made)

    def use(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        def step() -> None:
            rows = kept.thing(torch.tensor([1, 5, 5]))
            rows.sum().backward()
            kept.thing.weight.grad = None

        strategy.run(around(step))


BATCH, BATCHES = 8, 4


class Examples(Dataset[torch.Tensor]):
    """``fails``: from the second batch on."""

    def __init__(self, columns: int = COLUMNS * ROWS // BATCH // BATCHES, *, fails: bool = False) -> None:
        self._data = torch.ones(BATCH * BATCHES, columns)
        self._fails = fails

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._fails and index >= BATCH:
            raise FailedError(f"row {index}")
        return self._data[index]


class _Data(Row):
    fails_by_data = True

    def use(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        """In a loop that is left before the data has ended."""
        iterator = iter(kept.thing)
        for _ in range(2):
            strategy.run(around(_sum), args=(next(iterator),))

    def use_again(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        if not hasattr(kept, "batch"):
            kept.batch = next(iter(kept.thing))
        strategy.run(around(_sum), args=(kept.batch,))


def _sum(batch: torch.Tensor) -> torch.Tensor:
    return batch.sum()


class DataSets(_Data):
    name = "data sets"

    def home(self, strategy: Any, *, fails: bool = False) -> Any:
        return fails

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        examples = tracked(Examples(fails=home))
        return tracked(strategy.distribute_dataset(DataLoader(examples, batch_size=BATCH)))


class Iterators(_Data):
    name = "iterators"

    def home(self, strategy: Any, *, fails: bool = False) -> Any:
        options = ts.InputOptions(per_replica_buffer_size=2)
        return strategy.distribute_dataset(DataLoader(Examples(fails=fails), batch_size=BATCH), options)

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        return tracked(iter(home))


class LoaderProcesses(_Data):
    name = "loader processes"
    turns = 3
    turns_failed = 2  # torch's iterator and the error of its worker hold each other, and its end then takes 5 s

    def home(self, strategy: Any, *, fails: bool = False) -> Any:
        # A process that was spawned would spawn: another interpreter for every pass.
        loader = DataLoader(Examples(64, fails=fails), batch_size=BATCH, num_workers=1, multiprocessing_context="fork")
        return strategy.distribute_dataset(loader)

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        return tracked(iter(home))


class Functions(Row):
    name = "functions"

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        captured = tracked(torch.ones(ROWS, COLUMNS))

        def step() -> torch.Tensor:
            return captured[0].sum()

        return tracked(step)

    def use(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        strategy.run(around(kept.thing))


class Results(Row):
    name = "results"

    def home(self, strategy: Any, *, fails: bool = False) -> Any:
        with strategy.scope():
            return nn.Linear(1, 1)

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        def step() -> torch.Tensor:
            result = home(torch.ones(self.height * COLUMNS, 1))
            return tracked(result * 2)

        return strategy.run(step)

    def use(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        strategy.reduce("mean", kept.thing, axis=None)
        strategy.gather(kept.thing, axis=0)

        def step() -> torch.Tensor:
            total: torch.Tensor = home(torch.ones(self.height * COLUMNS, 1)).sum()
            return total

        strategy.run(around(step))

    def use_again(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        def step() -> torch.Tensor:
            rows: torch.Tensor = home(torch.ones(2, 1))
            return rows

        result = strategy.run(around(step))
        strategy.reduce("mean", result, axis=0)
        strategy.gather(result, axis=0)


class Threads(Row):
    name = "threads"

    def home(self, strategy: Any, *, fails: bool = False) -> Any:
        with strategy.scope():
            return nn.Linear(COLUMNS, self.height)

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        return tracked(ThreadPoolExecutor(1))

    def use(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        def step() -> torch.Tensor:
            loss = home(torch.ones(2, COLUMNS)).sum()
            loss.backward()
            home.zero_grad()
            return loss.detach()

        try:
            kept.thing.submit(strategy.run, around(step)).result()
        finally:
            kept.thing.shutdown()
            # A pool takes no work after that, and is used more than once.
            kept.thing = ThreadPoolExecutor(1)


class Strategies(Row):
    """Each with a model and an optimizer that others have used before it."""

    name = "strategies"
    turns = 4

    def __init__(self, open_one: Callable[[], Any]) -> None:
        self._open = open_one

    def home(self, strategy: Any, *, fails: bool = False) -> Any:
        model = nn.Linear(COLUMNS, self.height)
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def make(self, strategy: Any, home: Any, tracked: Tracked) -> Any:
        return tracked(self._open())

    def use(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        strategy = kept.thing
        with strategy.scope():
            own = nn.Linear(COLUMNS, self.height)
        with suppress(FailedError), strategy.scope():
            around(nn.Linear)(COLUMNS, self.height)

        def step(batch: torch.Tensor) -> None:
            hidden = torch.ones(2, COLUMNS) * batch.sum()
            (home.model(hidden) + own(hidden)).sum().backward()
            home.optimizer.step()
            home.optimizer.zero_grad()

        iterator = iter(strategy.distribute_dataset(DataLoader(Examples(8), batch_size=BATCH)))
        for _ in range(2):
            strategy.run(around(step), args=(next(iterator),))

    def use_again(self, strategy: Any, home: Any, kept: Any, around: Around) -> None:
        with kept.thing.scope():
            own = nn.Linear(1, 1)

        def step() -> torch.Tensor:
            return own(torch.ones(2, 1)).detach()

        kept.thing.run(around(step))
