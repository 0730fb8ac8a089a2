"""Into how many shards variables are cut, which rows each has, and what is refused of a user's own partitioner."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    row_offsets,
    shards_of,
)

examples = settings(max_examples=50, deadline=None, derandomize=True)
SHAPES = st.lists(st.integers(1, 50), min_size=1, max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bool, torch.complex128, np.float16, np.dtype("int64")])


def bytes_of(dtype: Any) -> int:
    return dtype.itemsize if isinstance(dtype, torch.dtype) else np.dtype(dtype).itemsize


@examples
@given(rows=st.integers(1, 300), shards=st.integers(1, 400))
def test_rows_are_divided_evenly_the_first_shards_being_the_larger(rows: int, shards: int) -> None:
    spans = row_offsets(rows, shards)
    sizes = [stop - start for start, stop in spans]
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(rows))
    assert len(spans) == min(rows, shards)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("rows", "shards"), [(0, 2), (3, 0), (-1, 1), (3, -2)])
def test_nothing_cannot_be_divided(rows: int, shards: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{rows} rows .* {shards} shards"):
        row_offsets(rows, shards)


@examples
@given(shape=SHAPES, dtype=DTYPES, limit=st.integers(1, 5000), max_shards=st.none() | st.integers(1, 9))
def test_max_size_shards_fit_with_as_few_as_possible(
    shape: list[int], dtype: Any, limit: int, max_shards: int | None
) -> None:
    shards, *others = MaxSizePartitioner(limit, max_shards)(shape, dtype)
    assert set(others) <= {1}
    row_bytes = math.prod(shape[1:]) * bytes_of(dtype)
    if max_shards is not None and shards == max_shards:
        return
    # The rows of a shard when all but the last are full.
    rows = -(-shape[0] // shards)
    assert rows == 1 or rows * row_bytes <= limit
    if shards > 1:
        assert -(-shape[0] // (shards - 1)) * row_bytes > limit


@examples
@given(shape=SHAPES, dtype=DTYPES, least=st.integers(1, 5000), max_shards=st.integers(1, 9))
def test_min_size_shards_number_what_the_bytes_make(shape: list[int], dtype: Any, least: int, max_shards: int) -> None:
    shards, *others = MinSizePartitioner(least, max_shards)(shape, dtype)
    assert set(others) <= {1}
    total = math.prod(shape) * bytes_of(dtype)
    assert 1 <= shards <= min(max_shards, shape[0])
    assert (shards - 1) * least < total
    if shards < min(max_shards, shape[0]):
        assert shards * least >= total


def test_another_axis_can_be_cut() -> None:
    assert FixedShardsPartitioner(3)(torch.Size([10, 4]), torch.float32, axis=1) == [1, 3]
    assert MaxSizePartitioner(8)([2, 4], torch.float32, axis=1) == [1, 4]
    assert MinSizePartitioner(8, 9)([2, 4], torch.float32, axis=1) == [1, 4]


@pytest.mark.parametrize("dtype", [np.dtype(object), object, str, np.dtype("U5"), bytes])
def test_strings_count_a_fixed_number_of_bytes(dtype: Any) -> None:
    assert MaxSizePartitioner(64, bytes_per_string=32)([10], dtype) == [5]
    assert MaxSizePartitioner(64)([10], dtype) == [3]
    assert MinSizePartitioner(16, 100, bytes_per_string=8)([10], dtype) == [5]


def test_zero_shards_means_no_limit_where_size_decides() -> None:
    assert MaxSizePartitioner(4, max_shards=0)([10], torch.float32) == [10]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MinSizePartitioner(0), "min_shard_bytes=0"),
        (lambda: MinSizePartitioner(max_shards=-1), "max_shards=-1"),
        (lambda: MinSizePartitioner(bytes_per_string=0), "bytes_per_string=0"),
        (lambda: MaxSizePartitioner(-4), "max_shard_bytes=-4"),
        (lambda: MaxSizePartitioner(4, max_shards=-2), "max_shards=-2"),
        (lambda: MaxSizePartitioner(4, bytes_per_string=0), "bytes_per_string=0"),
    ],
)
def test_sizes_and_numbers_are_positive(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_sizes_are_whole_numbers() -> None:
    with pytest.raises(WrongTypeError, match="max_shard_bytes must be a whole number; got float"):
        MaxSizePartitioner(1e6)  # type: ignore[arg-type]


@pytest.mark.parametrize("partitioner", [FixedShardsPartitioner(2), MinSizePartitioner(), MaxSizePartitioner(4)])
def test_scalars_cannot_be_cut(partitioner: Partitioner) -> None:
    with pytest.raises(InvalidArgumentError, match="0 dimensions"):
        partitioner([], torch.float32)


def test_a_variable_without_elements_has_no_size_to_divide() -> None:
    with pytest.raises(InvalidArgumentError, match=r"shape \(0, 4\)"):
        MaxSizePartitioner(4)([0, 4], torch.float32)


def test_the_base_class_says_what_to_override() -> None:
    with pytest.raises(UnsupportedError, match="__call__"):
        Partitioner()([3], torch.float32)


# shards_of: what a strategy asks


def test_a_scalar_is_whole_without_asking() -> None:
    def never(shape: Any, dtype: Any) -> list[int]:
        raise AssertionError("asked")

    assert shards_of(never, (), torch.float32) == 1


@pytest.mark.parametrize(
    ("answer", "shards"),
    [
        ([2, 1], 2),
        ((2, 1), 2),
        ([1, 1], 1),
        ([9, 1], 4),
        (np.array([2, 1]), 2),
        ([np.int64(3), 1], 3),
        ([2], 2),
        ([2, 1, 1], 2),
    ],
)
def test_answers_that_say_a_number_of_shards(answer: Any, shards: int) -> None:
    assert shards_of(lambda shape, dtype: answer, (4, 2), torch.float32) == shards


@pytest.mark.parametrize(
    "answer",
    [[1, 2], [2, 2], [0, 1], [-1, 1], [], [0], [2, 1, 2], None, 2, "21", [2.0, 1], [None, 1], {0: 2, 1: 1}],
)
def test_nonsense_is_refused_with_what_was_returned(answer: Any) -> None:
    def mine(shape: Any, dtype: Any) -> Any:
        return answer

    with pytest.raises(InvalidArgumentError) as failure:
        shards_of(mine, (4, 2), torch.float32)
    assert repr(answer) in str(failure.value)
    assert "mine" in str(failure.value)
    assert "(4, 2)" in str(failure.value)


def test_variables_without_rows() -> None:
    assert shards_of(FixedShardsPartitioner(2), (0, 4), torch.float32) == 1
    assert shards_of(MinSizePartitioner(4, 2), (0, 4), torch.float32) == 1
    with pytest.raises(InvalidArgumentError, match="without rows"):
        shards_of(lambda shape, dtype: [2, 1], (0, 4), torch.float32)


def test_the_partitioner_gets_the_shape_and_the_dtype() -> None:
    seen: list[Any] = []

    def mine(shape: torch.Size, dtype: Any, axis: int = 0) -> list[int]:
        seen.append((shape, dtype, axis))
        return [2, 1]

    assert shards_of(mine, [4, 2], torch.float64) == 2
    assert seen == [(torch.Size([4, 2]), torch.float64, 0)]
