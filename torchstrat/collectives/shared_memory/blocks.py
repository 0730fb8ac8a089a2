"""Where each rank writes what the others read, and which of two turns it is.

Every rank has two blocks. An exchange writes the block of its turn, meets the others, and reads theirs; the next one
takes the other block. So one meeting is enough: whoever writes a block for the second time has since met everybody
who read it the first time.
"""

from __future__ import annotations

import torch

from torchstrat.collectives.shared_memory.lockstep import LINE_BYTES, Lockstep
from torchstrat.collectives.shared_memory.neighbours import Neighbours

BLOCK_BYTES = 512 << 10
"""Of one rank and turn. Half of a usual second-level cache, so that what is added up is still near."""

_PAGE_BYTES = 4096


class Blocks:
    """The blocks of all ranks. Every rank makes one. Raises `NotNeighboursError` on all of them."""

    def __init__(self, neighbours: Neighbours, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._start = -(-size * LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES
        self._segment = neighbours.share(self._start + 2 * size * BLOCK_BYTES)
        self._segment.close()
        self._memory = memoryview(self._segment.mapping)
        self.rows = [[self._row_of(turn, other) for other in range(size)] for turn in (0, 1)]
        """Everybody's blocks, by turn."""
        self._tensors: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self.lockstep = Lockstep(self._segment, rank, size, neighbours.processes)
        self._turn = 0

    def _offset(self, turn: int, rank: int) -> int:
        return self._start + (turn * self.size + rank) * BLOCK_BYTES

    def _row_of(self, turn: int, rank: int) -> memoryview:
        start = self._offset(turn, rank)
        return self._memory[start : start + BLOCK_BYTES]

    def take_turn(self) -> list[memoryview]:
        """Everybody's block of the turn that begins."""
        return self.rows[self.take_turns(1)]

    def take_turn_of(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The same as flat tensors."""
        return self.both_turns_of(dtype)[self.take_turns(1)]

    def take_turns(self, number: int) -> int:
        """The first of ``number`` turns that begin, one after the other; they alternate between 0 and 1."""
        first = self._turn
        self._turn = (first + number) & 1
        return first

    def both_turns_of(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """`rows` as flat tensors."""
        if dtype not in self._tensors:
            count = BLOCK_BYTES // dtype.itemsize
            self._tensors[dtype] = [
                [self._segment.tensor(dtype, self._offset(turn, rank), count) for rank in range(self.size)]
                for turn in (0, 1)
            ]
        return self._tensors[dtype]
