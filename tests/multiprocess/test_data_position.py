"""A data position over real processes: two, then one, then three go through one pass, and every row comes once."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import torchstrat as ts
from torchstrat.testing import Workers

ROWS = 41
SEED_OF_RANK_ZERO = 5


class Numbers(Dataset[Any]):
    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return torch.tensor(index)


class Drawn(Sampler[int]):
    """Nobody's sampler: it draws row after row, from Python's stream."""

    def __iter__(self) -> Iterator[int]:
        rest = list(range(ROWS))
        while rest:
            yield rest.pop(random.randrange(len(rest)))


class Counting(Sampler[int]):
    """Goes on by itself."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        while self.taken < ROWS:
            self.taken += 1
            yield ROWS - self.taken
        self.taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Sequence(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(ROWS))


LOADERS: dict[str, Callable[[int], Any]] = {
    "shuffle": lambda size: DataLoader(Numbers(), size, shuffle=True),
    "shuffle in a worker": lambda size: DataLoader(Numbers(), size, shuffle=True, num_workers=1),
    "sampler": lambda size: DataLoader(Numbers(), size, sampler=Drawn()),
    "sampler with a state": lambda size: DataLoader(Numbers(), size, sampler=Counting()),
    "iterable": lambda size: DataLoader(Sequence(), size),
    "pipeline": lambda size: ts.data.ArrayDataset(torch.arange(ROWS)).shuffle(6).batch(size),
}


def read(
    loaders: dict[str, Callable[[int], Any]], size: int, kept: dict[str, bytes], steps: int | None, passes: int = 1
) -> dict[str, Any]:
    """In a process: for each loader the rows of this process by step, and what a checkpoint keeps after ``steps``."""
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    try:
        found = {}
        for name, make in loaders.items():
            # Ranks are seeded differently: the order is rank 0's.
            torch.manual_seed(SEED_OF_RANK_ZERO if strategy.is_chief else 1234)
            random.seed(SEED_OF_RANK_ZERO if strategy.is_chief else 1234)
            loader = make(size)
            dataset = strategy.distribute_dataset(loader)
            if kept:
                state, streams = pickle.loads(kept[name])
                dataset.load_state_dict(state)
                if strategy.is_chief:
                    torch.set_rng_state(streams[0])
                    random.setstate(streams[1])
            rows = []
            for _ in range(passes):
                for batch in itertools.islice(iter(dataset), steps):
                    parts = strategy.local_results(batch)
                    rows.append([row for part in parts for row in (part.tolist() if hasattr(part, "tolist") else part)])
            fetched = getattr(getattr(loader, "dataset", None), "fetched", None)
            streams = (torch.get_rng_state(), random.getstate())
            found[name] = (rows, pickle.dumps((dataset.state_dict(), streams)), fetched)
        return found
    finally:
        strategy.close()


def read_loaders(names: list[str], *arguments: Any) -> dict[str, Any]:
    return read({name: LOADERS[name] for name in names}, *arguments)


def read_files(files: list[Path], *arguments: Any) -> dict[str, Any]:
    return read({"files": lambda size: ts.data.TextLineDataset(files).batch(size)}, *arguments)


def steps_of(results: list[dict[str, Any]], name: str) -> list[list[Any]]:
    """The rows of every step over all ranks."""
    return [list(itertools.chain(*parts)) for parts in zip(*(found[name][0] for found in results), strict=True)]


def flat(steps: list[list[Any]]) -> list[Any]:
    return list(itertools.chain(*steps))


@pytest.fixture(scope="module")
def three_processes() -> Iterator[Workers]:
    with Workers(3, timeout_seconds=300) as workers:
        yield workers


def kept_of(results: list[dict[str, Any]]) -> dict[str, bytes]:
    """What rank 0 has written."""
    return {name: kept for name, (_, kept, _) in results[0].items()}


def test_two_then_one_then_three_processes(two_processes: Workers, three_processes: Workers) -> None:
    """With another global batch each time."""
    names = list(LOADERS)
    first = two_processes.run(read_loaders, names, 4, {}, 4)
    states = [
        {name: pickle.loads(kept)[0]["streams"].keys() for name, (_, kept, _) in found.items()} for found in first
    ]
    assert states[0] == states[1]
    second = [read_loaders(names, 3, kept_of(first), 3)]
    third = three_processes.run(read_loaders, names, 5, kept_of(second), None)
    whole = [read_loaders(names, ROWS, {}, None)]
    for name in names:
        before = flat(steps_of(first, name)) + flat(steps_of(second, name))
        # Behind a loader batches begin with the next row; a pipeline's own stay where they are, and one is cut.
        assert len(before) == 4 * 4 + (2 + 3 + 3 if name == "pipeline" else 3 * 3)
        handed_out = before + flat(steps_of(third, name))
        assert handed_out == flat(steps_of(whole, name)), name
        assert sorted(handed_out) == list(range(ROWS)), name
    for name in ("shuffle", "sampler"):
        fetched = flat([found[name][2] for found in third])
        assert not set(fetched) & set(flat(steps_of(first, name)) + flat(steps_of(second, name)))


def test_equal_processes_go_on_in_the_same_steps_and_passes(two_processes: Workers) -> None:
    names = [name for name in LOADERS if name not in ("iterable", "shuffle in a worker")]
    whole = two_processes.run(read_loaders, names, 4, {}, None, 2)
    before = two_processes.run(read_loaders, names, 4, {}, 5)
    after = two_processes.run(read_loaders, names, 4, kept_of(before), None, 2)
    for name in names:
        steps = steps_of(whole, name)
        assert steps_of(before, name) == steps[:5], name
        assert (steps_of(before, name) + steps_of(after, name)) == steps, name


def test_files_of_two_then_one_then_three_processes(
    two_processes: Workers, three_processes: Workers, tmp_path: Path
) -> None:
    files = [tmp_path / f"{index}.txt" for index in range(4)]
    for index, path in enumerate(files):
        path.write_text("".join(f"f{index}-{line}\n" for line in range(7)), encoding="utf-8")
    first = two_processes.run(read_files, files, 4, {}, 3)
    second = [read_files(files, 3, kept_of(first), 2)]
    third = three_processes.run(read_files, files, 2, kept_of(second), None)
    handed_out = [row for results in (first, second, third) for row in flat(steps_of(results, "files"))]
    assert sorted(handed_out) == sorted(f"f{index}-{line}" for index in range(4) for line in range(7))
