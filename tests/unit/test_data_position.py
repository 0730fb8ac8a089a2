"""A data position: what was handed out before and after a restart is every row of the pass once, in the same order."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    get_worker_info,
    random_split,
)

import torchstrat as ts
from tests.support.datasets import (
    ORDERS,
    Eagerly,
    Lazily,
    Numbers,
    Stateful,
    own_generator,
    put_streams,
    seed,
    stand,
    streams,
)
from tests.support.datasets import Stream as FixedStream
from tests.support.input_ranks import (
    distribute,
    distribute_from_function,
    joined,
    layout_in_process,
    on_ranks,
    plain,
)
from torchstrat import data
from torchstrat.data import DistributedDataset, InputLayout
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError

Seen = list[list[Any]]
"""Rows of each step, over all replicas of the process."""
Make = Callable[[], Any]
MakeOnRank = Callable[[InputLayout], DistributedDataset]
World = tuple[int, int]
"""Processes, and replicas in each."""

PASSES = 3
N = 23


def rows_of(batch: Any) -> list[Any]:
    """The rows of a step, replica by replica; the drawn numbers with them, where there are any."""
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    columns = [part.values if hasattr(part, "values") and not callable(part.values) else (part,) for part in parts]
    lists = [[row for component in column for row in plain(component)] for column in columns]
    return list(zip(*lists, strict=True)) if len(lists) > 1 else lists[0]


def row_numbers(steps: Iterable[list[Any]]) -> list[Any]:
    return [row[0] if isinstance(row, tuple | list) else row for step in steps for row in step]


def of(dataset: Callable[[], Any], **options: Any) -> MakeOnRank:
    return lambda layout: distribute(dataset(), layout, **options)


def run(
    make: MakeOnRank, world: World, kept: bytes | None = None, passes: int = 1, last: int | None = None
) -> tuple[list[Seen], bytes]:
    """By pass the rows of each step over all processes, of the last ``last`` steps; what a checkpoint keeps then."""
    processes, local = world

    def work(layout: InputLayout) -> tuple[list[Seen], bytes]:
        dataset = make(layout)
        if kept is not None:
            state, of_the_process = pickle.loads(kept)
            dataset.load_state_dict(state)
            if layout.worker_index == 0:
                put_streams(of_the_process)
        seen = []
        for number in range(passes):
            iterator = iter(dataset)
            seen.append([rows_of(step) for step in itertools.islice(iterator, last if number == passes - 1 else None)])
        state = pickle.dumps((dataset.state_dict(), streams()))
        iterator.close()
        return seen, state

    # One process gets its batches as where there are no others; one replica in all gets them bare.
    results = [work(layout_in_process(local))] if processes == 1 else on_ranks(processes, work, local)[0]
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert all(position_in(state).keys() == position_in(results[0][1]).keys() for _, state in results)
    by_pass = zip(*(seen for seen, _ in results), strict=True)
    return [[joined(step) for step in zip(*parts, strict=True)] for parts in by_pass], results[-1][1]


def position_in(kept: bytes) -> Any:
    return pickle.loads(kept)[0]


def undisturbed(make: MakeOnRank, world: World, passes: int = PASSES) -> list[Seen]:
    seed(1)
    return run(make, world, passes=passes)[0]


def until(make: MakeOnRank, world: World, cut: tuple[int, int]) -> tuple[list[Seen], bytes]:
    """Passes up to step ``cut[1]`` of pass ``cut[0]``. A pass of fewer steps has ended, and an empty one begun."""
    seed(1)
    before, kept = run(make, world, None, cut[0] + 1, cut[1])
    return before + ([] if position_in(kept)["under_way"] else [[]]), kept


def require_undisturbed(make: MakeOnRank, world: World, cut: tuple[int, int], state: Any = None) -> None:
    """Cut after a step and go on, in what stands for another process: all as if nothing had happened. ``state``: what
    is gone on from, if another torchstrat has saved it there."""
    before, kept = until(make, world, cut)
    if state is not None:
        kept = pickle.dumps((state, pickle.loads(kept)[1]))
    seed(99)
    after, _ = run(make, world, kept, PASSES - len(before) + 1)
    assert [*before[:-1], before[-1] + after[0], *after[1:]] == undisturbed(make, world)


# -- what is read by index, and what can only be read in sequence -----------------------------------------------------


class Rows(Numbers):
    """With each row a number that is drawn while it is read."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), torch.rand(())


class OwnDraws(Numbers):
    """Draws from generators of its own, one of them within what it calls."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.noise = np.random.default_rng(1)
        self.flip = functools.partial(random.Random.random, random.Random(2))

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.tensor(self.noise.random() + self.flip())


class Bulk(Rows):
    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index), torch.rand(len(index))


class WithGenerator(Lazily):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.choices = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.choices.permutation(self.length).tolist())


class Stream(IterableDataset[Any]):
    """Rows in an order that is drawn when it is opened; with workers, each reads its turn."""

    def __init__(self, length: int = N) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        order = list(range(self.length))
        random.Random(0 if worker is None else worker.seed - worker.id).shuffle(order)
        if worker is None:
            random.shuffle(order)
        return map(torch.tensor, order if worker is None else order[worker.id :: worker.num_workers])


class StatefulStream(IterableDataset[Any]):
    """Goes on by itself; begins again after its end."""

    def __init__(self, length: int = N) -> None:
        self.length, self.at, self.epoch, self.reads = length, 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            self.reads += 1
            yield torch.tensor([self.at - 1, self.epoch])
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class ShuffledBatches:
    """Draws from a stream of everybody's, when it is opened, and from one of its own."""

    def __init__(self) -> None:
        self.choices = random.Random(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(N))
        random.shuffle(order)
        self.choices.shuffle(order)
        return iter(torch.tensor(order).split(4))


class Chosen:
    """Draws from a stream that it was given."""

    def __init__(self, choices: random.Random) -> None:
        self.choices = choices

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.tensor(self.choices.sample(range(N), N)).split(4))


class MapOfBatches(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.arange(4 * index, min(N, 4 * index + 4))


class MapOfNoise(MapOfBatches):
    def __init__(self) -> None:
        self.noise = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.noise.random()


class Shuffled(IterableDataset[Any]):
    """A stage of a pipeline, around which there are others."""

    def __init__(self, rows: int) -> None:
        self.rows, self.rng = rows, random.Random(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(self.rows), self.rows))


class Mapped(IterableDataset[Any]):
    def __init__(self, rows: int = N) -> None:
        self.inner = Shuffled(rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.tensor, self.inner)


class AroundALoader:
    def __init__(self) -> None:
        self.loader = DataLoader(ChainDataset([Mapped()]), 4)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class ByPass(IterableDataset[Any]):
    """Shuffles by a number that only it knows of."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        return map(torch.tensor, random.Random(self.passes).sample(range(N), N))


def shuffled() -> Any:
    return data.ArrayDataset(torch.arange(N)).shuffle(7)


def hinted_loader() -> DataLoader[Any]:
    rows: Any = shuffled().shard(data.SHARD_HINT, data.SHARD_HINT)
    rows.auto_shard_policy = "HINT"
    return DataLoader(rows, 4)


def iter_anew(loader: DataLoader[Any]) -> Any:
    """An own iterable over a loader."""
    wrapper = AroundALoader()
    wrapper.loader = loader
    return wrapper


LOADERS: dict[str, Make] = {
    **{name: lambda make=make: make(Rows(N)) for name, make in ORDERS.items()},
    "generator in a sampler": lambda: DataLoader(Rows(N), 4, sampler=WithGenerator(N)),
    "generators in a data set": lambda: DataLoader(OwnDraws(N), 4, shuffle=True),
    "bulk": lambda: DataLoader(Bulk(N), None, sampler=BatchSampler(RandomSampler(range(N)), 4, False)),
}
SEQUENCES: dict[str, Make] = {
    "iterable": lambda: DataLoader(Stream(), 4),
    "stateful iterable": lambda: DataLoader(StatefulStream(), 4),
    "stateful iterable of batches": StatefulStream,
    "shuffled batches": ShuffledBatches,
    "a stage of a stage": lambda: DataLoader(Mapped(), 4),
    "around a loader": AroundALoader,
    "around a loader with a generator": lambda: iter_anew(ORDERS["generator"](Numbers(N))),
    "batches in a list": lambda: list(torch.arange(N).split(4)),
    "map-style batches": MapOfBatches,
    "arrays": lambda: torch.arange(2 * N).reshape(N, 2),
    "pipeline": lambda: shuffled().batch(4),
    "pipeline in a loader": lambda: DataLoader(shuffled(), 4),
    "repeated pipeline": lambda: shuffled().batch(4).repeat(2),
    "mapped and cut": lambda: data.ArrayDataset(torch.arange(N)).map(lambda row: row + 1).batch(3).take(6),
    "prefetched": lambda: shuffled().batch(4).prefetch(2),
    "hinted": hinted_loader,
}
POLICIES = [*itertools.product(LOADERS, [None]), *itertools.product(SEQUENCES, [None, "OFF"])]
BETWEEN_PASSES = (0, 200)


# One replica, which gets batches bare, at one cut in every run; what a cut keeps is of the batches: the rest in soak.
@pytest.mark.parametrize(
    ("cut", "replicas"),
    [
        pytest.param(cut, replicas, marks=[] if replicas == 2 or cut == (1, 2) else [pytest.mark.soak])
        for cut in [(0, 0), (0, 3), (1, 2), (1, 6), BETWEEN_PASSES]
        for replicas in (1, 2)
    ],
)
@pytest.mark.parametrize(("name", "policy"), POLICIES)
def test_it_goes_on_as_if_undisturbed(name: str, policy: str | None, cut: tuple[int, int], replicas: int) -> None:
    require_undisturbed(of((LOADERS | SEQUENCES)[name], auto_shard_policy=policy), (1, replicas), cut)


OF_WORKERS: dict[str, Callable[..., DataLoader[Any]]] = {
    # Without drawn numbers: those of a worker's stream are not part of a position.
    "shuffle": lambda **more: ORDERS["shuffle"](Numbers(N), num_workers=1, prefetch_factor=3, **more),
    "generator": lambda **more: ORDERS["shuffle"](Numbers(N), generator=own_generator(), num_workers=1, **more),
    "eager": lambda **more: ORDERS["eager sampler"](Numbers(N), num_workers=1, prefetch_factor=3, **more),
    "a stream that workers split": lambda **more: DataLoader(Stream(), 4, num_workers=2, **more),
    "a stage of a stage": lambda **more: DataLoader(Mapped(), 4, num_workers=1, **more),
    "a pipeline that workers split": lambda **more: DataLoader(shuffled(), 4, num_workers=2, **more),
}
WORKER_CUTS = [
    *itertools.product(["shuffle", "generator", "eager"], [(0, 2), (1, 1)], [1, 2], [False, True]),
    *itertools.product(
        ["a stream that workers split", "a pipeline that workers split"], [(1, 2)], [1, 2], [False, True]
    ),
    *itertools.product(["a stage of a stage"], [(1, 2)], [1, 2], [False]),
    *itertools.product(["shuffle"], [BETWEEN_PASSES], [2], [False, True]),
]
WORKERS_IN_EVERY_RUN = [
    ("shuffle", (0, 2), 1, False),
    ("shuffle", (1, 1), 2, True),
    ("generator", (1, 1), 1, False),
    ("generator", (0, 2), 2, True),
    ("eager", (1, 1), 2, False),
    ("eager", (0, 2), 1, True),
    ("a stream that workers split", (1, 2), 1, True),
    ("a pipeline that workers split", (1, 2), 2, False),
    ("a stage of a stage", (1, 2), 2, False),
    ("shuffle", BETWEEN_PASSES, 2, False),
    ("shuffle", BETWEEN_PASSES, 2, True),
]
"""Any two of: a loader, a cut, a number of replicas, and whether workers go on; the other combinations in soak."""


@pytest.mark.parametrize(
    ("name", "cut", "replicas", "persistent"),
    [pytest.param(*c, marks=[] if c in WORKERS_IN_EVERY_RUN else [pytest.mark.soak]) for c in WORKER_CUTS],
)
def test_workers_that_read_ahead(name: str, cut: tuple[int, int], replicas: int, persistent: bool) -> None:
    require_undisturbed(of(lambda: OF_WORKERS[name](persistent_workers=persistent)), (1, replicas), cut)


VERSION_1 = Path(__file__).parents[1] / "fixtures" / "positions" / "version_1.pt"
"""What version 1 saved of these data sets; never written again."""


@pytest.mark.parametrize("name", torch.load(VERSION_1))
def test_a_position_of_version_1_is_gone_on_with(name: str) -> None:
    kind, passes, steps = name.rsplit(" ", 2)
    make = (LOADERS | SEQUENCES).get(kind) or functools.partial(OF_WORKERS[kind], persistent_workers=True)
    require_undisturbed(of(make), (1, 2), (int(passes), int(steps)), torch.load(VERSION_1)[name])


def shared_generator() -> list[Any]:
    generator = own_generator()
    return [DataLoader(Numbers(length), 4, shuffle=True, generator=generator) for length in (14, 6)]


def split_data_set() -> list[Any]:
    parts = random_split(OwnDraws(20), [14, 6], own_generator())
    return [DataLoader(parts[0], 4, shuffle=True, generator=own_generator()), DataLoader(parts[1], 4)]


def shared_choices() -> list[Any]:
    choices = random.Random(3)
    return [Chosen(choices), Chosen(choices)]


def shared_function() -> list[Any]:
    noise = np.random.default_rng(1)
    return [data.ArrayDataset(torch.arange(n)).map(lambda row: row + noise.random()).batch(4) for n in (14, 6)]


def shared_batches() -> list[Any]:
    parts = random_split(MapOfNoise(), [4, 2], own_generator())
    return [*parts]


def in_turns(datasets: list[DistributedDataset], seen: list[Any]) -> Iterator[Any]:
    """The steps, and ends, of passes over each, as training and validation have them, after what has been ``seen``."""
    latest, what = seen[-1] if seen else ((0, 0), None)
    for turn in itertools.product(range(PASSES), range(len(datasets))):
        if turn > latest or (turn == latest and what != "end"):
            yield from ((turn, rows_of(step)) for step in datasets[turn[1]])
            yield turn, "end"


SHARING = [shared_generator, split_data_set, shared_choices, shared_function, shared_batches]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("make", SHARING)
def test_data_sets_that_draw_from_one_generator(make: Callable[[], list[Any]], processes: int) -> None:
    """Cut three times: within a pass, between two, and where only the first of them has gone on since."""

    def work(layout: InputLayout) -> tuple[list[Any], list[Any]]:
        seed(1)
        whole = list(in_turns([distribute(one, layout) for one in make()], []))
        datasets, seen = [distribute(one, layout) for one in make()], list[Any]()
        seed(1)
        for steps in (3, 13, 1, None):
            seen += itertools.islice(in_turns(datasets, [*seen]), steps)
            states = [one.state_dict() for one in datasets], streams()
            datasets = [distribute(one, layout) for one in make()]
            for one, state in zip(datasets, states[0], strict=True):
                one.load_state_dict(state)
            put_streams(states[1])
        return seen, whole

    results = [work(layout_in_process(2))] if processes == 1 else on_ranks(processes, work, 1)[0]
    for result in results:
        if isinstance(result, Exception):
            raise result
        assert result[0] == result[1]


@pytest.mark.parametrize("make", SHARING)
def test_a_pass_within_a_pass_that_draws_from_the_same_generator(make: Callable[[], list[Any]]) -> None:
    def rest(first: Iterable[Any], datasets: list[DistributedDataset]) -> list[Seen]:
        return [list(map(rows_of, one)) for one in (first, datasets[1], datasets[0])]

    datasets, again = ([distribute(one) for one in make()] for _ in range(2))
    iterator = iter(datasets[0])
    next(iterator), list(datasets[1]), next(iterator)
    for one, other in zip(datasets, again, strict=True):
        other.load_state_dict(one.state_dict())
    assert rest(again[0], again) == rest(iterator, datasets)


def test_other_generators_than_there_were() -> None:
    state = position(DataLoader(OwnDraws(8), 2))
    dataset = distribute(DataLoader(Rows(8), 2), 1)
    with pytest.raises(InvalidArgumentError, match=r"were numpy.*, random\.Random when it was saved and are none here"):
        dataset.load_state_dict(state)


def test_what_was_handed_out_is_not_read_again() -> None:
    length, taken = 10_000, 150
    _, kept = until(of(lambda: DataLoader(Rows(length), 64, shuffle=True)), (1, 2), (0, taken))
    rows = Rows(length)
    dataset = distribute(DataLoader(rows, 64, shuffle=True))
    dataset.load_state_dict(position_in(kept))
    iterator = iter(dataset)
    assert rows.fetched == []
    next(iterator)
    assert len(rows.fetched) == 64
    list(iterator)
    assert len(rows.fetched) == length - 64 * taken


def test_a_stateful_dataset_is_not_read_again() -> None:
    _, kept = until(of(lambda: DataLoader(StatefulStream(), 4)), (1, 2), (0, 3))
    stream = StatefulStream()
    [seen], _ = run(of(lambda: DataLoader(stream, 4)), (1, 2), kept)
    assert row_numbers(seen) == list(range(12, N))
    assert stream.reads == N - 12


def test_a_state_is_small_whatever_the_length_of_the_dataset() -> None:
    small, large = (
        len(pickle.dumps(position_in(until(of(lambda: make(length, 8)), (1, 1), (0, 9))[1])))  # noqa: B023
        for make in [IN_BATCHES["eager sampler"]]
        for length in (100, 100_000)
    )
    assert max(small, large) < 32_000
    assert abs(small - large) < 1000


def test_going_on_leaves_the_shared_random_streams_alone() -> None:
    _, kept = until(of(LOADERS["lazy sampler"]), (1, 1), (0, 3))
    dataset = distribute(LOADERS["lazy sampler"](), 1)
    dataset.load_state_dict(position_in(kept))
    seed(4)
    before = stand()
    iter(dataset)
    assert stand() == before


# -- reading ahead ----------------------------------------------------------------------------------------------------


class Watched(Numbers):
    """Whoever wants to can wait until a thread has read so many rows."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._changed = threading.Condition()

    def __getitem__(self, index: int) -> Any:
        with self._changed:
            self._changed.notify_all()
            return super().__getitem__(index)

    def wait_for(self, reads: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.fetched) >= reads, timeout=60)


def test_a_buffer_in_a_thread_does_not_count() -> None:
    def make(numbers: Numbers) -> DistributedDataset:
        return distribute(DataLoader(numbers, 2, shuffle=True, generator=own_generator()), per_replica_buffer_size=4)

    numbers = Watched(N)
    dataset = make(numbers)
    iterator = iter(dataset)
    before = [rows_of(next(iterator)) for _ in range(3)]
    numbers.wait_for(10)  # four rows more than were handed out
    state = dataset.state_dict()
    iterator.close()
    again = make(Numbers(N))
    again.load_state_dict(state)
    assert before + [rows_of(step) for step in again] == [rows_of(step) for step in make(Numbers(N))]


class Copying:
    """A placement as for an accelerator: batches are read one step ahead, to be copied in the background."""

    copies = True

    def place(self, step: Any) -> tuple[Any, tuple[Any, ...]]:
        return step, ()

    def receive(self, placed: tuple[Any, tuple[Any, ...]]) -> Any:
        return placed[0]


def copied_ahead(sampler: Callable[[int], Any]) -> MakeOnRank:
    layout = layout_in_process(2, placement=Copying())
    return lambda _: distribute(DataLoader(Numbers(N), 4, sampler=sampler(N)), layout)


@pytest.mark.parametrize("sampler", [Lazily, Eagerly, WithGenerator, Stateful])
@pytest.mark.parametrize("cut", [(0, 2), (1, 5), (1, 6)])
def test_batches_that_are_copied_ahead(sampler: Callable[[int], Any], cut: tuple[int, int]) -> None:
    """A sampler that draws from a shared stream has drawn ahead as well, and does not draw that once more."""
    require_undisturbed(copied_ahead(sampler), (1, 2), cut)


# -- other settings, and several processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("files") / f"{index}.txt" for index in range(5)]
    for index, path in enumerate(paths):
        path.write_text("".join(f"f{index}-{line}\n" for line in range(2 + index)), encoding="utf-8")
    return paths


IN_BATCHES: dict[str, Callable[[int, int], Any]] = {
    **{
        name: lambda length, size, make=ORDERS[name]: make(Numbers(length), size)
        for name in ("shuffle", "generator", "eager sampler", "stateful sampler", "batch sampler")
    },
    "generator in a sampler": lambda length, size: DataLoader(Numbers(length), size, sampler=WithGenerator(length)),
    "iterable": lambda length, size: DataLoader(FixedStream(length), size),
    "shuffled iterable": lambda length, size: DataLoader(Stream(length), size),
    "stateful iterable": lambda length, size: DataLoader(StatefulStream(length), size),
    "list": lambda length, size: list(torch.arange(length).split(size)),
    "pipeline": lambda length, size: data.ArrayDataset(torch.arange(length)).shuffle(5, seed=3).batch(size),
}
DRAWN_FROM_THE_PROCESS = ("shuffle", "eager sampler", "batch sampler", "shuffled iterable")
"""Which ranks of one process would do all at once."""
WORLDS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)), min_size=2, max_size=4)
"""Processes, replicas in each, global batch."""
STEPS = st.lists(st.integers(0, 6), min_size=3, max_size=3)


def cut_often(make: Callable[[int], MakeOnRank], worlds: list[tuple[int, int, int]], steps: list[int]) -> list[Any]:
    """All rows that are handed out where one pass is cut several times, and goes on with other settings each time."""
    seed(1)
    handed_out: list[Any] = []
    kept: bytes | None = None
    for (processes, local, size), taken in zip(worlds, [*steps[: len(worlds) - 1], None], strict=True):
        [seen], kept = run(make(size), (processes, local), kept, last=taken)
        handed_out += row_numbers(seen)
        if not position_in(kept)["under_way"]:
            break
    return handed_out


@pytest.mark.parametrize("kind", IN_BATCHES)
@settings(max_examples=25)
@given(length=st.integers(1, 40), worlds=WORLDS, steps=STEPS, off=st.booleans())
def test_other_batches_replicas_and_processes_within_a_pass(kind, length, worlds, steps, off) -> None:
    if off or kind in DRAWN_FROM_THE_PROCESS:
        worlds = [(1, local, size) for _, local, size in worlds]

    def make(size: int) -> MakeOnRank:
        return of(lambda: IN_BATCHES[kind](length, size), auto_shard_policy="OFF" if off else "AUTO")

    handed_out = cut_often(make, worlds, steps)
    [whole] = undisturbed(make(worlds[0][2]), (1, 1), 1)
    assert handed_out == row_numbers(whole)
    assert sorted(handed_out) == list(range(length))


@pytest.mark.parametrize("in_loader", [False, True])
@settings(max_examples=40)
@given(worlds=WORLDS, steps=STEPS)
def test_files_go_on_in_any_number_of_processes(files, in_loader, worlds, steps) -> None:
    def make(size: int) -> MakeOnRank:
        lines = data.TextLineDataset(files)
        return of(lambda: DataLoader(lines, size) if in_loader else lines.batch(size))

    assert sorted(cut_often(make, worlds, steps)) == sorted(joined(path.read_text().split() for path in files))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("in_loader", [False, True])
def test_the_pass_after_one_that_other_processes_began(
    files: list[Path], before: int, after: int, in_loader: bool
) -> None:
    """It is shuffled by its number, and not by that of the first one that these processes begin."""

    def dataset() -> Any:
        lines = data.TextLineDataset(files).shuffle(30, seed=3)
        return DataLoader(lines, 2) if in_loader else lines.batch(2)

    make = of(dataset, auto_shard_policy="FILE")
    kept = run(make, (before, 2), passes=2, last=1)[1]
    found = run(make, (after, 2), kept, passes=2)[0]
    assert found[1] == run(make, (after, 2), passes=3)[0][2]


def test_all_processes_get_one_state() -> None:
    def work(layout: InputLayout) -> bytes:
        dataset = distribute(DataLoader(Rows(12), 4, sampler=Stateful(12)), layout)
        iterator = iter(dataset)
        next(iterator)
        return pickle.dumps(dataset.state_dict())

    results, group = on_ranks(3, work)
    assert results[0] == results[1] == results[2]
    assert group.calls[0].count("the position in a distributed dataset") == 1


def of_function(dataset: Callable[[int], Any]) -> MakeOnRank:
    return lambda layout: distribute_from_function(lambda context: dataset(context.input_pipeline_id), layout)


EQUALLY: dict[str, Callable[[list[Path]], MakeOnRank]] = {
    **{
        policy: lambda files, policy=policy: of(lambda: data.TextLineDataset(files).batch(3), auto_shard_policy=policy)
        for policy in ("FILE", "OFF", "DATA")
    },
    **{
        name: lambda _, make=IN_BATCHES[name]: of(lambda: make(17, 4))
        for name in ("generator", "generator in a sampler", "stateful sampler", "iterable", "pipeline")
    },
    # Of no declared size, so that a batch lasts as many steps as there are processes.
    **{
        f"list of {sizes}": lambda _, sizes=sizes: of(
            lambda: list(torch.arange(sum(sizes)).split(sizes)), auto_shard_policy="OFF"
        )
        for sizes in ([5, 5, 3], [1, 1], [2, 5, 3])
    },
    # Of different lengths, so that one process has ended when the state is taken.
    "function": lambda _: of_function(lambda rank: DataLoader(Numbers(6 + 5 * rank), 2)),
}


@pytest.mark.parametrize("kind", EQUALLY)
def test_equal_processes_go_on_in_the_same_steps(files: list[Path], kind: str) -> None:
    [whole] = undisturbed(EQUALLY[kind](files), (2, 2), 1)
    for steps in range(len(whole) + 1):
        require_undisturbed(EQUALLY[kind](files), (2, 2), (0, steps))


@pytest.mark.parametrize(
    "make",
    [
        of_function(lambda rank: DataLoader(Numbers(8), 2)),
        of(lambda: [torch.arange(4)] * 3, auto_shard_policy="OFF"),
    ],
)
def test_pipelines_that_cannot_be_shared_out_anew(make: MakeOnRank) -> None:
    _, kept = run(make, (2, 1), last=1)
    with pytest.raises(InvalidArgumentError, match=r"2 input pipeline\(s\), .*; here there are 1"):
        run(make, (1, 1), kept)
    _, finished = run(make, (2, 1))
    run(make, (1, 1), finished)  # between passes there is nothing to share out


def position(loader: Any, steps: int = 1) -> Any:
    dataset = distribute(loader, 1)
    list(itertools.islice(iter(dataset), steps))
    return dataset.state_dict()


def test_processes_that_are_not_at_one_step() -> None:
    states = [position(DataLoader(Numbers(8), 2), steps) for steps in (1, 2)]

    def save(layout: InputLayout) -> Any:
        dataset = distribute(DataLoader(Numbers(8), 2), layout)
        list(itertools.islice(iter(dataset), 1 + layout.worker_index))
        return dataset.state_dict()

    def load(layout: InputLayout) -> Any:
        dataset = distribute(DataLoader(Numbers(8), 2), layout)
        dataset.load_state_dict(states[layout.worker_index])
        return iter(dataset)

    for work, message in ((save, "['after step 1', 'after step 2']"), (load, "go on after [2, 4] rows")):
        for error in on_ranks(2, work)[0]:
            assert isinstance(error, InvalidArgumentError)
            assert message in str(error)


# -- what the state is, and bad states --------------------------------------------------------------------------------


def test_a_loop_that_was_left_stays_the_pass_under_way() -> None:
    dataset, other = (distribute(DataLoader(Numbers(10), 2)) for _ in range(2))
    for batch in dataset:
        if rows_of(batch) == [2, 3]:
            break
    state = dataset.state_dict()
    other.load_state_dict(state)
    assert other.state_dict() == state  # until it is used
    assert [joined(map(rows_of, other)) for _ in range(2)] == [[4, 5, 6, 7, 8, 9], list(range(10))]


def test_an_iterators_state_is_that_of_its_pass() -> None:
    dataset, other = (distribute(DataLoader(Numbers(10), 2), 1) for _ in range(2))
    first = iter(dataset)
    next(first)
    second = iter(dataset)
    next(second), next(second)
    for iterator, expected in ((first, [2, 3]), (second, [4, 5])):
        other.load_state_dict(iterator.state_dict())
        assert rows_of(next(iter(other))) == expected


@pytest.mark.parametrize("name", ["generator", "lazy sampler", "generator in a sampler", "batch sampler"])
def test_a_checkpoint_carries_it(name: str, tmp_path: Path) -> None:
    dataset, other = (distribute(LOADERS[name]()) for _ in range(2))
    iterator = iter(dataset)
    before = row_numbers(map(rows_of, itertools.islice(iterator, 3)))
    ts.Checkpoint(dataset=dataset).save(tmp_path / "position")
    rest = row_numbers(map(rows_of, iterator))
    ts.Checkpoint(dataset=other).restore(tmp_path / "position")
    assert row_numbers(map(rows_of, other)) == rest
    assert len(before) + len(rest) == N


@pytest.mark.parametrize("name", ["stateful iterable", "stateful iterable of batches", "pipeline in a loader"])
def test_looking_at_an_example_moves_nothing(name: str) -> None:
    def look(layout: InputLayout) -> DistributedDataset:
        dataset = distribute(SEQUENCES[name](), layout)
        assert dataset.element_spec is not None
        return dataset

    assert undisturbed(look, (1, 1)) == undisturbed(of(SEQUENCES[name]), (1, 1))


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (DataLoader(Rows(8)), DataLoader(Rows(9)), "number of rows was 8 when it was saved and is 9 here"),
        (DataLoader(Rows(8)), DataLoader(Rows(8), shuffle=True), "sampler was BatchSampler of SequentialSampler"),
        (DataLoader(Rows(8)), DataLoader(Stream()), "reading was rows by index .* is rows in sequence here"),
        (DataLoader(Stream(), 2), DataLoader(Stream(), 2, num_workers=1), "num_workers was 0 .* is 1 here"),
        (MapOfBatches(), Rows(8), "number of batches was 6 .* is 8 here"),
        (DataLoader(Stream()), DataLoader(StatefulStream()), "dataset was Stream .* is StatefulStream here"),
    ],
)
def test_a_position_of_something_else_is_refused(saved: Any, here: Any, message: str) -> None:
    state = position(saved)
    with pytest.raises(InvalidArgumentError, match=message):
        distribute(here, 1).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, 3, {"version": 1}, "newer"])
def test_no_position(state: Any) -> None:
    error, message = WrongTypeError, "takes what its state_dict"
    if state == "newer":
        state = position(DataLoader(Rows(8))) | {"version": 3}
        error, message = InvalidArgumentError, "format version 3, and this torchstrat reads versions up to 2"
    with pytest.raises(error, match=message):
        distribute(DataLoader(Rows(8)), 1).load_state_dict(state)


def test_a_sampler_that_does_not_repeat_itself_is_refused_before_anything_is_read() -> None:
    passes = itertools.count()

    class Counting(Eagerly):
        def __iter__(self) -> Iterator[int]:
            shift = next(passes)
            return iter([(index + shift) % self.length for index in range(self.length)])

    state = position(DataLoader(Rows(8), 2, sampler=Counting(8)), 2)
    rows = Rows(8)
    dataset = distribute(DataLoader(rows, 2, sampler=Counting(8)), 1)
    dataset.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match=r"does not draw again.*4 row\(s\).*repeats others"):
        iter(dataset)
    assert rows.fetched == []
    assert dataset.state_dict() == state


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(ByPass(), 4),
        lambda: DataLoader(ByPass(), 4, num_workers=1),
        lambda: DataLoader(ByPass(), 4, num_workers=1, persistent_workers=True),
        lambda: iter_anew(DataLoader(ByPass(), 4)),
    ],
)
def test_a_sequence_that_does_not_repeat_itself_is_refused(make: Make, replicas: int) -> None:
    """Those whose workers begin anew with each pass do repeat it."""
    try:
        require_undisturbed(of(make), (1, replicas), (1, 2))
    except InvalidArgumentError as error:
        assert "does not read again what it read before" in str(error)  # noqa: PT017 - or it goes on rightly
    else:
        assert (make().num_workers, make().persistent_workers) == (1, False)


class Again:
    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize(
    ("one", "other"), [([2**53], [2**53 + 1]), ([1 + 1j], [1 + 2j]), ([2**63 - 1], [2**63 - 2]), ([1], [2])]
)
def test_nested_tensors_that_differ_a_little_are_other_data(one: list[Any], other: list[Any]) -> None:
    batches = [
        torch.nested.nested_tensor([torch.tensor(rows), torch.tensor(rows * 2)], layout=torch.jagged)
        for rows in (one, other)
    ]
    state = position(Again(batches[0], batches[0]))
    for batch in batches:
        dataset = distribute(Again(batch, batch), 1)
        dataset.load_state_dict(state)
        with (
            contextlib.nullcontext()
            if batch is batches[0]
            else pytest.raises(InvalidArgumentError, match="does not read again what it read before")
        ):
            assert len(list(dataset)) == 1


def test_columns_that_come_in_another_order_are_the_same_data() -> None:
    batch = {"x": torch.arange(2), "a": torch.ones(2)}
    dataset = distribute(Again(*[dict(reversed(batch.items()))] * 2), 1)
    dataset.load_state_dict(position(Again(batch, batch)))
    assert len(list(dataset)) == 1


def test_a_shorter_sequence_is_refused() -> None:
    dataset = distribute([torch.arange(2)] * 2, 1)
    dataset.load_state_dict(position([torch.arange(2)] * 3, 3))
    with pytest.raises(InvalidArgumentError, match=r"ended 2 row\(s\) before the saved data position"):
        iter(dataset)


def test_batches_out_of_order_have_no_position_within_a_pass() -> None:
    dataset = distribute(DataLoader(Numbers(8), 2, num_workers=1, in_order=False), 1)
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(UnsupportedError, match="in_order=False"):
        dataset.state_dict()
    list(iterator)
    assert not dataset.state_dict()["under_way"]
