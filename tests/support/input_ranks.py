"""Several ranks in one process, for input without process groups: a thread and an in-memory communicator for each."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from torchstrat import data
from torchstrat.data import DistributedDataset, InputLayout, InputOptions

TIMEOUT = timedelta(seconds=30)


def layout_in_process(replicas: int, **changes: Any) -> InputLayout:
    """All replicas in this process."""
    settings: dict[str, Any] = {
        "num_replicas": replicas,
        "local_replicas": tuple(range(replicas)),
        "devices": (torch.device("cpu"),) * replicas,
        "num_workers": 1,
        "worker_index": 0,
        "always_wrap": False,
        "communicator": None,
    }
    return InputLayout(**{**settings, **changes})


def distribute(dataset: Any, layout: InputLayout | int = 2, **options: Any) -> DistributedDataset:
    """``layout``: or the number of replicas, all in this process."""
    layout = layout_in_process(layout) if isinstance(layout, int) else layout
    return data.distribute_dataset(None, layout, dataset, InputOptions(**options))  # type: ignore[arg-type]


def distribute_from_function(function: Any, layout: InputLayout | int = 2, **options: Any) -> DistributedDataset:
    layout = layout_in_process(layout) if isinstance(layout, int) else layout
    return data.distribute_datasets_from_function(None, layout, function, InputOptions(**options))  # type: ignore[arg-type]


class InMemoryGroup:
    """What the communicators of one group share: a slot per rank, and a barrier on both sides of every exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT.total_seconds())
        self.calls: list[list[str]] = [[] for _ in range(size)]
        self.failures: list[str] = []
        self.words: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self.told = threading.Condition()

    def exchange(self, rank: int, value: Any, what: str) -> list[Any]:
        self.slots[rank] = (value, what)
        self.calls[rank].append(what)
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        assert len({name for _, name in found}) == 1, f"ranks make different calls: {[name for _, name in found]}"
        return [value for value, _ in found]


class InMemoryCommunicator:
    """One rank's end of an `InMemoryGroup`."""

    def __init__(self, group: InMemoryGroup, rank: int) -> None:
        self._group, self.rank = group, rank
        self.size, self.timeout = group.size, TIMEOUT
        self._things = 0

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        return self._group.exchange(self.rank, value, what)

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        return [list(row) for row in self.all_gather_object(numbers, what)]

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        return self._group.exchange(self.rank, value, what)[source]

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        self._group.failures.append(message)

    def named(self, what: str) -> str:
        return what

    def words(self, what: str) -> InMemoryWords:
        self._things += 1
        return InMemoryWords(self._group, self._things, self.rank)


class InMemoryWords:
    """What all ranks say about one thing."""

    def __init__(self, group: InMemoryGroup, thing: int, rank: int) -> None:
        self._told, self._size, self._rank = group.told, group.size, rank
        with self._told:  # two ranks at once would each make a dictionary of their own
            self._said = group.words[thing]

    def tell(self, word: str) -> None:
        with self._told:
            self._said.setdefault(self._rank, word)
            self._told.notify_all()

    def of_all(self) -> dict[int, str]:
        with self._told:
            assert self._told.wait_for(lambda: len(self._said) == self._size, TIMEOUT.total_seconds())
            return dict(self._said)


def on_ranks(workers: int, work: Callable[[InputLayout], Any], local: int = 1) -> tuple[list[Any], InMemoryGroup]:
    """``work(layout)`` on every rank at once; results, or the exceptions raised, in rank order, and the group."""
    group = InMemoryGroup(workers)

    def run(rank: int) -> Any:
        layout = layout_in_process(
            workers * local,
            local_replicas=tuple(range(rank * local, (rank + 1) * local)),
            devices=(torch.device("cpu"),) * local,
            num_workers=workers,
            worker_index=rank,
            always_wrap=True,
            communicator=InMemoryCommunicator(group, rank),
        )
        try:
            return work(layout)
        except Exception as error:
            return error

    with ThreadPoolExecutor(workers, thread_name_prefix="rank") as pool:
        return list(pool.map(run, range(workers))), group


def plain(value: Any) -> Any:
    """Tensors and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def components(batch: Any) -> list[Any]:
    """What each local replica has of a batch of one leaf."""
    return [plain(component) for component in batch.values]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for part in lists for item in part]
