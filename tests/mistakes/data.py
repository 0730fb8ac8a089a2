"""Distributing data."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import torchstrat as ts
from tests.mistakes.table import Area, Place, loader, rows
from torchstrat.errors import (
    InvalidArgumentError,
    OutOfRangeError,
    StrategyMixingError,
    UnsupportedError,
    WrongTypeError,
)

area = Area("Data")


@area.raises(
    "a dataset distributed twice",
    UnsupportedError,
    given="distributed already",
    needed="it was made from",
    change="Distribute once",
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    strategy.distribute_dataset(strategy.distribute_dataset(loader()))


@area.raises(
    "None for a dataset", InvalidArgumentError, given="is None", needed="the dataset", change="give a DataLoader"
)
def _(place: Place) -> None:
    place.mirrored().distribute_dataset(None)


@area.raises(
    "a file's name for a dataset", WrongTypeError, given="str", needed="is no dataset", change="give a DataLoader"
)
def _(place: Place) -> None:
    place.mirrored().distribute_dataset("rows.csv")


@area.raises(
    "a function for a dataset",
    WrongTypeError,
    given="function",
    needed="is no dataset",
    change="distribute_datasets_from_function",
)
def _(place: Place) -> None:
    place.mirrored().distribute_dataset(loader)


@area.raises(
    "a dataset without a loader",
    WrongTypeError,
    given="item 0 of TensorDataset",
    needed="is no batch",
    change="DataLoader",
)
def _(place: Place) -> None:
    next(iter(place.mirrored().distribute_dataset(rows())))


@area.raises(
    "a loader with batch_size=None",
    InvalidArgumentError,
    given=r"batch\[0\] has 3",
    needed="numbers of rows",
    change="DataLoader",
)
def _(place: Place) -> None:
    next(iter(place.mirrored().distribute_dataset(loader(None))))


@area.raises(
    "scalars that are not batched",
    InvalidArgumentError,
    given=r"tensor\(1\.\)",
    needed="a batch dimension",
    change="DataLoader",
)
def _(place: Place) -> None:
    next(iter(place.mirrored().distribute_dataset([torch.tensor(1.0)])))


@area.raises(
    "columns of different lengths", InvalidArgumentError, given="has 4", needed="numbers of rows", change="ts.data.same"
)
def _(place: Place) -> None:
    next(iter(place.mirrored().distribute_dataset([(torch.ones(4, 2), torch.ones(3))])))


@area.raises(
    "a DistributedSampler",
    UnsupportedError,
    given="DistributedSampler",
    needed="shards by itself",
    change="shuffle=True",
)
def _(place: Place) -> None:
    sampler: Any = DistributedSampler(rows(), num_replicas=2, rank=0)
    place.mirrored().distribute_dataset(DataLoader(rows(), batch_size=4, sampler=sampler))


@area.raises(
    "a dataset for a function of one",
    WrongTypeError,
    given="DataLoader",
    needed="needs a function",
    change="function itself",
)
def _(place: Place) -> None:
    place.mirrored().distribute_datasets_from_function(loader())


@area.raises(
    "a dataset function without a context",
    WrongTypeError,
    given=r"one of \(\)",
    needed="InputContext",
    change=r"dataset_fn\(context\)",
)
def _(place: Place) -> None:
    place.mirrored().distribute_datasets_from_function(lambda: loader())


@area.raises(
    "a dataset function without return",
    InvalidArgumentError,
    given="is None",
    needed="dataset",
    change="give a DataLoader",
)
def _(place: Place) -> None:
    place.mirrored().distribute_datasets_from_function(lambda context: None)


@area.raises("options as a dict", WrongTypeError, given="got dict", needed="InputOptions", change=r"ts\.InputOptions\(")
def _(place: Place) -> None:
    place.mirrored().distribute_dataset(loader(), {"fetch_to_device": False})


@area.raises(
    "the length of a distributed dataset", WrongTypeError, given="has no len", needed="-2", change=r"\.cardinality"
)
def _(place: Place) -> None:
    len(place.mirrored().distribute_dataset(loader()))


@area.raises("get_next past the end", OutOfRangeError, given="the last of 1", needed="get_next", change="or a for loop")
def _(place: Place) -> None:
    iterator = iter(place.mirrored().distribute_dataset(loader(8)))
    iterator.get_next()
    iterator.get_next()


@area.raises(
    "another strategy's dataset",
    StrategyMixingError,
    given="in the scope of",
    needed="one strategy",
    change="leave the inner",
)
def _(place: Place) -> None:
    iterator = iter(place.mirrored().distribute_dataset(loader()))
    with place.mirrored().scope():
        next(iterator)


@area.raises("a global batch that does not split", ValueError, given="30", needed="4", change="multiple|divis|split")
def _(place: Place) -> None:
    ts.InputContext(1, 0, 4).get_per_replica_batch_size(30)


@area.raises("a dataset without a length", WrongTypeError, given="NoLength", needed="needs __len__", change="has none")
def _(place: Place) -> None:
    class NoLength(Dataset[Any]):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.ones(4)

    place.mirrored().distribute_dataset(NoLength())


@area.right("a global batch smaller than the replicas", "No row is lost: replicas without rows do not run the step.")
def _(place: Place) -> None:
    x, _y = next(iter(place.mirrored().distribute_dataset(loader(1))))
    assert [len(part) for part in x.values] == [1, 0]
