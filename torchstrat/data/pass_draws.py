"""From which random streams a loader's data set draws in one pass that several processes make, each its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchstrat.data.order import IndexOrder
from torchstrat.data.own_draws import (
    OwnDraws,
    Seeds,
    draws_nothing,
    leave_for_next_pass,
    next_of,
    seeds_of_pass,
    stream_seed,
)
from torchstrat.data.position import Resume
from torchstrat.data.random_states import RandomStreams


class PassDraws:
    """Decides it for one pass.

    Where each process reads its own rows, every replica has streams of its own; where each reads a pipeline of its own,
    every pipeline has. Where each reads whole batches, all draw the same: from the process's streams, as plain PyTorch
    does, if those stand at the same place on all ranks; else from streams made for it.

    Args:
        loader: the user's.
        owned: generators that belong to its data set.
        whole: whether every process reads whole batches.
        resume: where to go on; generators of the data set are put where they stood.
    """

    def __init__(self, loader: DataLoader[Any], owned: Sequence[Any], whole: bool, resume: Resume | None) -> None:
        self._loader, self._owned, self._whole, self._resume = loader, owned, whole, resume
        beginning = {} if resume is None else resume.beginning
        RandomStreams((), owned).put(beginning.get("data", {}))
        self._had_own = bool(beginning.get("draws"))
        self._here = loader.num_workers == 0 and not draws_nothing(loader)
        self.seeds: Seeds | None = None
        """This rank's, to be told to the others where that matters."""
        if self._had_own:
            self.seeds = (beginning["draws"][0], beginning["draws"][1])
        elif whole or self._here:
            self.seeds = seeds_of_pass(loader.generator, owned)

    def begin(self, order: IndexOrder, rank: int) -> tuple[OwnDraws | None, torch.Generator | None]:
        """What reading a batch draws from if not from the process's streams, and what the loader draws the seed of its
        workers from."""
        self.seeds = order.seeds
        shared = self._whole and order.alike and not self._had_own
        if shared:
            self.seeds = None
            return None, self._loader.generator
        if self._whole and self.seeds is not None and self._loader.num_workers:
            return None, torch.Generator().manual_seed(stream_seed(self.seeds[0], self.first))
        return self._own(), generator_of_workers(self._loader, rank)

    def begin_alone(self, pipeline: int) -> tuple[OwnDraws | None, torch.Generator | None]:
        """`begin`, where no other process reads the same."""
        return self._own(), generator_of_workers(self._loader, pipeline)

    def _own(self) -> OwnDraws | None:
        if not self._here or self.seeds is None:
            return None
        if self._resume is None:
            leave_for_next_pass(self._owned)
        return OwnDraws(self.seeds, self._owned)

    @property
    def first(self) -> int:
        """The number of the first batch that is read."""
        return 0 if self._resume is None else self._resume.place.batches

    @property
    def here(self) -> bool:
        """Whether batches have to be taken in the caller's thread."""
        return self._here


def generator_of_workers(loader: DataLoader[Any], number: int) -> torch.Generator | None:
    """What the loader of one of several processes or pipelines draws the seed of its workers from: the first one's from
    what the user's does. Where the others' is another, `draw_for_workers` has to be called when torch draws."""
    users: torch.Generator | None = loader.generator
    if not loader.num_workers or not number:
        return users
    return torch.Generator().manual_seed((next_of(users) + number) % 2**63)


def draw_for_workers(loader: DataLoader[Any]) -> None:
    """As torch does, so that random streams stay equal on all ranks."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def beginning_with(
    of_order: Callable[[], dict[str, object]], owned: Sequence[object], seeds: Seeds | None = None
) -> Callable[[], dict[str, Any]]:
    """What it takes to draw the order again, and what the data set draws. It outlives the loader's workers."""
    data = RandomStreams((), owned)
    return lambda: {**of_order(), "data": data.own_states(), "draws": seeds}
