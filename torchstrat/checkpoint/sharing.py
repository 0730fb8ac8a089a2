"""Who of several processes writes what, where more than one of them holds it.

Parameters and optimizer state are the same on every process that holds them, so each is written by one, and the bytes
are spread evenly. Anything else (buffers, counters) may differ from process to process, and what belongs together must
not be put together from several: it is written by the first that holds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchstrat.checkpoint.items import Writes
from torchstrat.checkpoint.pieces import Path, key_of
from torchstrat.core.errors import InvalidArgumentError

_SHARED_BYTES = 1 << 20
"""Smaller tensors are not worth another file: the first that holds them writes them."""

Place = tuple[Path, int]
"""What is written once: a path, and the row of the whole tensor at which the piece begins (-1: no tensor)."""


@dataclass(frozen=True)
class Offer:
    """What one process could write. ``like``: dtype and shape of the piece, which must agree; None for other values.
    ``shared``: any that holds it may write it; otherwise the first."""

    place: Place
    like: Any
    bytes: int
    shared: bool


def offers_of(writes: Writes) -> list[Offer]:
    offers = []
    for piece, tensor in writes.tensors:
        shared = piece.path in writes.replicated and tensor.nbytes >= _SHARED_BYTES
        like = (str(tensor.dtype), tuple(tensor.shape), piece.shape)
        offers.append(Offer((piece.path, piece.start), like, tensor.nbytes, shared))
    return offers + [Offer((path, -1), None, 0, shared=False) for path, _ in writes.values]


def share(offers: Sequence[Sequence[Offer]], sees: Sequence[bool], folder: str) -> list[set[Place]]:
    """For each rank what it writes. ``sees``: whether that rank sees ``folder``; only such ranks write.

    Every rank computes the same. Raises `InvalidArgumentError` for what only ranks hold that do not see the folder, and
    for one name of different things.
    """
    holders: dict[Place, list[int]] = defaultdict(list)
    known: dict[Place, Offer] = {}
    for rank, of_rank in enumerate(offers):
        for offer in of_rank:
            first = known.setdefault(offer.place, offer)
            if first.like != offer.like:
                raise InvalidArgumentError(
                    f"{key_of(offer.place[0])} is {_shown(first)} on rank {holders[offer.place][0]} and "
                    f"{_shown(offer)} on rank {rank}; a checkpoint needs the same objects on every rank."
                )
            holders[offer.place].append(rank)
    refuse_twice(place[0] for place in known)
    written: list[set[Place]] = [set() for _ in offers]
    loads = [0] * len(offers)
    able_for = {place: [rank for rank in ranks if sees[rank]] for place, ranks in holders.items()}
    # Those without a choice first, then the large ones: what comes later evens the loads out.
    choice = {place: len(able_for[place]) if offer.shared else 1 for place, offer in known.items()}
    for place, offer in sorted(
        known.items(), key=lambda item: (choice[item[0]], -item[1].bytes, key_of(item[0][0]), item[0][1])
    ):
        able = able_for[place]
        if not able:
            raise InvalidArgumentError(
                f"{key_of(place[0])} is held by rank {holders[place][0]} alone, which does not see {folder}. The path "
                "of a checkpoint must be on a file system that all processes share, under the same name."
            )
        rank = min(able, key=lambda one: (loads[one], one)) if offer.shared else able[0]
        written[rank].add(place)
        loads[rank] += offer.bytes
    return written


def selected(writes: Writes, places: set[Place]) -> Writes:
    """The part of ``writes`` that is in ``places``."""
    return Writes(
        [(piece, tensor) for piece, tensor in writes.tensors if (piece.path, piece.start) in places],
        [(path, value) for path, value in writes.values if (path, -1) in places],
    )


def refuse_twice(paths: Any) -> None:
    """Raise `InvalidArgumentError` where two paths have one name in the file."""
    by_key: dict[str, Path] = {}
    for path in paths:
        if by_key.setdefault(key_of(path), path) != path:
            raise InvalidArgumentError(
                f"two values of the checkpoint would both be called {key_of(path)}: {by_key[key_of(path)]} and {path}. "
                "Give their objects other names."
            )


def _shown(offer: Offer) -> str:
    return "no tensor" if offer.like is None else f"{offer.like[0]} {offer.like[1]}"
