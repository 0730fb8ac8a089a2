"""What the logical-device annotations check, in which order; one logical device takes the trivial ones only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrat as ts
from torchstrat.data.spec import TensorSpec
from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.logical_devices import check_logical_device_id, check_split

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


def test_sizes_that_are_not_fixed_divide() -> None:
    assert check_split((None, 4), [3, 2], 6) == (3, 2)
    with pytest.raises(InvalidArgumentError, match="dimension 1 has size 4"):
        check_split((None, 4), [2, 3], 6)
    with pytest.raises(InvalidArgumentError, match="number of dimensions is not known"):
        check_split(None, [2, 3], 6)


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        # Each breaks all later conditions as well.
        ((3, 8), [2], "entries and dimensions differ, 1 and 2"),
        ((3, 8), [2, 3.5, 1], "entries and dimensions differ, 3 and 2"),
        ((3, 8), [2, 1.5], "dimension 0 has size 3, which does not divide into 2"),
        ((4, 8), [2, 2.0], "makes 4.0 parts, and a replica has 2 logical devices"),
        ((4, 8), [2, 1.5], "dimension 1 has size 8"),
        ((4, 8), [0, 2], "entry 0 is 0; the least is 1"),
        ((4, 8), [-2, -1], "entry 0 is -2; the least is 1"),
        ((None, 8), [-1, -2], "entry 0 is -1; the least is 1"),
        ((4, 8), [2, float("nan")], "dimension 1"),
        ((), [], "makes 1 parts"),
    ],
)
def test_the_first_condition_that_does_not_hold_is_reported(
    shape: tuple[int | None, ...], dims: Any, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_split(shape, dims, 2)


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ((4, 4), [1, 2.0], "entry 1 is float 2.0"),
        ((4, 4), [1, np.float32(2)], "entry 1 is float32"),
        ((4, 4), [1, "2"], "entry 1 is str '2'"),
        ((4, 4), [None, 2], "entry 0 is NoneType"),
        ((4, 4), [1, torch.tensor(2.0)], "entry 1 is Tensor"),
        ((4, 4), 2, "must be a sequence of integers.*int 2"),
        ((4, 4), "12", "must be a sequence of integers.*str '12'"),
        ((4, 4), torch.tensor(2), "must be a sequence of integers.*Tensor"),
        ((4, 4), None, "must be a sequence of integers"),
    ],
)
def test_what_is_not_integers(shape: tuple[int, ...], dims: Any, message: str) -> None:
    with pytest.raises(WrongTypeError, match=message):
        check_split(shape, dims, 2)


def test_a_scalar_cannot_be_split_even_into_one_part() -> None:
    with pytest.raises(WrongTypeError, match="replicate_to_logical_devices"):
        check_split((), [], 1)


@pytest.mark.parametrize("index", [0, 3, np.int64(3), torch.tensor(2)])
def test_ids(index: Any) -> None:
    assert check_logical_device_id(index, 4) == int(index)
    assert type(check_logical_device_id(index, 4)) is int


@pytest.mark.parametrize(("index", "count", "message"), [(-1, 4, "ids are 0 to 3"), (4, 4, "ids are 0 to 3"),
                                                         (1, 1, "the only id is 0")])  # fmt: skip
def test_ids_out_of_range(index: int, count: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"logical_device_id={index}.*{message}"):
        check_logical_device_id(index, count)


@pytest.mark.parametrize("index", [1.0, "0", None, [0]])
def test_ids_are_integers(index: Any) -> None:
    with pytest.raises(WrongTypeError, match="must be an integer"):
        check_logical_device_id(index, 4)


@pytest.mark.parametrize(
    "make", [ts.OneDeviceStrategy, ts.MirroredStrategy, ts.CentralStorageStrategy, ts.get_strategy]
)
def test_one_logical_device_takes_the_trivial_annotations_and_no_others(make: Any) -> None:
    strategy, value = make(), torch.ones(2, 3)
    try:
        for call in (strategy.split_to_logical_devices, strategy.experimental_split_to_logical_devices):
            assert call(value, [1, 1]) is value
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


def test_arrays_and_specs_have_shapes_too() -> None:
    strategy, spec = ts.OneDeviceStrategy("cpu"), TensorSpec((None, 3), torch.float32)
    array = np.zeros((2, 3))
    assert strategy.split_to_logical_devices(array, (1, 1)) is array
    assert strategy.split_to_logical_devices(spec, (1, 1)) is spec
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
