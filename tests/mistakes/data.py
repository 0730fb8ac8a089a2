"""Distributing data."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import torchstrat as ts
from tests.mistakes.table import Area, loader, raises, right, rows
from torchstrat.errors import (
    InvalidArgumentError,
    OutOfRangeError,
    StrategyMixingError,
    UnsupportedError,
    WrongTypeError,
)


class Data(Area):
    title = "Data"

    @raises(UnsupportedError, "distributed already", "it was made from", "Distribute once")
    def a_dataset_distributed_twice(self) -> None:
        strategy = self.mirrored()
        strategy.distribute_dataset(strategy.distribute_dataset(loader()))

    @raises(InvalidArgumentError, "is None", "the dataset", "give a DataLoader")
    def none_for_a_dataset(self) -> None:
        self.mirrored().distribute_dataset(None)

    @raises(WrongTypeError, "str", "is no dataset", "give a DataLoader")
    def the_name_of_a_file_for_a_dataset(self) -> None:
        self.mirrored().distribute_dataset("rows.csv")

    @raises(WrongTypeError, "function", "is no dataset", "distribute_datasets_from_function")
    def a_function_for_a_dataset(self) -> None:
        self.mirrored().distribute_dataset(loader)

    @raises(WrongTypeError, "item 0 of TensorDataset", "is no batch", "DataLoader")
    def a_dataset_without_a_loader(self) -> None:
        next(iter(self.mirrored().distribute_dataset(rows())))

    @raises(InvalidArgumentError, r"batch\[0\] has 3", "numbers of rows", "DataLoader")
    def a_loader_with_batch_size_none(self) -> None:
        next(iter(self.mirrored().distribute_dataset(loader(None))))

    @raises(InvalidArgumentError, r"tensor\(1\.\)", "a batch dimension", "DataLoader")
    def scalars_that_are_not_batched(self) -> None:
        next(iter(self.mirrored().distribute_dataset([torch.tensor(1.0)])))

    @raises(InvalidArgumentError, "has 4", "numbers of rows", "ts.data.same")
    def columns_of_different_lengths(self) -> None:
        next(iter(self.mirrored().distribute_dataset([(torch.ones(4, 2), torch.ones(3))])))

    @raises(InvalidArgumentError, "a tensor on the meta device", "no values", "on the CPU")
    def a_batch_on_the_meta_device(self) -> None:
        next(iter(self.mirrored().distribute_dataset([torch.ones(4, 2, device="meta")])))

    @raises(WrongTypeError, "array of >f4", "no tensor can hold", "astype")
    def an_array_of_another_byte_order(self) -> None:
        next(iter(self.mirrored().distribute_dataset([np.ones(4, ">f4")])))

    @raises(WrongTypeError, "elements with a mark, Same", "about a batch", r"batch\(…\)\.map")
    def a_mark_before_rows_are_batched(self) -> None:
        list(ts.data.ArrayDataset(torch.ones(4)).map(ts.data.same).batch(2))

    @raises(WrongTypeError, r"array of datetime64\[D\]", "no tensor can hold", "astype")
    def an_array_of_dates(self) -> None:
        dates = np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]")
        next(iter(self.mirrored().distribute_dataset([dates])))

    @raises(WrongTypeError, r"array of datetime64\[D\]", "no tensor can hold", "astype")
    def a_date(self) -> None:
        next(iter(self.mirrored().distribute_dataset([(torch.ones(2), ts.data.same(np.datetime64("2020-01-01")))])))

    @raises(UnsupportedError, "DistributedSampler", "shards by itself", "shuffle=True")
    def a_distributed_sampler(self) -> None:
        sampler: Any = DistributedSampler(rows(), num_replicas=2, rank=0)
        self.mirrored().distribute_dataset(DataLoader(rows(), batch_size=4, sampler=sampler))

    @raises(WrongTypeError, "DataLoader", "needs a function", "function itself")
    def a_dataset_for_a_function_of_one(self) -> None:
        self.mirrored().distribute_datasets_from_function(loader())

    @raises(WrongTypeError, r"one of \(\)", "InputContext", r"dataset_fn\(context\)")
    def a_dataset_function_without_a_context(self) -> None:
        self.mirrored().distribute_datasets_from_function(lambda: loader())

    @raises(InvalidArgumentError, "is None", "dataset", "give a DataLoader")
    def a_dataset_function_without_return(self) -> None:
        self.mirrored().distribute_datasets_from_function(lambda context: None)

    @raises(WrongTypeError, "got dict", "InputOptions", r"ts\.InputOptions\(")
    def options_as_a_dict(self) -> None:
        self.mirrored().distribute_dataset(loader(), {"fetch_to_device": False})

    @raises(WrongTypeError, "has no len", "-2", r"\.cardinality")
    def the_length_of_a_distributed_dataset(self) -> None:
        len(self.mirrored().distribute_dataset(loader()))

    @raises(OutOfRangeError, "the last of 1", "get_next", "or a for loop")
    def get_next_past_the_end(self) -> None:
        iterator = iter(self.mirrored().distribute_dataset(loader(8)))
        iterator.get_next()
        iterator.get_next()

    @raises(StrategyMixingError, "in the scope of", "one strategy", "leave the inner")
    def the_dataset_of_another_strategy(self) -> None:
        iterator = iter(self.mirrored().distribute_dataset(loader()))
        with self.mirrored().scope():
            next(iterator)

    @raises(ValueError, "30", "4", "multiple|divis|split")
    def a_global_batch_that_does_not_split(self) -> None:
        ts.InputContext(1, 0, 4).get_per_replica_batch_size(30)

    @raises(WrongTypeError, "NoLength", "needs __len__", "has none")
    def a_dataset_without_a_length(self) -> None:
        class NoLength(Dataset[Any]):
            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.ones(4)

        self.mirrored().distribute_dataset(NoLength())

    @right("No row is lost: replicas without rows do not run the step.")
    def a_global_batch_smaller_than_the_replicas(self) -> None:
        x, _y = next(iter(self.mirrored().distribute_dataset(loader(1))))
        assert [len(part) for part in x.values] == [1, 0]
