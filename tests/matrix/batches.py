"""Batches: does each replica's step get its own rows, whatever a batch is and however it comes?

Rows: what a batch is (`tests.matrix.batch_kinds`). Columns: how it comes. A cell trains two layers for an epoch of two
full batches and a short one, and compares their weights with a plain loop over what the loader gives.

Left out, since nothing tells it from what the rule says (rows are along dim 0 of every leaf): time-first batches with
as many steps as rows, and masks with as many positions, of which only the batches are seen. README says how to mark
them. A collate function that looks at the whole batch and makes one that cannot be cut (packed, offsets, a class that
takes no other rows) sees each replica's examples; README says so.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchstrat as ts
from tests.matrix import places
from tests.matrix.batch_kinds import COUNTS, KINDS, ROWS, Example, Kind, examples_of
from tests.matrix.table import RIGHT, Cell, Expected, PlantedFault, Table, assert_close, cells_at, refused
from torchstrat.core import nest
from torchstrat.data import distributed, marks, prefetch, rows, streams
from torchstrat.errors import WrongTypeError
from torchstrat.testing.fake_cluster import FakeCluster

SERVERS = "parameter servers, 1 worker"
FUNCTION_SECONDS = 60.0


class Rows(Dataset[Any]):
    def __init__(self, examples: list[Any]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        return self._examples[index]


class RowsOfDicts(Rows):
    """As those of Hugging Face: lists of numbers by name, and many rows at once."""

    def __getitem__(self, index: int) -> Any:
        x, y = self._examples[index]
        return {"x": x.tolist(), "y": y}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Noisy(Rows):
    """Augments its rows, each by itself."""

    def __getitem__(self, index: int) -> Example:
        x, y = self._examples[index]
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(index)).double() / 10, y


class Damaged(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == ROWS + 1:
            raise OSError(f"row {index} is damaged")
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __init__(self, rows_of: Rows) -> None:
        self._rows = rows_of

    def __iter__(self) -> Iterator[Any]:
        return (self._rows[index] for index in range(len(self._rows)))


class LoaderOfItsOwn(DataLoader[Any]):
    """Finishes its batches in an iterator of its own."""

    def _get_iterator(self) -> Any:
        return (batch for batch in super()._get_iterator())


def _dataset(kind: Kind) -> Rows:
    return (RowsOfDicts if kind.of_dicts else Rows)(examples_of(kind))


def _loader(kind: Kind) -> DataLoader[Any]:
    return DataLoader(_dataset(kind), ROWS, collate_fn=kind.collate)


class CollateByName:
    """A kind's collate function for data-loading workers that are started anew."""

    def __init__(self, kind: Kind) -> None:
        self._name = next(name for name, one in KINDS.items() if one is kind)

    def __call__(self, examples: list[Any]) -> Any:
        return KINDS[self._name].collate(examples)


def _with_workers(kind: Kind) -> DataLoader[Any]:
    return DataLoader(_dataset(kind), ROWS, collate_fn=CollateByName(kind), num_workers=1)


def _of_sampler(kind: Kind) -> DataLoader[Any]:
    stops = list(accumulate(COUNTS))
    order = torch.randperm(stops[-1], generator=torch.Generator().manual_seed(0)).tolist()
    batches = [order[stop - count : stop] for stop, count in zip(stops, COUNTS, strict=True)]
    return DataLoader(_dataset(kind), batch_sampler=batches, collate_fn=kind.collate)


def _looking_at_all(kind: Kind) -> DataLoader[Any]:
    def collate(examples: list[Example]) -> Any:
        middle = torch.cat([x.flatten() for x, _ in examples]).mean()
        return kind.collate([(x - middle, y) for x, y in examples])

    return DataLoader(Rows(examples_of(kind)), ROWS, collate_fn=collate)


def _augmenting(kind: Kind) -> DataLoader[Any]:
    return DataLoader(Noisy(examples_of(kind)), ROWS, collate_fn=kind.collate)


def _generator(kind: Kind) -> Iterator[Any]:
    return (batch for batch in _loader(kind))


def _filling_again(kind: Kind) -> Iterator[Any]:
    """Each batch in the memory of the first, as readers of files do that allocate once."""
    memory: Any = None
    for batch in _loader(kind):
        memory = batch if memory is None else memory
        yield nest.map_structure(lambda kept, new: kept[: len(new)].copy_(new), memory, batch)


def _stateful(kind: Kind) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return StatefulDataLoader(_dataset(kind), ROWS, collate_fn=kind.collate)


class Column(NamedTuple):
    make: Callable[[Kind], Any]
    """What is distributed."""
    sees_examples: bool = True
    """Whether whoever distributes it can see the examples, and not only the batches."""
    where: tuple[str, ...] = (
        *("mirrored x2", "central_storage x2", "torchrun mirrored", "torchrun central_storage"),
        places.TPU,
    )
    by_items: bool = False
    """Whether its items are asked for by their numbers, and are taken for batches only where they look like some."""
    without: frozenset[str] = frozenset()
    """Kinds that cannot come that way."""


_FEW = ("mirrored x2", "torchrun mirrored", places.TPU)
_DICTS = frozenset({"rows of dicts"})
COLUMNS: Mapping[str, Column] = {
    "loader": Column(_loader),
    "loader with workers": Column(_with_workers, where=("mirrored x2",)),
    "loader with workers that are started anew": Column(  # which takes seconds for each
        _with_workers, where=("torchrun mirrored",), without=frozenset(KINDS) - {"named tuple", "time first, marked"}
    ),
    "loader with an iterator of its own": Column(
        lambda kind: LoaderOfItsOwn(_dataset(kind), ROWS, collate_fn=kind.collate), sees_examples=False, where=_FEW
    ),
    "batch sampler": Column(_of_sampler),
    "collate looks at the whole batch": Column(
        _looking_at_all,
        without=_DICTS | {name for name, kind in KINDS.items() if not kind.whole},
    ),
    "augmenting data set": Column(_augmenting, where=_FEW, without=_DICTS),
    "iterable data set": Column(lambda kind: DataLoader(Stream(_dataset(kind)), ROWS, collate_fn=kind.collate)),
    "generator": Column(_generator, sees_examples=False),
    "generator that fills its memory again": Column(
        _filling_again, sees_examples=False, without=frozenset(KINDS) - {"tuple", "dict"}
    ),
    "data set of batches": Column(
        lambda kind: Rows(list(_loader(kind))), sees_examples=False, where=_FEW, by_items=True
    ),
    "list of batches": Column(lambda kind: list(_loader(kind)), sees_examples=False, where=_FEW),
} | ({"StatefulDataLoader": Column(_stateful, False, _FEW)} if importlib.util.find_spec("torchdata") else {})


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(ROWS, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def _step(kind: Kind, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    predicted, wanted = kind.scores(model, batch)
    assert predicted.shape == wanted.shape, f"{tuple(predicted.shape)} are no scores of {tuple(wanted.shape)} rows"
    nn.functional.mse_loss(predicted, wanted).backward()
    optimizer.step()


def _plainly(kind: Kind, batches: Iterable[Any]) -> nn.Module:
    model, optimizer = _build()
    for batch in batches:
        _step(kind, model, optimizer, ts.data.unmarked(batch))
    return model


def _check(kind: Kind, column: Column, place: str, is_told: bool) -> None:
    made = column.make(kind)
    plain = _plainly(kind, map(made.__getitem__, range(len(made))) if isinstance(made, Rows) else made)
    with places.opened(place) as strategy, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope():
            model, optimizer = _build()
        for batch in strategy.distribute_dataset(column.make(kind)):
            if is_told:
                break
            strategy.run(partial(_step, kind, model, optimizer), args=(batch,))
    said = [str(one.message) for one in caught if re.search(r"ts\.data\.(axis|same|examples)", str(one.message))]
    if is_told:
        for text in said:
            warnings.warn(text, stacklevel=1)
        return
    assert not said, f"nothing is in doubt here, and yet it was said: {said}"
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def _check_damaged(kind: Kind, place: str) -> None:
    """The step before is right, and asking once more is not the end of the data."""
    data = Damaged(examples_of(kind))
    loader = DataLoader(data, ROWS, collate_fn=kind.collate)
    plain = _plainly(kind, [next(iter(loader))])
    with places.opened(place) as strategy:
        with strategy.scope():
            model, optimizer = _build()
        batches = iter(strategy.distribute_dataset(loader))
        strategy.run(partial(_step, kind, model, optimizer), args=(next(batches),))
        for _ in range(2):
            with pytest.raises(OSError, match="row 6 is damaged"):
                next(batches)
        assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def _check_on_worker(kind: Kind) -> None:
    """Every worker reads whole batches of its own data set; here there is one."""
    plain = _plainly(kind, _loader(kind))
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(None, rows_only=False)
        with strategy.scope():
            model, optimizer = _build()
        coordinator = ts.ClusterCoordinator(strategy)
        batches = iter(coordinator.create_per_worker_dataset(lambda: _loader(kind)))
        step = partial(_step, kind, model, optimizer)
        for _ in COUNTS:
            scheduled = coordinator.schedule(lambda data: strategy.run(step, args=(next(data),)), args=(batches,))
            scheduled.get(FUNCTION_SECONDS)
        strategy.extended.pull()
        assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def _expected(kind: Kind, column: Column) -> Expected | None:
    if column.by_items and kind.alone is not None and kind.alone.verdict == "refused":
        says = "(item 0 of Rows is no batch of tensors|cannot be split over replicas)"
        return refused(WrongTypeError, says, "it may be an example")
    return RIGHT if column.sees_examples else kind.alone


def _expected_at(kind: Kind, expected: Expected, place: str) -> Expected:
    if place == places.TPU and kind.on_tpu is not None and expected.verdict == "right":
        return kind.on_tpu
    return expected


def cells() -> Iterator[Cell]:
    for name, kind in KINDS.items():
        for column_name, column in COLUMNS.items():
            expected = _expected(kind, column)
            if expected is None or name in column.without:
                continue
            for place in column.where:
                check = partial(_check, kind, column, place, expected.verdict == "documented")
                yield Cell(name, column_name, place, check, _expected_at(kind, expected, place))
        for place in () if name in _DICTS else ("mirrored x2", *(() if kind.on_tpu else (places.TPU,))):
            yield Cell(name, "a row that raises", place, partial(_check_damaged, kind, place))
        yield Cell(name, "per worker", SERVERS, partial(_check_on_worker, kind))


# -- planted faults --------------------------------------------------------------------------------------------------


def _with(owner: Any, name: str, other: Any) -> Callable[[], AbstractContextManager[object]]:
    return lambda: patch.object(owner, name, other)


def _by_counts(reading: Any, whole: Any, examples: Any) -> Any:
    return whole if rows.common_rows(whole) == len(examples) else None


def _shallow(like: Any, values: list[Any]) -> Any:
    made = object.__new__(type(like))
    made.__dict__.update(vars(like))
    for name, value in zip(marks.names(like), values, strict=True):
        setattr(made, name, value)
    return made


@contextmanager
def _copying_when_asked() -> Iterator[None]:
    class Asked(Future[object]):
        def result(self, timeout: float | None = None) -> object:
            return self.job()  # type: ignore[attr-defined]

    def submit(_: object, job: Callable[[], object]) -> Future[object]:
        future = Asked()
        future.job = job  # type: ignore[attr-defined]
        return future

    with patch.object(prefetch, "wait"), patch.object(prefetch._Background, "submit", submit):
        yield


_cut_along = rows._cut_along
FAULTS = (
    PlantedFault(
        "equal counts are taken for rows along dim 0",
        _with(streams.CollateReading, "marked", _by_counts),
        cells_at("time first, as many steps as rows", "loader"),
    ),
    PlantedFault(
        "what becomes of fewer examples is not looked at",
        _with(streams, "_narrowed", lambda dims, *_: dims),
        cells_at("time first, as many steps as rows", "loader"),
    ),
    PlantedFault(
        "leaves with different numbers of rows are each split by their own",
        _with(streams, "require_aligned", lambda batch: 0),
        cells_at("list of examples", "generator", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "a list that may hold examples is not told of",
        _with(streams, "tell_of_lists", lambda batch: None),
        cells_at("list of as many examples as channels", "generator"),
    ),
    PlantedFault(
        "tuples of a class of their own become plain ones",
        _with(nest, "_rebuild_tuple", lambda like, values: tuple(values)),
        cells_at("tuple with a constructor of its own", "generator"),
    ),
    PlantedFault(
        "the next batch is read while one is copied",
        _copying_when_asked,
        cells_at("tuple", "generator that fills its memory again", places.TPU),
    ),
    PlantedFault(
        "rows that wait to be taken apart stay where they were read to",
        _with(rows, "in_own_memory", lambda leaf: leaf),
        cells_at("dict", "generator that fills its memory again", places.TPU),
    ),
    PlantedFault(
        "a mapping's class is called with pairs",
        _with(nest, "_filled_copy", lambda like, values: type(like)(dict(zip(like, values, strict=True)))),
        cells_at("dict subclass", "loader", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "a copy may write to the original's entries",
        _with(nest, "_differ", lambda first, second: False),
        cells_at("mapping that shares its entries with a copy", "loader"),
    ),
    PlantedFault(
        "dataclasses are copied with what they have computed",
        _with(marks, "_rebuild_dataclass", _shallow),
        cells_at("dataclass", "generator"),
    ),
    PlantedFault(
        "the step gets the marks",
        _with(distributed, "unmarked", lambda value: value),
        cells_at("numbers, marked", "loader", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "marked rows are cut along dim 0",
        _with(rows, "_cut_along", lambda leaf, dim, start, stop: _cut_along(leaf, 0, start, stop)),
        cells_at("time first, marked", "generator"),
    ),
    PlantedFault(
        "every replica gets the first examples of a list",
        _with(rows, "_cut_list", lambda values, start, stop: values[: stop - start]),
        cells_at("list of examples, marked", "generator"),
    ),
    PlantedFault(
        "nested tensors are not cut",
        _with(rows, "_cut_nested", lambda leaf, start, stop: leaf),
        cells_at("nested, jagged", "generator"),
    ),
)

TABLE = Table(
    name="batches",
    question="Does each replica's step get its own rows, whatever a batch is and however it comes?",
    make_cells=cells,
    always=(
        "dataclass whose __post_init__ changes its fields | loader | tpu x2, computed on the CPU",
        "list of as many examples as channels | loader with an iterator of its own | mirrored x2",
        "strings | loader | torchrun mirrored",
    ),
    faults=FAULTS,
    alike=places.launch_of,
    bundle=8,
)
