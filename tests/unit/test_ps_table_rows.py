"""Rows of tables: unique ids by marks are those of torch.unique; what waits until a lookup comes; rows as bytes."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchstrat.errors import InvalidArgumentError
from torchstrat.parameter_server.messages import Shard, VariableSpec
from torchstrat.parameter_server.variables.put_rows import put_rows
from torchstrat.parameter_server.worker import unique_ids
from torchstrat.parameter_server.worker.table_rows import TableRows
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
    says = rf"id {wrong} is not in table table, which has rows 0 to {rows - 1}"
    with pytest.raises(InvalidArgumentError, match=says):
        one.of(table(rows), torch.tensor([1, wrong, 2]))
    assert one.of(table(rows), torch.tensor([4, 4, 2]))[0].tolist() == [2, 4]


class Access:
    """Answers for rows whenever it is told to; counts what was asked."""

    def __init__(self) -> None:
        self.peers: dict[int, str] = {0: "one"}
        self.servers = SimpleNamespace(peers=lambda: dict(self.peers))
        self.started: list[list[int]] = []

    def start_reading_rows(self, spec: VariableSpec, ids: torch.Tensor) -> Any:
        self.started.append(ids.tolist())
        answer: Future[torch.Tensor] = Future()
        answer.set_result(ids.float()[:, None].expand(-1, 2).clone())
        return SimpleNamespace(wait=answer.result)

    def read_rows(self, spec: VariableSpec, ids: torch.Tensor) -> torch.Tensor:
        return self.start_reading_rows(spec, ids).wait()


def test_what_was_asked_for_first_makes_room() -> None:
    access = Access()
    rows = TableRows(access, limit_bytes=5 * 2 * 4)  # type: ignore[arg-type]

    def asks_again(*ids: int) -> bool:
        before = len(access.started)
        rows.read(table(24), torch.tensor(ids))
        return len(access.started) > before

    def prefetch(*ids: int) -> None:
        rows.prefetch(table(24), torch.tensor(ids, dtype=torch.int64))

    for ids in ([1, 2], [3, 4], [5, 6]):
        prefetch(*ids)
    prefetch(*range(6))  # what can never fit throws nothing out, and is not asked for
    prefetch()
    assert access.started == [[1, 2], [3, 4], [5, 6]]
    assert [asks_again(5, 6), asks_again(1, 2), asks_again(3, 4)] == [False, True, False]
    prefetch(1, 2)
    prefetch(*range(7, 12))
    assert [asks_again(1, 2), asks_again(*range(7, 12))] == [True, False]


def test_rows_of_servers_that_were_replaced_are_not_taken() -> None:
    access = Access()
    rows, ids = TableRows(access), torch.tensor([1, 2])  # type: ignore[arg-type]
    rows.prefetch(table(24), ids)
    access.peers = {0: "another"}
    assert rows.read(table(24), ids).values[:, 0].tolist() == [1.0, 2.0]
    assert access.started == [[1, 2], [1, 2]]
    access.peers = {0: "one"}
    rows.read(table(24), ids)
    assert len(access.started) == 3, "they are gone for good"


# -- written as runs of bytes: what `index_copy_` writes, to the last bit ----------------------------------------------

IDS = torch.tensor([0, 3, 4, 10])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool]


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 5).to(dtype)


def require_same_as_index_copy(table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    expected = table.detach().clone().index_copy_(0, ids, rows.detach())
    is_counted = not table.is_inference()
    version = table._version if is_counted else -1
    put_rows(table, ids, rows)
    assert torch.equal(table, expected)
    assert table.grad_fn is None
    assert not is_counted or table._version > version or not len(ids), "who looks at the counter has to see a change"


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", [(), (1,), (7,), (2, 3), (0,)], ids=str)
def test_rows(row: tuple[int, ...], dtype: torch.dtype) -> None:
    require_same_as_index_copy(filled((11, *row), dtype), IDS, filled((4, *row), dtype, 2))


def test_bits_that_are_no_numbers_are_kept() -> None:
    table = torch.zeros(3, 2)
    put_rows(table, torch.tensor([1]), torch.tensor([[float("nan"), -0.0]]))
    assert table[1, 0].isnan()
    assert table[1, 1].signbit()


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.inference_mode])
def test_other_layouts_parameters_and_no_rows(around: type[contextlib.AbstractContextManager[None]]) -> None:
    with around():
        require_same_as_index_copy(filled((5, 11)).t(), IDS, torch.ones(4, 5))
        require_same_as_index_copy(filled((22, 5))[::2], IDS, torch.ones(4, 5))
        require_same_as_index_copy(filled((11, 5)), IDS, filled((5, 4), seed=2).t())
        require_same_as_index_copy(filled((13, 5))[2:], IDS, torch.ones(1, 5).expand(4, 5))
        require_same_as_index_copy(torch.nn.Parameter(filled((11, 2))), IDS, torch.nn.Parameter(torch.ones(4, 2)))
        require_same_as_index_copy(filled((11, 2)), IDS[:0], torch.zeros(0, 2))
        require_same_as_index_copy(torch.zeros(0, 2), IDS[:0], torch.zeros(0, 2))


@pytest.mark.parametrize("rows", [torch.ones(4, 2, dtype=torch.float64), torch.ones(4, 4), torch.ones(2, 2)])
def test_rows_that_do_not_fit_change_nothing(rows: torch.Tensor) -> None:
    table = torch.zeros(11, 2)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        put_rows(table, IDS, rows)
    with pytest.raises(IndexError):
        put_rows(table, torch.tensor([0, 11]), torch.ones(2, 2))
    assert not table.any()
