"""How a tensor is cut over replicas and their logical devices: every element is held as often as it should be."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstrat.errors import InvalidArgumentError
from torchstrat.sharding.grid import REPLICA_AXIS, DeviceGrid, Sharding, logical_axis

examples = settings(max_examples=60, deadline=None, derandomize=True)


def grid_of(replicas: int, logical_devices: int, order: list[int] | None = None) -> DeviceGrid:
    numbers = order or list(range(replicas * logical_devices))
    rows = [numbers[row * logical_devices : (row + 1) * logical_devices] for row in range(replicas)]
    return DeviceGrid(tuple(map(tuple, rows)))


@st.composite
def shardings(draw: st.DrawFn) -> tuple[tuple[int, ...], Sharding, DeviceGrid]:
    """A shape, a sharding that it divides by, and a grid with its devices in any order."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    replicas = draw(st.integers(1, 3))
    count = replicas * math.prod(sizes)
    grid = grid_of(replicas, math.prod(sizes), draw(st.permutations(range(count))))
    axes = draw(st.permutations([REPLICA_AXIS, *map(logical_axis, range(len(sizes)))]))
    rank = draw(st.integers(1, 3))
    spec: list[list[str]] = [[] for _ in range(rank)]
    for axis in axes:
        dim = draw(st.integers(-1, rank - 1))  # -1: the axis cuts nothing
        if dim >= 0:
            spec[dim].append(axis)
    sharding = Sharding(sizes, tuple(map(tuple, spec)))
    shape = tuple(parts * draw(st.integers(1, 3)) for parts in sharding.parts(replicas))
    return shape, sharding, grid


@examples
@given(shardings())
def test_every_element_is_on_as_many_devices(drawn: tuple[tuple[int, ...], Sharding, DeviceGrid]) -> None:
    shape, sharding, grid = drawn
    held = torch.zeros(shape, dtype=torch.int64)
    tiles = sharding.tiles(shape, grid)
    for tile in tiles.values():
        assert held[tile].shape == sharding.tile_shape(shape, grid.num_replicas)
        held[tile] += 1
    count = grid.num_replicas * grid.num_logical_devices
    assert tiles.keys() == set(range(count))
    assert set(held.flatten().tolist()) == {count // math.prod(sharding.parts(grid.num_replicas))}


@examples
@given(shardings())
def test_devices_that_agree_on_an_axis_hold_the_same(drawn: tuple[tuple[int, ...], Sharding, DeviceGrid]) -> None:
    """Two devices hold the same part exactly if they are at the same place of all axes that cut the tensor."""
    shape, sharding, grid = drawn
    cutting = {axis for axes in sharding.spec for axis in axes}
    places: dict[int, tuple[int, ...]] = {}
    for replica, devices in enumerate(grid.devices):
        for device, coordinates in zip(devices, itertools.product(*map(range, sharding.axis_sizes)), strict=True):
            own = {REPLICA_AXIS: replica} | {logical_axis(index): at for index, at in enumerate(coordinates)}
            places[device] = tuple(own[axis] for axis in sorted(cutting))
    tiles = sharding.tiles(shape, grid)
    for one, other in itertools.combinations(places, 2):
        assert (tiles[one] == tiles[other]) == (places[one] == places[other])


@examples
@given(parts=st.lists(st.integers(1, 3), min_size=1, max_size=4), replicas=st.integers(1, 2))
def test_part_i_of_a_split_is_on_logical_device_i_of_every_replica(parts: list[int], replicas: int) -> None:
    grid, sharding = grid_of(replicas, math.prod(parts)), Sharding.split(parts)
    tiles = sharding.tiles(parts, grid)  # one element for each part
    numbers = torch.arange(math.prod(parts)).reshape(parts)
    for devices in grid.devices:
        assert [numbers[tiles[device]].item() for device in devices] == list(range(math.prod(parts)))


def test_a_stack_is_cut_over_replicas_first() -> None:
    grid = grid_of(2, 2)
    stacked = Sharding.split((1, 2)).stacked()
    assert stacked.rank == 3
    assert stacked.parts(2) == (2, 1, 2)
    assert stacked.tiles((2, 5, 4), grid) == {
        0: (slice(0, 1), slice(0, 5), slice(0, 2)),
        1: (slice(0, 1), slice(0, 5), slice(2, 4)),
        2: (slice(1, 2), slice(0, 5), slice(0, 2)),
        3: (slice(1, 2), slice(0, 5), slice(2, 4)),
    }


def test_the_first_of_several_axes_is_the_slowest() -> None:
    sharding = Sharding((2, 3), (("d1", "d0"),))
    tiles = sharding.tiles((6,), grid_of(1, 6))
    assert [tiles[device][0].start for device in range(6)] == [0, 2, 4, 1, 3, 5]


def test_replicated_is_whole_everywhere() -> None:
    sharding = Sharding.replicated(2, 4)
    assert sharding.is_replicated
    assert [*sharding.tiles((3, 5), grid_of(2, 4)).values()] == [(slice(0, 3), slice(0, 5))] * 8
    assert not Sharding.split((1, 4)).is_replicated
    assert Sharding.split((1, 1)).is_replicated


def test_a_scalar_is_whole_everywhere() -> None:
    assert set(Sharding.replicated(0, 2).tiles((), grid_of(1, 2)).values()) == {()}


@pytest.mark.parametrize("devices", [(), ((),), ((0, 1), (2,))])
def test_a_grid_is_a_rectangle(devices: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="as many logical devices in each"):
        DeviceGrid(devices)


def test_a_device_is_in_one_place() -> None:
    with pytest.raises(InvalidArgumentError, match="in one place only"):
        DeviceGrid(((0, 1), (1, 2)))


def test_an_axis_cuts_once() -> None:
    with pytest.raises(InvalidArgumentError, match="one dimension only"):
        Sharding((4,), (("d0",), ("d0",)))


def test_axes_that_are_not_the_grids() -> None:
    with pytest.raises(InvalidArgumentError, match="for 3 logical devices"):
        Sharding((3,), (("d0",),)).tiles((6,), DeviceGrid(((0, 1), (2, 3))))
