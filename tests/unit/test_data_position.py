"""A data position: what was handed out before and after a restart is every row of the pass once, in the same order."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import torchstrat as ts
from tests.unit.data_ranks import layout_in_process, on_ranks, plain
from torchstrat import data
from torchstrat.data import DistributedDataset, InputLayout, InputOptions
from torchstrat.data import draws as draws_module
from torchstrat.data.progress import Progress
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError

Seen = list[list[Any]]
"""Rows of each step, over all replicas of the process."""
Make = Callable[[], Any]

PASSES = 3


class Rows(Dataset[Any]):
    """Row ``i`` is ``i`` and a number drawn while it is read. Counts what is read."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.tensor(index), torch.rand(())


class OwnDraws(Rows):
    """Draws from generators of its own, one of them within what it calls."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.noise = np.random.default_rng(1)
        self.flip = functools.partial(random.Random.random, random.Random(2))

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.tensor(self.noise.random() + self.flip())


def distributed(dataset: Any, replicas: int = 1, **options: Any) -> DistributedDataset:
    layout = layout_in_process(replicas)
    return data.distribute_dataset(None, layout, dataset, InputOptions(**options))  # type: ignore[arg-type]


def rows_of(batch: Any) -> list[Any]:
    """The rows of a step, replica by replica; the drawn numbers with them, where there are any."""
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    columns = [part.values if hasattr(part, "values") and not callable(part.values) else (part,) for part in parts]
    lists = [[row for component in column for row in plain(component)] for column in columns]
    return list(zip(*lists, strict=True)) if len(lists) > 1 else lists[0]


def row_numbers(steps: Seen) -> list[Any]:
    return [row[0] if isinstance(row, tuple) else row for step in steps for row in step]


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def stand_of_streams() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def put_streams(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def undisturbed(make: Make, passes: int = PASSES) -> list[Seen]:
    seed(1)
    dataset = make()
    return [[rows_of(batch) for batch in dataset] for _ in range(passes)]


def until(make: Make, cut: tuple[int, int]) -> tuple[list[Seen], bytes]:
    """Passes up to step ``cut[1]`` of pass ``cut[0]``, and what a checkpoint keeps then. A pass of fewer steps has
    ended, and an empty one begun."""
    seed(1)
    dataset = make()
    before: list[Seen] = [[rows_of(batch) for batch in dataset] for _ in range(cut[0])]
    iterator = iter(dataset)
    before.append([rows_of(batch) for batch in itertools.islice(iterator, cut[1])])
    state = dataset.state_dict()
    before += [] if state["under_way"] else [[]]
    kept = pickle.dumps((state, stand_of_streams()))
    iterator.close()
    return before, kept


def resumed(make: Make, kept: bytes, passes: int) -> list[Seen]:
    """The rest of the pass, and the passes after it, in what stands for another process."""
    seed(99)
    dataset = make()
    state, streams = pickle.loads(kept)
    dataset.load_state_dict(state)
    put_streams(streams)
    return [[rows_of(batch) for batch in dataset] for _ in range(passes)]


def require_undisturbed(make: Make, cut: tuple[int, int], passes: int = PASSES) -> None:
    """Cut after a step and go on: all as if nothing had happened."""
    expected = undisturbed(make, passes)
    before, kept = until(make, cut)
    after = resumed(make, kept, passes - len(before) + 1)
    assert [*before[:-1], before[-1] + after[0], *after[1:]] == expected


# -- map-style data behind a DataLoader -----------------------------------------------------------------------------


class Lazily(Sampler[int]):
    """Draws from the process's streams while it is iterated."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        rest = list(range(self.length))
        while rest:
            yield rest.pop(random.randrange(len(rest)))

    def __len__(self) -> int:
        return self.length


class Eagerly(Lazily):
    """Draws when it is opened."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.length).tolist())


class WithGenerator(Lazily):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.choices = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.choices.permutation(self.length).tolist())


class Growing:
    """A batch sampler of nobody's class."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        order, size = torch.randperm(self.length).tolist(), 1
        while order:
            yield [order.pop() for _ in range(min(size, len(order)))]
            size += 1


class Stateful(Sampler[int]):
    """Says and sets where it stands, and counts epochs that only it knows of."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.taken = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(self.length).tolist()
        while self.taken < self.length:
            self.taken += 1
            yield order[self.taken - 1]
        self.epoch, self.taken = self.epoch + 1, 0

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


N = 23
LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "sequential": lambda **more: DataLoader(Rows(N), batch_size=4, **more),
    "shuffle": lambda **more: DataLoader(Rows(N), batch_size=4, shuffle=True, **more),
    "generator": lambda **more: DataLoader(Rows(N), batch_size=4, shuffle=True, generator=own_generator(), **more),
    "drop_last": lambda **more: DataLoader(Rows(N), batch_size=4, shuffle=True, drop_last=True, **more),
    "subset": lambda **more: DataLoader(Rows(N), batch_size=4, sampler=SubsetRandomSampler(range(3, 20)), **more),
    "weighted": lambda **more: DataLoader(
        Rows(N), batch_size=4, sampler=WeightedRandomSampler([1.0] * 5 + [3.0] * (N - 5), 50), **more
    ),
    "replacement": lambda **more: DataLoader(
        Rows(N),
        batch_size=4,
        sampler=RandomSampler(Rows(N), replacement=True, num_samples=100, generator=own_generator()),
        **more,
    ),
    "lazy sampler": lambda **more: DataLoader(Rows(N), batch_size=4, sampler=Lazily(N), **more),
    "eager sampler": lambda **more: DataLoader(Rows(N), batch_size=4, sampler=Eagerly(N), **more),
    "generator in a sampler": lambda **more: DataLoader(Rows(N), batch_size=4, sampler=WithGenerator(N), **more),
    "stateful sampler": lambda **more: DataLoader(Rows(N), batch_size=4, sampler=Stateful(N), **more),
    "batch sampler": lambda **more: DataLoader(Rows(N), batch_sampler=Growing(N), **more),
    "generators in a data set": lambda **more: DataLoader(OwnDraws(N), batch_size=4, shuffle=True, **more),
    "bulk": lambda **more: DataLoader(
        Bulk(N), batch_size=None, sampler=BatchSampler(RandomSampler(range(N)), 4, False), **more
    ),
}


class Bulk(Rows):
    def __getitem__(self, index: Any) -> Any:
        self.reads += len(index)
        return torch.tensor(index), torch.rand(len(index))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("cut", [(0, 0), (0, 3), (1, 2)])
def test_a_loader_goes_on_as_if_undisturbed(name: str, replicas: int, cut: tuple[int, int]) -> None:
    require_undisturbed(lambda: distributed(LOADERS[name](), replicas), cut)


@pytest.mark.parametrize("name", LOADERS)
def test_between_two_passes(name: str) -> None:
    def finished(make: Make) -> tuple[Seen, bytes]:
        seed(1)
        dataset = make()
        first = [rows_of(batch) for batch in dataset]
        return first, pickle.dumps((dataset.state_dict(), stand_of_streams()))

    make = lambda: distributed(LOADERS[name](), 2)  # noqa: E731
    expected = undisturbed(make)
    first, kept = finished(make)
    assert [first, *resumed(make, kept, PASSES - 1)] == expected


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    global_batch=st.integers(1, 9),
    replicas=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    cut=st.tuples(st.integers(0, 1), st.integers(0, 12)),
)
def test_any_cut_at_equal_settings(
    length: int, global_batch: int, replicas: int, shuffle: bool, drop_last: bool, cut: tuple[int, int]
) -> None:
    def make() -> DistributedDataset:
        loader = DataLoader(Rows(length), global_batch, shuffle=shuffle, drop_last=drop_last)
        return distributed(loader, replicas)

    require_undisturbed(make, cut)


@settings(max_examples=80, deadline=None)
@given(
    length=st.integers(1, 40),
    batches=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    replicas=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    steps=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    name=st.sampled_from(["shuffle", "eager", "growing", "stateful"]),
)
def test_other_batches_and_replicas_within_a_pass(
    length: int, batches: list[int], replicas: list[int], steps: list[int], name: str
) -> None:
    """Cut several times in one pass, each time going on with other settings."""
    samplers: dict[str, Callable[[], Sampler[int]]] = {
        "shuffle": lambda: RandomSampler(range(length)),
        "eager": lambda: Eagerly(length),
        "stateful": lambda: Stateful(length),
    }

    def loader(global_batch: int) -> DataLoader[Any]:
        if name == "growing":
            return DataLoader(Rows(length), batch_sampler=Growing(length))
        return DataLoader(Rows(length), global_batch, sampler=samplers[name]())

    seed(1)
    handed_out: list[int] = []
    dataset = distributed(loader(batches[0]), replicas[0])
    state: Any = None
    for number, global_batch in enumerate(batches):
        dataset = distributed(loader(global_batch), replicas[number])
        if state is not None:
            dataset.load_state_dict(pickle.loads(state))
        iterator = iter(dataset)
        last = number == len(batches) - 1
        taken = list(iterator) if last else list(itertools.islice(iterator, steps[number]))
        handed_out += row_numbers([rows_of(batch) for batch in taken])
        state = pickle.dumps(dataset.state_dict())
        iterator.close()
        if not pickle.loads(state)["under_way"]:
            break
    assert sorted(handed_out) == list(range(length))
    seed(1)
    whole = undisturbed(lambda: distributed(loader(batches[0])), 1)
    assert handed_out == row_numbers(whole[0])


def test_what_was_handed_out_is_not_read_again() -> None:
    length, taken = 10_000, 150
    make = lambda: distributed(DataLoader(Rows(length), 64, shuffle=True), 2)  # noqa: E731
    _, kept = until(make, (0, taken))
    rows = Rows(length)
    dataset = distributed(DataLoader(rows, 64, shuffle=True), 2)
    dataset.load_state_dict(pickle.loads(kept)[0])
    iterator = iter(dataset)
    assert rows.reads == 0
    next(iterator)
    assert rows.reads == 64
    for _ in iterator:
        pass
    assert rows.reads == length - 64 * taken


def test_a_state_is_small_whatever_the_length_of_the_dataset() -> None:
    sizes = []
    for length in (100, 100_000):
        _, kept = until(lambda: distributed(DataLoader(Rows(length), 8, sampler=Eagerly(length))), (0, 9))  # noqa: B023
        sizes.append(len(pickle.dumps(pickle.loads(kept)[0])))
    assert max(sizes) < 32_000
    assert abs(sizes[0] - sizes[1]) < 1000


def test_going_on_leaves_the_shared_random_streams_alone() -> None:
    _, kept = until(lambda: distributed(LOADERS["lazy sampler"]()), (0, 3))
    seed(4)
    dataset = distributed(LOADERS["lazy sampler"]())
    dataset.load_state_dict(pickle.loads(kept)[0])
    iter(dataset)
    found, streams = stand_of_streams(), []
    seed(4)
    streams = stand_of_streams()
    assert torch.equal(found[0], streams[0])
    assert found[1] == streams[1]
    assert all(np.array_equal(one, other) for one, other in zip(found[2], streams[2], strict=True))


# -- data-loading workers and reading ahead --------------------------------------------------------------------------


class Numbers(Rows):
    """Without drawn numbers: those of a worker's stream are not part of a position."""

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.tensor(index)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("cut", [(0, 2), (1, 1)])
@pytest.mark.parametrize("order", ["shuffle", "generator", "eager"])
def test_workers_that_read_ahead(order: str, cut: tuple[int, int], persistent: bool, replicas: int) -> None:
    def make() -> DistributedDataset:
        chosen: dict[str, Any] = {
            "shuffle": {"shuffle": True},
            "generator": {"shuffle": True, "generator": own_generator()},
            "eager": {"sampler": Eagerly(N)},
        }[order]
        return distributed(
            DataLoader(Numbers(N), 4, num_workers=1, prefetch_factor=3, persistent_workers=persistent, **chosen),
            replicas,
        )

    require_undisturbed(make, cut)


@pytest.mark.parametrize("persistent", [False, True])
def test_between_passes_of_workers(persistent: bool) -> None:
    def make() -> DistributedDataset:
        return distributed(DataLoader(Numbers(N), 4, shuffle=True, num_workers=1, persistent_workers=persistent), 2)

    expected = undisturbed(make)
    seed(1)
    dataset = make()
    first = [rows_of(batch) for batch in dataset]
    kept = pickle.dumps((dataset.state_dict(), stand_of_streams()))
    assert [first, *resumed(make, kept, PASSES - 1)] == expected


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
            assert self._changed.wait_for(lambda: self.reads >= reads, timeout=60)


def test_a_buffer_in_a_thread_does_not_count() -> None:
    def make(numbers: Numbers) -> DistributedDataset:
        loader = DataLoader(numbers, 2, shuffle=True, generator=own_generator())
        return distributed(loader, 2, per_replica_buffer_size=4)

    numbers = Watched(N)
    dataset = make(numbers)
    iterator = iter(dataset)
    before = [rows_of(next(iterator)) for _ in range(3)]
    numbers.wait_for(10)  # four rows more than were handed out
    state = dataset.state_dict()
    iterator.close()
    again = make(Numbers(N))
    again.load_state_dict(state)
    after = [rows_of(batch) for batch in again]
    assert [*before, *after] == [rows_of(batch) for batch in make(Numbers(N))]


class Copying:
    """A placement as for an accelerator: batches are read one step ahead, to be copied in the background."""

    copies = True

    def place(self, step: Any) -> tuple[Any, tuple[Any, ...]]:
        return step, ()

    def receive(self, placed: tuple[Any, tuple[Any, ...]]) -> Any:
        return placed[0]


def copied_ahead(sampler: Callable[[int], Sampler[int]]) -> DistributedDataset:
    layout = layout_in_process(2, placement=Copying())
    loader = DataLoader(Numbers(N), 4, sampler=sampler(N))
    return data.distribute_dataset(None, layout, loader, None)  # type: ignore[arg-type]


def test_several_cuts_of_batches_that_are_copied_ahead() -> None:
    """The second without having handed out all that had been drawn before the first."""
    expected = undisturbed(lambda: copied_ahead(Lazily), 1)
    before, kept = until(lambda: copied_ahead(Lazily), (0, 2))
    seen = before[0]
    for steps in (0, 1, None):
        seed(98)
        dataset = copied_ahead(Lazily)
        state, streams = pickle.loads(kept)
        dataset.load_state_dict(state)
        put_streams(streams)
        iterator = iter(dataset)
        seen += [rows_of(batch) for batch in itertools.islice(iterator, steps)]
        kept = pickle.dumps((dataset.state_dict(), stand_of_streams()))
        iterator.close()
    assert seen == expected[0]


@pytest.mark.parametrize("sampler", [Lazily, Eagerly, WithGenerator, Stateful])
@pytest.mark.parametrize("cut", [(0, 2), (1, 5), (1, 6)])
def test_batches_that_are_copied_ahead(sampler: Callable[[int], Sampler[int]], cut: tuple[int, int]) -> None:
    """A sampler that draws from a shared stream has drawn ahead as well, and does not draw that once more."""

    require_undisturbed(lambda: copied_ahead(sampler), cut)


# -- what can only be read in sequence -------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Rows in an order that is drawn when it is opened; with workers, each reads its turn."""

    def __init__(self, length: int = N) -> None:
        self.length, self.reads = length, 0

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        order = list(range(self.length))
        random.Random(0 if worker is None else worker.seed - worker.id).shuffle(order)
        if worker is None:
            random.shuffle(order)
        return self._read(order if worker is None else order[worker.id :: worker.num_workers])

    def _read(self, order: list[int]) -> Iterator[Any]:
        for index in order:
            self.reads += 1
            yield torch.tensor(index)


class StatefulStream(IterableDataset[Any]):
    """Goes on by itself; begins again after its end."""

    def __init__(self, length: int = N) -> None:
        self.length, self.at, self.epoch, self.reads = length, 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            self.reads += 1
            yield torch.tensor([self.at - 1 + 1000 * self.epoch])
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def pipeline() -> data.Pipeline:
    return data.ArrayDataset(torch.arange(N)).shuffle(7).batch(4)


SEQUENCES: dict[str, Make] = {
    "iterable": lambda: DataLoader(Stream(), 4),
    "stateful iterable": lambda: DataLoader(StatefulStream(), 4),
    "stateful iterable of batches": StatefulStream,
    "shuffled batches": lambda: ShuffledBatches(),
    "batches in a list": lambda: list(torch.arange(N).split(4)),
    "map-style batches": lambda: MapOfBatches(),
    "arrays": lambda: torch.arange(2 * N).reshape(N, 2),
    "pipeline": pipeline,
    "pipeline in a loader": lambda: DataLoader(data.ArrayDataset(torch.arange(N)).shuffle(7), 4),
    "repeated pipeline": lambda: pipeline().repeat(2),
    "mapped and cut": lambda: data.ArrayDataset(torch.arange(N)).map(lambda row: row + 1).batch(3).take(6),
    "prefetched": lambda: pipeline().prefetch(2),
    "hinted": lambda: hinted_loader(),
}


def hinted_loader() -> DataLoader[Any]:
    rows: Any = data.ArrayDataset(torch.arange(N)).shuffle(7).shard(data.SHARD_HINT, data.SHARD_HINT)
    rows.auto_shard_policy = "HINT"
    return DataLoader(rows, 4)


class ShuffledBatches:
    """Draws from a stream of everybody's, when it is opened, and from one of its own."""

    def __init__(self) -> None:
        self.choices = random.Random(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(N))
        random.shuffle(order)
        self.choices.shuffle(order)
        return iter(torch.tensor(order).split(4))


class MapOfBatches(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.arange(4 * index, min(N, 4 * index + 4))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("policy", [None, "OFF"])
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("cut", [(0, 0), (0, 2), (1, 6)])
def test_a_sequence_goes_on_as_if_undisturbed(
    name: str, cut: tuple[int, int], policy: str | None, replicas: int
) -> None:
    require_undisturbed(lambda: distributed(SEQUENCES[name](), replicas, auto_shard_policy=policy), cut)


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_between_passes(name: str) -> None:
    make = lambda: distributed(SEQUENCES[name](), 2)  # noqa: E731
    expected = undisturbed(make)
    seed(1)
    dataset = make()
    first = [rows_of(batch) for batch in dataset]
    kept = pickle.dumps((dataset.state_dict(), stand_of_streams()))
    assert [first, *resumed(make, kept, PASSES - 1)] == expected


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("source", [Stream, lambda: data.ArrayDataset(torch.arange(N)).shuffle(7)])
def test_streams_that_workers_split(source: Make, persistent: bool, replicas: int) -> None:
    make = lambda: distributed(  # noqa: E731
        DataLoader(source(), 4, num_workers=2, persistent_workers=persistent), replicas
    )
    require_undisturbed(make, (1, 2))


def test_a_stateful_dataset_is_not_read_again() -> None:
    _, kept = until(lambda: distributed(DataLoader(StatefulStream(), 4), 2), (0, 3))
    stream = StatefulStream()
    dataset = distributed(DataLoader(stream, 4), 2)
    dataset.load_state_dict(pickle.loads(kept)[0])
    rest = [rows_of(batch) for batch in dataset]
    assert row_numbers(rest) == list(range(12, N)) or [row[0] for row in row_numbers(rest)] == list(range(12, N))
    assert stream.reads == N - 12


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    replicas=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    steps=st.integers(0, 8),
    kind=st.sampled_from(["loader", "list", "pipeline", "stateful"]),
    policy=st.sampled_from(["AUTO", "OFF"]),
)
def test_sequences_in_other_batches(
    sizes: tuple[int, int], replicas: tuple[int, int], steps: int, kind: str, policy: str
) -> None:
    makes: dict[str, Callable[[int], Any]] = {
        "loader": lambda size: DataLoader(Stream(), size),
        "list": lambda size: list(torch.arange(N).split(size)),
        "pipeline": lambda size: data.ArrayDataset(torch.arange(N)).shuffle(5).batch(size),
        "stateful": lambda size: DataLoader(StatefulStream(), size),
    }

    def make(number: int) -> DistributedDataset:
        return distributed(makes[kind](sizes[number]), replicas[number], auto_shard_policy=policy)

    before, kept = until(lambda: make(0), (0, steps))
    after = resumed(lambda: make(1), kept, 1) if len(before) == 1 else [[]]
    found = row_numbers(before[0] + after[0])
    found = [row[0] if isinstance(row, list) else row for row in found]
    assert sorted(found) == list(range(N))


# -- what the state is, and bad states --------------------------------------------------------------------------------


def test_a_loop_that_was_left_stays_the_pass_under_way() -> None:
    make = lambda: distributed(DataLoader(Numbers(10), 2), 2)  # noqa: E731
    dataset = make()
    for batch in dataset:
        if rows_of(batch) == [2, 3]:
            break
    state = dataset.state_dict()
    other = make()
    other.load_state_dict(state)
    assert other.state_dict() == state  # until it is used
    assert row_numbers([rows_of(batch) for batch in other]) == [4, 5, 6, 7, 8, 9]
    assert row_numbers([rows_of(batch) for batch in other]) == list(range(10))


def test_an_iterators_state_is_that_of_its_pass() -> None:
    dataset = distributed(DataLoader(Numbers(10), 2), 1)
    first = iter(dataset)
    next(first)
    second = iter(dataset)
    next(second), next(second)
    for iterator, expected in ((first, 2), (second, 4)):
        other = distributed(DataLoader(Numbers(10), 2), 1)
        other.load_state_dict(iterator.state_dict())
        assert row_numbers([rows_of(next(iter(other)))]) == [expected, expected + 1]


@pytest.mark.parametrize("name", ["generator", "lazy sampler", "generator in a sampler", "batch sampler"])
def test_a_checkpoint_carries_it(name: str, tmp_path: Path) -> None:
    dataset = distributed(LOADERS[name](), 2)
    iterator = iter(dataset)
    before = [rows_of(batch) for batch in itertools.islice(iterator, 3)]
    ts.Checkpoint(dataset=dataset).save(tmp_path / "position")
    rest = [rows_of(batch) for batch in iterator]
    other = distributed(LOADERS[name](), 2)
    ts.Checkpoint(dataset=other).restore(tmp_path / "position")
    assert row_numbers([rows_of(batch) for batch in other]) == row_numbers(rest)
    assert len(row_numbers(before)) + len(row_numbers(rest)) in (N, 100)


def test_looking_at_an_example_moves_nothing() -> None:
    for name in ("stateful iterable", "stateful iterable of batches", "pipeline in a loader"):
        expected = undisturbed(lambda: distributed(SEQUENCES[name](), 1))  # noqa: B023
        seed(1)
        dataset = distributed(SEQUENCES[name](), 1)
        assert dataset.element_spec is not None
        assert [[rows_of(batch) for batch in dataset] for _ in range(PASSES)] == expected


def test_after_the_last_row_nothing_is_left_of_the_pass() -> None:
    require_undisturbed(lambda: distributed(DataLoader(Numbers(8), 4), 2), (0, 2))


def position(loader: Any, steps: int = 1, **options: Any) -> Any:
    dataset = distributed(loader, 1, **options)
    list(itertools.islice(iter(dataset), steps))
    return dataset.state_dict()


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
        distributed(here).load_state_dict(state)


def test_a_sampler_that_does_not_repeat_itself_is_refused_before_anything_is_read() -> None:
    class Counting(Eagerly):
        passes = itertools.count()

        def __iter__(self) -> Iterator[int]:
            shift = next(Counting.passes)
            return iter([(index + shift) % self.length for index in range(self.length)])

    state = position(DataLoader(Rows(8), 2, sampler=Counting(8)), 2)
    rows = Rows(8)
    dataset = distributed(DataLoader(rows, 2, sampler=Counting(8)))
    dataset.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match=r"does not draw again.*4 row\(s\).*repeats others"):
        iter(dataset)
    assert rows.reads == 0
    assert dataset.state_dict() == state


def test_a_shorter_sequence_is_refused() -> None:
    state = position([torch.arange(2)] * 3, 3)
    dataset = distributed([torch.arange(2)] * 2)
    dataset.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match=r"ended 2 row\(s\) before the saved data position"):
        iter(dataset)


@pytest.mark.parametrize("state", [{}, 3, {"version": 1}])
def test_no_position(state: Any) -> None:
    with pytest.raises(WrongTypeError, match="takes what its state_dict"):
        distributed(DataLoader(Rows(8))).load_state_dict(state)


def test_a_newer_version() -> None:
    state = position(DataLoader(Rows(8))) | {"version": 2}
    with pytest.raises(InvalidArgumentError, match="format version 2, and this torchstrat reads versions up to 1"):
        distributed(DataLoader(Rows(8))).load_state_dict(state)


def test_batches_out_of_order_have_no_position_within_a_pass() -> None:
    dataset = distributed(DataLoader(Numbers(8), 2, num_workers=1, in_order=False))
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(UnsupportedError, match="in_order=False"):
        dataset.state_dict()
    for _ in iterator:
        pass
    assert not dataset.state_dict()["under_way"]


# -- several processes ------------------------------------------------------------------------------------------------

MakeOnRank = Callable[[InputLayout], DistributedDataset]


def of(dataset: Callable[[], Any], **options: Any) -> MakeOnRank:
    return lambda layout: data.distribute_dataset(None, layout, dataset(), InputOptions(**options))  # type: ignore[arg-type]


def run_ranks(make: MakeOnRank, processes: int, local: int, state: Any, steps: int | None) -> tuple[Seen, Any]:
    """Rows of each step over all processes, and the state after ``steps`` of them."""

    def work(layout: InputLayout) -> tuple[Seen, Any]:
        dataset = make(layout)
        if state is not None:
            dataset.load_state_dict(pickle.loads(state))
        iterator = iter(dataset)
        seen = [rows_of(batch) for batch in itertools.islice(iterator, steps)]
        kept = pickle.dumps(dataset.state_dict())
        iterator.close()
        return seen, kept

    # One replica in all gets its batches bare, as where there is a single process.
    alone = processes * local == 1
    results = [work(layout_in_process(1))] if alone else on_ranks(processes, work, local)[0]
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert all(pickle.loads(kept).keys() == pickle.loads(results[0][1]).keys() for _, kept in results)
    seen = [list(itertools.chain(*step)) for step in zip(*(seen for seen, _ in results), strict=True)]
    return seen, results[-1][1]


def test_all_processes_get_one_state() -> None:
    def work(layout: InputLayout) -> bytes:
        dataset = of(lambda: DataLoader(Rows(12), 4, sampler=Stateful(12)))(layout)
        iterator = iter(dataset)
        next(iterator)
        return pickle.dumps(dataset.state_dict())

    results, group = on_ranks(3, work)
    assert results[0] == results[1] == results[2]
    assert group.calls[0].count("the position in a distributed dataset") == 1


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 30),
    worlds=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 7)), min_size=2, max_size=3),
    steps=st.integers(0, 4),
    kind=st.sampled_from(["shuffle", "lazy", "stateful", "iterable", "pipeline"]),
)
def test_other_numbers_of_processes(length: int, worlds: list[tuple[int, int, int]], steps: int, kind: str) -> None:
    """``worlds``: processes, replicas in each, global batch."""
    makes: dict[str, Callable[[int], Any]] = {
        "shuffle": lambda size: DataLoader(Numbers(length), size, shuffle=True, generator=own_generator()),
        "lazy": lambda size: DataLoader(Numbers(length), size, sampler=Eagerly(length)),
        "stateful": lambda size: DataLoader(Numbers(length), size, sampler=Stateful(length)),
        "iterable": lambda size: DataLoader(FixedStream(length), size),
        "pipeline": lambda size: data.ArrayDataset(torch.arange(length)).shuffle(5, seed=3).batch(size),
    }
    seed(1)
    handed_out: list[Any] = []
    state: Any = None
    for number, (processes, local, size) in enumerate(worlds):
        last = number == len(worlds) - 1
        make = of(lambda size=size: makes[kind](size))  # type: ignore[misc]
        seen, state = run_ranks(make, processes, local, state, None if last else steps)
        handed_out += row_numbers(seen)
        if not pickle.loads(state)["under_way"]:
            break
    assert sorted(handed_out) == list(range(length))


class FixedStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return self._read(list(range(self.length)))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{index}.txt" for index in range(5)]
    for index, path in enumerate(paths):
        path.write_text("".join(f"f{index}-{line}\n" for line in range(2 + index)), encoding="utf-8")
    return paths


@pytest.mark.parametrize("worlds", [[2, 2], [2, 1], [1, 3], [3, 2, 1], [2, 3, 2]])
@pytest.mark.parametrize("kind", ["lines", "loader"])
def test_files_go_on_in_any_number_of_processes(files: list[Path], worlds: list[int], kind: str) -> None:
    every = sorted(line for path in files for line in path.read_text(encoding="utf-8").split())
    for steps in range(0, 9, 2):
        state: Any = None
        handed_out: list[str] = []
        for number, processes in enumerate(worlds):
            lines = data.TextLineDataset(files)
            make = of(lambda lines=lines: DataLoader(lines, 3) if kind == "loader" else lines.batch(3))  # type: ignore[misc]
            last = number == len(worlds) - 1
            seen, state = run_ranks(make, processes, 1 + number % 2, state, None if last else steps)
            handed_out += row_numbers(seen)
            if not pickle.loads(state)["under_way"]:
                break
        assert sorted(handed_out) == every, steps


@pytest.mark.parametrize("policy", ["FILE", "OFF", "DATA"])
def test_equal_processes_go_on_in_the_same_steps(files: list[Path], policy: str) -> None:
    make = of(lambda: data.TextLineDataset(files).batch(3), auto_shard_policy=policy)
    whole, _ = run_ranks(make, 2, 2, None, None)
    for steps in range(len(whole) + 1):
        before, state = run_ranks(make, 2, 2, None, steps)
        after, _ = run_ranks(make, 2, 2, state, None)
        assert before + after == whole, steps


def of_function(dataset: Callable[[int], Any]) -> MakeOnRank:
    return lambda layout: data.distribute_datasets_from_function(
        None,  # type: ignore[arg-type]
        layout,
        lambda context: dataset(context.input_pipeline_id),
        None,
    )


def test_datasets_of_a_function() -> None:
    """Of different lengths, so that one process has ended when the state is taken."""
    make = of_function(lambda rank: DataLoader(Numbers(6 + 5 * rank), 2))
    whole, _ = run_ranks(make, 2, 2, None, None)
    for steps in range(len(whole) + 1):
        before, state = run_ranks(make, 2, 2, None, steps)
        after, _ = run_ranks(make, 2, 2, state, None)
        assert before + after == whole, steps


@pytest.mark.parametrize(
    "make",
    [
        of_function(lambda rank: DataLoader(Numbers(8), 2)),
        of(lambda: [torch.arange(4)] * 3, auto_shard_policy="OFF"),
    ],
)
def test_pipelines_that_cannot_be_shared_out_anew(make: MakeOnRank) -> None:
    _, state = run_ranks(make, 2, 1, None, 1)
    with pytest.raises(InvalidArgumentError, match=r"2 input pipeline\(s\), .*; here there are 1"):
        run_ranks(make, 1, 1, state, None)
    _, finished = run_ranks(make, 2, 1, None, None)
    run_ranks(make, 1, 1, finished, None)  # between passes there is nothing to share out


def test_processes_after_different_steps() -> None:
    def work(layout: InputLayout) -> Any:
        dataset = of(lambda: DataLoader(Numbers(8), 2))(layout)
        iterator = iter(dataset)
        for _ in range(1 + layout.worker_index):
            next(iterator)
        return dataset.state_dict()

    results, _ = on_ranks(2, work)
    for error in results:
        assert isinstance(error, InvalidArgumentError)
        assert "['after step 1', 'after step 2']" in str(error)


def test_processes_that_load_different_states() -> None:
    states = [position(DataLoader(Numbers(8), 2), steps) for steps in (1, 2)]

    def work(layout: InputLayout) -> Any:
        dataset = of(lambda: DataLoader(Numbers(8), 2))(layout)
        dataset.load_state_dict(states[layout.worker_index])
        return iter(dataset)

    results, _ = on_ranks(2, work)
    for error in results:
        assert isinstance(error, InvalidArgumentError)
        assert "go on after [2, 4] rows" in str(error)


# -- controls: without these parts the tests above fail ---------------------------------------------------------------


def test_control_counting_what_was_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def ahead(self: Progress, steps: Any, standing: Any) -> Iterator[Any]:
        for step in steps:
            self._places = standing.after(step)
            self._made.append(self._places)
            yield step

    monkeypatch.setattr(Progress, "following", ahead)
    monkeypatch.setattr(Progress, "hand_out", lambda self: None)
    with pytest.raises(AssertionError):
        test_a_buffer_in_a_thread_does_not_count()


def test_control_forgetting_the_samplers_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module.RandomStreams, "put", lambda self, states: None)
    with pytest.raises(InvalidArgumentError, match="does not draw again"):
        require_undisturbed(lambda: distributed(LOADERS["shuffle"]()), (0, 3))
