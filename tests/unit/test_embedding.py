"""Lookups on tables in shards give what the whole table gives, forwards and backwards; sparse ids in all forms.

Combiners and weights are compared with TensorFlow's in tests/conformance (embedding_lookup).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
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


def sharded(rows: list[int], whole: torch.Tensor | None = None) -> ShardedVariable:
    parts = (whole_of(rows) if whole is None else whole).split(rows)
    return ShardedVariable([torch.nn.Parameter(part.clone()) for part in parts])


FIVE = whole_of([5])


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
    whole = whole_of(rows)[:, 0] if row_shape == () else whole_of(rows, *row_shape)
    variable, table = sharded(rows, whole), whole.clone().requires_grad_()
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
        FIVE,
        torch.nn.Parameter(FIVE),
        list(FIVE.split([3, 2])),
        torch.nn.Embedding.from_pretrained(FIVE),
        ts.Variable(FIVE),
        [ts.Variable(part) for part in FIVE.split([1, 4])],
    ],
    ids=["ShardedVariable", "list", "tensor", "parameter", "tensors", "Embedding", "Variable", "Variables"],
)
@pytest.mark.parametrize(
    "ids", [torch.tensor([[4, 0], [0, 2]]), 3, [3, 0], np.array([[3]], dtype=np.int32), []], ids=repr
)
def test_what_tables_and_ids_can_be(table: Any, ids: Any) -> None:
    found = embedding_lookup(table, ids)
    assert torch.equal(found, FIVE[torch.as_tensor(ids, dtype=torch.int64)])


class Unread:
    """A shard that must not be read."""

    shape, dtype = torch.Size([3, 2]), torch.float64

    def read(self, *_: Any) -> Any:
        raise AssertionError("read or edited")

    read_rows = edit = read


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


def test_long_rows_are_scaled_down_and_the_table_is_not() -> None:
    variable = sharded([3, 2])
    rows = embedding_lookup(variable, torch.arange(5), max_norm=0.5)
    norms = torch.linalg.vector_norm(FIVE, dim=1)
    assert torch.allclose(torch.linalg.vector_norm(rows, dim=1), norms.clamp(max=0.5))
    assert (variable.numpy() == FIVE.numpy()).all()
    assert embedding_lookup(variable, [], max_norm=0.5).shape == (0, 2)
    zeros = torch.nn.Parameter(torch.zeros(2, 2))
    embedding_lookup(zeros, [0], max_norm=0.5).sum().backward()
    assert zeros.grad is not None
    assert torch.isfinite(zeros.grad.to_dense()).all()


def test_a_row_of_exactly_the_largest_norm_has_the_gradient_of_the_longer_ones() -> None:
    gradients = []
    for length in (1.0, 2.0):
        row = (length * torch.tensor([[3.0, 4.0]])).requires_grad_()
        embedding_lookup(row, [0], max_norm=5.0).sum().backward()
        assert row.grad is not None
        gradients.append(row.grad * length)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_keeps_its_own_kind_of_gradient(sparse: bool) -> None:
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


def coo(values: Any) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor(INDICES).T, torch.tensor(values), SHAPE, check_invariants=True)


def jagged(values: list[Any]) -> torch.Tensor:
    rows = [torch.tensor(part) for part in (values[:2], values[2:3], values[:0], values[3:])]
    return torch.nested.nested_tensor([row.to(rows[0].dtype) for row in rows], layout=torch.jagged)


FORMS: dict[str, Any] = {
    "lists": (INDICES, IDS, SHAPE),
    "tensors": (torch.tensor(INDICES), torch.tensor(IDS, dtype=torch.int32), torch.tensor(SHAPE)),
    "coo": coo(IDS),
    "offsets": (torch.tensor(IDS), torch.tensor([0, 2, 3, 3])),
}
FORMS_OF_WEIGHTS: dict[str, Any] = {
    "values": torch.tensor(WEIGHTS),
    "list": WEIGHTS,
    "lists": (INDICES, WEIGHTS, SHAPE),
    "coo": coo(WEIGHTS),
}


@pytest.mark.parametrize(
    ("form", "weights"),
    [*((f, w) for f in FORMS.values() for w in FORMS_OF_WEIGHTS.values()), (jagged(IDS), jagged(WEIGHTS))],
    ids=[*(f"{f}, {w}" for f in FORMS for w in FORMS_OF_WEIGHTS), "jagged"],
)
def test_all_forms_of_ids_and_weights_mean_the_same(form: Any, weights: Any) -> None:
    found = embedding_lookup_sparse(sharded([3, 2]), form, weights, combiner="sum")
    assert torch.allclose(found, torch.stack([FIVE[0] + 3 * FIVE[3], 2 * FIVE[4], 0 * FIVE[0], 0.5 * FIVE[1]]))


@pytest.mark.parametrize("one", [np.float32, np.int64, torch.tensor])
def test_three_numbers_are_three_weights(one: Any) -> None:
    """And not indices, weights and a shape."""
    found = embedding_lookup_sparse(sharded([3, 2]), ([0, 3, 4], [0, 2]), [one(1), one(3), one(2)], combiner="sum")
    assert torch.allclose(found, torch.stack([FIVE[0] + 3 * FIVE[3], 2 * FIVE[4]]))


def test_positions_need_no_order_and_repeated_ones_are_two_ids() -> None:
    ids = torch.sparse_coo_tensor([[1, 0, 1], [0, 0, 0]], torch.tensor([2, 1, 3]), (2, 1), check_invariants=True)
    found = embedding_lookup_sparse(FIVE, ids, None, combiner="sum")
    assert torch.allclose(found, torch.stack([FIVE[1], FIVE[2] + FIVE[3]]))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", None])
@pytest.mark.parametrize("max_norm", [None, 0.7])
def test_tables_and_weights_have_right_gradients(combiner: str | None, max_norm: float | None) -> None:
    def combined(weights: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([shard * 1 for shard in shards])  # sparse gradients become dense, which gradcheck needs
        return embedding_lookup_sparse(whole, FORMS["lists"], weights, combiner=combiner, max_norm=max_norm)

    weights = torch.tensor(WEIGHTS, dtype=torch.float64, requires_grad=True)
    shards = [part.clone().requires_grad_() for part in FIVE.split([3, 2])]
    assert torch.autograd.gradcheck(combined, (weights, *shards))


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_that_add_up_to_nothing_give_zeros_and_finite_gradients(combiner: str) -> None:
    table = torch.nn.Parameter(FIVE.clone())
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    found = embedding_lookup_sparse(table, ([[0, 0], [0, 1]], [1, 2], [2, 2]), weights, combiner=combiner)
    assert found.tolist() == [[0, 0], [0, 0]]
    found.sum().backward()
    assert table.grad is not None
    assert weights.grad is not None
    assert torch.isfinite(table.grad.to_dense()).all()
    assert torch.isfinite(weights.grad).all()


@pytest.mark.parametrize("ids", [([], [], [3, 2]), ([], [0, 0, 0]), (torch.zeros(0, 2, dtype=torch.int64), [], [3, 2])])
def test_no_ids_at_all_give_zeros(ids: Any) -> None:
    assert torch.equal(embedding_lookup_sparse(sharded([3, 2]), ids, None), torch.zeros(3, 2, dtype=torch.float64))
    assert torch.equal(safe_embedding_lookup_sparse(sharded([3, 2]), ids, default_id=4), FIVE[[4, 4, 4]])


# The safe lookup


def test_negative_ids_and_weights_are_left_out() -> None:
    ids, zero = (INDICES, [0, -1, 4, -7], SHAPE), torch.zeros(2, dtype=torch.float64)
    found = safe_embedding_lookup_sparse(FIVE, ids)
    assert torch.allclose(found, torch.stack([FIVE[0], FIVE[4], zero, zero]))
    found = safe_embedding_lookup_sparse(FIVE, ids, torch.tensor([-1.0, 1.0, 0.5, 1.0]))
    assert torch.allclose(found, torch.stack([zero, FIVE[4], zero, zero]))
    found = safe_embedding_lookup_sparse(FIVE, ids, torch.tensor([-1.0, 1.0, 0.0, 1.0]), combiner="sum", default_id=1)
    assert torch.allclose(found, torch.stack([-FIVE[0], zero, FIVE[1], FIVE[1]]))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_a_default_row_where_nothing_counts(combiner: str, weights: Any) -> None:
    found = safe_embedding_lookup_sparse(sharded([3, 2]), (INDICES, [-1] * 4, SHAPE), weights, combiner, default_id=3)
    assert torch.allclose(found, FIVE[[3, 3, 3, 3]])


def test_rows_may_be_counted_through_several_dimensions() -> None:
    found = safe_embedding_lookup_sparse(FIVE, ([[0, 1, 0], [1, 0, 3]], [2, 4], [2, 2, 4]), combiner="sum")
    expected = torch.zeros(2, 2, 2, dtype=torch.float64)
    expected[0, 1], expected[1, 0] = FIVE[2], FIVE[4]
    assert torch.equal(found, expected)


# What is refused


def of_sparse(ids: Any, weights: Any = None, **options: Any) -> tuple[Any, ...]:
    return embedding_lookup_sparse, (FIVE, ids, weights), options


MALFORMED: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    *(((embedding_lookup, (FIVE, ids)), WrongTypeError, "int32 or int64") for ids in ([1.5], torch.tensor([True]))),
    ((embedding_lookup, (FIVE, torch.tensor([1.0]))), WrongTypeError, "int32 or int64"),
    ((embedding_lookup, (FIVE, torch.tensor([1], dtype=torch.uint8))), WrongTypeError, "int32 or int64"),
    *(((embedding_lookup, (one, [0])), WrongTypeError, r"table|variable") for one in ("table", None, [], {"a": 1})),
    ((embedding_lookup, ([torch.ones(2, 2), 3], [0])), WrongTypeError, r"table|variable"),
    ((embedding_lookup, (torch.tensor(1.0), [0])), InvalidArgumentError, "rows"),
    ((embedding_lookup, ([torch.ones(2, 2), torch.ones(2, 3)], [0])), InvalidArgumentError, "equal dtypes and rows"),
    ((embedding_lookup, (FIVE, [0]), {"max_norm": 0}), InvalidArgumentError, "max_norm=0"),
    (of_sparse(torch.tensor([0, 1])), WrongTypeError, "embedding_lookup"),
    (of_sparse("ids"), WrongTypeError, "got str"),
    (of_sparse((INDICES, [0.5] * 4, SHAPE)), WrongTypeError, "int32 or int64"),
    (of_sparse((INDICES, IDS[:3], SHAPE)), InvalidArgumentError, r"indices of shape \(4, 2\) for 3 ids"),
    (of_sparse((INDICES, IDS, [4])), InvalidArgumentError, "two dimensions"),
    (of_sparse((INDICES, IDS, [3, 3])), InvalidArgumentError, r"indices\[3\] is \[3, 2\]"),
    (of_sparse(([[0, -1]], [0], [1, 1])), InvalidArgumentError, r"indices\[0\] is \[0, -1\]"),
    (of_sparse((torch.tensor(IDS), torch.tensor([0, 3, 2]))), InvalidArgumentError, "ascend"),
    (of_sparse((torch.tensor(IDS), torch.tensor([1, 3]))), InvalidArgumentError, "the first is 0"),
    (of_sparse((torch.tensor(IDS), torch.tensor([0, 5]))), InvalidArgumentError, "beyond"),
    (of_sparse((torch.tensor(IDS), torch.tensor([], dtype=torch.int64))), InvalidArgumentError, "no offsets"),
    (of_sparse(FORMS["lists"], WEIGHTS[:3]), InvalidArgumentError, r"\(3,\)"),
    (of_sparse(FORMS["lists"], torch.ones(4, 1)), InvalidArgumentError, r"\(4, 1\)"),
    (of_sparse(FORMS["lists"], ([*INDICES[:1], [0, 2], *INDICES[2:]], WEIGHTS, SHAPE)), ValueError, "other positions"),
    (of_sparse(FORMS["lists"], "weights"), WrongTypeError, "one weight per id"),
    (of_sparse(FORMS["lists"], combiner="max"), InvalidArgumentError, r"combiner='max'.*mean, sum, sqrtn"),
    (
        (safe_embedding_lookup_sparse, (FIVE, FORMS["lists"]), {"combiner": "max"}),
        InvalidArgumentError,
        r"combiner='max'.*mean, sum, sqrtn",
    ),
    (
        (safe_embedding_lookup_sparse, (FIVE, ([[0, 0]], [5], [1, 1]))),
        InvalidArgumentError,
        "is 5, which is not in",
    ),
    (
        (safe_embedding_lookup_sparse, (FIVE, ([[0, 0]], [0], [1, 1])), {"default_id": 5}),
        InvalidArgumentError,
        r"default_id.* is 5",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), MALFORMED)
def test_what_is_refused(call: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    function, arguments, options = (*call, {})[:3]
    with pytest.raises(kind, match=message):
        function(*arguments, **options)
