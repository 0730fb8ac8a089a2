"""Rows written as runs of bytes: what `index_copy_` writes, to the last bit."""

from __future__ import annotations

import pytest
import torch

from torchstrat.parameter_server.variables.put_rows import put_rows

IDS = torch.tensor([0, 3, 4, 10])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 5).to(dtype)


def require_same_as_index_copy(table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    expected = table.clone().index_copy_(0, ids, rows)
    version = table._version
    put_rows(table, ids, rows)
    assert torch.equal(table, expected)
    assert table._version > version or not len(ids), "who looks at the version counter has to see a change"


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", [(), (1,), (7,), (2, 3), (0,)], ids=str)
def test_rows(row: tuple[int, ...], dtype: torch.dtype) -> None:
    require_same_as_index_copy(filled((11, *row), dtype, 1), IDS, filled((4, *row), dtype, 2))


def test_bits_that_are_no_numbers_are_kept() -> None:
    table = torch.zeros(3, 2)
    put_rows(table, torch.tensor([1]), torch.tensor([[float("nan"), -0.0]]))
    assert table[1, 0].isnan()
    assert table[1, 1].signbit()


def test_no_rows_and_no_table() -> None:
    require_same_as_index_copy(filled((11, 2), torch.float32, 1), IDS[:0], torch.zeros(0, 2))
    require_same_as_index_copy(torch.zeros(0, 2), IDS[:0], torch.zeros(0, 2))


def test_other_layouts() -> None:
    require_same_as_index_copy(filled((5, 11), torch.float32, 1).t(), IDS, torch.ones(4, 5))
    require_same_as_index_copy(filled((22, 5), torch.float32, 1)[::2], IDS, torch.ones(4, 5))
    require_same_as_index_copy(filled((11, 5), torch.float32, 1), IDS, filled((5, 4), torch.float32, 2).t())
    require_same_as_index_copy(filled((13, 5), torch.float32, 1)[2:], IDS, torch.ones(1, 5).expand(4, 5))


def test_parameters_without_their_graph() -> None:
    table, rows = torch.nn.Parameter(torch.zeros(11, 2)), torch.nn.Parameter(torch.ones(4, 2))
    put_rows(table, IDS, rows)
    assert torch.equal(table.detach().nonzero()[::2, 0], IDS)
    assert table.grad_fn is None


@pytest.mark.parametrize("rows", [torch.ones(4, 2, dtype=torch.float64), torch.ones(4, 4), torch.ones(2, 2)])
def test_rows_that_do_not_fit_change_nothing(rows: torch.Tensor) -> None:
    table = torch.zeros(11, 2)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        put_rows(table, IDS, rows)
    with pytest.raises(IndexError):
        put_rows(table, torch.tensor([0, 11]), torch.ones(2, 2))
    assert not table.any()


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        table = torch.zeros(11, 2)
        put_rows(table, IDS, torch.ones(4, 2))
    assert torch.equal(table.nonzero()[::2, 0], IDS)
