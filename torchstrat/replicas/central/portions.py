"""Who steps what: a portion for each rank, of equally many bytes. Pure: every rank computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_CUT_ELEMENTS = 256
"""Parameters are cut at multiples of this. Kernels take elements in groups of vectors, at most 128 at a time, and what
is left over one by one, which may round another way: so the same elements are left over as in a step of the whole."""


class Work(NamedTuple):
    """One parameter of a step. ``may_be_cut``: its elements may be stepped by several ranks."""

    numel: int
    itemsize: int
    may_be_cut: bool

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_cut(self) -> bool:
        return self.may_be_cut and self.numel >= 2 * _CUT_ELEMENTS


class Part(NamedTuple):
    """Elements ``[start, stop)`` of parameter number ``number``."""

    number: int
    start: int
    stop: int


def portions(works: Sequence[Work], ranks: int) -> list[list[Part]]:
    """For each rank its parts, in the order of the parameters. Every element is in one."""
    shares: list[list[Part]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    whole = [(work.bytes, index) for index, work in enumerate(works) if not work.is_cut]
    for size, index in sorted(whole, key=lambda one: (-one[0], one[1])):
        rank = loads.index(min(loads))
        shares[rank].append(Part(index, 0, works[index].numel))
        loads[rank] += size
    each = -(-sum(work.bytes for work in works) // ranks)
    _cut(works, [each - load for load in loads], shares)
    return [sorted(share) for share in shares]


def _cut(works: Sequence[Work], room: list[int], shares: list[list[Part]]) -> None:
    """One rank after the other takes as much of the row of parameters as it has room for, the last one the rest."""
    rank = 0
    for index, work in enumerate(works):
        start = 0
        while work.is_cut and start < work.numel:
            rest = work.numel - start
            count = min(rest, max(0, round(room[rank] / work.itemsize / _CUT_ELEMENTS)) * _CUT_ELEMENTS)
            if rank == len(room) - 1:
                count = rest
            if count:
                shares[rank].append(Part(index, start, start + count))
                room[rank] -= count * work.itemsize
                start += count
            if count < rest:
                rank += 1
