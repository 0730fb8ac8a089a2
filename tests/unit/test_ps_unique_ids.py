"""Unique ids by marks are those that torch.unique finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchstrat.errors import InvalidArgumentError
from torchstrat.parameter_server.messages import Shard, VariableSpec
from torchstrat.parameter_server.worker import unique_ids
from torchstrat.parameter_server.worker.unique_ids import ROWS_PER_ID, UniqueIds


def table(rows: int) -> VariableSpec:
    return VariableSpec(0, "table", (rows, 2), torch.float32, "parameter", (Shard(0, 0, rows),), True, True)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(0, 299), max_size=40)), min_size=1, max_size=6),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_batches_of_several_tables(batches: list[tuple[int, list[int]]], dtype: torch.dtype) -> None:
    one = UniqueIds()
    for rows, numbers in batches:
        ids = torch.tensor([number % rows for number in numbers], dtype=dtype)
        unique, places = one.of(table(rows), ids)
        wanted, wanted_places = torch.unique(ids, return_inverse=True)
        assert unique.dtype == places.dtype == torch.int64
        assert unique.tolist() == wanted.tolist()
        assert places.tolist() == wanted_places.tolist()


def test_any_shape_and_inference_mode() -> None:
    one, ids = UniqueIds(), torch.tensor([[5, 3, 5], [0, 3, 9]])
    with torch.inference_mode():
        one.of(table(10), ids)
    unique, places = one.of(table(10), ids[:, ::2])
    assert unique.tolist() == [0, 5, 9]
    assert places.tolist() == [[1, 1], [0, 2]]
    unique, places = one.of(table(10), torch.tensor(7))
    assert (unique.tolist(), places.item()) == ([7], 0)


def test_a_table_much_larger_than_the_batch_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(unique_ids.np, "flatnonzero", lambda marks: sizes.append(len(marks)) or marks.nonzero()[0])
    one, ids = UniqueIds(), torch.tensor([3, 1, 3])
    for rows in (3 * ROWS_PER_ID, 3 * ROWS_PER_ID + 1, 10**12):
        assert one.of(table(rows), ids)[0].tolist() == [1, 3]
    assert sizes == [3 * ROWS_PER_ID]


@pytest.mark.parametrize("rows", [10, 10_000])
@pytest.mark.parametrize("wrong", [-1, -10_001, 10_000, 2**40])
def test_an_id_out_of_range_leaves_nothing_marked(rows: int, wrong: int) -> None:
    one = UniqueIds()
    with pytest.raises(
        InvalidArgumentError, match=rf"id {wrong} is not in table table, which has rows 0 to {rows - 1}"
    ):
        one.of(table(rows), torch.tensor([1, wrong, 2]))
    assert one.of(table(rows), torch.tensor([4, 4, 2]))[0].tolist() == [2, 4]
    assert not one._marks.any()
