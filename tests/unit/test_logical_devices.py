"""Logical devices of a replica: what annotations check, in which order, and the axes that they make up."""

from __future__ import annotations

import inspect
import itertools
import math
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrat as ts
from torchstrat.data import TensorSpec
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.sharding.annotations import check_logical_device_id, check_split
from torchstrat.sharding.dtensor.devices import LogicalAxes, LogicalDevices, Traffic, cut_axes, make_groups
from torchstrat.sharding.dtensor.operators.data_attribute import both_are_asked
from torchstrat.sharding.dtensor.replica_axis import Alone
from torchstrat.sharding.grid import DeviceGrid, Sharding

examples = settings(max_examples=60, deadline=None, derandomize=True)


@examples
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4))
def test_what_divides_and_multiplies_to_the_number_of_devices_is_accepted(factors: list[tuple[int, int]]) -> None:
    dims = tuple(parts for _, parts in factors)
    shape = [times * parts for times, parts in factors]  # size 0 included: it divides
    assert check_split(shape, dims, math.prod(dims)) == dims
    with pytest.raises(InvalidArgumentError, match="the product of the entries must be that number"):
        check_split(shape, dims, math.prod(dims) + 1)


@pytest.mark.parametrize(
    "dims", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int32(1), torch.tensor(2)], range(1, 3)]
)
def test_integers_of_any_library_become_pythons(dims: Any) -> None:
    checked = check_split((3, 4), dims, 2)
    assert checked == (1, 2)
    assert [type(entry) for entry in checked] == [int, int]


@pytest.mark.parametrize(
    ("shape", "dims", "error", "message"),
    [
        # Each breaks all later conditions as well.
        ((3, 8), [2], InvalidArgumentError, "entries and dimensions differ, 1 and 2"),
        ((3, 8), [2, 3.5, 1], InvalidArgumentError, "entries and dimensions differ, 3 and 2"),
        ((3, 8), [2, 1.5], InvalidArgumentError, "dimension 0 has size 3, which does not divide into 2"),
        ((4, 8), [2, 2.0], InvalidArgumentError, "makes 4.0 parts, and a replica has 2 logical devices"),
        ((4, 8), [2, 1.5], InvalidArgumentError, "dimension 1 has size 8"),
        ((4, 8), [0, 2], InvalidArgumentError, "entry 0 is 0; the least is 1"),
        ((4, 8), [-2, -1], InvalidArgumentError, "entry 0 is -2; the least is 1"),
        ((None, 8), [-1, -2], InvalidArgumentError, "entry 0 is -1; the least is 1"),
        ((4, 8), [2, float("nan")], InvalidArgumentError, "dimension 1"),
        ((), [], InvalidArgumentError, "makes 1 parts"),
        # sizes that are not fixed
        ((None, 4), [2, 3], InvalidArgumentError, "dimension 1 has size 4"),
        (None, [2, 3], InvalidArgumentError, "number of dimensions is not known"),
        # what is not integers
        ((4, 4), [1, 2.0], WrongTypeError, "entry 1 is float 2.0"),
        ((4, 4), [1, np.float32(2)], WrongTypeError, "entry 1 is float32"),
        ((4, 4), [1, "2"], WrongTypeError, "entry 1 is str '2'"),
        ((4, 4), [None, 2], WrongTypeError, "entry 0 is NoneType"),
        ((4, 4), [1, torch.tensor(2.0)], WrongTypeError, "entry 1 is Tensor"),
        ((4, 4), 2, WrongTypeError, "must be a sequence of integers.*int 2"),
        ((4, 4), "12", WrongTypeError, "must be a sequence of integers.*str '12'"),
        ((4, 4), torch.tensor(2), WrongTypeError, "must be a sequence of integers.*Tensor"),
        ((4, 4), None, WrongTypeError, "must be a sequence of integers"),
    ],
)
def test_the_first_condition_that_does_not_hold_is_reported(
    shape: Any, dims: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_split(shape, dims, 2)


def test_sizes_that_are_not_fixed_divide_and_a_scalar_cannot_be_split() -> None:
    assert check_split((None, 4), [3, 2], 6) == (3, 2)
    with pytest.raises(WrongTypeError, match="replicate_to_logical_devices"):  # even into one part
        check_split((), [], 1)


@pytest.mark.parametrize("index", [0, 3, np.int64(3), torch.tensor(2)])
def test_ids(index: Any) -> None:
    assert check_logical_device_id(index, 4) == int(index)
    assert type(check_logical_device_id(index, 4)) is int


@pytest.mark.parametrize(
    ("index", "count", "error", "message"),
    [
        (-1, 4, InvalidArgumentError, "logical_device_id=-1.*ids are 0 to 3"),
        (4, 4, InvalidArgumentError, "logical_device_id=4.*ids are 0 to 3"),
        (1, 1, InvalidArgumentError, "logical_device_id=1.*the only id is 0"),
        *((index, 4, WrongTypeError, "must be an integer") for index in (1.0, "0", None, [0])),
    ],
)
def test_what_is_no_id(index: Any, count: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_logical_device_id(index, count)


@pytest.mark.parametrize(
    "make", [ts.OneDeviceStrategy, ts.MirroredStrategy, ts.CentralStorageStrategy, ts.get_strategy]
)
def test_one_logical_device_takes_the_trivial_annotations_and_no_others(make: Any) -> None:
    strategy, value, array = make(), torch.ones(2, 3), np.zeros((2, 3))
    spec = TensorSpec((None, 3), torch.float32)
    try:
        for call in (strategy.split_to_logical_devices, strategy.experimental_split_to_logical_devices):
            assert [call(one, [1, 1]) is one for one in (value, array, spec)] == [True] * 3
            with pytest.raises(InvalidArgumentError, match="1 logical device;"):
                call(value, [2, 1])
            with pytest.raises(WrongTypeError, match="need a tensor; got float"):
                call(1.0, [])
        for call in (strategy.replicate_to_logical_devices, strategy.experimental_replicate_to_logical_devices):
            assert call(value) is value
        for call in (strategy.assign_to_logical_device, strategy.experimental_assign_to_logical_device):
            assert call(value, 0) is value
            with pytest.raises(InvalidArgumentError, match="the only id is 0"):
                call(value, 1)
    finally:
        strategy.close()


def test_annotations_work_in_a_step() -> None:
    strategy = ts.OneDeviceStrategy("cpu")
    with strategy.scope():
        weight = torch.nn.Parameter(torch.ones(2, 2))

    def step() -> torch.Tensor:
        product = strategy.split_to_logical_devices(weight * 3, (1, 1))
        strategy.replicate_to_logical_devices(product).sum().backward()
        return product

    assert torch.equal(strategy.run(step), torch.full((2, 2), 3.0))
    assert torch.equal(weight.grad, torch.full((2, 2), 3.0))  # type: ignore[arg-type]
    strategy.close()


# == axes: tiles lie where the grid of a TPU has them ================================================================


@pytest.mark.parametrize("count", [2, 3, 4, 8, 12])
def test_pieces_are_the_tiles_of_the_grid(count: int) -> None:
    whole = torch.arange(48 * 24).reshape(48, 24)
    grid = DeviceGrid((tuple(range(count)),))
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
            mesh: Any = {arranged.names: None}
            for own in range(count):
                devices = LogicalDevices(arranged, mesh, own, {}, torch.device("cpu"))
                piece = devices.own_piece(whole, cut)
                assert torch.equal(piece, whole[tiles[own]])
                assert arranged.piece_shape(whole.shape, cut) == piece.shape
                assert arranged.whole_shape(piece.shape, cut) == whole.shape
            assert arranged.sharding_of(cut, 2).tiles(whole.shape, grid) == tiles


def test_rules_name_the_axes_of_the_mesh() -> None:
    axes = LogicalAxes([4, 1, 3])
    assert (axes.sizes, axes.names) == ((2, 2, 3), ("d0_0", "d0_1", "d2"))
    assert axes.cut_of(Sharding((4, 1, 3), (("d2",), ("d0",)))) == (1, 1, 0)
    assert axes.cut_of(Sharding((4, 1, 3), ((), ("d0", "d2")))) == (1, 1, 1)
    with pytest.raises(UnsupportedError, match=r"dimension 1 is to be cut along d2, d0, in this order"):
        axes.cut_of(Sharding((4, 1, 3), ((), ("d2", "d0"))))
    with pytest.raises(InvalidArgumentError, match=r"parts \(3, 4\) do not fit .* Pass logical_mesh_shape=\(3, 4\)"):
        axes.cut_of(Sharding.split((3, 4)))
    assert cut_axes((None, 2, 0)) == (1, 2)


def test_groups_are_those_that_differ_along_their_axes() -> None:
    made: dict[int, list[tuple[int, ...]]] = {1: [], 6: []}

    def groups_of(rank: int) -> Any:
        def make(ranks: tuple[int, ...]) -> Any:
            made[rank].append(ranks)
            return ranks

        return make_groups(LogicalAxes([4]), 2, rank, make)

    assert groups_of(6) == {(0,): (4, 6), (1,): (6, 7), (0, 1): (4, 5, 6, 7)}
    assert groups_of(1) == {(0,): (1, 3), (1,): (0, 1), (0, 1): (0, 1, 2, 3)}
    assert made[1] == made[6], "all processes make all groups, in one order"


def test_traffic_is_shown_by_kind() -> None:
    traffic = Traffic()
    assert str(traffic) == "nothing"
    for kind, sent in (("sums", 1000), ("sums", 500), ("pieces", 7)):
        traffic.add(kind, sent)
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


class _Noting(property):
    """``torch.Tensor.data`` that notes what is assigned."""

    def __init__(self, data: Any) -> None:
        self.noted: list[Any] = []
        super().__init__(data.__get__, lambda tensor, value: self.noted.append(value) or data.__set__(tensor, value))


@pytest.mark.parametrize("first", [True, False])
def test_who_else_asks_about_the_data_of_tensors_goes_on_asking(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noting, given = _Noting(torch.Tensor.data), torch.ones(2)
    with ExitStack() as stack:
        if first:
            monkeypatch.setattr(torch.Tensor, "data", noting)
        stack.enter_context(both_are_asked())
        if not first:
            noting = _Noting(inspect.getattr_static(torch.Tensor, "data"))
            monkeypatch.setattr(torch.Tensor, "data", noting)
        torch.zeros(2).data = given
    with both_are_asked():
        torch.zeros(2).data = given
    torch.zeros(2).data = given
    assert vars(torch.Tensor)["data"] is noting
    assert [one is given for one in noting.noted] == [True] * 3
