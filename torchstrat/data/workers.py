"""What a `DataLoader`'s workers draw, where each process reads rows or a pipeline of its own, and the signals they get.

Where a loader has an iterator of its own, what is drawn is decided or noticed in the workers, by ``worker_init_fn`` and
``collate_fn``, which are all of a worker that such a loader asks others for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchstrat.data.own_draws import (
    draws_nothing,
    generators_of_data,
    next_of,
    process_stands,
    seed_apart,
    stream_seeds,
    tell_of_common_draws,
)
from torchstrat.data.pipeline import Pipeline

logger = logging.getLogger("torchstrat.data")

WorkerInit = Callable[[int], None] | None


class WorkerSettings(TypedDict, total=False):
    """Arguments of a `DataLoader` that its workers get."""

    worker_init_fn: Callable[[int], None]
    collate_fn: Callable[[Any], object]


class SeedsApart:
    """Gives the workers of one pipeline random streams of their own, and other states to the data set's generators.

    Args:
        pipeline: its number.
    """

    def __init__(self, pipeline: int) -> None:
        self._pipeline = pipeline
        self._begun = _flag()

    def settings(self, loader: DataLoader[object]) -> WorkerSettings:
        return {"worker_init_fn": functools.partial(self._begin, loader.worker_init_fn, loader.collate_fn)}

    def _begin(self, init: WorkerInit, collate: Callable[..., object], worker: int) -> None:
        """In a worker, before it looks at its data set."""
        info = get_worker_info()
        assert info is not None
        if isinstance(info.dataset, Pipeline):  # what is sharded after a shuffle needs one order in all pipelines
            info.dataset.seed_in_workers = info.seed - worker
        seeds = stream_seeds(info.seed, self._pipeline)
        object.__setattr__(info, "seed", seeds[0])  # which is frozen, and by which functions of the user's seed
        torch.manual_seed(seeds[0])
        random.seed(seeds[1])
        np.random.seed(seeds[2])
        seed_apart(generators_of_data(info.dataset, collate), self._pipeline)
        self._begun[0] = 1
        if init is not None:
            init(worker)

    def require_begun(self, loader: DataLoader[object]) -> None:
        """After a batch of its workers has come."""
        if self._pipeline == 1 and not self._begun[0] and not draws_nothing(loader):
            _tell_of_workers_begun_before(type(loader).__qualname__)


class Watch:
    """Notices in a loader's workers whether the data set, which shards itself, perhaps by what every process draws
    alike, goes on to draw from their streams; see `own_draws.Watched`.

    With its first element a data set draws what its beginning needs. What is drawn after that, up to a worker's second
    batch, is drawn for the batches.
    """

    def __init__(self) -> None:
        self._drawn = _flag()
        # In a worker: where its streams stood then, and how many batches are still looked at.
        self._stood: int | None = None
        self._left = 2

    def settings(self, loader: DataLoader[object], collate: Callable[[Any], object] | None = None) -> WorkerSettings:
        """``collate``: if it is to be another one than the loader's."""
        return {
            "worker_init_fn": functools.partial(self._begin, loader.worker_init_fn),
            "collate_fn": functools.partial(self._collated, collate or loader.collate_fn),
        }

    def tell(self, name: str) -> None:
        """After a batch has come."""
        if self._drawn[0]:
            tell_of_common_draws(name)

    def _begin(self, init: WorkerInit, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        dataset = info.dataset
        kind: Any = type(dataset)
        opened = kind.__iter__

        def followed(asked: object) -> Iterator[object]:
            elements = opened(asked)
            return _First(elements, self._begun) if asked is dataset else elements

        kind.__iter__ = followed  # of this process, which ends with its worker; the loader keeps the data set itself
        if init is not None:
            init(worker)

    def _begun(self) -> None:
        if self._left:
            self._stood = process_stands()

    def _collated(self, collate: Callable[[Any], object], examples: object) -> object:
        batch = collate(examples)
        if self._left and self._stood is not None:
            self._left -= 1
            if self._stood != process_stands():
                self._drawn[0] = 1
        return batch


class _First:
    """``elements`` of which the first is reported."""

    def __init__(self, elements: Iterator[object], report: Callable[[], None]) -> None:
        self._elements, self._report = elements, report
        self._waits = True

    def __iter__(self) -> _First:
        return self

    def __next__(self) -> object:
        element = next(self._elements)
        if self._waits:
            self._waits = False
            self._report()
        return element

    def __getattr__(self, name: str) -> object:  # its state_dict, say
        return getattr(self._elements, name)


class WatchedInWorkers(Iterator[object]):
    """``items`` of a loader that has been given the settings of ``watch``."""

    def __init__(self, items: Iterator[object], watch: Watch, name: str) -> None:
        self._items, self._watch, self._name = items, watch, name

    def __next__(self) -> object:
        item = next(self._items)
        self._watch.tell(self._name)
        return item


class ReadByItself(Iterator[object]):
    """The items of what reads loaders in a way of its own, and may start their workers whenever it is asked.

    Args:
        open_items: called here.
        loaders: those with workers.
        pipeline: the number of this one.
    """

    def __init__(
        self, open_items: Callable[[], Iterator[object]], loaders: Sequence[DataLoader[object]], pipeline: int
    ) -> None:
        self._loaders = [(loader, _care_of(loader, pipeline)) for loader in loaders]
        with self._cared_for():
            self._items = open_items()

    def __next__(self) -> object:
        with self._cared_for():
            item = next(self._items)
        for loader, care in self._loaders:
            if isinstance(care, Watch):
                care.tell(type(loader.dataset).__qualname__)
            elif care is not None:
                care.require_begun(loader)
        return item

    @contextlib.contextmanager
    def _cared_for(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for loader, care in self._loaders:
                if care is not None:
                    stack.enter_context(_set(loader, care.settings(loader)))
            yield


def _care_of(loader: DataLoader[object], pipeline: int) -> SeedsApart | Watch | None:
    """The first pipeline draws what it does in plain PyTorch, and tells for all."""
    if isinstance(loader.dataset, IterableDataset) and not isinstance(loader.dataset, Pipeline):
        return None if pipeline else Watch()
    return SeedsApart(pipeline) if pipeline else None


@contextlib.contextmanager
def _set(loader: DataLoader[object], settings: Mapping[str, object]) -> Iterator[None]:
    given = {name: getattr(loader, name) for name in settings}
    for name, value in settings.items():
        setattr(loader, name, value)
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(loader, name, value)


def loaders_in(iterable: object) -> list[DataLoader[object]]:
    """The loaders with workers that it is, or has in attributes."""
    found = [iterable] if isinstance(iterable, DataLoader) else getattr(iterable, "__dict__", {}).values()
    return [one for one in found if isinstance(one, DataLoader) and one.num_workers]


def generator_of_workers(loader: DataLoader[object], number: int) -> torch.Generator | None:
    """What the loader of one of several processes or pipelines draws the seed of its workers from: the first one's from
    what the user's does. Where the others' is another, `draw_for_workers` has to be called when torch draws."""
    users: torch.Generator | None = loader.generator
    if not loader.num_workers or not number:
        return users
    return torch.Generator().manual_seed((next_of(users) + number) % 2**63)


def draw_for_workers(loader: DataLoader[object]) -> None:
    """As torch does, so that random streams stay equal on all ranks."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def _flag() -> torch.Tensor:
    """What a worker, forked or spawned, sets for the process that started it."""
    flag: torch.Tensor = torch.zeros(1, dtype=torch.uint8).share_memory_()
    return flag


@functools.cache
def _tell_of_workers_begun_before(name: str) -> None:
    logger.warning(
        "%s has workers that were started before it was iterated here, or without its worker_init_fn: where processes "
        "are seeded equally, what the data set draws in these workers is the same in all of them. Let it start them "
        "when it is iterated, or give it a worker_init_fn that seeds with context.input_pipeline_id.",
        name,
    )


def outlive_preemption(worker: int = 0) -> None:
    """``worker_init_fn`` of a `DataLoader` with ``num_workers``, in a program that saves on SIGTERM::

        DataLoader(dataset, num_workers=4, worker_init_fn=ts.data.outlive_preemption)

    torchrun and Slurm send SIGTERM to all processes, those that load data too. Those die of it, and their `DataLoader`
    raises in the training process, before it has come to the end of its step. After this call a process ends only of a
    SIGTERM that its own parent sends, as a `DataLoader` does with those that do not end otherwise, or, as ever, when
    the parent is gone.

    Linux only; elsewhere it does nothing. ``worker`` is not used. A ``worker_init_fn`` of your own calls this.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    # PyTorch has set a handler in C by now, which knows who sent the signal and is not to be had from Python. A thread
    # that waits for the signal hears of the sender; it gets it as long as no other thread does.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="torchstrat-sigterm-of-the-parent", daemon=True).start()
