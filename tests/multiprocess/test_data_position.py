"""A data position over real processes: two, then one, then three go through one pass, and every row comes once."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchstrat as ts
from tests.support.datasets import ORDERS, Numbers, Stream, put_streams, seed, streams
from tests.support.input_ranks import joined, plain
from torchstrat.testing import Workers

ROWS = 41
LOADERS: dict[str, Callable[[int, Path], Any]] = {
    "shuffle": lambda size, _: ORDERS["shuffle"](Numbers(ROWS), size),
    "shuffle in a worker": lambda size, _: ORDERS["shuffle"](Numbers(ROWS), size, num_workers=1),
    "sampler": lambda size, _: ORDERS["lazy sampler"](Numbers(ROWS), size),
    "sampler with a state": lambda size, _: ORDERS["stateful sampler"](Numbers(ROWS), size),
    "iterable": lambda size, _: DataLoader(Stream(ROWS), size),
    "pipeline": lambda size, _: ts.data.ArrayDataset(torch.arange(ROWS)).shuffle(6).batch(size),
    "files": lambda size, folder: ts.data.TextLineDataset(sorted(folder.iterdir())).batch(size),
}


def read(folder: Path, size: int, kept: dict[str, bytes], steps: int | None) -> dict[str, Any]:
    """In a process: for each loader the rows of this process by step, and what a checkpoint keeps after ``steps``."""
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    try:
        found = {}
        for name in LOADERS:
            seed(5 if strategy.is_chief else 1234)  # the order is rank 0's
            loader = LOADERS[name](size, folder)
            dataset = strategy.distribute_dataset(loader)
            if kept:
                state, of_the_process = pickle.loads(kept[name])
                dataset.load_state_dict(state)
                if strategy.is_chief:
                    put_streams(of_the_process)
            batches = itertools.islice(iter(dataset), steps)
            rows = [joined(map(plain, strategy.local_results(batch))) for batch in batches]
            fetched = getattr(getattr(loader, "dataset", None), "fetched", None)
            found[name] = (rows, pickle.dumps((dataset.state_dict(), streams())), fetched)
        return found
    finally:
        strategy.close()


def steps_of(results: list[dict[str, Any]], name: str) -> list[list[Any]]:
    """The rows of every step over all ranks."""
    return [joined(parts) for parts in zip(*(found[name][0] for found in results), strict=True)]


def kept_of(results: list[dict[str, Any]]) -> dict[str, bytes]:
    """What rank 0 has written."""
    return {name: kept for name, (_, kept, _) in results[0].items()}


@pytest.fixture(scope="module")
def three_processes() -> Iterator[Workers]:
    with Workers(3, timeout_seconds=300) as workers:
        yield workers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text("".join(f"f{index}-{line}\n" for line in range(7)), encoding="utf-8")
    return tmp_path


def test_two_then_one_then_three_processes(two_processes: Workers, three_processes: Workers, folder: Path) -> None:
    """With another global batch each time."""
    first = two_processes.run(read, folder, 4, {}, 4)
    pipelines = [{name: pickle.loads(kept)[0]["streams"].keys() for name, (_, kept, _) in one.items()} for one in first]
    assert pipelines[0] == pipelines[1]
    second = [read(folder, 3, kept_of(first), 3)]
    third = three_processes.run(read, folder, 5, kept_of(second), None)
    whole = [read(folder, ROWS, {}, None)]
    for name in LOADERS:
        before = joined(steps_of(first, name) + steps_of(second, name))
        handed_out, expected = before + joined(steps_of(third, name)), joined(steps_of(whole, name))
        if name == "files":
            assert sorted(handed_out) == sorted(expected) == sorted(f"f{n}-{m}" for n in range(4) for m in range(7))
        else:
            # Behind a loader batches begin with the next row; a pipeline's own stay where they are, and one is cut.
            assert len(before) == 4 * 4 + (2 + 3 + 3 if name == "pipeline" else 3 * 3), name
            assert handed_out == expected, name
            assert sorted(handed_out) == list(range(ROWS)), name
        if name in ("shuffle", "sampler"):
            assert not set(joined(found[name][2] for found in third)) & set(before), "read again"
