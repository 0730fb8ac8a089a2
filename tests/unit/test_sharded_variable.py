"""`ShardedVariable`: it reads as its shards put together; edits reach exactly the shards and rows they are about."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchstrat as ts
from torchstrat import ShardedVariable
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    row_offsets,
    shards_of,
)

examples = settings(max_examples=60, deadline=None, derandomize=True)
LAYOUTS = [[3, 3, 3, 2, 2], [4, 3, 3], [1, 1, 1, 1], [6], [1, 4, 2], [0, 3, 0, 2]]
EVEN = [layout for layout in LAYOUTS if layout not in ([1, 4, 2], [0, 3, 0, 2])]
DOUBLE = torch.float64
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "update": lambda old, new: new,
}


def whole_of(rows: list[int], dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    """``(sum of rows, 2)``, all entries different."""
    return torch.arange(2 * sum(rows), dtype=dtype).reshape(-1, 2) + 1


def sharded(rows: list[int], dtype: torch.dtype = DOUBLE) -> ShardedVariable:
    trained = dtype.is_floating_point
    return ShardedVariable([nn.Parameter(part.clone(), trained) for part in whole_of(rows, dtype).split(rows)])


def sparse(indices: Any, rows: torch.Tensor, size: Any) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.as_tensor(indices)[None], rows, tuple(size), check_invariants=True)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=DOUBLE)


def assert_is(variable: ShardedVariable, expected: torch.Tensor) -> None:
    assert torch.equal(torch.as_tensor(variable), expected)


class RemoteShard:
    """A shard that is no tensor: keeps its rows to itself, and notes down what it is asked."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.asked: list[Any] = []
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def read(self) -> torch.Tensor:
        self.asked.append("read")
        return self._tensor.clone()

    def read_rows(self, rows: torch.Tensor) -> torch.Tensor:
        self.asked.append(rows.tolist())
        return self._tensor[rows]

    def edit(self, op: str, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        assert rows is not None
        self.asked.append((op, rows.tolist()))
        for row, one in zip(rows, value, strict=True):
            self._tensor[row] = OPS[op](self._tensor[row], one)


def remote(rows: list[int]) -> tuple[ShardedVariable, list[RemoteShard]]:
    shards = [RemoteShard(part.clone()) for part in whole_of(rows).split(rows)]
    return ShardedVariable(list(shards)), shards


# Reading


@st.composite
def keys(draw: Any, rows: int) -> Any:
    number = st.sampled_from([int, np.int64, np.int8])
    bound = st.none() | st.builds(lambda kind, one: kind(one), number, st.integers(-rows - 2, rows + 2))
    slices = st.builds(slice, bound, bound, st.none() | st.integers(1, rows + 1))
    masks = st.lists(st.booleans(), min_size=rows, max_size=rows).map(lambda bits: torch.tensor(bits, dtype=torch.bool))
    ints = st.builds(lambda kind, one: kind(one), number, st.integers(-rows, rows - 1))
    of_columns = st.builds(slice, st.none() | st.integers(-3, 3), st.none(), st.none() | st.integers(1, 3))
    columns = st.integers(-2, 1) | of_columns | st.none()
    first = slices | masks | ints | st.just(...) | st.none()
    pairs = st.tuples(slices | masks | ints, columns) | st.tuples(st.none(), slices | ints)
    key = draw(first | st.tuples(first) | pairs)
    return key.numpy() if isinstance(key, torch.Tensor) and draw(st.booleans()) else key


@examples
@given(data=st.data(), rows=st.sampled_from(LAYOUTS))
def test_an_index_gives_a_copy_of_what_it_gives_of_the_whole(data: st.DataObject, rows: list[int]) -> None:
    key = data.draw(keys(sum(rows)))
    expected = whole_of(rows)[torch.from_numpy(key) if isinstance(key, np.ndarray) else key]
    variable = sharded(rows)
    found = variable[key]
    assert torch.equal(found, expected)
    assert torch.equal(remote(rows)[0][key], expected)
    with torch.no_grad():
        found.zero_()
    assert_is(variable, whole_of(rows))


def test_an_index_asks_only_for_the_rows_it_names() -> None:
    variable, shards = remote([3, 3, 3, 2, 2])
    variable[2:8:2, 0]
    variable[-1]
    variable[torch.tensor([False] * 12 + [True])]
    assert [shard.asked for shard in shards] == [[[2], []], [[1], []], [[0], []], [[]], [[1], [1]]]


OUT_OF_RANGE = [5, -6, (0, 2), (0, 0, 0), (), np.ones(3, bool), torch.ones(6, dtype=torch.bool)]
WRONG_KINDS = [[0, 1], [True] * 5, 1.5, "a", torch.tensor(1), np.array([1]), slice(torch.tensor(1), 3), slice(0, 2.0)]
STEPS = [slice(None, None, -1), slice(None, None, 0), True, np.True_, torch.tensor(True)]


@pytest.mark.parametrize(
    ("key", "errors", "says"),
    [
        *((key, (IndexError, ValueError), None) for key in OUT_OF_RANGE),
        *((key, (WrongTypeError,), "got") for key in [*WRONG_KINDS, (0, "a")]),
        *((key, (InvalidArgumentError,), r"positive|single bool") for key in STEPS),
    ],
)
def test_indices_that_are_refused(key: Any, errors: tuple[type[Exception], ...], says: str | None) -> None:
    with pytest.raises(errors[0], match=says) as failure:
        sharded([3, 2])[key]
    assert all(isinstance(failure.value, error) for error in errors)


def test_gradients_arrive_at_the_shards() -> None:
    variable, whole = sharded([3, 2]), whole_of([3, 2]).requires_grad_()
    for table in (variable, whole):
        ((table * table)[1:4].sum() + table[2:, 0].prod()).backward()
    assert whole.grad is not None
    assert torch.allclose(torch.cat([shard.grad for shard in variable.variables]), whole.grad)
    grads = torch.autograd.grad((variable * 3).sum(), variable.variables)
    assert all(torch.equal(grad, torch.full_like(grad, 3)) for grad in grads)


# Assigning


@pytest.mark.parametrize("value", [1.0, ones(2), ones(4, 2), ones(6, 2), torch.ones(5, 2), "a"])
@pytest.mark.parametrize("name", ["assign", "assign_add", "assign_sub"])
def test_values_of_another_shape_or_dtype_change_nothing(name: str, value: Any) -> None:
    variable = sharded([3, 2])
    with pytest.raises((InvalidArgumentError, WrongTypeError), match=name):
        getattr(variable, name)(value)
    assert_is(variable, whole_of([3, 2]))


def test_assigns_numbers_arrays_and_sharded_variables_and_is_a_value_itself() -> None:
    variable = sharded([3, 2])
    variable.assign(sharded([1, 4]) * 2)
    variable.assign_add(sharded([1, 4]))
    variable.assign_sub(np.ones((5, 2)))
    variable.assign_add([[1, 1]] * 5)
    assert_is(variable, whole_of([3, 2]) * 3)
    tensor = torch.zeros(2, 5, 2, dtype=DOUBLE)
    tensor[1] = variable
    assert torch.equal(tensor[1], whole_of([3, 2]) * 3)


@examples
@given(
    data=st.data(), op=st.sampled_from(sorted(OPS)), rows=st.sampled_from(EVEN), prefix=st.sampled_from(["", "batch_"])
)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.int32])
def test_scatters_row_after_row(dtype: torch.dtype, data: st.DataObject, op: str, rows: list[int], prefix: str) -> None:
    ids = data.draw(st.lists(st.integers(0, sum(rows) - 1), max_size=6))
    numbers = data.draw(st.lists(st.integers(-3, 9), min_size=2 * len(ids), max_size=2 * len(ids)))
    values = torch.tensor(numbers, dtype=dtype).reshape(-1, 2)
    expected = whole_of(rows, dtype)
    for row, value in zip(ids, values, strict=True):
        expected[row] = OPS[op](expected[row], value)
    variable = sharded(rows, dtype)
    delta = sparse(torch.tensor(ids, dtype=torch.int64), values, variable.shape)
    name = f"scatter_{op}" if op != "update" else f"{prefix}scatter_update"
    assert getattr(variable, name)(delta) is variable
    assert_is(variable, expected)


def test_shards_without_rows_are_divided_evenly_too() -> None:
    none, two = sharded([0, 0]), sharded([1, 1, 0])
    assert none.sparse_read(torch.zeros(0, dtype=torch.int64)).shape == (0, 2)
    assert_is(none.scatter_add(sparse(torch.zeros(0, dtype=torch.int64), ones(0, 2), (0, 2))), whole_of([0]))
    assert torch.equal(two.sparse_read(torch.tensor([1, 0])), whole_of([2]))
    assert_is(two.scatter_add(sparse([1], ones(1, 2), (2, 2))), whole_of([2]) + torch.tensor([[0.0], [1.0]]))


def test_a_scatter_reaches_only_the_shards_with_rows_in_it() -> None:
    variable, shards = remote([3, 3, 2])
    variable.scatter_add(sparse([6, 1, 6], ones(3, 2), (8, 2)))
    assert [shard.asked for shard in shards] == [[("add", [1])], [], [("add", [0, 0])]]
    assert torch.as_tensor(variable)[6].tolist() == [15.0, 16.0]


@pytest.mark.parametrize(
    ("rows", "edit", "kind", "message"),
    [
        ([3, 2], lambda v: v.scatter_add(ones(5, 2)), WrongTypeError, "sparse COO"),
        ([3, 2], lambda v: v.scatter_add(1.0), WrongTypeError, "got float"),
        ([3, 2], lambda v: v.scatter_add(ones(5, 2).to_sparse()), InvalidArgumentError, "2 sparse dimensions"),
        ([3, 2], lambda v: v.scatter_add(sparse([], ones(0, 3), (5, 3))), InvalidArgumentError, r"\(3,\)"),
        ([3, 2], lambda v: v.scatter_add(sparse([0], ones(1, 3), (5, 3))), InvalidArgumentError, r"\(3,\)"),
        ([3, 2], lambda v: v.scatter_add(sparse([0], torch.ones(1, 2), (5, 2))), InvalidArgumentError, "torch.float32"),
        (
            [3, 2],
            lambda v: v.scatter_add(sparse([0, 5], ones(2, 2), (9, 2))),
            InvalidArgumentError,
            "5.* not in .0, 5.",
        ),
        # Rows are only edited where partitioners would divide them so.
        ([1, 4, 2], lambda v: v.scatter_add(sparse([0], ones(1, 2), (7, 2))), UnsupportedError, r"\[1, 4, 2\] rows"),
        ([1, 4, 2], lambda v: v.sparse_read(torch.tensor([0])), UnsupportedError, "sparse_read"),
        ([0, 0], lambda v: v.sparse_read(torch.tensor([0])), IndexError, r"ids\[0\] is 0, which is not in \[0, 0\)"),
        ([0, 0], lambda v: v.scatter_add(sparse([0], ones(1, 2), (1, 2))), IndexError, r"ids\[0\] is 0"),
        ([3, 2], lambda v: v.sparse_read(torch.tensor([4, 5])), IndexError, r"ids\[1\] is 5"),
        ([3, 2], lambda v: v.sparse_read(torch.tensor([[4]])), InvalidArgumentError, "shape"),
        ([3, 2], lambda v: v.sparse_read(torch.tensor([1.0])), WrongTypeError, "int32 or int64"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(rows: list[int], edit: Any, kind: type[Exception], message: str) -> None:
    variable = sharded(rows)
    with pytest.raises(kind, match=message):
        edit(variable)
    assert_is(variable, whole_of(rows))


# What it is made of

TWO_ROWS = nn.Parameter(torch.ones(2, 2))


def test_a_module_has_the_shards_among_its_own() -> None:
    module = nn.Module()
    module.table = ShardedVariable([nn.Parameter(torch.ones(2, 2)), nn.Buffer(torch.zeros(1, 2))], "t")
    assert [name for name, _ in module.named_parameters()] == ["table.part_0"]
    assert [name for name, _ in module.named_buffers()] == ["table.part_1"]
    assert not ShardedVariable([nn.Buffer(torch.zeros(1, 2), persistent=False)]).state_dict()
    state = copy.deepcopy(module.state_dict())
    module.table.assign(torch.full((3, 2), 7.0))
    module.load_state_dict(state)
    assert torch.as_tensor(module.table).tolist() == [[1, 1], [1, 1], [0, 0]]
    module.double()
    assert module.table.dtype == torch.as_tensor(module.table).dtype == DOUBLE
    assert module.table.assign_add(ones(3, 2)).numpy().tolist() == [[2, 2], [2, 2], [1, 1]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_copies_are_independent(copied: Any) -> None:
    variable = sharded([3, 2])
    other = copied(variable)
    other.assign_add(ones(5, 2))
    assert_is(variable, whole_of([3, 2]))
    assert_is(other, whole_of([3, 2]) + 1)


def test_it_says_what_it_is() -> None:
    assert repr(sharded([3, 2])) == (
        "<ShardedVariable 'ShardedVariable' shape=(5, 2), dtype=torch.float64, shards of 3, 2 rows>"
    )
    assert ShardedVariable([nn.Parameter(torch.ones(1))], name="emb").name == "emb"
    assert sharded([3, 2]).row_spans == ((0, 3), (3, 5))


def test_a_scatter_of_no_rows_changes_nothing_however_its_tensor_was_made() -> None:
    variable = sharded([3, 2])
    for empty in (torch.zeros(5, 2, dtype=DOUBLE).to_sparse(), sparse([], ones(0, 2), (5, 2))):
        assert variable.scatter_sub(empty) is variable
    assert variable.sparse_read([]).shape == (0, 2)
    assert_is(variable, whole_of([3, 2]))


def test_integers_that_are_divided_by_zero_change_nothing_in_any_shard() -> None:
    variable = ShardedVariable([nn.Buffer(torch.full((2, 1), 7)), nn.Buffer(torch.full((1, 1), 7))])
    with pytest.raises(InvalidArgumentError, match="scatter_div got zeros to divide torch"):
        variable.scatter_div(sparse([0, 2], torch.tensor([[2], [0]]), (3, 1)))
    assert_is(variable, torch.full((3, 1), 7))


def test_arrays_of_what_numpy_has_not_are_of_float32() -> None:
    shard = nn.Parameter(torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16))
    variable = ts.Variable(shard.detach())
    for array in (ShardedVariable([shard]).numpy(), variable.numpy(), np.asarray(variable)):
        assert (array.dtype, array.tolist()) == (np.float32, [[1.5, 2.0]])


def test_scatter_div_of_repeated_rows_divides_repeatedly() -> None:
    delta = sparse([1, 1, 3], torch.tensor([[2.0, 4.0], [2.0, 1.0], [0.5, 8.0]], dtype=DOUBLE), (5, 2))
    expected = whole_of([3, 2]) / torch.tensor([[1, 1], [4, 4], [1, 1], [0.5, 8], [1, 1]], dtype=DOUBLE)
    assert torch.allclose(torch.as_tensor(sharded([3, 2]).scatter_div(delta)), expected)
    whole_numbers = ShardedVariable([nn.Parameter(torch.tensor([[-7]]), requires_grad=False)])
    whole_numbers.scatter_div(sparse([0], torch.tensor([[2]]), (1, 1)))
    assert torch.as_tensor(whole_numbers).tolist() == [[-3]]


def test_rows_of_a_shorter_table_are_rows_too_and_shards_may_be_variables() -> None:
    parts = [ts.Variable(part) for part in whole_of([3, 2]).split([3, 2])]
    variable = ShardedVariable(parts).scatter_add(sparse([1], ones(1, 2), (2, 2))).assign_sub(ones(5, 2))
    expected = whole_of([3, 2]) - 1
    expected[1] += 1
    assert_is(variable, expected)
    assert torch.equal(torch.cat([part.read_value() for part in parts]), expected)
    assert not list(variable.parameters())
    assert torch.equal(variable.sparse_read(torch.tensor([4, 0, 3, 2, 0])), expected[[0, 2, 0, 4, 3]])
    variable.scatter_sub(sparse([4, 4], ones(2, 2), (5, 2))).scatter_mul(sparse([0], 3 * ones(1, 2), (5, 2)))
    expected[4] -= 2
    expected[0] *= 3
    assert_is(variable, expected)
    assert_is(variable.assign(ones(5, 2)), ones(5, 2))
    assert variable in {variable}
    with pytest.raises(TypeError, match="unsupported operand"):
        np.ones(2) - variable


def test_a_computation_in_flight_notices_an_assignment() -> None:
    variable = sharded([3, 2])
    loss = (variable.variables[0] ** 2).sum()
    variable.assign(torch.zeros(5, 2, dtype=DOUBLE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- which rows each shard of a variable has, and what is refused of a user's own partitioner --------------------------


@examples
@given(rows=st.integers(1, 300), shards=st.integers(1, 400))
def test_rows_are_divided_evenly_the_first_shards_being_the_larger(rows: int, shards: int) -> None:
    spans = row_offsets(rows, shards)
    sizes = [stop - start for start, stop in spans]
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(rows))
    assert len(spans) == min(rows, shards)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


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
def test_other_axes_strings_and_no_limit(partitioner, shape, dtypes, axis, shards) -> None:
    assert [partitioner(shape, dtype, axis=axis) for dtype in dtypes] == [shards] * len(dtypes)


OF_ITS_SHARDS = r"\.variables"
NO_ANSWERS: list[Any] = [[1, 2], [2, 2], [0, 1], [-1, 1], [], [0], [2, 1, 2], None, 2, "21", [2.0, 1], [None, 1]]


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
        *(
            (lambda answer=answer: shards_of(lambda *_: answer, (4, 2), torch.float32), InvalidArgumentError,
             rf"(?=.*{re.escape(repr(answer))})(?=.*lambda)(?=.*\(4, 2\))")
            for answer in (*NO_ANSWERS, {0: 2, 1: 1})
        ),
        *(
            (lambda rows=rows, n=n: row_offsets(rows, n), InvalidArgumentError, f"{rows} rows .* {n} shards")
            for rows, n in ((0, 2), (3, 0), (-1, 1), (3, -2))
        ),
        *(
            (lambda variables=variables: ShardedVariable(variables), WrongTypeError, "variable")
            for variables in (None, [None], [1, 2], [TWO_ROWS * 2], {"a": TWO_ROWS})
        ),
        (lambda: torch.add(sharded([3, 2]), 1, out=sharded([3, 2])), UnsupportedError, "assign"),
        (lambda: nn.functional.relu_(sharded([3, 2])), UnsupportedError, "assign"),
        *(
            (lambda given=given: given(sharded([3, 2])), UnsupportedError, OF_ITS_SHARDS)
            for given in (
                lambda v: torch.autograd.grad((v * 3).sum(), v),
                lambda v: torch.autograd.grad((v * 3).sum(), [v]),
                lambda v: torch.autograd.grad((v * 3).sum(), inputs=v),
                lambda v: torch.autograd.grad((v * 3).sum(), inputs=[v]),
            )
        ),
    ],
)  # fmt: skip
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
