"""Who writes what: every value once, the bytes spread evenly, and only by those that hold it and see the folder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchstrat.checkpoint.items import Writes
from torchstrat.checkpoint.pieces import Piece
from torchstrat.checkpoint.sharing import Offer, offers_of, selected, share
from torchstrat.errors import InvalidArgumentError

MIB = 1 << 20


def offer(name: str, size: int = 0, start: int = 0) -> Offer:
    return Offer((("model", name), start), ("torch.float32", (2,), (2,)), size, shared=size > 0)


@given(
    sizes=st.lists(st.sampled_from([0, MIB, 3 * MIB, 10 * MIB]), max_size=12),
    held=st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4),
    sees=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_each_is_written_once_by_one_that_can(sizes: list[int], held: list[list[bool]], sees: list[bool]) -> None:
    ranks = len(held)
    offers = [[offer(str(n), size) for n, size in enumerate(sizes) if held[rank][n]] for rank in range(ranks)]
    able = [{one.place for one in of_rank} if sees[rank] else set() for rank, of_rank in enumerate(offers)]
    places = {one.place for of_rank in offers for one in of_rank}
    if places - set().union(*able):
        with pytest.raises(InvalidArgumentError, match=r"is held by rank \d alone, which does not see /shared"):
            share(offers, sees[:ranks], "/shared")
        return
    written = share(offers, sees[:ranks], "/shared")
    assert sum(map(len, written)) == len(places)
    assert set().union(*written) == places
    assert all(mine <= can for mine, can in zip(written, able, strict=True))
    for place in places:  # what is not to be shared: by the first
        if not next(one for of_rank in offers for one in of_rank if one.place == place).shared:
            assert place in written[next(rank for rank in range(ranks) if place in able[rank])]


def test_what_may_differ_stays_together() -> None:
    """Large buffers, too: two ranks' running statistics are not to be mixed."""
    piece, buffer, small = (Piece(("model", name), (MIB,)) for name in ("weight", "buffer", "bias"))
    tensors = [(piece, torch.zeros(MIB)), (buffer, torch.zeros(MIB)), (small, torch.zeros(2))]
    writes = Writes(tensors, [(("model", "note"), "x")], frozenset({piece.path, small.path}))
    offers = offers_of(writes)
    assert [one.shared for one in offers] == [True, False, False, False]
    first, second = (selected(writes, mine) for mine in share([offers, offers], [True, True], ""))
    assert [one.path for one, _ in first.tensors] == [buffer.path, small.path]
    assert len(first.values) == 1
    assert [one.path for one, _ in second.tensors] == [piece.path]
    assert not second.values


def test_shards_of_one_tensor_are_different_things() -> None:
    offers = [[offer("table", MIB, start=0)], [offer("table", MIB, start=2)]]
    assert share(offers, [True, True], "") == [{(("model", "table"), 0)}, {(("model", "table"), 2)}]


def test_one_name_of_different_things() -> None:
    other = Offer((("model", "a"), 0), ("torch.float64", (2,), (2,)), 0, shared=False)
    with pytest.raises(InvalidArgumentError, match=r"model\.a is torch\.float32.* rank 0 and torch\.float64.* rank 1"):
        share([[offer("a")], [other]], [True, True], "")
