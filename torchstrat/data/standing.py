"""Which place in its streams each step leads to, as steps are made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchstrat.core import nest
from torchstrat.data.layout import InputLayout
from torchstrat.data.position import Place, Saved, Stream
from torchstrat.data.readings import require_aligned
from torchstrat.data.streams import InferredBatch, Step, fixed_size_steps

Places = Mapping[int, Place]
"""By the number of the stream."""


@dataclass
class Cycle:
    """What the sizes of the fixed-size rule depend on besides the rows."""

    num_workers: int = 0
    local_replicas: int = 0
    declared: int = 0
    inferred: InferredBatch = field(default_factory=InferredBatch)

    @property
    def settings(self) -> tuple[int, int, int]:
        return self.num_workers, self.local_replicas, self.declared

    def plain(self) -> tuple[int, ...]:
        return (*self.settings, -1 if self.inferred.rows is None else self.inferred.rows)


class Standing(Protocol):
    """Follows the streams of one pass in this process. It keeps them open, and so is kept only where steps are made."""

    streams: Mapping[int, Stream[Any]]
    steps_before: int
    """Of this pass, when the streams were opened."""
    cycle: Cycle

    def before(self) -> Places:
        """Before the first step."""

    def after(self, step: Step) -> Places:
        """After ``step``, which has just been made. Called for every step, where it is made."""

    def at_end(self) -> Places:
        """After the last step, when there was found to be no other."""


class StepPerItem:
    """Every step takes whole items of the streams, and no more than it needs."""

    def __init__(self, streams: Mapping[int, Stream[Any]], saved: Saved | None) -> None:
        self.streams = streams
        self.steps_before = 0 if saved is None else saved.steps
        self.cycle = Cycle()

    def before(self) -> Places:
        return {number: stream.stand() for number, stream in self.streams.items()}

    def after(self, step: Step) -> Places:
        return self.before()

    def at_end(self) -> Places:
        return _ended(self.streams)


class FixedSizes:
    """Steps by the fixed-size rule, which cut what the streams give, one stream after the other, across batches.

    Args:
        streams: this process's; usually one, several to go on with those of a larger number of processes.
        declared: rows of a full batch.
        layout: the replicas.
        saved: the position from which the streams go on, if they do.
    """

    def __init__(
        self, streams: Mapping[int, Stream[nest.Nest]], declared: int | None, layout: InputLayout, saved: Saved | None
    ) -> None:
        self.streams = streams
        self._layout = layout
        self._by_rows = layout.num_replicas > 1
        self._places = {number: stream.stand() for number, stream in streams.items()}
        self._borders: deque[tuple[int, int, Place]] = deque()  # what had been read by then, stream, place
        self._read, self._taken, self._passed = 0, 0, 0
        self.cycle = Cycle(layout.num_workers, len(layout.local_replicas), declared or 0)
        self.steps_before = 0
        if saved is not None and saved.cycle[:3] == self.cycle.settings:
            self.steps_before = saved.steps
            self.cycle.inferred.rows = saved.cycle[3] if saved.cycle[3] >= 0 else None

    def steps(self) -> Iterator[Step]:
        """Cut the streams. Once; not kept here, so that whoever takes the steps can let go of the streams."""
        declared = self.cycle.declared
        return fixed_size_steps(self._batches(), declared, self._layout, self.steps_before, self.cycle.inferred)

    def _batches(self) -> Iterator[nest.Nest]:
        for number, stream in self.streams.items():
            for batch in stream.items:
                self._read += require_aligned(batch) if self._by_rows else 1
                self._borders.append((self._read, number, stream.stand()))
                yield batch
            self._borders.append((self._read, number, stream.stand()))

    def before(self) -> Places:
        return dict(self._places)

    def after(self, step: Step) -> Places:
        self._taken += sum(step.rows) if self._by_rows else 1
        while self._borders and self._borders[0][0] <= self._taken:
            self._passed, number, place = self._borders.popleft()
            self._places[number] = place
        if self._taken == self._passed:
            return dict(self._places)
        number = self._borders[0][1]
        begun = self._places[number]
        # The batch is read again when this place is gone on from; these rows of it are then left out.
        return {**self._places, number: begun._replace(extra=begun.extra + self._taken - self._passed)}

    def at_end(self) -> Places:
        return _ended(self.streams)


def _ended(streams: Mapping[int, Stream[Any]]) -> Places:
    return {number: stream.stand()._replace(ended=True) for number, stream in streams.items()}
