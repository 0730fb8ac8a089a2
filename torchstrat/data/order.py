"""The order of indices as a sampler draws it: rank 0's for every process of the job, and drawn again to resume a pass.

Torch's own samplers are *replayed*: rank 0 hands out the state of the random stream once per epoch, and every rank
draws for itself, when PyTorch would: a pass that is left early leaves the stream where it does there. Any other
sampler, or batch sampler, is drawn from on rank 0 alone and its indices are sent; when PyTorch would too, as it may
follow what the training does (by its losses, say). The other ranks' random streams move as rank 0's do. Both happen in
the caller's thread, at the same steps on every rank, so that neither random streams nor collectives depend on how fast
a rank is.

An order is not saved. Saved are the random states at its beginning, how many rows were handed out, and a checksum of
their indices. To go on, the sampler draws again from those states; indices are skipped, no row is read. Samplers with
``state_dict()`` and ``load_state_dict()`` are asked to go on by themselves.
"""

from __future__ import annotations

import copy
import itertools
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
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

from torchstrat.core.engine import Communicator
from torchstrat.core.errors import CommunicationError, InvalidArgumentError, UnsupportedError
from torchstrat.core.randomness import RandomGenerator, RandomStreams, generators_in, state_of
from torchstrat.data.own_draws import CommonDraws, Seeds, generators_of_data
from torchstrat.data.pipeline import len_of
from torchstrat.data.position import Place, Resume, generators_now
from torchstrat.data.sequence import Stateful, drawing_again, is_stateful, own_state

T = TypeVar("T")
Index = Any
"""What a sampler yields: a list of indices for a batch, or one index where the dataset makes the batches."""

_CHUNK = 4096


def stateful_part(sampler: object) -> Stateful | None:
    """The sampler, or the one that torch's `BatchSampler` groups, if it can say and set where it stands; else None."""
    candidates = (sampler, sampler.sampler) if type(sampler) is BatchSampler else (sampler,)
    return next((one for one in candidates if is_stateful(one)), None)


def rows_named(index: Index, grouped: bool) -> list[Any]:
    """The rows that an index names, one by one. ``grouped``: it is a batch's; else one that is no list or vector, such
    as a tuple, names one row (or whatever the dataset makes of it)."""
    if isinstance(index, list):
        return index
    if getattr(index, "ndim", 0) == 1:
        return list(index.tolist())
    return list(index) if grouped else [index]


def checksum_of(named: list[Any], before: int = 0) -> int:
    """A checksum of rows' indices, going on from that of the rows ``before``, however they are grouped in batches."""
    try:
        return zlib.crc32(array("q", named), before)
    except (TypeError, OverflowError):  # keys of another kind
        for row in named:
            before = zlib.crc32(array("q", [row]) if _is_whole(row) else repr(row).encode(), before)
        return before


def _is_whole(row: Any) -> bool:
    try:
        array("q", [row])
    except (TypeError, OverflowError):
        return False
    return True


class Draws:
    """The index batches of one pass, drawn as they are asked for.

    Args:
        sampler: the loader's batch sampler, or its sampler where the dataset makes the batches.
        streams: what it may draw from.
        grouped: whether an index is a batch of rows, as a batch sampler's is.
        resume: where to go on; None: at the beginning. `begin`, or else the first draw, then repeats what was drawn,
            and leaves the random streams as they are.

    Raises:
        InvalidArgumentError: in `begin`: the sampler drew something else than it had in the run that was saved.
    """

    def __init__(self, sampler: Any, streams: RandomStreams, grouped: bool, resume: Resume | None = None) -> None:
        self._sampler, self._streams, self._grouped, self._resume = sampler, streams, grouped, resume
        self._stateful = stateful_part(sampler)
        self.own_states: deque[tuple[object, bool]] | None = None if self._stateful is None else deque()
        """After each batch that was drawn and has not been counted yet, with whether it was the last; None for a
        sampler without ``state_dict()``."""
        self._ended = False
        self._drawing = threading.RLock()  # which may be in another thread, while this one saves where it stands
        self._at_first: dict[str, object] | None = None
        self._drawn, self._drawn_again = 0, 0
        self._is_exhausted = False  # asked for more than there is: with that, too, torch's own draw
        self.first_place = Place(own=self.own_state()) if resume is None else resume.place
        """Before the first batch. Known only after `begin`, where a pass goes on."""
        # Two moments: some samplers draw when they are opened, others when they are first asked, and in between a
        # DataLoader draws the seed of its workers.
        self._at_opening = streams.states() if resume is None else resume.beginning["at_opening"]
        self._batches: Iterator[Index] = iter(()) if resume is not None else self._opened()

    def __iter__(self) -> Iterator[Index]:
        return self

    def __next__(self) -> Index:
        with self._drawing:
            self.begin()
            if self._at_first is None:
                self._at_first = self._streams.states()
            try:
                index = next(self._batches)
            except StopIteration:
                self._is_exhausted = True
                raise
            if self._grouped and not isinstance(index, list | tuple | range | torch.Tensor | np.ndarray):
                index = list(index)  # it is looked at twice: here, and by who fetches the rows, or a part of them
            count = len(rows_named(index, self._grouped))
            self._drawn += count
            self._is_exhausted = type(self._sampler) is BatchSampler and count < self._sampler.batch_size
            if self.own_states is not None:
                self.own_states.append((self.own_state(), self._ended))
            return index

    def _opened(self) -> Iterator[Index]:
        """The sampler's batches. One that knows where it stands may begin anew with its end, within the last batch."""
        if self._stateful is None or self._stateful is self._sampler:
            return iter(self._sampler)
        return iter(BatchSampler(self._watched(), self._sampler.batch_size, self._sampler.drop_last))

    def _watched(self) -> Iterator[int]:
        yield from self._sampler.sampler
        self._ended = True

    def beginning(self) -> dict[str, object]:
        """What it takes to draw all of this again."""
        with self._drawing:
            if self._resume is not None:
                now = generators_now(self._streams) if self._resume.is_settled else {}
                return {**self._resume.beginning, **now}
            first = self._streams.own_states() if self._at_first is None else self._at_first
            drawn = -1 if self._at_first is None else max(self._drawn, self._drawn_again)
            found = {"at_opening": self._at_opening, "at_first": first, "drawn": drawn}
            return {**found, "exhausted": self._is_exhausted, **generators_now(self._streams)}

    def begin(self) -> None:
        """Go to where ``resume`` says, if it does; once."""
        resume, self._resume = self._resume, None
        if resume is None:
            return
        own = self._streams if self._stateful is None else RandomStreams(())
        with drawing_again(resume, own, whole=True):
            if self._stateful is not None:
                self._load(resume)
            elif resume.beginning["drawn"] < 0:
                self._streams.put(self._at_opening)
                self._batches = iter(self._sampler)
                self._streams.put(resume.beginning["at_first"])
            else:
                self._repeat(resume)

    def own_state(self) -> object:
        """What the sampler says of itself now, if it does."""
        return own_state(self._stateful)

    def _load(self, resume: Resume) -> None:
        """Its own generators are the sampler's affair; the shared streams are those of the beginning of the pass."""
        assert self._stateful is not None
        self._stateful.load_state_dict(copy.deepcopy(resume.place.own))
        self._streams.put_shared(self._at_opening)
        batches = iter(()) if resume.place.ended else self._opened()
        if resume.beginning["drawn"] >= 0:
            self._at_first = resume.beginning["at_first"]
            self._streams.put_shared(self._at_first)
            # Now, while these streams stand there: the first batch may be what draws the whole order.
            batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
        skipped, rest = _skip_batches(batches, resume.place.extra, self._grouped, resume.place.order)
        self._batches = itertools.chain(rest, batches)
        self._go_on_after(skipped, resume)

    def _repeat(self, resume: Resume) -> None:
        """Draw again what was drawn, and keep what was drawn and not handed out."""
        self._at_first = resume.beginning["at_first"]
        self._drawn_again = resume.beginning["drawn"]
        count, extra, drawn = resume.place.rows or 0, resume.place.extra, resume.beginning["drawn"]
        self._is_exhausted = resume.beginning.get("exhausted", False)
        if type(self._sampler) is BatchSampler:
            # Row by row, so that batches of another size begin with the next row.
            self._streams.put(self._at_first)
            rows = iter(self._sampler.sampler)
            self._require_same(_skip_rows(rows, count, 0), resume)
            skipped = _skip_rows(rows, extra, resume.place.order)
            ahead = list(itertools.islice(rows, None if self._is_exhausted else max(0, drawn - count - extra)))
            rest: Any = itertools.chain(ahead, rows)
            self._batches = iter(BatchSampler(rest, self._sampler.batch_size, self._sampler.drop_last))
        else:
            self._streams.put(self._at_opening)
            batches = iter(self._sampler)
            self._streams.put(self._at_first)
            found, left = _skip_batches(batches, count, self._grouped, 0)
            self._require_same(found, resume)
            batches = itertools.chain(left, batches)
            skipped, kept = _skip_batches(batches, extra, self._grouped, resume.place.order)
            reached = count + extra + sum(len(index) for index in kept)
            while (reached < drawn or self._is_exhausted) and (more := list(itertools.islice(batches, 1))):
                kept += more
                reached += len(rows_named(more[0], self._grouped))
            self._batches = itertools.chain(kept, batches)
        self._go_on_after(skipped, resume)

    def _go_on_after(self, extra: tuple[int, int], resume: Resume) -> None:
        """``extra``: the number and the checksum of the rows that were skipped beyond those of the place."""
        count = (resume.place.rows or 0) + extra[0]
        self._drawn = count
        self.first_place = resume.place._replace(rows=count, order=extra[1], extra=0)

    def _require_same(self, found: tuple[int, int], resume: Resume) -> None:
        if found != (resume.place.rows, resume.place.order):
            raise InvalidArgumentError(
                f"{type(self._sampler).__name__} does not draw again what it drew before: of the "
                f"{resume.place.rows} row(s) that were handed out in this pass when the data position was saved, it "
                f"repeats {'others' if found[0] == resume.place.rows else found[0]}. Give the sampler, the dataset "
                "and their settings of that run. A sampler can repeat itself if it draws from PyTorch's, Python's or "
                "NumPy's generator as the only one to do so during a pass, or from a generator in an attribute of "
                "its own, and counts nothing else; any other needs state_dict() and load_state_dict()."
            )


def _skip_rows(rows: Iterator[Any], count: int, order: int) -> tuple[int, int]:
    """Take ``count`` rows; how many there were, and the checksum that goes on from ``order``."""
    found = 0
    while chunk := list(itertools.islice(rows, min(_CHUNK, count - found))):
        found, order = found + len(chunk), checksum_of(chunk, order)
    return found, order


def _skip_batches(
    batches: Iterator[Index], count: int, grouped: bool, order: int
) -> tuple[tuple[int, int], list[Index]]:
    """`_skip_rows` for batches; with what is left of the last one, if it is larger, as a batch of its own."""
    found = 0
    while found < count and (taken := list(itertools.islice(batches, 1))):
        named = rows_named(taken[0], grouped)
        used = named[: count - found]
        found, order = found + len(used), checksum_of(used, order)
        if len(used) < len(named):
            return (found, order), [named[len(used) :]]
    return (found, order), []


class Counted:
    """Hands index batches on, and keeps the place after each of them until the batch has been read.

    Args:
        batches: of indices.
        first: the place before them, once the first has been drawn.
        grouped: as for `Draws`.
        draws: where they come from, if this process draws.
    """

    def __init__(
        self, batches: Iterator[Index], first: Callable[[], Place], grouped: bool, draws: Draws | None
    ) -> None:
        self._batches, self._first, self._grouped, self.draws = batches, first, grouped, draws
        self._last: Place | None = None
        self.places: deque[Place] = deque()

    def __iter__(self) -> Iterator[Index]:
        return self

    def __next__(self) -> Index:
        index = next(self._batches)
        last = self._first() if self._last is None else self._last
        named = rows_named(index, self._grouped)
        states = None if self.draws is None else self.draws.own_states
        own, ended = (None, False) if states is None else states.popleft()
        rows = (last.rows or 0) + last.extra + len(named)
        self._last = Place(last.batches + 1, rows, checksum_of(named, last.order), own, ended)
        self.places.append(self._last)
        return index


class Served(Iterator[T]):
    """Batches or steps, one for each index batch, with the place after the one that was given out last."""

    def __init__(self, items: Iterator[T], order: Counted, first: Place) -> None:
        self._items, self._order = items, order
        self._place = first

    def __next__(self) -> T:
        try:
            item = next(self._items)
        except StopIteration:
            draws = self._order.draws
            self._place = self._place._replace(own=None if draws is None else draws.own_state(), ended=True)
            raise
        self._place = self._order.places.popleft()
        return item

    def stand(self) -> Place:
        return self._place


_OWN_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def index_sampler(loader: DataLoader[object]) -> Any:
    """What the loader draws from: its batch sampler, or its sampler where the dataset makes the batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def streams_of(loader: DataLoader[object], owned: Sequence[RandomGenerator]) -> RandomStreams:
    """What the loader's sampler may draw from, and the generators that are ``owned`` by its data set. Torch's own
    samplers have one stream each; any other may use all."""
    own = _own_sampler(index_sampler(loader))
    found = [*generators_in(loader), *([] if own is not None else _generators_of(loader)), *owned]
    generators = list({id(one): one for one in found}.values())
    if own is None:
        return RandomStreams(own=generators)
    default = type(own) is not SequentialSampler and getattr(own, "generator", None) is None
    return RandomStreams(("torch",) if default else (), generators)


def sampler_name(loader: DataLoader[object]) -> str:
    """Which order it has, in words."""
    return " of ".join(type(sampler).__name__ for sampler in _grouped_samplers(loader))


def _grouped_samplers(loader: DataLoader[object]) -> Iterator[object]:
    """What it draws from, the sampler that this groups, and so on."""
    sampler: object = index_sampler(loader)
    for _ in range(8):
        if sampler is None:
            return
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _generators_of(loader: DataLoader[object]) -> list[RandomGenerator]:
    """Generators beside the process's that drawing indices can reach."""
    found = [one for sampler in _grouped_samplers(loader) for one in generators_of_data(sampler, None)]
    return list({id(one): one for one in found}.values())


def refuse_distributed_sampler(loader: DataLoader[object]) -> None:
    """A loader that is sharded by its sampler would be sharded twice."""
    if any(isinstance(sampler, DistributedSampler) for sampler in _grouped_samplers(loader)):
        raise UnsupportedError(
            "the DataLoader has a DistributedSampler, and distribute_dataset shards by itself: each replica would "
            "see a part of a part. Give the loader of the whole dataset (shuffle=True instead of the sampler, "
            "batch_size=<global batch>), or keep it with InputOptions(auto_shard_policy=AutoShardPolicy.OFF)."
        )


def refuse_indices_of_the_whole(loader: DataLoader[object]) -> bool:
    """Whether the loader shuffles. Raises `UnsupportedError` if its order is not one that part of the rows can have."""
    sampler = index_sampler(loader)
    own = _own_sampler(sampler)
    plain = isinstance(own, SequentialSampler) or (
        isinstance(own, RandomSampler) and not own.replacement and own.num_samples == len(own.data_source)
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
        streams: what drawing the order may draw from on this rank.
        resume: where to go on, equal on every rank; None: at the beginning.
        seeds: of what this rank's data set draws in this pass, for `seeds`.

    Raises:
        InvalidArgumentError: the ranks' datasets have different lengths, or they are to go on at different places.
    """

    def __init__(
        self,
        loader: DataLoader[object],
        communicator: Communicator,
        ahead: int,
        streams: RandomStreams,
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
        self.alike = all(other == self.seeds for _, _, _, other, _ in said)
        """Whether all ranks' random streams stood at the same place. The order moves all of them alike."""
        self.draws: Draws | None = None
        """On the ranks that draw, rank 0 among them."""
        self._common = CommonDraws([] if self._replay else _generators_of(loader))

        def open_draws() -> list[Index]:
            self.draws = Draws(sampler, streams, loader.batch_sampler is not None, resume)
            return []

        if self._replay:
            open_draws()
        else:
            self._from_rank_zero(open_draws)
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

    def beginning(self) -> dict[str, object]:
        """What it takes to draw this order again, on the ranks that draw."""
        return {} if self.draws is None else self.draws.beginning()

    def prepare(self, step: int) -> None:
        """Have enough indices at hand that no other thread has to draw during step ``step``."""
        while not self._ended and self._drawn < step + 1 + self._ahead:
            self._draw(step + 1 + self._ahead - self._drawn)

    def _draw(self, count: int) -> None:
        """``count``: how many are needed."""
        if not self._replay:
            batches = self._from_rank_zero(lambda: self._own_draws(count))
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

    def _from_rank_zero(self, draw: Callable[[], list[Index]]) -> list[Index]:
        """What ``draw`` gives there."""
        sent: tuple[object, ...] = ()
        failure: BaseException | None = None
        if self._communicator.rank == 0:
            try:
                with self._common.noted() as moves:
                    batches = draw()
                sent = (batches, None, moves)
            except Exception as error:  # the others wait for a message: they get one, then it is raised everywhere
                failure = error
                sent = ([], f"{type(error).__name__}: {error}", [])
        batches, text, moves = self._communicator.broadcast_object(sent, 0, "the indices of the next batches")
        if failure is not None:
            raise failure
        if text is not None:
            raise CommunicationError(f"the sampler of rank 0, which draws for all ranks, raised {text}")
        if self._communicator.rank:
            self._common.follow(moves)
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

    def _fingerprint(self, sampler: object) -> object:
        """Equal on ranks whose samplers draw alike from the same stream; None where that cannot be known."""
        own = self._own
        if own is None:
            return None
        numbers: list[object] = []
        if isinstance(own, WeightedRandomSampler):
            numbers = own.weights.tolist()
        elif isinstance(own, SubsetRandomSampler):
            numbers = list(own.indices)
        settings = [getattr(sampler, name, None) for name in ("batch_size", "drop_last")]
        settings += [len_of(own), len_of(getattr(own, "data_source", None)), getattr(own, "replacement", None)]
        seeded = getattr(own, "generator", None) is not None
        return (type(own).__name__, seeded, str(settings), zlib.crc32(repr(numbers).encode()))


def _own_sampler(sampler: object) -> object:
    """The sampler inside, if it is one of torch's own, alone or in torch's own `BatchSampler`; else None."""
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler if type(sampler) in _OWN_SAMPLERS else None
