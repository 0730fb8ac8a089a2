"""`ShardedVariable`: it reads as its shards put together; edits reach exactly the shards and rows they are about."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrat as ts
from torchstrat import ShardedVariable
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.parameter_server.variables.shard_edits import EditOp, apply_edit
from torchstrat.parameter_server.variables.sharded_slicing import ShardIndexError

examples = settings(max_examples=60, deadline=None, derandomize=True)
LAYOUTS = [[3, 3, 3, 2, 2], [4, 3, 3], [1, 1, 1, 1], [6], [1, 4, 2], [0, 3, 0, 2]]
layouts = st.sampled_from(LAYOUTS)


def whole_of(rows: list[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``(sum of rows, 2)``, all entries different."""
    return torch.arange(2 * sum(rows), dtype=dtype).reshape(-1, 2) + 1


def sharded(rows: list[int], dtype: torch.dtype = torch.float64) -> ShardedVariable:
    trained = dtype.is_floating_point
    return ShardedVariable([torch.nn.Parameter(part.clone(), trained) for part in whole_of(rows, dtype).split(rows)])


def sparse(indices: Any, rows: torch.Tensor, size: Any) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.as_tensor(indices)[None], rows, tuple(size), check_invariants=True)


class RemoteShard:
    """A shard that is no tensor: keeps its rows to itself, and notes down what it is asked."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.asked: list[Any] = []

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    def read(self) -> torch.Tensor:
        self.asked.append("read")
        return self._tensor.clone()

    def read_rows(self, rows: torch.Tensor) -> torch.Tensor:
        self.asked.append(rows.tolist())
        return self._tensor[rows]

    def edit(self, op: EditOp, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        self.asked.append((op, None if rows is None else rows.tolist()))
        apply_edit(self._tensor, op, value, rows)


def remote(rows: list[int]) -> tuple[ShardedVariable, list[RemoteShard]]:
    shards = [RemoteShard(part.clone()) for part in whole_of(rows).split(rows)]
    return ShardedVariable(list(shards)), shards


# Reading


@pytest.mark.parametrize("rows", LAYOUTS)
def test_converts_to_its_shards_put_together(rows: list[int]) -> None:
    variable, whole = sharded(rows), whole_of(rows)
    converted = torch.as_tensor(variable)
    assert torch.equal(converted, whole)
    assert not converted.requires_grad
    assert variable.shape == whole.shape
    assert variable.dtype == whole.dtype
    assert variable.numpy().tolist() == whole.tolist()
    converted.zero_()
    assert torch.equal(torch.as_tensor(variable), whole), "a conversion is a copy"


@st.composite
def keys(draw: Any, rows: int) -> Any:
    bound = st.none() | st.integers(-rows - 2, rows + 2)
    steps = st.none() | st.integers(1, rows + 1)
    column_steps = st.none() | st.integers(1, 3)
    slices = st.builds(slice, bound, bound, steps)
    masks = st.lists(st.booleans(), min_size=rows, max_size=rows).map(lambda bits: torch.tensor(bits, dtype=torch.bool))
    ints = st.integers(-rows, rows - 1)
    columns = st.integers(-2, 1) | st.builds(slice, st.none() | st.integers(-3, 3), st.none(), column_steps) | st.none()
    first = slices | masks | ints | st.just(...) | st.none()
    key = draw(
        first | st.tuples(first) | st.tuples(slices | masks | ints, columns) | st.tuples(st.none(), slices | ints)
    )
    numpy = isinstance(key, torch.Tensor) and draw(st.booleans())
    return key.numpy() if numpy else key


@examples
@given(data=st.data(), rows=layouts)
def test_an_index_gives_what_it_gives_of_the_whole(data: st.DataObject, rows: list[int]) -> None:
    key = data.draw(keys(sum(rows)))
    expected = whole_of(rows)[torch.from_numpy(key) if isinstance(key, np.ndarray) else key]
    assert torch.equal(sharded(rows)[key], expected)
    assert torch.equal(remote(rows)[0][key], expected)


def test_an_index_asks_only_for_the_rows_it_names() -> None:
    variable, shards = remote([3, 3, 3, 2, 2])
    variable[2:8:2, 0]
    variable[-1]
    variable[torch.tensor([False] * 12 + [True])]
    assert [shard.asked for shard in shards] == [[[2], []], [[1], []], [[0], []], [[]], [[1], [1]]]


@pytest.mark.parametrize("rows", [[3, 2], [5]])
@pytest.mark.parametrize("key", [0, slice(1, 4), ..., None, slice(None), (slice(None), 1)])
def test_what_an_index_gives_is_a_copy(rows: list[int], key: Any) -> None:
    variable = sharded(rows)
    with torch.no_grad():
        variable[key].zero_()
    assert torch.equal(torch.as_tensor(variable), whole_of(rows))


@pytest.mark.parametrize("key", [5, -6, (0, 2), (0, 0, 0), (), np.ones(3, bool), torch.ones(6, dtype=torch.bool)])
def test_indices_out_of_range(key: Any) -> None:
    with pytest.raises(ShardIndexError) as failure:
        sharded([3, 2])[key]
    assert isinstance(failure.value, IndexError)
    assert isinstance(failure.value, ValueError)


@pytest.mark.parametrize(
    "key",
    [[0, 1], [True] * 5, 1.5, "a", torch.tensor(1), np.array([1]), slice(torch.tensor(1), 3), slice(0, 2.0), (0, "a")],
)
def test_indices_of_the_wrong_kind(key: Any) -> None:
    with pytest.raises(WrongTypeError, match="got"):
        sharded([3, 2])[key]


@pytest.mark.parametrize("key", [slice(None, None, -1), slice(None, None, 0), True, np.True_, torch.tensor(True)])
def test_steps_are_positive_and_a_single_bool_is_no_mask(key: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"positive|single bool"):
        sharded([3, 2])[key]


def test_integers_of_numpy_are_integers() -> None:
    assert torch.equal(sharded([3, 2])[np.int64(4)], whole_of([3, 2])[4])
    assert torch.equal(sharded([3, 2])[np.int32(1) : np.int8(4)], whole_of([3, 2])[1:4])


EXPRESSIONS: list[Callable[[Any], Any]] = [
    lambda v: v + 1,
    lambda v: 2 - v,
    lambda v: v * v,
    lambda v: v @ torch.ones(2, 3, dtype=torch.float64),
    lambda v: torch.ones(5, dtype=torch.float64) @ v,
    lambda v: torch.ones(2, dtype=torch.float64) / v,
    lambda v: abs(-v) ** 2 // 3 % 2,
    lambda v: v < 4,
    lambda v: v == v,
    lambda v: v != 3,
    lambda v: torch.cat([v, v]),
    lambda v: torch.nn.functional.linear(torch.ones(3, 2, dtype=torch.float64), weight=v),
    lambda v: torch.zeros(5, 2, dtype=torch.float64).copy_(v),
    lambda v: torch.stack([torch.sum(v), torch.max(v)]),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_computes_like_a_tensor(expression: Callable[[Any], torch.Tensor]) -> None:
    result = expression(sharded([3, 2]))
    assert type(result) is torch.Tensor
    assert torch.equal(result, expression(whole_of([3, 2])))


def test_gradients_arrive_at_the_shards() -> None:
    variable, whole = sharded([3, 2]), whole_of([3, 2]).requires_grad_()
    for table in (variable, whole):
        ((table * table)[1:4].sum() + table[2:, 0].prod()).backward()
    assert whole.grad is not None
    assert torch.allclose(torch.cat([shard.grad for shard in variable.variables]), whole.grad)
    grads = torch.autograd.grad((variable * 3).sum(), variable.variables)
    assert all(torch.equal(grad, torch.full_like(grad, 3)) for grad in grads)


@pytest.mark.parametrize("arguments", [lambda v: ([v],), lambda v: (v,)])
def test_it_is_not_differentiated_as_a_whole(arguments: Any) -> None:
    variable = sharded([3, 2])
    with pytest.raises(UnsupportedError, match=r"\.variables"):
        torch.autograd.grad((variable * 3).sum(), *arguments(variable))
    with pytest.raises(UnsupportedError, match=r"\.variables"):
        torch.autograd.grad((variable * 3).sum(), inputs=arguments(variable)[0])


def test_an_augmented_assignment_only_binds_the_name_anew() -> None:
    variable = before = sharded([3, 2])
    variable += 1  # type: ignore[assignment, misc]
    assert type(variable) is torch.Tensor
    assert torch.equal(torch.as_tensor(before), whole_of([3, 2]))


@pytest.mark.parametrize(
    "edit",
    [
        lambda v: torch.add(v, 1, out=v),
        lambda v: torch.nn.functional.relu_(v),
    ],
)
def test_torch_does_not_edit_a_copy_of_it(edit: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedError, match="assign"):
        edit(sharded([3, 2]))


@pytest.mark.parametrize("name", ["device", "trainable", "value", "read_value", "requires_grad", "sum"])
def test_what_it_has_not(name: str) -> None:
    variable = sharded([3, 2])
    assert not hasattr(variable, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(variable, name)


def test_it_has_no_length_and_is_no_sequence_of_rows() -> None:
    variable = sharded([3, 2])
    with pytest.raises(TypeError):
        len(variable)  # type: ignore[arg-type]
    assert np.asarray(variable).shape == ()
    assert [tuple(shard.shape) for shard in variable] == [(3, 2), (2, 2)]
    assert variable in {variable}
    with pytest.raises(TypeError, match="unsupported operand"):
        np.ones(2) - variable


# Assigning


@pytest.mark.parametrize("rows", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("assign", lambda old, new: new),
        ("assign_add", lambda old, new: old + new),
        ("assign_sub", lambda old, new: old - new),
    ],
)
def test_assigns_to_every_shard_its_rows(rows: list[int], name: str, expected: Any) -> None:
    variable, value = sharded(rows), whole_of(rows) * 0.5
    shards = variable.variables
    assert getattr(variable, name)(value) is variable
    assert torch.equal(torch.as_tensor(variable), expected(whole_of(rows), value))
    assert all(one is other for one, other in zip(shards, variable.variables, strict=True)), "edited in place"


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        torch.ones(2, dtype=torch.float64),
        torch.ones(4, 2, dtype=torch.float64),
        torch.ones(6, 2, dtype=torch.float64),
        torch.ones(5, 2),
        "a",
    ],
)
@pytest.mark.parametrize("name", ["assign", "assign_add", "assign_sub"])
def test_values_of_another_shape_or_dtype_change_nothing(name: str, value: Any) -> None:
    variable = sharded([3, 2])
    with pytest.raises((InvalidArgumentError, WrongTypeError), match=name):
        getattr(variable, name)(value)
    assert torch.equal(torch.as_tensor(variable), whole_of([3, 2]))


def test_a_tensor_takes_it_as_a_value() -> None:
    tensor = torch.zeros(2, 5, 2, dtype=torch.float64)
    tensor[1] = sharded([3, 2])
    assert torch.equal(tensor[1], whole_of([3, 2]))


def test_assigns_numbers_arrays_and_sharded_variables() -> None:
    variable = sharded([3, 2])
    variable.assign(sharded([1, 4]) * 2)
    variable.assign_add(sharded([1, 4]))
    variable.assign_sub(np.ones((5, 2)))
    variable.assign_add([[1, 1]] * 5)
    assert torch.equal(torch.as_tensor(variable), whole_of([3, 2]) * 3)


def test_a_computation_in_flight_notices_an_assignment() -> None:
    variable = sharded([3, 2])
    loss = (variable.variables[0] ** 2).sum()
    variable.assign(torch.zeros(5, 2, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


SCATTERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scatter_add": torch.add,
    "scatter_sub": torch.sub,
    "scatter_mul": torch.mul,
    "scatter_min": torch.minimum,
    "scatter_max": torch.maximum,
    "scatter_update": lambda old, new: new,
    "batch_scatter_update": lambda old, new: new,
}
EVEN = [layout for layout in LAYOUTS if layout not in ([1, 4, 2], [0, 3, 0, 2])]


@examples
@given(data=st.data(), name=st.sampled_from(sorted(SCATTERS)), rows=st.sampled_from(EVEN))
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_scatters_row_after_row(dtype: torch.dtype, data: st.DataObject, name: str, rows: list[int]) -> None:
    ids = data.draw(st.lists(st.integers(0, sum(rows) - 1), max_size=6))
    numbers = data.draw(st.lists(st.integers(-3, 9), min_size=2 * len(ids), max_size=2 * len(ids)))
    values = torch.tensor(numbers, dtype=dtype).reshape(-1, 2)
    expected = whole_of(rows, dtype)
    for row, value in zip(ids, values, strict=True):
        expected[row] = SCATTERS[name](expected[row], value)
    variable = sharded(rows, dtype)
    delta = sparse(torch.tensor(ids, dtype=torch.int64), values, variable.shape)
    assert getattr(variable, name)(delta) is variable
    assert torch.equal(torch.as_tensor(variable), expected)


def test_scatter_div_of_repeated_rows_divides_repeatedly() -> None:
    delta = sparse([1, 1, 3], torch.tensor([[2.0, 4.0], [2.0, 1.0], [0.5, 8.0]], dtype=torch.float64), (5, 2))
    variable = sharded([3, 2]).scatter_div(delta)
    expected = whole_of([3, 2])
    expected[1] /= torch.tensor([4.0, 4.0])
    expected[3] /= torch.tensor([0.5, 8.0])
    assert torch.allclose(torch.as_tensor(variable), expected)
    whole_numbers = ShardedVariable([torch.nn.Parameter(torch.tensor([[-7]]), requires_grad=False)])
    whole_numbers.scatter_div(sparse([0], torch.tensor([[2]]), (1, 1)))
    assert torch.as_tensor(whole_numbers).tolist() == [[-3]]


def test_a_scatter_reaches_only_the_shards_with_rows_in_it() -> None:
    variable, shards = remote([3, 3, 2])
    variable.scatter_add(sparse([6, 1, 6], torch.ones(3, 2, dtype=torch.float64), (8, 2)))
    assert [shard.asked for shard in shards] == [[("add", [1])], [], [("add", [0, 0])]]
    assert torch.as_tensor(variable)[6].tolist() == [15.0, 16.0]


def test_rows_of_a_shorter_table_are_rows_too() -> None:
    variable = sharded([3, 2]).scatter_add(sparse([1], torch.ones(1, 2, dtype=torch.float64), (2, 2)))
    assert torch.as_tensor(variable)[1].tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    ("delta", "kind", "message"),
    [
        (torch.ones(5, 2, dtype=torch.float64), WrongTypeError, "sparse COO"),
        (1.0, WrongTypeError, "got float"),
        (torch.eye(5, 2, dtype=torch.float64).to_sparse(), InvalidArgumentError, "2 sparse dimensions"),
        (sparse([0], torch.ones(1, 3, dtype=torch.float64), (5, 3)), InvalidArgumentError, r"\(3,\)"),
        (sparse([0], torch.ones(1, 2), (5, 2)), InvalidArgumentError, "torch.float32"),
        (sparse([0, 5], torch.ones(2, 2, dtype=torch.float64), (9, 2)), InvalidArgumentError, "5.* not in .0, 5."),
    ],
)
def test_rows_that_do_not_fit_change_nothing(delta: Any, kind: type[Exception], message: str) -> None:
    variable = sharded([3, 2])
    with pytest.raises(kind, match=message):
        variable.scatter_add(delta)
    assert torch.equal(torch.as_tensor(variable), whole_of([3, 2]))


def test_rows_are_only_edited_where_partitioners_would_divide_them_so() -> None:
    delta = sparse([0], torch.ones(1, 2, dtype=torch.float64), (7, 2))
    with pytest.raises(UnsupportedError, match=r"\[1, 4, 2\] rows"):
        sharded([1, 4, 2]).scatter_add(delta)
    with pytest.raises(UnsupportedError, match="sparse_read"):
        sharded([1, 4, 2]).sparse_read(torch.tensor([0]))


def test_sparse_read_groups_rows_by_shard() -> None:
    rows = sharded([3, 2]).sparse_read(torch.tensor([4, 0, 3, 2, 0]))
    assert torch.equal(rows, whole_of([3, 2])[[0, 2, 0, 4, 3]])
    with pytest.raises(ShardIndexError, match=r"ids\[1\] is 5"):
        sharded([3, 2]).sparse_read(torch.tensor([4, 5]))
    with pytest.raises(InvalidArgumentError, match="shape"):
        sharded([3, 2]).sparse_read(torch.tensor([[4]]))
    with pytest.raises(WrongTypeError, match="int32 or int64"):
        sharded([3, 2]).sparse_read(torch.tensor([1.0]))


# What it is made of


@pytest.mark.parametrize(
    "variables",
    [
        [],
        (),
        None,
        torch.nn.Parameter(torch.ones(2, 2)),
        [torch.ones(2, 2)],
        [1, 2],
        [torch.nn.Parameter(torch.ones(2)) * 2],
        [None],
        {"a": torch.nn.Parameter(torch.ones(2))},
    ],
)
def test_only_lists_of_variables(variables: Any) -> None:
    with pytest.raises(WrongTypeError, match="variable"):
        ShardedVariable(variables)


@pytest.mark.parametrize(
    "others", [torch.ones(2, 3), torch.ones(2), torch.ones(2, 2, dtype=torch.float64), torch.tensor(1.0)]
)
def test_shards_have_to_be_alike(others: torch.Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="shard"):
        ShardedVariable([torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(others)])


def test_a_module_has_the_shards_among_its_own() -> None:
    module = torch.nn.Module()
    module.table = ShardedVariable([torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Buffer(torch.zeros(1, 2))], "t")
    assert [name for name, _ in module.named_parameters()] == ["table.part_0"]
    assert [name for name, _ in module.named_buffers()] == ["table.part_1"]
    state = copy.deepcopy(module.state_dict())
    module.table.assign(torch.full((3, 2), 7.0))
    module.load_state_dict(state)
    assert torch.as_tensor(module.table).tolist() == [[1, 1], [1, 1], [0, 0]]
    module.double()
    assert module.table.dtype == torch.float64
    assert torch.as_tensor(module.table).dtype == torch.float64
    assert module.table.assign_add(torch.ones(3, 2, dtype=torch.float64)).numpy().tolist() == [[2, 2], [2, 2], [1, 1]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_copies_are_independent(copied: Any) -> None:
    variable = sharded([3, 2])
    other = copied(variable)
    other.assign_add(torch.ones(5, 2, dtype=torch.float64))
    assert torch.equal(torch.as_tensor(variable), whole_of([3, 2]))
    assert torch.equal(torch.as_tensor(other), whole_of([3, 2]) + 1)


def test_optimizers_step_the_shards() -> None:
    variable = sharded([3, 2])
    optimizer = torch.optim.SGD(variable.parameters(), lr=0.5)
    (variable * 2).sum().backward()
    optimizer.step()
    assert torch.equal(torch.as_tensor(variable), whole_of([3, 2]) - 1)


def test_shards_may_be_variables() -> None:
    parts = [ts.Variable(part) for part in whole_of([3, 2]).split([3, 2])]
    variable = ShardedVariable(parts, name="counts")
    assert variable.variables == parts or all(a is b for a, b in zip(variable.variables, parts, strict=True))
    assert torch.equal(variable[2:4], whole_of([3, 2])[2:4])
    ones = torch.ones(5, 2, dtype=torch.float64)
    variable.assign_add(ones).assign_sub(2 * ones)
    delta = sparse([4, 4, 0], ones[:3], (5, 2))
    variable.scatter_add(delta).scatter_sub(delta).scatter_sub(delta).scatter_mul(sparse([1], 3 * ones[:1], (5, 2)))
    expected = whole_of([3, 2]) - 1
    expected[4] -= 2
    expected[0] -= 1
    expected[1] *= 3
    assert torch.equal(torch.cat([part.read_value() for part in parts]), expected)
    variable.assign(ones)
    assert torch.equal(torch.as_tensor(variable), ones)
    assert not list(variable.parameters())


def test_variables_that_another_process_keeps_are_read_and_edited_by_rows() -> None:
    parts = [ts.Variable(part) for part in whole_of([3, 2]).split([3, 2])]
    kept = [RemoteShard(part.read_value()) for part in parts]
    for part, shard in zip(parts, kept, strict=True):
        part._cells = (shard,)  # type: ignore[assignment]  # of a storage's members only those that are used here
    variable = ShardedVariable(parts)
    assert torch.equal(variable[3], whole_of([3, 2])[3])
    variable.scatter_max(sparse([4, 0], torch.full((2, 2), 50.0, dtype=torch.float64), (5, 2)))
    variable.assign_sub(torch.ones(5, 2, dtype=torch.float64))
    assert [shard.asked for shard in kept] == [
        [("max", [0]), ("sub", None)],
        [[0], ("max", [1]), ("sub", None)],
    ]


def test_it_says_what_it_is() -> None:
    assert repr(sharded([3, 2])) == (
        "<ShardedVariable 'ShardedVariable' shape=(5, 2), dtype=torch.float64, shards of 3, 2 rows>"
    )
    assert ShardedVariable([torch.nn.Parameter(torch.ones(1))], name="emb").name == "emb"
    assert sharded([3, 2]).row_spans == ((0, 3), (3, 5))


@examples
@given(data=st.data(), op=st.sampled_from(["assign", "add", "sub", "mul", "div", "min", "max"]))
def test_whole_edits_broadcast(data: st.DataObject, op: EditOp) -> None:
    numbers = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=2))
    value = torch.tensor(numbers, dtype=torch.float64)
    tensor, old = whole_of([3]), whole_of([3])
    apply_edit(tensor, op, value)
    functions = {"div": torch.div, "assign": lambda _, new: new.expand(3, 2)}
    names = {
        "add": "scatter_add",
        "sub": "scatter_sub",
        "mul": "scatter_mul",
        "min": "scatter_min",
        "max": "scatter_max",
    }
    expected = functions[op](old, value) if op in functions else SCATTERS[names[op]](old, value)
    assert torch.equal(tensor, expected)
