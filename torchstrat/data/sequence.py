"""Data that can only be read one batch after the other: counting what was read, and getting back to a place in it.

A dataset with ``state_dict()`` and ``load_state_dict()`` of its own goes on by itself. Any other is opened from the
random states that it was opened from, and what was handed out is read and dropped: that gives the same rows if it
reads the same again, as a DataLoader assumes of it too.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Protocol, TypeGuard

from torch.nn.utils.rnn import PackedSequence

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError, TorchstratError
from torchstrat.core.randomness import RandomStreams
from torchstrat.data import rows, spec
from torchstrat.data.position import AHEAD, Place, Resume, Stream, generators_now
from torchstrat.data.streams import END

FIRST: Final = "first"
"""In the beginning of a pass that can only be read in sequence: what `FirstItems` has noted of it."""
_ITEMS = 16


class Stateful(Protocol):
    """What can say and set where its reading stands."""

    def state_dict(self) -> object: ...
    def load_state_dict(self, state: object, /) -> object: ...


def is_stateful(dataset: object) -> TypeGuard[Stateful]:
    """Whether it can say and set where its reading stands."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


class FirstItems:
    """What a pass began with, to tell whether it is read again: checksums of its first items.

    Args:
        name: of the dataset, for messages.
        resume: of the position that is gone on with.
        count: how many items are looked at.
    """

    def __init__(self, name: str, resume: Resume | None, count: int = _ITEMS) -> None:
        self._name, self._count = name, count
        saved = {} if resume is None else resume.beginning.get(FIRST, {})
        self._saved: list[int] = [*saved.get("sums", [])]
        self._kind: str | None = saved.get("kind")
        self._sums = list[int]()
        self._is_again = False

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """While items are passed over that had been handed out when the position was saved."""
        self._is_again = True
        try:
            yield
        finally:
            self._is_again = False

    def state(self) -> dict[str, object]:
        """For the beginning of a pass."""
        return {FIRST: {"kind": self._kind or "", "sums": [*(self._sums or self._saved)]}}

    def look(self, item: nest.Nest, kind: str) -> None:
        """At the next item; those of another ``kind``, such as batches of another size, are not compared.

        Raises:
            InvalidArgumentError: it is another one than there was.
        """
        number = len(self._sums)
        if number >= self._count:
            return
        alike = kind == self._kind and number < len(self._saved)
        saved = self._saved[number] if self._is_again and alike else None
        try:
            found = rows.checksum_by_keys(item)
            # An earlier torchstrat saved sums that went by the order of keys.
            is_other = saved not in (None, found) and saved != rows.checksum(item)
        except (TypeError, ValueError, RuntimeError):  # a class of nobody's, which need not have any bytes
            found, is_other = 0, saved not in (None, 0)
        if is_other:
            raise InvalidArgumentError(
                f"{self._name} does not read again what it read before: of what was handed out in this pass when the "
                f"data position was saved, item {number} is another one now. Give the dataset of that run. One that "
                "can only be read in sequence repeats itself if it draws from PyTorch's, Python's or NumPy's generator "
                "as the only one to do so during a pass, or from a generator that it holds, and counts nothing else, "
                "such as its passes. Give any other state_dict() and load_state_dict(), or leave the position out of "
                "what is restored, to start the pass over."
            )
        self._kind = kind
        self._sums.append(found)

    def watched(
        self, items: Iterator[nest.Nest], shown: Callable[[nest.Nest], tuple[nest.Nest, str] | None]
    ) -> Iterator[nest.Nest]:
        """``items``, of which the first are looked at: what ``shown`` has of each, if it has something."""
        return itertools.chain(self._looked_at(itertools.islice(items, self._count), shown), items)

    def _looked_at(
        self, items: Iterator[nest.Nest], shown: Callable[[nest.Nest], tuple[nest.Nest, str] | None]
    ) -> Iterator[nest.Nest]:
        for item in items:
            if (found := shown(item)) is not None:
                self.look(*found)
            yield item


def shown_batch(batch: nest.Nest) -> tuple[nest.Nest, str]:
    """What `FirstItems` looks at of a batch."""
    return rows.to_tensors(batch), f"batch of {rows_of(batch)}"


def in_sequence(
    read: Callable[[], Iterator[nest.Nest]],
    resume: Resume | None,
    streams: RandomStreams | None = None,
    stateful: Stateful | None = None,
    name: str = "",
) -> Stream[nest.Nest]:
    """Read what ``read`` opens, from the beginning or from ``resume`` on.

    Args:
        read: opens the batches. Eager where it has to draw from random streams.
        resume: where to go on.
        streams: what the data may be drawn from; None: nothing.
        stateful: the object that knows where it stands, if there is one; see `is_stateful`.
        name: of the dataset, if it may read other things the next time.
    """
    if not name or stateful is not None:
        return _in_sequence(read, resume, streams, stateful)
    first = FirstItems(name, resume, 1)
    with first.again():
        found = _in_sequence(lambda: first.watched(read(), shown_batch), resume, streams, stateful)
    return replace(found, beginning=lambda: {**found.beginning(), **first.state()})


def _in_sequence(
    read: Callable[[], Iterator[nest.Nest]],
    resume: Resume | None,
    streams: RandomStreams | None,
    stateful: Stateful | None,
) -> Stream[nest.Nest]:
    streams = RandomStreams(()) if streams is None else streams
    if resume is None:
        states = streams.states()
        place = Place(own=own_state(stateful))
        batches = read()
    else:
        states, place = resume.beginning["streams"], resume.place
        batches = _read_again(read, resume, streams, stateful)
    counted = sequentially(batches, place, stateful)
    return Stream(counted, counted.stand, lambda: {"streams": states, **generators_now(streams)})


@contextlib.contextmanager
def drawing_again(resume: Resume, streams: RandomStreams, whole: bool = False) -> Iterator[None]:
    """Around what the run that is gone on with has drawn already: random streams are as they were after it.

    Args:
        resume: of a position; one that does not say where generators of the user's objects stood leaves them as they
            are then.
        streams: with these generators.
        whole: whether also what was read ahead is drawn again, and kept. Where it is not, it is drawn once more later,
            so generators that may have moved for it stay where that begins.
    """
    own = streams.own_states()
    with spec.undisturbed_randomness():
        yield
    if resume.is_settled and (whole or not resume.beginning.get(AHEAD, False)):
        streams.put(own)


def own_state(stateful: Stateful | None) -> object:
    """A copy of what it says: it may go on changing the object that it returned."""
    return None if stateful is None else copy.deepcopy(stateful.state_dict())


@contextlib.contextmanager
def unmoved(stateful: Stateful | None) -> Iterator[None]:
    """Have a look at the data; what knows where it stands is put back there."""
    state = own_state(stateful)
    try:
        yield
    finally:
        if stateful is not None:
            stateful.load_state_dict(state)


def _read_again(
    read: Callable[[], Iterator[nest.Nest]], resume: Resume, streams: RandomStreams, stateful: Stateful | None
) -> Iterator[nest.Nest]:
    with drawing_again(resume, streams if stateful is None else RandomStreams(())):
        if resume.place.ended:
            streams.put(resume.beginning.get("own_now", {}))  # of a position of version 1
            if stateful is not None:
                stateful.load_state_dict(copy.deepcopy(resume.place.own))  # where its next pass begins
            return iter(())
        if stateful is not None and resume.place.own is not None:
            streams.put_shared(resume.beginning["streams"])
            stateful.load_state_dict(copy.deepcopy(resume.place.own))
            return skip_extra(read(), resume.place)
        streams.put(resume.beginning["streams"])
        return skip_extra(skip(read(), resume.place), resume.place)


def skip(batches: Iterator[nest.Nest], place: Place) -> Iterator[nest.Nest]:
    """Read and drop what comes before ``place``; of a batch in which it lies, the rest is handed out.

    Raises:
        InvalidArgumentError: the data ends before, or the rows of a batch in which it lies cannot be told apart.
    """
    missing = place.batches if place.rows is None else place.rows
    while missing > 0:
        batch = next(batches, END)
        if batch is END:
            raise InvalidArgumentError(
                f"the dataset has ended {missing} {'batch(es)' if place.rows is None else 'row(s)'} before the saved "
                "data position: it is shorter than when the position was saved. Give the dataset of that run, or leave "
                "the position out of what is restored."
            )
        count = 1 if place.rows is None else rows_of(batch)
        if count is not None and count <= missing:
            missing -= count
            continue
        if count is None or rows.common_rows(batch) != count:
            raise InvalidArgumentError(
                "the saved data position lies within a batch whose tensors do not have the same number of rows, which "
                "cannot be cut there. Go on with the batch size of the run that saved it."
            )
        return _first(rows.cut_batch(batch, missing, count), batches)
    return batches


def skip_extra(batches: Iterator[nest.Nest], place: Place) -> Iterator[nest.Nest]:
    """Drop the rows that were handed out of the batch that begins at ``place``."""
    return skip(batches, Place(rows=place.extra)) if place.extra else batches


def _first(batch: nest.Nest, others: Iterator[nest.Nest]) -> Iterator[nest.Nest]:
    yield batch
    yield from others


def rows_of(batch: nest.Nest) -> int | None:
    """Rows of a batch, as those of its first tensor; None where nobody can tell."""
    found = _rows_of_tensor(batch)
    if found is not None:
        return found
    try:
        return rows.common_rows(batch)
    except TorchstratError:
        return None


def _rows_of_tensor(batch: nest.Nest) -> int | None:
    if rows.is_array(batch):
        return rows.length(batch) if batch.ndim else None
    if nest.is_nested(batch) and not isinstance(batch, PackedSequence):
        for _, child in nest.children(batch):
            if (found := _rows_of_tensor(child)) is not None:
                return found
    return None


class Counting(Iterator[nest.Nest]):
    """Batches with the place after the one that was given out last.

    ``after(place, batch)`` is the place after a batch that was read at ``place``; `END` in place of a batch: after all.
    """

    def __init__(self, batches: Iterator[nest.Nest], first: Place, after: Callable[[Place, nest.Nest], Place]) -> None:
        self._batches, self._place, self._after = batches, first, after

    def __next__(self) -> nest.Nest:
        batch = next(self._batches, END)
        self._place = self._after(self._place, batch)
        if batch is END:
            raise StopIteration
        return batch

    def stand(self) -> Place:
        return self._place


def sequentially(batches: Iterator[nest.Nest], first: Place, stateful: Stateful | None = None) -> Counting:
    """Counts batches, and their rows while somebody can tell."""

    def after(before: Place, batch: nest.Nest) -> Place:
        if batch is END:
            own = before.own if before.ended else own_state(stateful)
            return Place(before.batches, before.rows, own=own, ended=True)
        count = None if before.rows is None else rows_of(batch)
        total = None if before.rows is None or count is None else before.rows + before.extra + count
        return Place(before.batches + 1, total, own=own_state(stateful))

    return Counting(batches, first, after)
