"""The sum of every rank's tensors, made where they lie.

Tensors of one dtype are read as one long row, which is cut into chunks of a block. Of each chunk every rank owns a
portion: the others publish theirs of it, the owner adds them up in the order of ranks and publishes the sum. So each
rank adds up an equal part, and every one has the same bits. Chunks overlap: one is published while the one before is
added up, and both with one meeting. What is small is published whole and added up by everybody.

Where each rank needs but its own elements of the sum, the second half is left out: nothing is published by the owner.

Every rank has two blocks. An exchange writes the block of its turn, meets the others, and reads theirs; the next one
takes the other block. So one meeting is enough: whoever writes a block for the second time has since met everybody who
read it the first time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from torchstrat.core._torch_private import foreach_add_, foreach_copy_, foreach_mul_
from torchstrat.distributed.collectives.shared_memory.lockstep import LINE_BYTES, Lockstep
from torchstrat.distributed.collectives.shared_memory.neighbours import Neighbours

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


SMALL_BYTES = 64 << 10
"""Up to this size together, adding up everything on every rank beats meeting more often."""

_KEPT_ROWS = 32
_ALIGNMENT_BYTES = 64  # of portions: ranks that write one cache line in turns slow each other down


class Piece(NamedTuple):
    """Elements ``[start, stop)`` of tensor number ``tensor``."""

    tensor: int
    start: int
    stop: int


class Portion(NamedTuple):
    """What one rank owns of a chunk: elements ``[start, stop)`` of a block, and which of the tensors."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]


Chunk = tuple[Portion, ...]


@functools.lru_cache(maxsize=32)
def make_chunks(numels: tuple[int, ...], itemsize: int, size: int) -> tuple[Chunk, ...]:
    """Tensors of these lengths, one after the other, as chunks; a portion per rank in each. Every element is in one.

    The portions of a rank have one place in all chunks: of two chunks that use the same blocks, the earlier may still
    be read while the later is written.
    """
    step = max(1, _ALIGNMENT_BYTES // itemsize)
    room = BLOCK_BYTES // itemsize // size // step * step
    total = sum(numels)
    chunks = []
    for begin in range(0, total, room * size):
        count = min(room * size, total - begin)
        share = -(-count // (size * step)) * step
        bounds = [min(rank * share, count) for rank in range(size)] + [count]
        portions = enumerate(itertools.pairwise(bounds))
        chunks.append(tuple(_portion(numels, begin + low, begin + high, rank * room) for rank, (low, high) in portions))
    return tuple(chunks)


@functools.lru_cache(maxsize=32)
def make_owned_chunks(owned: tuple[tuple[Piece, ...], ...], itemsize: int) -> tuple[Chunk, ...]:
    """The same where each rank owns pieces that are given, one tuple per rank, in any order."""
    size = len(owned)
    step = max(1, _ALIGNMENT_BYTES // itemsize)
    room = BLOCK_BYTES // itemsize // size // step * step
    rows = [list(_filled(pieces, room)) for pieces in owned]
    chunks = []
    for number in range(max(map(len, rows))):
        parts = [row[number] if number < len(row) else () for row in rows]
        sizes = [tuple(piece.stop - piece.start for piece in part) for part in parts]
        chunks.append(
            tuple(
                Portion(rank * room, rank * room + sum(counts), part, counts)
                for rank, (part, counts) in enumerate(zip(parts, sizes, strict=True))
            )
        )
    return tuple(chunks)


def _filled(pieces: Sequence[Piece], room: int) -> Iterator[tuple[Piece, ...]]:
    """Cut such that groups of them have ``room`` elements each, but for the last group."""
    group: list[Piece] = []
    left = room
    for tensor, start, stop in pieces:
        while start < stop:
            count = min(left, stop - start)
            group.append(Piece(tensor, start, start + count))
            start, left = start + count, left - count
            if not left:
                yield tuple(group)
                group, left = [], room
    if group:
        yield tuple(group)


def _portion(numels: tuple[int, ...], low: int, high: int, place: int) -> Portion:
    """Elements ``[low, high)`` of all tensors together."""
    pieces = []
    offset = 0
    for index, numel in enumerate(numels):
        start, stop = max(low - offset, 0), min(high - offset, numel)
        if start < stop:
            pieces.append(Piece(index, start, stop))
        offset += numel
    return Portion(place, place + high - low, tuple(pieces), tuple(piece.stop - piece.start for piece in pieces))


class _Row(NamedTuple):
    """Small tensors one after the other: what each rank has published, this rank's as these tensors, and their sum."""

    published: list[torch.Tensor]
    own: list[torch.Tensor]
    total: torch.Tensor
    totals: list[torch.Tensor]


class InPlaceSum:
    """Sums over the ranks of ``blocks``. ``meet()`` returns once all ranks have called it as often."""

    def __init__(self, blocks: Blocks, meet: Callable[[], None]) -> None:
        self._blocks, self._meet = blocks, meet
        self._kept_rows: dict[tuple[object, ...], _Row] = {}
        self._totals: dict[torch.dtype, torch.Tensor] = {}
        self._factor: float | None = None
        self._factors: dict[torch.dtype, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        """Replace each tensor (contiguous, in host memory, without a graph) by ``factor`` times its sum over all
        ranks, which pass tensors of equal lengths and dtypes in one order."""
        rows: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                rows.setdefault(tensor.dtype, []).append(tensor.detach().view(-1))
        for dtype, row in rows.items():
            numels = tuple(flat.numel() for flat in row)
            if sum(numels) * dtype.itemsize <= SMALL_BYTES:
                self._sum_small(row, factor)
            else:
                self._sum_in_chunks(row, make_chunks(numels, dtype.itemsize, self._blocks.size), factor, for_all=True)

    @torch.no_grad()
    def to_owners(self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]]) -> None:
        """The same, but each rank gets the elements alone that it owns; the others stay as they are, or become the sum.

        ``tensors`` are of one dtype; ``owned``: for each rank pieces of them, which together are all of them.
        """
        row = [tensor.detach().view(-1) for tensor in tensors]
        if not row:
            return
        numels = tuple(flat.numel() for flat in row)
        if sum(numels) * row[0].itemsize <= SMALL_BYTES:
            self._sum_small(row, factor)
        else:
            chunks = make_owned_chunks(tuple(tuple(pieces) for pieces in owned), row[0].itemsize)
            self._sum_in_chunks(row, chunks, factor, for_all=False)

    def _sum_small(self, row: list[torch.Tensor], factor: float) -> None:
        add_up = self._publish_whole(row, self._blocks.take_turns(1), 0)
        self._meet()
        add_up(factor)

    def publish_small(
        self, tensors: Sequence[torch.Tensor], turn: int, after_bytes: int
    ) -> Callable[[float], None] | None:
        """Publish tensors (as above) in the blocks of ``turn``, behind what else stands there. Returns what is to be
        called with the factor after a meeting; None if they are not small, or of several dtypes, and nothing is
        published."""
        dtype = tensors[0].dtype
        if sum([t.numel() for t in tensors]) * dtype.itemsize > SMALL_BYTES or any(t.dtype != dtype for t in tensors):
            return None
        start = -(-after_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES // dtype.itemsize
        return self._publish_whole(tensors, turn, start)

    def _publish_whole(self, tensors: Sequence[torch.Tensor], turn: int, start: int) -> Callable[[float], None]:
        """In this rank's block of ``turn``, from element ``start`` on."""
        row = self._row(tensors[0].dtype, turn, start, tuple(tensor.shape for tensor in tensors))
        foreach_copy_(row.own, tensors)
        return functools.partial(self._add_up_small, tensors, row)

    def _add_up_small(self, tensors: Sequence[torch.Tensor], row: _Row, factor: float) -> None:
        """As one row: an operator per tensor would take longer than what it computes."""
        first, second, *rest = row.published
        torch.add(first, second, out=row.total)
        for other in rest:
            row.total.add_(other)
        if factor != 1.0:
            row.total.mul_(self._as_operand(factor, row.total.dtype))
        foreach_copy_(tensors, row.totals)

    def _as_operand(self, factor: float, dtype: torch.dtype) -> float | torch.Tensor:
        """A number that PyTorch makes a tensor of costs as much as three such multiplications."""
        if dtype not in (torch.float32, torch.float64):
            return factor
        if factor != self._factor:
            self._factor = factor
            self._factors = {one: torch.tensor(factor, dtype=one) for one in (torch.float32, torch.float64)}
        return self._factors[dtype]

    def _row(self, dtype: torch.dtype, turn: int, start: int, shapes: tuple[torch.Size, ...]) -> _Row:
        """For tensors one after the other, from element ``start`` of the ranks' blocks on."""
        key = (dtype, turn, start, shapes)
        if key not in self._kept_rows:
            if len(self._kept_rows) >= _KEPT_ROWS:
                self._kept_rows.clear()
            self._kept_rows[key] = self._make_row(*key)
        return self._kept_rows[key]

    @torch.inference_mode(False)  # or nobody could write to them outside of it, where that is what was first summed in
    def _make_row(self, dtype: torch.dtype, turn: int, start: int, shapes: tuple[torch.Size, ...]) -> _Row:
        sizes = [shape.numel() for shape in shapes]
        published = [block[start : start + sum(sizes)] for block in self._blocks.both_turns_of(dtype)[turn]]
        total = self._totals.setdefault(dtype, torch.empty(SMALL_BYTES // dtype.itemsize, dtype=dtype))[: sum(sizes)]

        def views(row: torch.Tensor) -> list[torch.Tensor]:
            return [part.view(shape) for part, shape in zip(row.split(sizes), shapes, strict=True)]

        return _Row(published, views(published[self._blocks.rank]), total, views(total))

    def _sum_in_chunks(
        self, row: list[torch.Tensor], chunks: tuple[Chunk, ...], factor: float, *, for_all: bool
    ) -> None:
        turns = self._blocks.both_turns_of(row[0].dtype)
        first = self._blocks.take_turns(len(chunks))
        for step in range(len(chunks) + 1):
            if step < len(chunks):
                self._publish(row, chunks[step], turns[(first + step) & 1], self._before(factor))
            if step > 0:
                self._add_up(row, chunks[step - 1], turns[(first + step - 1) & 1], factor, publish=for_all)
            if for_all or step < len(chunks):  # of the last sums nobody else needs to know
                self._meet()
            if for_all and step > 0:
                self._read_back(row, chunks[step - 1], turns[(first + step - 1) & 1])

    def _before(self, factor: float) -> float:
        """Two ranks multiply what they publish, which costs nothing on the way; with more, the sum is multiplied."""
        return factor if self._blocks.size == 2 else 1.0

    def _publish(self, row: list[torch.Tensor], chunk: Chunk, blocks: list[torch.Tensor], factor: float) -> None:
        mine = blocks[self._blocks.rank]
        for rank, portion in enumerate(chunk):
            if rank != self._blocks.rank and portion.pieces:
                _join(_pieces_of(row, portion), mine[portion.start : portion.stop], factor)

    def _add_up(
        self, row: list[torch.Tensor], chunk: Chunk, blocks: list[torch.Tensor], factor: float, *, publish: bool
    ) -> None:
        me = self._blocks.rank
        portion = chunk[me]
        if not portion.pieces:
            return
        views = _pieces_of(row, portion)
        parts = [block[portion.start : portion.stop] for block in blocks]
        if len(parts) == 2:  # the order of two does not matter, and the sum can be made where it is kept
            _scale_and_add(views, factor, parts[1 - me], portion.sizes)
            if publish:
                _join(views, parts[me])
            return
        _join(views, parts[me])
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total.add_(part)
        if factor != 1.0:
            total.mul_(factor)
        if publish:
            parts[me].copy_(total)
        _spread(total, views, portion.sizes)

    def _read_back(self, row: list[torch.Tensor], chunk: Chunk, blocks: list[torch.Tensor]) -> None:
        for rank, portion in enumerate(chunk):
            if rank != self._blocks.rank and portion.pieces:
                _spread(blocks[rank][portion.start : portion.stop], _pieces_of(row, portion), portion.sizes)


def _pieces_of(row: list[torch.Tensor], portion: Portion) -> list[torch.Tensor]:
    return [row[piece.tensor][piece.start : piece.stop] for piece in portion.pieces]


def _join(pieces: Sequence[torch.Tensor], target: torch.Tensor, factor: float = 1.0) -> None:
    if len(pieces) > 1:
        torch.cat(list(pieces), out=target)
        if factor != 1.0:
            target.mul_(factor)
    elif factor != 1.0:
        torch.mul(pieces[0], factor, out=target)
    else:
        target.copy_(pieces[0])


def _scale_and_add(pieces: list[torch.Tensor], factor: float, other: torch.Tensor, sizes: tuple[int, ...]) -> None:
    if len(pieces) == 1 and factor == 1.0:  # of whole numbers, perhaps
        pieces[0].add_(other)
    elif len(pieces) == 1:
        torch.add(other, pieces[0], alpha=factor, out=pieces[0])
    else:
        if factor != 1.0:
            foreach_mul_(pieces, factor)
        foreach_add_(pieces, other.split(sizes))


def _spread(source: torch.Tensor, pieces: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> None:
    if len(pieces) == 1:
        pieces[0].copy_(source)
    else:
        foreach_copy_(pieces, source.split(sizes))
