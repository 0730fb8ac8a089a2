"""The order of indices, which is rank 0's: what its sampler draws, every process of the job gets.

Torch's own samplers are *replayed*: rank 0 hands out the state of the random stream once per epoch, and every rank
draws for itself, when PyTorch would: a pass that is left early leaves the stream where it does there. Any other
sampler, or batch sampler, is drawn from on rank 0 alone and its indices are sent, a few batches at a time. Both happen
in the caller's thread, at the same steps on every rank, so that neither random streams nor collectives depend on how
fast a rank is.
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

from torchstrat.core.errors import CommunicationError, InvalidArgumentError, UnsupportedError
from torchstrat.core.randomness import state_of
from torchstrat.data.draws import Draws, Index
from torchstrat.data.own_draws import Seeds
from torchstrat.data.position import Place, Resume
from torchstrat.data.random_states import RandomStreams, generators_in
from torchstrat.distributed.collectives.communicator import Communicator

BATCHES_PER_MESSAGE = 16
"""Enough to make the message's latency not count; few enough for samplers that follow the training."""

_OWN_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What the loader draws from: its batch sampler, or its sampler where the dataset makes the batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def streams_of(loader: DataLoader[Any]) -> RandomStreams:
    """What the loader's sampler may draw from. Torch's own samplers have one stream each; any other may use all."""
    own = _own_sampler(index_sampler(loader))
    if own is None:
        return RandomStreams(own=generators_in(loader))
    default = type(own) is not SequentialSampler and getattr(own, "generator", None) is None
    return RandomStreams(("torch",) if default else (), generators_in(loader))


def sampler_name(loader: DataLoader[Any]) -> str:
    """Which order it has, in words."""
    names: list[str] = []
    sampler = index_sampler(loader)
    while sampler is not None and len(names) < 8:
        names.append(type(sampler).__name__)
        sampler = getattr(sampler, "sampler", None)
    return " of ".join(names)


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


def refuse_indices_of_the_whole(loader: DataLoader[Any]) -> bool:
    """Whether the loader shuffles. Raises `UnsupportedError` if its order is not one that part of the rows can have."""
    sampler = index_sampler(loader)
    own = _own_sampler(sampler)
    plain = isinstance(own, SequentialSampler) or (
        isinstance(own, RandomSampler) and not own.replacement and own._num_samples is None
    )
    if not plain or (loader.batch_sampler is not None and type(sampler) is not BatchSampler):
        raise UnsupportedError(
            f"under AutoShardPolicy.HINT each process reads the rows that the data set's shard() gives it, and the "
            f"DataLoader has a sampler ({sampler_name(loader)}) that draws indices of the whole. Give the loader "
            "batch_size and shuffle instead, or use AutoShardPolicy.DATA."
        )
    return isinstance(own, RandomSampler)


class IndexOrder:
    """One epoch's order of a `DataLoader`, the same in every process. Collective: all ranks make one together.

    Args:
        loader: this rank's loader, of equal settings on every rank.
        communicator: the way to the others.
        ahead: how many batches beyond the current step this rank may ask for.
        resume: where to go on, equal on every rank; None: at the beginning.
        seeds: of what this rank's data set draws in this pass, for `seeds`.

    Raises:
        InvalidArgumentError: the ranks' datasets have different lengths, or they are to go on at different places.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        communicator: Communicator,
        ahead: int,
        resume: Resume | None = None,
        seeds: Seeds | None = None,
    ) -> None:
        self._communicator = communicator
        self._own = _own_sampler(index_sampler(loader))
        sampler = index_sampler(loader)
        self._first_place = Place() if resume is None else resume.place
        start = (self._first_place.rows, self._first_place.order, self._first_place.extra)
        said = communicator.all_gather_object(
            (len_of(loader.dataset), self._fingerprint(sampler), ahead, seeds, start), "the length of a dataset"
        )
        lengths = [length for length, *_ in said]
        if len(set(lengths)) > 1:
            raise InvalidArgumentError(
                f"the dataset has {lengths} items on ranks 0 to {len(lengths) - 1}: every rank needs the whole, equal "
                "dataset. Data that is sharded already needs InputOptions(auto_shard_policy=AutoShardPolicy.OFF)."
            )
        starts = [place for *_, place in said]
        if len(set(starts)) > 1:
            raise InvalidArgumentError(
                f"ranks 0 to {len(said) - 1} go on after {[rows for rows, *_ in starts]} rows of the pass: every rank "
                "has to load the same data position."
            )
        self._replay = self._own is not None and len({fingerprint for _, fingerprint, *_ in said}) == 1
        self._ahead = max(ahead for _, _, ahead, *_ in said)
        self.seeds = said[0][3]
        """Rank 0's."""
        self.alike = self._replay and all(other == self.seeds for _, _, _, other, _ in said)
        """Whether all ranks' random streams stood at the same place, and the order moves all of them alike."""
        self.draws: Draws | None = None
        """On the ranks that draw, rank 0 among them."""
        if self._replay or communicator.rank == 0:
            self.draws = Draws(sampler, streams_of(loader), loader.batch_sampler is not None, resume)
        # Where draws are repeated, every rank knows the stream that they were made from.
        self._seeded = resume is not None and resume.beginning["drawn"] >= 0
        self._pending: deque[Index] = deque()
        self._first, self._ended, self._drawn = True, False, 0

    def __iter__(self) -> Iterator[Index]:
        while True:
            if not self._pending and not self._ended:
                self._draw(1)
            if not self._pending:
                return
            yield self._pending.popleft()

    def begin(self) -> None:
        """Draw again what was drawn before, where every rank does. Rank 0 alone does it when the others listen."""
        if self._replay and self.draws is not None:
            self.draws.begin()

    def place_before(self) -> Place:
        """Where this pass goes on."""
        return self._first_place if self.draws is None else self.draws.first_place

    def beginning(self) -> dict[str, Any]:
        """What it takes to draw this order again, on the ranks that draw."""
        return {} if self.draws is None else self.draws.beginning()

    def prepare(self, step: int) -> None:
        """Have enough indices at hand that no other thread has to draw during step ``step``."""
        while not self._ended and self._drawn < step + 1 + self._ahead:
            self._draw(step + 1 + self._ahead - self._drawn)

    def _draw(self, count: int) -> None:
        """``count``: how many are needed. More are sent at a time, for the message's sake."""
        if not self._replay:
            count, batches = BATCHES_PER_MESSAGE, self._receive()
        elif self._first and not self._seeded:
            batches = self._replay_first(count)
        else:
            batches = self._own_draws(count)
        self._first = False
        self._ended = len(batches) < count
        self._drawn += len(batches)
        self._pending.extend(batches)

    def _own_draws(self, count: int) -> list[Index]:
        """The next ones of this rank's sampler; fewer at its end."""
        return list(itertools.islice(self.draws or (), count))

    def _receive(self) -> list[Index]:
        message: tuple[list[Index], BaseException | None] = ([], None)
        if self.draws is not None:
            drawn: list[Index] = []
            try:
                drawn.extend(itertools.islice(self.draws, BATCHES_PER_MESSAGE))
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

    def _replay_first(self, count: int) -> list[Index]:
        """The first draws, made on rank 0's random stream: the only ones that torch's samplers take from outside."""
        if type(self._own) is SequentialSampler:
            return self._own_draws(count)
        stream = getattr(self._own, "generator", None)
        generator = torch.default_generator if stream is None else stream
        before = state_of(generator)
        state = self._communicator.broadcast_object(before, 0, "the state of the sampler's random stream")
        generator.set_state(state)
        batches = self._own_draws(count)
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


def len_of(dataset: Any) -> int | None:
    """None where it does not say."""
    try:
        return len(dataset)
    except TypeError:
        return None
