"""Input over real processes: every row once, in the global batches of one process and of plain PyTorch."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

import torchstrat as ts
from tests.support.datasets import ORDERS, Lazily, Numbers, seed
from tests.support.input_ranks import joined
from torchstrat.testing import Workers, spawn

ROWS = 11
EPOCHS = 2
SEED_OF_RANK_ZERO = 5
Epoch = list[tuple[list[list[int]], tuple[int, ...]]]
"""Per step: each local replica's row numbers, and the rows of every replica of the group."""


class Rows(Numbers):
    """Item ``i`` is ``(i, [i, 10 i])``; for a list of indices, the batch of those items."""

    def __getitem__(self, index: Any) -> Any:
        row = torch.as_tensor(index)
        return row, torch.stack([row, 10 * row], dim=-1)


class Batches(Rows):
    """Item ``i`` is a batch of ``i + 1`` rows, made by the dataset."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(torch.arange(index + 1) + 10 * index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(Rows(ROWS).__getitem__, range(ROWS))


SHUFFLE, LAZY = ORDERS["shuffle"], ORDERS["lazy sampler"]
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    **{name: lambda make=make: make(Rows(ROWS)) for name, make in ORDERS.items()},
    "no batching": lambda: DataLoader(Batches(4), batch_size=None, shuffle=True),
    "bulk loading": lambda: DataLoader(Rows(ROWS), None, sampler=BatchSampler(RandomSampler(range(ROWS)), 4, False)),
    "shuffle in a worker": lambda: SHUFFLE(Rows(ROWS), num_workers=1),
    "lazy sampler in workers": lambda: LAZY(Rows(ROWS), 2, num_workers=2),
    "persistent workers": lambda: SHUFFLE(Rows(ROWS), num_workers=1, persistent_workers=True),
    "batches smaller than the group": lambda: DataLoader(Rows(ROWS), 1),
    "iterable": lambda: DataLoader(Stream(), 4),
}
READ_BY = {2: list(LOADERS), 3: ["shuffle", "drop_last", "batch sampler", "batches smaller than the group"]}
"""By number of processes. What three share out otherwise than two are incomplete batches."""
NOT_ALL_ONCE = ("drop_last", "subset", "weighted", "replacement", "no batching")


def epochs(strategy: ts.Strategy, name: str) -> list[Epoch]:
    """In an order that is rank 0's although ranks are seeded differently."""
    seed(SEED_OF_RANK_ZERO if strategy.is_chief else 1234)
    dataset = strategy.distribute_dataset(LOADERS[name]())
    return [[_step(*batch) for batch in dataset] for _ in range(EPOCHS)]


def _step(rows: Any, pairs: Any) -> tuple[list[list[int]], tuple[int, ...]]:
    local = [component.tolist() for component in rows.values]
    assert [[[row, 10 * row] for row in component] for component in local] == [p.tolist() for p in pairs.values]
    return local, rows.batch_info.rows


def read_all(names: list[str]) -> dict[str, Any]:
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    try:
        return {name: epochs(strategy, name) for name in names}
    finally:
        strategy.close()


@pytest.fixture(scope="module")
def readings(two_processes: Workers) -> dict[int, list[dict[str, list[Epoch]]]]:
    """By number of processes, by rank: what each loader gave. One process runs as many replicas itself."""
    with Workers(3, timeout_seconds=300) as three_processes:
        groups = {2: two_processes, 3: three_processes}
        return {size: groups[size].run(read_all, names) for size, names in READ_BY.items()}


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in READ_BY.items() for name in names])
def test_processes_see_the_global_batches_of_one_process(
    name: str, size: int, readings: dict[int, list[dict[str, list[Epoch]]]]
) -> None:
    of_group: list[Epoch] = []
    for of_ranks in zip(*(found[name] for found in readings[size]), strict=True):
        of_group.append([])
        for parts in zip(*of_ranks, strict=True):
            assert len({rows for _, rows in parts}) == 1, "ranks disagree about the rows of a step"
            of_group[-1].append((joined(local for local, _ in parts), parts[0][1]))
    assert all(tuple(map(len, local)) == rows for steps in of_group for local, rows in steps)
    in_one_process = ts.MirroredStrategy([f"cpu:{index}" for index in range(size)])
    assert of_group == epochs(in_one_process, name)
    in_one_process.close()
    seed(SEED_OF_RANK_ZERO)
    loader = LOADERS[name]()
    batches = [[joined(local) for local, _ in steps] for steps in of_group]
    assert batches == [[rows.tolist() for rows, _ in loader] for _ in range(EPOCHS)]
    if name not in NOT_ALL_ONCE:
        assert all(sorted(joined(steps)) == list(range(ROWS)) for steps in batches)


# -- passes that are left early ----------------------------------------------------------------------------------------

LEFT_AFTER = (1, 2, 3, 4)
LOADING = (0, 1)


def _shuffled(loading: int) -> DataLoader[Any]:
    sampler = RandomSampler(range(8), num_samples=20, generator=torch.Generator().manual_seed(3))
    return DataLoader(Numbers(8), batch_size=4, sampler=sampler, num_workers=loading)


def _left_early(strategy: ts.Strategy | None, loading: int, left_after: int) -> list[list[list[int]]]:
    """What each of three passes over one loader gives here until it is left: what a sampler has drawn counts for the
    next one."""
    loader: Any = _shuffled(loading) if strategy is None else strategy.distribute_dataset(_shuffled(loading))
    passes = (itertools.islice(iter(loader), left_after) for _ in range(3))
    parts = (lambda rows: (rows,)) if strategy is None else strategy.local_results
    return [[joined(part.tolist() for part in parts(rows)) for rows in one] for one in passes]


def leave_early(processes: int) -> dict[tuple[int, int], Any]:
    here = [f"cpu:{index}" for index in range(4 // processes)] if processes < 2 else None
    strategy = ts.MirroredStrategy(here, timeout=timedelta(seconds=240))
    try:
        return {(loading, after): _left_early(strategy, loading, after) for loading in LOADING for after in LEFT_AFTER}
    finally:
        strategy.close()


def test_a_pass_that_is_left_early_has_drawn_what_it_draws_in_pytorch(two_processes: Workers) -> None:
    plain = {(loading, after): _left_early(None, loading, after) for loading in LOADING for after in LEFT_AFTER}
    assert leave_early(1) == plain
    first, second = two_processes.run(leave_early, 2)
    for way, passes in plain.items():
        pairs = [list(zip(*both, strict=True)) for both in zip(first[way], second[way], strict=True)]
        assert [[joined(parts) for parts in one] for one in pairs] == passes, way


# -- what the program draws beside the order ---------------------------------------------------------------------------


def draw() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def draw_beside(strategy: ts.Strategy | None, name: str, own_seed: int) -> list[list[float]]:
    """In each step of two passes, of which the first is left early."""
    seed(own_seed)
    loader: Any = LOADERS[name]()
    given = loader if strategy is None else strategy.distribute_dataset(loader)
    return [draw() for left_after in (2, None) for _ in itertools.islice(iter(given), left_after)]


def draw_beside_all(names: list[str], processes: int, apart: bool = False) -> dict[str, list[list[float]]]:
    here = [f"cpu:{index}" for index in range(4 // processes)] if processes < 2 else None
    strategy = ts.MirroredStrategy(here, timeout=timedelta(seconds=240))
    try:
        return {name: draw_beside(strategy, name, 5 if strategy.is_chief or not apart else 6) for name in names}
    finally:
        strategy.close()


def test_what_a_program_draws_beside_the_order_is_the_same_on_every_rank(two_processes: Workers) -> None:
    plain = {name: draw_beside(None, name, 5) for name in LOADERS}
    assert draw_beside_all(list(LOADERS), 1) == plain
    assert two_processes.run(draw_beside_all, list(LOADERS), 2) == [plain] * 2


def test_a_rank_that_is_seeded_by_itself_draws_its_own_beside_the_order(two_processes: Workers) -> None:
    names = ["lazy sampler", "eager sampler"]
    first, second = two_processes.run(draw_beside_all, names, 2, True)
    assert first == {name: draw_beside(None, name, 5) for name in names}
    assert second == dict.fromkeys(names, draw_beside(None, "sequential", 6)), "no order has moved its streams"


_of_the_script = np.random.default_rng()


class ByScript(Sampler[int]):
    """By a generator that the collate function draws from, too, and by one of its own."""

    def __init__(self) -> None:
        self.own = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        for row in _of_the_script.permutation(ROWS).tolist():
            yield (row + self.own.randrange(ROWS)) % ROWS


def mixed(rows: list[torch.Tensor]) -> torch.Tensor:
    """Each beside another one of its batch."""
    whole = torch.stack(rows)
    orders = torch.randperm(len(rows)), torch.from_numpy(_of_the_script.permutation(len(rows)))
    return torch.stack([whole, *(whole[order] for order in orders)], dim=1)


def mix(strategy: ts.Strategy | None, loading: int, lazily: bool) -> list[list[list[int]]]:
    seed(5)
    _of_the_script.bit_generator.state = np.random.default_rng(5).bit_generator.state
    sampler = Lazily(ROWS) if lazily else ByScript()
    loader: Any = DataLoader(Numbers(ROWS), 4, sampler=sampler, num_workers=loading, collate_fn=mixed)
    given = loader if strategy is None else strategy.distribute_dataset(loader)
    steps = (rows for left_after in (2, None) for rows in itertools.islice(iter(given), left_after))
    return [(rows if strategy is None else strategy.gather(rows, axis=0)).tolist() for rows in steps]


def mix_all(processes: int) -> list[list[list[list[int]]]]:
    here = [f"cpu:{index}" for index in range(4 // processes)] if processes < 2 else None
    strategy = ts.MirroredStrategy(here, timeout=timedelta(seconds=240))
    try:
        return [mix(strategy, loading, lazily) for loading in LOADING for lazily in (True, False)]
    finally:
        strategy.close()


def test_rows_are_mixed_as_in_pytorch_whoever_draws_the_order(two_processes: Workers) -> None:
    plain = [mix(None, loading, lazily) for loading in LOADING for lazily in (True, False)]
    assert mix_all(1) == plain
    assert two_processes.run(mix_all, 2) == [plain] * 2


# -- samplers that follow the training ---------------------------------------------------------------------------------


class Hardest(Sampler[int]):
    """The rows with the largest losses so far, in groups of four."""

    def __init__(self) -> None:
        self.losses = torch.arange(8.0)

    def __iter__(self) -> Iterator[int]:
        for _ in range(6):
            yield from self.losses.topk(4).indices.tolist()


def mine(strategy: ts.Strategy | None, loading: int) -> list[list[int]]:
    """The global batches of two passes, of which the first is left early."""
    sampler = Hardest()
    loader: Any = DataLoader(Numbers(8), batch_size=4, sampler=sampler, num_workers=loading)
    given = loader if strategy is None else strategy.distribute_dataset(loader)
    found = []
    for left_after in (4, None):
        for rows in itertools.islice(iter(given), left_after):
            every = rows if strategy is None else strategy.gather(rows, axis=0)
            sampler.losses[every] *= 0.3 + 0.01 * every
            found.append(every.tolist())
    return found


def mine_all(processes: int) -> list[list[list[int]]]:
    here = [f"cpu:{index}" for index in range(4 // processes)] if processes < 2 else None
    strategy = ts.MirroredStrategy(here, timeout=timedelta(seconds=240))
    try:
        return [mine(strategy, loading) for loading in LOADING]
    finally:
        strategy.close()


def test_a_sampler_that_follows_the_training_is_drawn_from_when_pytorch_would(two_processes: Workers) -> None:
    plain = [mine(None, loading) for loading in LOADING]
    assert all(len({tuple(sorted(rows)) for rows in found}) > 2 for found in plain), "and so it does follow"
    assert mine_all(1) == plain
    assert two_processes.run(mine_all, 2) == [plain] * 2


# -- batches that are read ahead ---------------------------------------------------------------------------------------


class ByBuffer(IterableDataset[Any]):
    """Draws which row is next, of those at hand."""

    def __iter__(self) -> Iterator[Any]:
        at_hand = list(range(8))
        for row in range(8, 64):
            chosen = random.randrange(8)
            yield torch.tensor(at_hand[chosen])
            at_hand[chosen] = row
        yield from map(torch.tensor, at_hand)


def read_ahead() -> tuple[list[int], list[float]]:
    """The rows, and what the program draws beside."""
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    options = ts.InputOptions(per_replica_buffer_size=3)
    seed(5)
    found: tuple[list[int], list[float]] = ([], [])
    try:
        for rows in strategy.distribute_dataset(DataLoader(ByBuffer(), 4), options):
            found[0].extend(rows.values[0].tolist())
            time.sleep(0 if strategy.is_chief else 0.01)  # a thread would read meanwhile
            found[1].append(random.random())
        return found
    finally:
        strategy.close()


def test_ranks_that_read_ahead_draw_alike(two_processes: Workers) -> None:
    (first, beside), (second, beside_second) = two_processes.run(read_ahead)
    assert sorted(first + second) == list(range(64))
    assert beside == beside_second


# -- forks of data-loading workers -------------------------------------------------------------------------------------


class SlowState:
    """A generator whose state another thread is still reading when this one forks."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.is_read, self.go_on = threading.Event(), threading.Event()

    def get_state(self) -> torch.Tensor:
        self.is_read.set()
        self.go_on.wait(60)
        return self._generator.get_state()


def fork_while_a_state_is_read() -> int:
    """The exit status of the child: whether garbage is collected there before it leaves its parent's alone."""
    collects: list[bool] = []
    os.register_at_fork(after_in_child=lambda: collects.append(gc.isenabled()))
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    dataset = strategy.distribute_dataset(DataLoader(Rows(ROWS), 4))
    generator = SlowState(torch.default_generator)
    with mock.patch.object(torch, "default_generator", generator):
        reader = threading.Thread(target=lambda: dataset.element_spec)
        reader.start()
        generator.is_read.wait(60)
        threading.Timer(0.5, generator.go_on.set).start()
        child = os.fork()
        if not child:
            os._exit(int(collects[0]))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        reader.join()
    strategy.close()
    return status


def test_a_forked_worker_collects_none_of_its_parents_garbage_while_a_thread_reads_a_random_state() -> None:
    assert spawn(fork_while_a_state_is_read, 2) == [0, 0]
