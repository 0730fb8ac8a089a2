"""The logical devices of a replica as axes: tiles lie where the grid of a TPU has them."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta
from typing import Any

import pytest
import torch

from torchstrat.dtensor.alone import Alone
from torchstrat.dtensor.axes import LogicalAxes, cut_axes
from torchstrat.dtensor.devices import LogicalDevices, make_groups
from torchstrat.dtensor.traffic import Traffic
from torchstrat.errors import InvalidArgumentError, UnsupportedError
from torchstrat.sharding.grid import DeviceGrid, Sharding


def devices(axes: LogicalAxes, own: int) -> LogicalDevices:
    mesh: Any = {axes.names: None}
    return LogicalDevices(axes, mesh, own, {}, torch.device("cpu"))


@pytest.mark.parametrize("count", [2, 3, 4, 8, 12])
def test_pieces_are_the_tiles_of_the_grid(count: int) -> None:
    whole = torch.arange(48 * 24).reshape(48, 24)
    grid = DeviceGrid((tuple(range(count)),))
    seen = 0
    for parts in itertools.product(range(1, count + 1), repeat=2):
        if math.prod(parts) != count:
            continue
        sharding = Sharding.split(parts)
        tiles = sharding.tiles(whole.shape, grid)
        axes = LogicalAxes([size for size in parts if size > 1])
        for arranged in (axes, LogicalAxes([count])):
            try:
                cut = arranged.cut_of(sharding)
            except InvalidArgumentError as error:
                assert arranged is not axes  # one arrangement cannot have all partitions of 12
                assert f"logical_mesh_shape={parts}" in str(error)  # noqa: PT017
                continue
            for own in range(count):
                piece = devices(arranged, own).own_piece(whole, cut)
                assert torch.equal(piece, whole[tiles[own]])
                assert arranged.piece_shape(whole.shape, cut) == piece.shape
                assert arranged.whole_shape(piece.shape, cut) == whole.shape
            seen += 1
            shown = arranged.sharding_of(cut, 2)
            assert shown.tiles(whole.shape, grid) == tiles
    assert seen


def test_rules_name_the_axes_of_the_mesh() -> None:
    axes = LogicalAxes([4, 1, 3])
    assert axes.sizes == (2, 2, 3)
    assert axes.names == ("d0_0", "d0_1", "d2")
    assert axes.cut_of(Sharding((4, 1, 3), (("d2",), ("d0",)))) == (1, 1, 0)
    assert axes.cut_of(Sharding((4, 1, 3), ((), ("d0", "d2")))) == (1, 1, 1)
    with pytest.raises(UnsupportedError, match=r"dimension 1 is to be cut along d2, d0, in this order"):
        axes.cut_of(Sharding((4, 1, 3), ((), ("d2", "d0"))))
    with pytest.raises(InvalidArgumentError, match=r"parts \(3, 4\) do not fit .* Pass logical_mesh_shape=\(3, 4\)"):
        axes.cut_of(Sharding.split((3, 4)))
    assert cut_axes((None, 2, 0)) == (1, 2)


def test_groups_are_those_that_differ_along_their_axes() -> None:
    axes = LogicalAxes([4])
    made: dict[int, list[tuple[int, ...]]] = {}

    def make(rank: int) -> dict[tuple[int, ...], Any]:
        made[rank] = []

        def group(ranks: tuple[int, ...]) -> Any:
            made[rank].append(ranks)
            return ranks

        return make_groups(axes, 2, rank, group)

    assert make(6) == {(0,): (4, 6), (1,): (6, 7), (0, 1): (4, 5, 6, 7)}
    assert make(1) == {(0,): (1, 3), (1,): (0, 1), (0, 1): (0, 1, 2, 3)}
    assert made[1] == made[6], "all processes make all groups, in one order"


def test_traffic_is_shown_by_kind() -> None:
    traffic = Traffic()
    assert str(traffic) == "nothing"
    traffic.add("sums", 1000)
    traffic.add("sums", 500)
    traffic.add("pieces", 7)
    assert (str(traffic), traffic.total_bytes) == ("pieces 7 bytes in 1, sums 1,500 bytes in 2", 1507)
    traffic.clear()
    assert traffic.total_bytes == 0


def test_a_process_alone_answers_itself() -> None:
    alone, tensor = Alone(3, timedelta(seconds=1)), torch.tensor([2.0])
    alone.all_reduce(tensor, "x").wait()
    assert (alone.rank, alone.size, alone.ranks, float(tensor)) == (0, 1, (3,), 2.0)
    assert alone.all_gather_numbers([1, 2], "x") == [[1.0, 2.0]]
    assert alone.subgroup((0,)) is alone
    alone.sum_in_place([tensor], 0.5, "x")
    assert float(tensor) == 1.0
