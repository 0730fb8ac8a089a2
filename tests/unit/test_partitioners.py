"""Which rows each shard of a variable has, and what is refused of a user's own partitioner.

Into how many shards the three partitioners cut is recorded in tests/conformance.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrat as ts
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    row_offsets,
    shards_of,
)

examples = settings(max_examples=50, derandomize=True)


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


PARTITIONERS = st.one_of(
    st.builds(FixedShardsPartitioner, st.integers(1, 12)),
    st.builds(MinSizePartitioner, st.integers(1, 600), st.integers(1, 12)),
    st.builds(MaxSizePartitioner, st.integers(1, 600), st.none() | st.integers(1, 12)),
)


@examples
@given(partitioner=PARTITIONERS, shape=st.lists(st.integers(1, 30), min_size=1, max_size=2))
def test_a_partitioned_variable_has_every_row_once(partitioner: Any, shape: list[int]) -> None:
    value = torch.arange(math.prod(shape)).reshape(shape)
    spans = row_offsets(shape[0], shards_of(partitioner, shape, value.dtype))
    shards = [torch.nn.Parameter(value[start:stop].clone(), requires_grad=False) for start, stop in spans]
    assert all(len(shard) for shard in shards)
    variable = ts.ShardedVariable(shards)
    assert list(variable.row_spans) == spans
    assert torch.equal(torch.as_tensor(variable), value)
    assert all(torch.equal(variable[row], value[row]) for row in (0, shape[0] // 2, shape[0] - 1))


STRINGS = [np.dtype(object), object, str, np.dtype("U5"), bytes]


@pytest.mark.parametrize(
    ("partitioner", "shape", "dtypes", "axis", "shards"),
    [
        (FixedShardsPartitioner(3), torch.Size([10, 4]), [torch.float32], 1, [1, 3]),
        (MaxSizePartitioner(8), [2, 4], [torch.float32], 1, [1, 4]),
        (MinSizePartitioner(8, 9), [2, 4], [torch.float32], 1, [1, 4]),
        (MaxSizePartitioner(64, bytes_per_string=32), [10], STRINGS, 0, [5]),
        (MaxSizePartitioner(64), [10], STRINGS, 0, [3]),
        (MinSizePartitioner(16, 100, bytes_per_string=8), [10], STRINGS, 0, [5]),
        (MaxSizePartitioner(4, max_shards=0), [10], [torch.float32], 0, [10]),  # 0: no limit
    ],
)
def test_other_axes_strings_and_no_limit(
    partitioner: Partitioner, shape: Any, dtypes: list[Any], axis: int, shards: list[int]
) -> None:
    assert [partitioner(shape, dtype, axis=axis) for dtype in dtypes] == [shards] * len(dtypes)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MinSizePartitioner(0), InvalidArgumentError, "min_shard_bytes=0"),
        (lambda: MinSizePartitioner(max_shards=-1), InvalidArgumentError, "max_shards=-1"),
        (lambda: MinSizePartitioner(bytes_per_string=0), InvalidArgumentError, "bytes_per_string=0"),
        (lambda: MaxSizePartitioner(-4), InvalidArgumentError, "max_shard_bytes=-4"),
        (lambda: MaxSizePartitioner(4, max_shards=-2), InvalidArgumentError, "max_shards=-2"),
        (lambda: MaxSizePartitioner(4, bytes_per_string=0), InvalidArgumentError, "bytes_per_string=0"),
        (lambda: MaxSizePartitioner(1e6), WrongTypeError, "max_shard_bytes must be a whole number; got float"),  # type: ignore[arg-type]
        (lambda: FixedShardsPartitioner(2)([], torch.float32), InvalidArgumentError, "0 dimensions"),
        (lambda: MinSizePartitioner()([], torch.float32), InvalidArgumentError, "0 dimensions"),
        (lambda: MaxSizePartitioner(4)([], torch.float32), InvalidArgumentError, "0 dimensions"),
        (lambda: MaxSizePartitioner(4)([0, 4], torch.float32), InvalidArgumentError, r"shape \(0, 4\)"),
        (lambda: Partitioner()([3], torch.float32), UnsupportedError, "__call__"),
        (lambda: shards_of(lambda *_: [2, 1], (0, 4), torch.float32), InvalidArgumentError, "without rows"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# shards_of: what a strategy asks


def test_what_a_strategy_asks() -> None:
    seen: list[Any] = []

    def mine(shape: torch.Size, dtype: Any, axis: int = 0) -> list[int]:
        seen.append((shape, dtype, axis))
        return [2, 1]

    assert shards_of(mine, (), torch.float32) == 1, "a scalar is whole without asking"
    assert seen == []
    assert shards_of(mine, [4, 2], torch.float64) == 2
    assert seen == [(torch.Size([4, 2]), torch.float64, 0)]
    for partitioner in (FixedShardsPartitioner(2), MinSizePartitioner(4, 2)):
        assert shards_of(partitioner, (0, 4), torch.float32) == 1


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
    assert all(part in str(failure.value) for part in (repr(answer), "mine", "(4, 2)"))
