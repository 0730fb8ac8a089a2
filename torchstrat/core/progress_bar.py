"""`progress`: a bar for the loop over a dataset."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Generic, TypeVar

from torchstrat.core import context
from torchstrat.core.waiting import is_terminal

ElementT = TypeVar("ElementT")

_is_told = False
"""Whether the line about the missing package has been written."""


def progress(elements: Iterable[ElementT], description: str | None = None) -> Progress[ElementT]:
    """Show on the terminal how far a loop has come, and how fast it goes::

        for epoch in range(epochs):
            for batch in ts.progress(batches, f"epoch {epoch}"):
                strategy.run(train_step, args=(batch,))

    The bar is that of tqdm, ``pip install 'torchstrat[progress]'``; without it one line says so, and the loop runs.
    Nothing is shown where standard error is no terminal. Of several processes the chief shows the bar. On parameter
    servers, where the loop schedules functions, it counts those that were scheduled.

    Args:
        elements: a distributed or a leased dataset, a `DataLoader`, or any other iterable. They are not read ahead, and
            each ``for`` over the result begins a new pass.
        description: stands before the bar.
    """
    return Progress(elements, description)


class Progress(Generic[ElementT]):
    """What `progress` returns: the same elements."""

    def __init__(self, elements: Iterable[ElementT], description: str | None) -> None:
        self._elements, self._description = elements, description

    def __iter__(self) -> Iterator[ElementT]:
        if not (is_terminal(sys.stderr) and _is_chief(self._elements)):
            yield from self._elements
            return
        try:
            from tqdm import tqdm
        except ImportError:
            _tell_what_is_missing()
            yield from self._elements
            return
        with tqdm(total=_length(self._elements), desc=self._description, file=sys.stderr, dynamic_ncols=True) as bar:
            for element in self._elements:
                yield element
                bar.update()


def _is_chief(elements: object) -> bool:
    own = context.strategy_of(elements)
    strategies = [own] if own is not None else list(context.strategies)
    return all(strategy.is_chief for strategy in strategies)


def _length(elements: object) -> int | None:
    """Where it is known; a dataset's cardinality is negative where it is not."""
    cardinality = getattr(elements, "cardinality", None)
    if isinstance(cardinality, int):
        return cardinality if cardinality >= 0 else None
    try:
        return len(elements) if isinstance(elements, Sized) else None
    except TypeError:  # a DataLoader of an iterable dataset
        return None


def _tell_what_is_missing() -> None:
    global _is_told
    if not _is_told:
        _is_told = True
        sys.stderr.write("torchstrat: there is no progress bar without tqdm: pip install 'torchstrat[progress]'\n")
