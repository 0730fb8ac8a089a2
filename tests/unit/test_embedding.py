"""Lookups on tables in shards give what the whole table gives, forwards and backwards; sparse ids in all forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrat as ts
from torchstrat import ShardedVariable, embedding_lookup, embedding_lookup_sparse, safe_embedding_lookup_sparse
from torchstrat.errors import InvalidArgumentError, WrongTypeError

examples = settings(max_examples=40, deadline=None, derandomize=True)
LAYOUTS = [[3, 3, 3, 2, 2], [4], [1, 1, 1, 1], [1, 4, 2], [0, 2, 0, 3]]


def whole_of(rows: list[int], *row_shape: int) -> torch.Tensor:
    shape = (sum(rows), *(row_shape or (2,)))
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def sharded(rows: list[int], *row_shape: int) -> ShardedVariable:
    parts = whole_of(rows, *row_shape).split(rows)
    return ShardedVariable([torch.nn.Parameter(part.clone()) for part in parts])


def dense(gradients: list[torch.Tensor | None]) -> torch.Tensor:
    assert all(gradient is not None and gradient.layout is torch.sparse_coo for gradient in gradients)
    return torch.cat([gradient.to_dense() for gradient in gradients if gradient is not None])


@examples
@given(data=st.data(), rows=st.sampled_from(LAYOUTS), dtype=st.sampled_from([torch.int32, torch.int64]))
@pytest.mark.parametrize("row_shape", [(2,), (), (2, 3)])
def test_rows_and_their_gradients_are_those_of_the_whole_table(
    row_shape: tuple[int, ...], data: st.DataObject, rows: list[int], dtype: torch.dtype
) -> None:
    numbers = data.draw(st.lists(st.integers(0, sum(rows) - 1), max_size=8))
    ids = torch.tensor(numbers, dtype=dtype).reshape(-1, 2) if len(numbers) % 2 == 0 else torch.tensor(numbers)
    parts = whole_of(rows, 6)[:, :1].reshape(-1) if row_shape == () else whole_of(rows, *row_shape)
    variable = ShardedVariable([torch.nn.Parameter(part.clone()) for part in parts.split(rows)])
    table = parts.clone().requires_grad_()
    found, expected = embedding_lookup(variable, ids), table[ids.long()]
    assert torch.equal(found, expected)
    weights = torch.arange(found.numel(), dtype=found.dtype).reshape(found.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert table.grad is not None
    assert torch.allclose(dense([shard.grad for shard in variable.variables]), table.grad)


def test_gradients_are_sparse_with_local_ids_in_the_order_of_the_lookup_and_repeated() -> None:
    variable = sharded([3, 2, 2])
    embedding_lookup(variable, torch.tensor([4, 0, 2, 0, 3])).sum().backward()
    ids = [shard.grad._indices()[0].tolist() for shard in variable.variables]
    assert ids == [[0, 2, 0], [1, 0], []]
    assert all(shard.grad.shape == shard.shape for shard in variable.variables)


@pytest.mark.parametrize(
    "table",
    [
        sharded([3, 2]),
        sharded([3, 2]).variables,
        whole_of([3, 2]),
        torch.nn.Parameter(whole_of([3, 2])),
        list(whole_of([3, 2]).split([3, 2])),
        torch.nn.Embedding.from_pretrained(whole_of([3, 2])),
        ts.Variable(whole_of([3, 2])),
        [ts.Variable(part) for part in whole_of([3, 2]).split([1, 4])],
    ],
    ids=["ShardedVariable", "list", "tensor", "parameter", "tensors", "Embedding", "Variable", "Variables"],
)
def test_what_a_table_can_be(table: Any) -> None:
    ids = torch.tensor([[4, 0], [0, 2]])
    assert torch.equal(embedding_lookup(table, ids), whole_of([3, 2])[ids])


@pytest.mark.parametrize("table", ["table", None, [], [torch.ones(2, 2), 3], {"a": 1}])
def test_what_is_no_table(table: Any) -> None:
    with pytest.raises(WrongTypeError, match=r"table|variable"):
        embedding_lookup(table, torch.tensor([0]))


def test_tables_need_rows_of_one_kind() -> None:
    with pytest.raises(InvalidArgumentError, match="rows"):
        embedding_lookup(torch.tensor(1.0), torch.tensor([0]))
    with pytest.raises(InvalidArgumentError, match="equal dtypes and rows"):
        embedding_lookup([torch.ones(2, 2), torch.ones(2, 3)], torch.tensor([0]))


def test_ids_as_numbers_and_arrays() -> None:
    table = whole_of([5])
    assert torch.equal(embedding_lookup(table, 3), table[3])
    assert torch.equal(embedding_lookup(table, [3, 0]), table[[3, 0]])
    assert torch.equal(embedding_lookup(table, np.array([[3]], dtype=np.int32)), table[3].reshape(1, 1, 2))
    assert embedding_lookup(table, []).shape == (0, 2)


class Unread:
    """A shard that must not be read."""

    shape = torch.Size([3, 2])
    dtype = torch.float64

    def read(self) -> torch.Tensor:
        raise AssertionError("read")

    def read_rows(self, rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError("read")

    def edit(self, op: Any, value: Any, rows: Any = None) -> None:
        raise AssertionError("edited")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0, 6, 7]), r"ids\[1\] is 6, which is not in \[0, 6\).*2 of 3"),
        (torch.tensor([[0, 1], [2, -1]]), r"ids\[1, 1\] is -1"),
        (torch.tensor(9), "the id is 9"),
    ],
)
def test_an_id_out_of_range_is_named_before_any_row_is_read(ids: torch.Tensor, message: str) -> None:
    with pytest.raises(IndexError, match=message) as failure:
        embedding_lookup([Unread(), Unread()], ids)
    assert isinstance(failure.value, InvalidArgumentError)
    sparse = (torch.zeros(ids.numel(), 2, dtype=torch.int64), ids.flatten(), (1, 1))
    with pytest.raises(InvalidArgumentError, match="not in"):
        embedding_lookup_sparse([Unread(), Unread()], sparse, None)


@pytest.mark.parametrize(
    "ids", [torch.tensor([1.0]), [1.5], torch.tensor([True]), torch.tensor([1], dtype=torch.uint8)]
)
def test_ids_are_whole_numbers(ids: Any) -> None:
    with pytest.raises(WrongTypeError, match="int32 or int64"):
        embedding_lookup(whole_of([5]), ids)


def test_long_rows_are_scaled_down_and_the_table_is_not() -> None:
    variable = sharded([3, 2])
    before = variable.numpy()
    rows = embedding_lookup(variable, torch.arange(5), max_norm=0.5)
    norms = torch.linalg.vector_norm(whole_of([3, 2]), dim=1)
    assert torch.allclose(torch.linalg.vector_norm(rows, dim=1), norms.clamp(max=0.5))
    assert (variable.numpy() == before).all()
    assert embedding_lookup(variable, [], max_norm=0.5).shape == (0, 2)
    zeros = torch.nn.Parameter(torch.zeros(2, 2))
    embedding_lookup(zeros, [0], max_norm=0.5).sum().backward()
    assert zeros.grad is not None
    assert torch.isfinite(zeros.grad.to_dense()).all()
    with pytest.raises(InvalidArgumentError, match="max_norm=0"):
        embedding_lookup(variable, [0], max_norm=0)


def test_a_row_of_exactly_the_largest_norm_has_the_gradient_of_the_longer_ones() -> None:
    gradients = []
    for length in (1.0, 2.0):
        row = (length * torch.tensor([[3.0, 4.0]])).requires_grad_()
        embedding_lookup(row, [0], max_norm=5.0).sum().backward()
        assert row.grad is not None
        gradients.append(row.grad * length)
    torch.testing.assert_close(*gradients)


def test_an_embedding_keeps_its_own_kind_of_gradient() -> None:
    for sparse in (False, True):
        module = torch.nn.Embedding(5, 2, padding_idx=1, sparse=sparse)
        embedding_lookup(module, torch.tensor([1, 3])).sum().backward()
        gradient = module.weight.grad
        assert gradient is not None
        assert gradient.is_sparse is sparse
        assert gradient.to_dense().sum(dim=1).tolist() == [0, 0, 0, 2, 0]


# Sparse ids

INDICES = [[0, 0], [0, 1], [1, 0], [3, 2]]
IDS = [0, 3, 4, 1]
WEIGHTS = [1.0, 3.0, 2.0, 0.5]
SHAPE = [4, 3]
AS_COO = torch.sparse_coo_tensor(torch.tensor(INDICES).T, torch.tensor(IDS), SHAPE, check_invariants=True)

FORMS: dict[str, Any] = {
    "lists": (INDICES, IDS, SHAPE),
    "tensors": (torch.tensor(INDICES), torch.tensor(IDS, dtype=torch.int32), torch.tensor(SHAPE)),
    "coo": AS_COO,
    "offsets": (torch.tensor(IDS), torch.tensor([0, 2, 3, 3])),
}
FORMS_OF_WEIGHTS: dict[str, Any] = {
    "values": torch.tensor(WEIGHTS),
    "list": WEIGHTS,
    "lists": (INDICES, WEIGHTS, SHAPE),
    "coo": torch.sparse_coo_tensor(torch.tensor(INDICES).T, torch.tensor(WEIGHTS), SHAPE, check_invariants=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("form_of_weights", FORMS_OF_WEIGHTS)
def test_all_forms_of_ids_and_weights_mean_the_same(form: str, form_of_weights: str) -> None:
    found = embedding_lookup_sparse(sharded([3, 2]), FORMS[form], FORMS_OF_WEIGHTS[form_of_weights], combiner="sum")
    table = whole_of([3, 2])
    expected = torch.stack([table[0] + 3 * table[3], 2 * table[4], 0 * table[0], 0.5 * table[1]])
    assert torch.allclose(found, expected)


def test_ids_in_a_jagged_tensor() -> None:
    rows = [torch.tensor([0, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64), torch.tensor([1])]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    weights = torch.nested.nested_tensor([torch.ones(len(row)) * 2 for row in rows], layout=torch.jagged)
    found = embedding_lookup_sparse(sharded([3, 2]), jagged, weights, combiner="sum")
    assert torch.allclose(found, 2 * embedding_lookup_sparse(sharded([3, 2]), FORMS["lists"], None, combiner="sum"))


def test_positions_need_no_order_and_repeated_ones_are_two_ids() -> None:
    coo = torch.sparse_coo_tensor([[1, 0, 1], [0, 0, 0]], torch.tensor([2, 1, 3]), (2, 1), check_invariants=True)
    table = whole_of([5])
    found = embedding_lookup_sparse(table, coo, None, combiner="sum")
    assert torch.allclose(found, torch.stack([table[1], table[2] + table[3]]))


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_and_means_are_those_of_embedding_bags(combiner: str, weighted: bool) -> None:
    variable = sharded([3, 2])
    ids, offsets = FORMS["offsets"]
    weights = torch.tensor(WEIGHTS, dtype=torch.float64) if weighted else None
    found = embedding_lookup_sparse(variable, (ids, offsets), weights, combiner=combiner)
    expected = F.embedding_bag(ids, whole_of([3, 2]), offsets, mode="sum", per_sample_weights=weights)
    if combiner == "mean":
        sums = torch.zeros(4, dtype=torch.float64).index_add(
            0, torch.tensor([0, 0, 1, 3]), torch.ones(4, dtype=torch.float64) if weights is None else weights
        )
        expected = expected / sums.clamp(min=0.1)[:, None]
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", None])
@pytest.mark.parametrize("max_norm", [None, 0.7])
def test_tables_and_weights_have_right_gradients(combiner: str | None, max_norm: float | None) -> None:
    def combined(weights: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        tables = [shard * 1 for shard in shards]  # sparse gradients become dense, which gradcheck needs
        whole = torch.cat(tables)
        return embedding_lookup_sparse(whole, FORMS["lists"], weights, combiner=combiner, max_norm=max_norm)

    weights = torch.tensor(WEIGHTS, dtype=torch.float64, requires_grad=True)
    shards = [part.clone().requires_grad_() for part in whole_of([3, 2]).split([3, 2])]
    assert torch.autograd.gradcheck(combined, (weights, *shards))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_gradients_of_shards_are_those_of_the_whole(combiner: str) -> None:
    variable, whole = sharded([3, 2]), whole_of([3, 2]).requires_grad_()
    scale = torch.arange(8, dtype=torch.float64).reshape(4, 2)
    for table in (variable, whole):
        (embedding_lookup_sparse(table, FORMS["coo"], WEIGHTS, combiner=combiner) * scale).sum().backward()
    assert whole.grad is not None
    assert torch.allclose(dense([shard.grad for shard in variable.variables]), whole.grad.to_dense())


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_that_add_up_to_nothing_give_zeros_and_finite_gradients(combiner: str) -> None:
    table = torch.nn.Parameter(whole_of([5]))
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    found = embedding_lookup_sparse(table, ([[0, 0], [0, 1]], [1, 2], [2, 2]), weights, combiner=combiner)
    assert found.tolist() == [[0, 0], [0, 0]]
    found.sum().backward()
    assert table.grad is not None
    assert weights.grad is not None
    assert torch.isfinite(table.grad.to_dense()).all()
    assert torch.isfinite(weights.grad).all()


def test_no_ids_at_all_give_zeros() -> None:
    variable = sharded([3, 2])
    for ids in (([], [], [3, 2]), ([], [0, 0, 0]), (torch.zeros(0, 2, dtype=torch.int64), [], [3, 2])):
        assert torch.equal(embedding_lookup_sparse(variable, ids, None), torch.zeros(3, 2, dtype=torch.float64))
        found = safe_embedding_lookup_sparse(variable, ids, default_id=4)
        assert torch.equal(found, whole_of([3, 2])[[4, 4, 4]])


@pytest.mark.parametrize(
    ("ids", "kind", "message"),
    [
        (torch.tensor([0, 1]), WrongTypeError, "embedding_lookup"),
        ("ids", WrongTypeError, "got str"),
        ((INDICES, [0.5] * 4, SHAPE), WrongTypeError, "int32 or int64"),
        ((INDICES, IDS[:3], SHAPE), InvalidArgumentError, r"indices of shape \(4, 2\) for 3 ids"),
        ((INDICES, IDS, [4]), InvalidArgumentError, "two dimensions"),
        ((INDICES, IDS, [3, 3]), InvalidArgumentError, r"indices\[3\] is \[3, 2\]"),
        (([[0, -1]], [0], [1, 1]), InvalidArgumentError, r"indices\[0\] is \[0, -1\]"),
        ((torch.tensor(IDS), torch.tensor([0, 3, 2])), InvalidArgumentError, "ascend"),
        ((torch.tensor(IDS), torch.tensor([1, 3])), InvalidArgumentError, "the first is 0"),
        ((torch.tensor(IDS), torch.tensor([0, 5])), InvalidArgumentError, "beyond"),
        ((torch.tensor(IDS), torch.tensor([], dtype=torch.int64)), InvalidArgumentError, "no offsets"),
    ],
)
def test_malformed_sparse_ids(ids: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        embedding_lookup_sparse(whole_of([5]), ids, None)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (WEIGHTS[:3], r"\(3,\)"),
        (torch.ones(4, 1), r"\(4, 1\)"),
        (([[0, 0], [0, 2], [1, 0], [3, 2]], WEIGHTS, SHAPE), "other positions"),
        ("weights", "one weight per id"),
    ],
)
def test_weights_that_do_not_match_the_ids(weights: Any, message: str) -> None:
    with pytest.raises((InvalidArgumentError, WrongTypeError), match=message):
        embedding_lookup_sparse(whole_of([5]), FORMS["lists"], weights)


@pytest.mark.parametrize("lookup", [embedding_lookup_sparse, safe_embedding_lookup_sparse])
def test_unknown_combiners(lookup: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"combiner='max'.*mean, sum, sqrtn"):
        lookup(whole_of([5]), FORMS["lists"], None, combiner="max")


# The safe lookup


def test_negative_ids_and_weights_are_left_out() -> None:
    table = whole_of([5])
    ids = (INDICES, [0, -1, 4, -7], SHAPE)
    zero = torch.zeros(2, dtype=torch.float64)
    found = safe_embedding_lookup_sparse(table, ids)
    assert torch.allclose(found, torch.stack([table[0], table[4], zero, zero]))
    found = safe_embedding_lookup_sparse(table, ids, torch.tensor([-1.0, 1.0, 0.5, 1.0]))
    assert torch.allclose(found, torch.stack([zero, table[4], zero, zero]))
    found = safe_embedding_lookup_sparse(table, ids, torch.tensor([-1.0, 1.0, 0.0, 1.0]), combiner="sum", default_id=1)
    assert torch.allclose(found, torch.stack([-table[0], zero, table[1], table[1]]))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 2.0, 0.5]])
def test_a_default_row_where_nothing_counts(combiner: str, weights: Any) -> None:
    variable = sharded([3, 2])
    found = safe_embedding_lookup_sparse(variable, (INDICES, [-1] * 4, SHAPE), weights, combiner, default_id=3)
    assert torch.allclose(found, whole_of([3, 2])[[3, 3, 3, 3]])


def test_ids_that_are_too_large_are_errors_in_the_safe_lookup_too() -> None:
    with pytest.raises(InvalidArgumentError, match="is 5, which is not in"):
        safe_embedding_lookup_sparse(whole_of([5]), ([[0, 0]], [5], [1, 1]))
    with pytest.raises(InvalidArgumentError, match=r"default_id.* is 5"):
        safe_embedding_lookup_sparse(whole_of([5]), ([[0, 0]], [0], [1, 1]), default_id=5)


def test_rows_may_be_counted_through_several_dimensions() -> None:
    table = whole_of([5])
    found = safe_embedding_lookup_sparse(table, ([[0, 1, 0], [1, 0, 3]], [2, 4], [2, 2, 4]), combiner="sum")
    assert found.shape == (2, 2, 2)
    assert torch.equal(found[0, 1], table[2])
    assert torch.equal(found[1, 0], table[4])
    assert not found[0, 0].any()
    assert not found[1, 1].any()
