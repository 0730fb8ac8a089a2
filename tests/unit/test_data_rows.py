"""Batches as rows: every kind of leaf can be cut, joined, emptied and told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from tests.unit.data_ranks import plain
from torchstrat.data import rows
from torchstrat.errors import InvalidArgumentError, WrongTypeError


def jagged(*values: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in values], layout=torch.jagged)


def content(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return [row.tolist() for row in leaf.unbind()]
    return plain(leaf.to_dense() if isinstance(leaf, torch.Tensor) else leaf)


LEAVES: dict[str, tuple[Any, list[Any]]] = {
    "tensor": (torch.tensor([[0, 1], [2, 3], [4, 5]]), [[0, 1], [2, 3], [4, 5]]),
    "strings": (np.array(["a", "b", "c"], dtype=object), ["a", "b", "c"]),
    "list": (["a", "b", "c"], ["a", "b", "c"]),
    "jagged": (jagged([1], [2, 2], [3]), [[1], [2, 2], [3]]),
    "sparse": (torch.eye(3).to_sparse(), torch.eye(3).tolist()),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_cutting_and_joining(kind: str) -> None:
    leaf, expected = LEAVES[kind]
    assert rows.length(leaf) == 3
    parts = rows.split_by_sizes(leaf, (2, 0, 1))
    assert [content(part) for part in parts] == [expected[:2], [], expected[2:]]
    assert content(rows.join([parts[0], parts[2]])) == expected


@pytest.mark.parametrize("kind", LEAVES)
def test_an_empty_batch_keeps_type_and_trailing_shape(kind: str) -> None:
    leaf, _ = LEAVES[kind]
    empty = rows.empty_like(leaf)
    assert type(empty) is type(leaf)
    assert rows.length(empty) == 0
    if isinstance(leaf, torch.Tensor):
        assert empty.dtype == leaf.dtype
        assert leaf.is_nested or empty.shape[1:] == leaf.shape[1:]


def test_a_cut_of_a_dense_tensor_shares_its_memory() -> None:
    batch = torch.zeros(4)
    rows.cut(batch, 1, 3).fill_(1)
    assert batch.tolist() == [0, 1, 1, 0]


def test_every_leaf_is_split_by_its_own_length() -> None:
    first, second = rows.split_equally({"x": torch.arange(4), "y": torch.arange(2), "none": None}, 2)
    assert {key: plain(value) for key, value in first.items()} == {"x": [0, 1], "y": [0], "none": None}
    assert {key: plain(value) for key, value in second.items()} == {"x": [2, 3], "y": [1], "none": None}


def test_rows_are_those_of_the_first_tensor() -> None:
    assert rows.count_rows((["a", "b", "c"], torch.zeros(2), torch.zeros(3))) == 2
    assert rows.count_rows(["a", "b", "c"]) == 3


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((torch.zeros(2), torch.tensor(1)), InvalidArgumentError, "holds a scalar"),
        ({"x": torch.zeros(2), "epoch": 3}, WrongTypeError, "3 of type int"),
        (pack_padded_sequence(torch.zeros(2, 2), torch.tensor([2, 1])), InvalidArgumentError, "PackedSequence"),
        ([], WrongTypeError, "no tensor"),
    ],
)
def test_what_has_no_rows_is_refused(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rows.count_rows(batch)


def test_numpy_becomes_tensors_and_strings_object_arrays() -> None:
    found = rows.to_tensors([np.arange(2), np.float32(1.5), np.array(["a", "b"]), torch.ones(1)])
    assert found[0].dtype is torch.int64
    assert found[1].dtype is torch.float32
    assert found[1].shape == ()
    assert found[2].dtype == np.dtype(object)
    read_only = np.arange(3)
    read_only.flags.writeable = False
    assert rows.to_tensors(read_only).tolist() == [0, 1, 2]


def test_checksums_tell_content_dtype_and_shape_apart() -> None:
    batches = [
        torch.arange(4), torch.arange(4).flip(0), torch.arange(4).reshape(2, 2), torch.arange(4.0),
        torch.zeros(0), torch.ones(2, dtype=torch.bfloat16), jagged([1], [2, 2]), torch.eye(2).to_sparse(),
        np.array(["a"], dtype=object), ["b"],
    ]  # fmt: skip
    sums = [rows.checksum(batch) for batch in batches]
    assert len(set(sums)) == len(sums)
    assert rows.checksum((torch.arange(4), ["b"])) == rows.checksum((torch.arange(4), ["b"]))
