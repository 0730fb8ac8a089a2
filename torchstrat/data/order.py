"""The order of indices, which is rank 0's: what its sampler draws, every process of the job gets.

Torch's own samplers are *replayed*: rank 0 hands out the state of the random stream once per epoch, and every rank
draws for itself. Any other sampler, or batch sampler, is drawn from on rank 0 alone and its indices are sent, a few
batches at a time. Both happen in the caller's thread, at the same steps on every rank, so that neither random streams
nor collectives depend on how fast a rank is.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchstrat.collectives.communicator import Communicator
from torchstrat.errors import CommunicationError, InvalidArgumentError, UnsupportedError

Index = Any
"""What a sampler yields: a list of indices for a batch, or one index where the dataset makes the batches."""

BATCHES_PER_MESSAGE = 16
"""Enough to make the message's latency not count; few enough for samplers that follow the training."""

_OWN_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What the loader draws from: its batch sampler, or its sampler where the dataset makes the batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def refuse_distributed_sampler(loader: DataLoader[Any]) -> None:
    """A loader that is sharded by its sampler would be sharded twice."""
    sampler = index_sampler(loader)
    while sampler is not None:
        if isinstance(sampler, DistributedSampler):
            raise UnsupportedError(
                "the DataLoader has a DistributedSampler, and distribute_dataset shards by itself: each replica would "
                "see a part of a part. Give the loader of the whole dataset (shuffle=True instead of the sampler, "
                "batch_size=<global batch>), or keep it with InputOptions(auto_shard_policy=AutoShardPolicy.OFF)."
            )
        sampler = getattr(sampler, "sampler", None)


class IndexOrder:
    """One epoch's order of a `DataLoader`, the same in every process. Collective: all ranks make one together.

    Args:
        loader: this rank's loader, of equal settings on every rank.
        communicator: the way to the others.
        ahead: how many batches beyond the current step this rank may ask for.

    Raises:
        InvalidArgumentError: the ranks' datasets have different lengths.
    """

    def __init__(self, loader: DataLoader[Any], communicator: Communicator, ahead: int) -> None:
        self._communicator = communicator
        self._own = _own_sampler(index_sampler(loader))
        sampler = index_sampler(loader)
        said = communicator.all_gather_object(
            (_length(loader.dataset), self._fingerprint(sampler), ahead), "the length of a dataset"
        )
        lengths = [length for length, _, _ in said]
        if len(set(lengths)) > 1:
            raise InvalidArgumentError(
                f"the dataset has {lengths} items on ranks 0 to {len(lengths) - 1}: every rank needs the whole, equal "
                "dataset. Data that is sharded already needs InputOptions(auto_shard_policy=AutoShardPolicy.OFF)."
            )
        self._replay = self._own is not None and len({fingerprint for _, fingerprint, _ in said}) == 1
        self._ahead = max(ahead for _, _, ahead in said)
        self._draws: Iterator[Index] | None = None
        if self._replay or communicator.rank == 0:
            self._draws = iter(sampler)
        self._pending: deque[Index] = deque()
        self._first, self._ended, self._drawn = True, False, 0

    def __iter__(self) -> Iterator[Index]:
        while True:
            if not self._pending and not self._ended:
                self._draw()
            if not self._pending:
                return
            yield self._pending.popleft()

    def prepare(self, step: int) -> None:
        """Have enough indices at hand that no other thread has to draw during step ``step``."""
        while not self._ended and self._drawn < step + 1 + self._ahead:
            self._draw()

    def _draw(self) -> None:
        if not self._replay:
            batches = self._receive()
        elif self._first:
            batches = self._replay_first()
        else:
            batches = list(itertools.islice(self._draws or (), BATCHES_PER_MESSAGE))
        self._first = False
        self._ended = len(batches) < BATCHES_PER_MESSAGE
        self._drawn += len(batches)
        self._pending.extend(batches)

    def _receive(self) -> list[Index]:
        message: tuple[list[Index], BaseException | None] = ([], None)
        if self._draws is not None:
            drawn: list[Index] = []
            try:
                drawn.extend(itertools.islice(self._draws, BATCHES_PER_MESSAGE))
                message = (drawn, None)
            except Exception as error:  # the others wait for a message: they get one, then it is raised everywhere
                message = ([], error)
        failure = message[1]
        what = "the indices of the next batches"
        sent = (message[0], None if failure is None else f"{type(failure).__name__}: {failure}")
        batches, text = self._communicator.broadcast_object(sent, 0, what)
        if failure is not None:
            raise failure
        if text is not None:
            raise CommunicationError(f"the sampler of rank 0, which draws for all ranks, raised {text}")
        return list(batches)

    def _replay_first(self) -> list[Index]:
        """The first draws, made on rank 0's random stream: the only ones that torch's samplers take from outside."""
        if type(self._own) is SequentialSampler:
            return list(itertools.islice(self._draws or (), BATCHES_PER_MESSAGE))
        stream = getattr(self._own, "generator", None)
        generator = torch.default_generator if stream is None else stream
        before = generator.get_state()
        state = self._communicator.broadcast_object(before, 0, "the state of the sampler's random stream")
        generator.set_state(state)
        batches = list(itertools.islice(self._draws or (), BATCHES_PER_MESSAGE))
        if stream is None and not torch.equal(before, state):
            generator.set_state(before)  # this rank's default stream is its own: seeded differently, left alone
        return batches

    def _fingerprint(self, sampler: Any) -> object:
        """Equal on ranks whose samplers draw alike from the same stream; None where that cannot be known."""
        own = self._own
        if own is None:
            return None
        numbers: list[Any] = []
        if isinstance(own, WeightedRandomSampler):
            numbers = own.weights.tolist()
        elif isinstance(own, SubsetRandomSampler):
            numbers = list(own.indices)
        settings = [getattr(sampler, name, None) for name in ("batch_size", "drop_last")]
        settings += [getattr(own, name, None) for name in ("num_samples", "replacement")]
        seeded = getattr(own, "generator", None) is not None
        return (type(own).__name__, seeded, str(settings), zlib.crc32(repr(numbers).encode()))


def _own_sampler(sampler: Any) -> Any:
    """The sampler inside, if it is one of torch's own, alone or in torch's own `BatchSampler`; else None."""
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler if type(sampler) in _OWN_SAMPLERS else None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
