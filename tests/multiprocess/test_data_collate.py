"""Collate functions that look at the whole batch, in two processes as in plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

import torchstrat as ts
from torchstrat.testing import Workers

ROWS = 14
PASSES = 2
Rows = list[list[float]]


class Ragged(Dataset[torch.Tensor]):
    """Row ``i`` has a length and noise of its own. Records what is fetched."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(1)
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        drawn = [index + torch.rand(()).item(), random.random(), np.random.randn(), self.own.random()]
        return torch.tensor(drawn + [1.0] * (index % 5), dtype=torch.float64)


class Bulk(Ragged):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return mixed([super(Bulk, self).__getitem__(one) for one in index])


class Together(Ragged):
    """Asked for several rows at once, as data sets of Hugging Face are."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(mixed([self[index] for index in indices]))


def mixed(rows: list[torch.Tensor]) -> torch.Tensor:
    """Padded, standardised, and mixed with each other, as mixup does."""
    batch = pad_sequence(rows, batch_first=True)
    batch = torch.cat([batch - batch.mean(0), torch.full((len(rows), 1), float(batch.size(1)))], 1)
    share = np.random.beta(1, 1)
    found = share * batch + (1 - share) * batch[torch.randperm(len(rows))]
    return torch.nn.functional.pad(found, (0, 10 - found.size(1)))


class Drawn(Sampler[int]):
    """Nobody's sampler, which draws on rank 0 alone."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(ROWS).tolist())

    def __len__(self) -> int:
        return ROWS


def in_workers(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(dataset, 4, collate_fn=mixed, shuffle=True, num_workers=2, multiprocessing_context="fork")


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "collate": lambda: DataLoader(Ragged(), 4, collate_fn=mixed, shuffle=True),
    "generator": lambda: DataLoader(
        Ragged(), 4, collate_fn=mixed, shuffle=True, generator=torch.Generator().manual_seed(2)
    ),
    "workers": lambda: in_workers(Ragged()),
    "bulk": lambda: DataLoader(Bulk(), batch_size=None, sampler=BatchSampler(RandomSampler(range(ROWS)), 4, False)),
    "getitems": lambda: DataLoader(Together(), 4, shuffle=True),
}


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def plainly(name: str) -> list[Rows]:
    seed(3)
    loader = LOADERS[name]()
    return [[row for batch in loader for row in batch.tolist()] for _ in range(PASSES)]


def distributed(names: list[str], first_seed: int = 3, rank_seed: int = 0, collate: Any = "batch") -> dict[str, Any]:
    """By loader, pass and step: the rows of this process."""
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    rank = 0 if strategy.is_chief else 1
    try:
        found = {}
        for name in names:
            seed(first_seed + rank_seed * rank)
            loader = DataLoader(Ragged(), 4, collate_fn=mixed, sampler=Drawn()) if name == "drawn" else LOADERS[name]()
            dataset = strategy.distribute_dataset(loader, ts.InputOptions(collate=collate))
            found[name] = [[batch.values[0].tolist() for batch in dataset] for _ in range(PASSES)]
            if name == "collate":
                found["fetched"] = loader.dataset.fetched  # type: ignore[attr-defined]
        return found
    finally:
        strategy.close()


def whole(parts: list[Any], name: str) -> list[Rows]:
    first, second = (part[name] for part in parts)
    return [
        [row for pair in zip(*both, strict=True) for part in pair for row in part]
        for both in zip(first, second, strict=True)
    ]


@pytest.fixture(scope="module")
def readings(two_processes: Workers) -> list[Any]:
    return two_processes.run(distributed, list(LOADERS))


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_plain_pytorch(name: str, readings: list[Any]) -> None:
    np.testing.assert_allclose(whole(readings, name)[0], plainly(name)[0], atol=1e-12)
    np.testing.assert_allclose(whole(readings, name)[1], plainly(name)[1], atol=1e-12)


def test_ranks_that_are_seeded_differently_read_the_same_batches(two_processes: Workers) -> None:
    parts = two_processes.run(distributed, ["collate", "workers", "drawn"], 3, 5)
    for name in ("collate", "workers", "drawn"):
        for rows in whole(parts, name):
            for start in range(0, ROWS, 4):
                batch = np.array(rows[start : start + 4])
                # Mixed with others of the same batch by the same share, the differences to the mean still cancel.
                np.testing.assert_allclose(batch[:, :4].sum(0), 0, atol=1e-9)
        assert whole(parts, name)[0] != whole(parts, name)[1]


def test_rows_that_do_not_depend_on_the_others_are_read_once(two_processes: Workers) -> None:
    parts = two_processes.run(distributed, ["collate"], 3, 0, "rows")
    first, second = (part["fetched"] for part in parts)
    assert sorted(first + second) == sorted([*range(ROWS)] * PASSES)


def test_whole_batches_are_read_by_all(readings: list[Any]) -> None:
    assert [len(part["fetched"]) for part in readings] == [ROWS * PASSES] * 2
