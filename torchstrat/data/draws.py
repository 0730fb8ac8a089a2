"""The order of indices as a sampler draws it: counted as it is handed on, and drawn again to go on within a pass.

An order is not saved. Saved are the random states at its beginning, how many rows were handed out, and a checksum of
their indices. To go on, the sampler draws again from those states; indices are skipped, no row is read. Samplers with
``state_dict()`` and ``load_state_dict()`` are asked to go on by themselves.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.data import spec
from torchstrat.data.position import Place, Resume
from torchstrat.data.random_states import RandomStreams

Index = Any
"""What a sampler yields: a list of indices for a batch, or one index where the dataset makes the batches."""

_CHUNK = 4096


def stateful_part(sampler: Any) -> Any:
    """The sampler, or the one that torch's `BatchSampler` groups, if it can say and set where it stands; else None."""
    candidates = (sampler, sampler.sampler) if type(sampler) is BatchSampler else (sampler,)
    for one in candidates:
        if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)):
            return one
    return None


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
            and leaves the shared random streams as they are.

    Raises:
        InvalidArgumentError: in `begin`: the sampler drew something else than it had in the run that was saved.
    """

    def __init__(self, sampler: Any, streams: RandomStreams, grouped: bool, resume: Resume | None = None) -> None:
        self._sampler, self._streams, self._grouped, self._resume = sampler, streams, grouped, resume
        self._stateful = stateful_part(sampler)
        self.own_states: deque[tuple[Any, bool]] | None = None if self._stateful is None else deque()
        """After each batch that was drawn and has not been counted yet, with whether it was the last; None for a
        sampler without ``state_dict()``."""
        self._ended = False
        self._at_first: dict[str, Any] | None = None
        self._drawn, self._drawn_again = 0, 0
        self.first_place = Place(own=self.own_state()) if resume is None else resume.place
        """Before the first batch. Known only after `begin`, where a pass goes on."""
        # Two moments: some samplers draw when they are opened, others when they are first asked, and in between a
        # DataLoader draws the seed of its workers.
        self._at_opening = streams.states() if resume is None else resume.beginning["at_opening"]
        self._batches: Iterator[Index] = iter(()) if resume is not None else self._opened()

    def __iter__(self) -> Iterator[Index]:
        return self

    def __next__(self) -> Index:
        self.begin()
        if self._at_first is None:
            self._at_first = self._streams.states()
        index = next(self._batches)
        if self._grouped and not hasattr(index, "__len__"):
            index = list(index)  # it is looked at twice: here, and by who fetches the rows
        self._drawn += len(rows_named(index, self._grouped))
        if self.own_states is not None:
            self.own_states.append((self.own_state(), self._ended))
        return index

    def _opened(self) -> Iterator[Index]:
        """The sampler's batches. One that knows where it stands may begin anew with its end, within the last batch."""
        if self._stateful is None or self._stateful is self._sampler:
            return iter(self._sampler)
        return iter(BatchSampler(self._watched(), self._sampler.batch_size, self._sampler.drop_last))

    def _watched(self) -> Iterator[Any]:
        yield from self._sampler.sampler
        self._ended = True

    def beginning(self) -> dict[str, Any]:
        """What it takes to draw all of this again."""
        if self._resume is not None:
            return dict(self._resume.beginning)
        first = self._streams.own_states() if self._at_first is None else self._at_first
        drawn = -1 if self._at_first is None else max(self._drawn, self._drawn_again)
        return {"at_opening": self._at_opening, "at_first": first, "drawn": drawn}

    def begin(self) -> None:
        """Go to where ``resume`` says, if it does; once."""
        resume, self._resume = self._resume, None
        if resume is None:
            return
        with spec.undisturbed_randomness():
            if self._stateful is not None:
                self._load(resume)
            elif resume.beginning["drawn"] < 0:
                self._streams.put(self._at_opening)
                self._batches = iter(self._sampler)
                self._streams.put(resume.beginning["at_first"])
            else:
                self._repeat(resume)

    def own_state(self) -> Any:
        """What the sampler says of itself now, if it does."""
        # A copy: what a sampler hands out here may be what it goes on changing.
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())

    def _load(self, resume: Resume) -> None:
        """Its own generators are the sampler's affair; the shared streams are those of the beginning of the pass."""
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
        if type(self._sampler) is BatchSampler:
            # Row by row, so that batches of another size begin with the next row.
            self._streams.put(self._at_first)
            rows = iter(self._sampler.sampler)
            self._require_same(_skip_rows(rows, count, 0), resume)
            skipped = _skip_rows(rows, extra, resume.place.order)
            ahead = list(itertools.islice(rows, max(0, drawn - count - extra)))
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
            while reached < drawn and (more := list(itertools.islice(batches, 1))):
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


class Served:
    """Batches or steps, one for each index batch, with the place after the one that was given out last."""

    def __init__(self, items: Iterator[Any], order: Counted, first: Place) -> None:
        self._items, self._order = items, order
        self._place = first

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
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
