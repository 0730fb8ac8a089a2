"""Batches as rows: every kind of leaf can be cut, joined, emptied and told apart."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import torchstrat as ts
from tests.unit.data_ranks import plain
from torchstrat.data import marks, readings, rows
from torchstrat.data.loader_batches import CollateAndSplit
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


def time_first(*lengths: int) -> Any:
    return [torch.full((length, 2), float(number)) for number, length in enumerate(lengths)]


def test_marked_leaves_are_cut_joined_and_emptied_as_said() -> None:
    batch = {
        "x": ts.data.axis(torch.arange(6).reshape(2, 3), 1),
        "names": ts.data.examples(("a", "b", "c")),
        "mask": ts.data.same({"m": torch.ones(4), "n": 2}),
    }
    parts = rows.split_by_sizes(batch, (2, 0, 1))
    whole = ts.data.unmarked(rows.join_batches([parts[0], parts[2]]))
    shown = [ts.data.unmarked(part) for part in parts]
    assert [(part["x"].tolist(), part["names"]) for part in shown] == [
        ([[0, 1], [3, 4]], ("a", "b")),
        ([[], []], ()),
        ([[2], [5]], ("c",)),
    ]
    assert all(part["mask"]["m"].tolist() == [1] * 4 and part["mask"]["n"] == 2 for part in shown)
    assert (whole["x"].tolist(), whole["names"]) == ([[0, 1, 2], [3, 4, 5]], ("a", "b", "c"))
    assert rows.common_rows(rows.empty_like(batch)) == 0
    assert rows.checksum(batch) != rows.checksum(parts[0])


def test_marks_survive_pickling_and_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "pinned", lambda value: value + 1)
    for marked in (ts.data.same(torch.ones(2)), ts.data.axis(torch.ones(2, 2), -1)):
        again = pickle.loads(pickle.dumps(marked)).pin_memory()
        assert type(again) is type(marked)
        assert (again.value == 2).all()
        assert getattr(again, "dim", 1) == 1


@pytest.mark.parametrize(
    ("mark", "error", "message"),
    [
        (lambda: ts.data.axis(torch.ones(2), 1), InvalidArgumentError, r"got a tensor of shape \(2,\)"),
        (lambda: ts.data.axis("abc", 0), WrongTypeError, "needs tensors or arrays; got 'abc'"),
        (lambda: ts.data.axis(torch.ones(2), 1.0), WrongTypeError, "an int as dim"),
        (lambda: ts.data.axis(jagged([1], [2, 2]), 1), WrongTypeError, "dense or sparse COO"),
        (lambda: ts.data.examples(torch.ones(2)), WrongTypeError, "a list with an entry for each row; got Tensor"),
        (lambda: ts.data.same(ts.data.examples([1])), WrongTypeError, "marked already, as Examples"),
    ],
)
def test_what_cannot_be_marked(mark: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mark()


def reading_of(collate: Any, examples: list[Any]) -> Any:
    return readings.CollateReading(collate).marked(collate(examples), examples)


def test_the_rows_are_found_by_what_becomes_fewer() -> None:
    along = reading_of(lambda found: {"x": pad_sequence(found), "n": [len(one) for one in found]}, time_first(3, 2, 1))
    assert (along["x"].dim, along["n"].value) == (1, [3, 2, 1])
    plainly = reading_of(lambda found: pad_sequence(found, batch_first=True), time_first(3, 2, 1))
    assert isinstance(plainly, torch.Tensor)
    assert reading_of(lambda found: (torch.stack(found), torch.eye(3)), list(torch.ones(3, 3))) is None
    assert reading_of(lambda found: torch.cat(found), time_first(3, 2, 1)) is None
    assert len(reading_of(list, time_first(3, 3, 3)).value) == 3


def test_looking_for_the_rows_moves_no_random_stream_and_no_example() -> None:
    def collate(found: list[Any]) -> Any:
        torch.rand(1)
        return torch.stack([one.pop("x") for one in found])

    torch.manual_seed(0)
    expected = torch.rand(2)[1]
    torch.manual_seed(0)
    examples = [{"x": torch.ones(3)} for _ in range(3)]
    split = CollateAndSplit(collate, rows.to_tensors, 2, (0, 1), False)(examples)
    assert [part.shape for part in split.parts] == [(2, 3), (1, 3)]
    assert torch.rand(1) == expected


def test_what_nothing_tells_is_told_once() -> None:
    def only_whole(found: list[Any]) -> torch.Tensor:
        assert len(found) == 3
        return torch.stack(found)

    reading = readings.CollateReading(only_whole)
    examples = list(torch.ones(3, 3))
    with pytest.warns(UserWarning, match=r"made batch of 3 examples.*along dims \[0, 1\].*ts\.data\.axis\(x, 0\)"):
        assert reading.marked(only_whole(examples), examples) is not None
    assert reading.marked(only_whole(examples), examples) is not None


def test_nested_tensors_with_holes_or_transposed_are_cut() -> None:
    full = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    turned = rows.cut(full.transpose(1, 2), 1, 2)
    assert [row.shape for row in turned.unbind()] == [(3, 1)]
    holes = torch.nested.narrow(
        torch.arange(20).reshape(2, 10), 1, torch.tensor([1, 2]), torch.tensor([3, 4]), layout=torch.jagged
    )
    assert [row.tolist() for row in rows.cut(holes, 1, 2).unbind()] == [[12, 13, 14, 15]]
    assert rows.length(rows.cut(holes, 0, 0)) == 0


def test_a_data_set_that_makes_batches_of_many_rows_is_split_by_rows() -> None:
    whole = (torch.arange(5), torch.arange(5) * 2)
    split = CollateAndSplit(lambda made: made, rows.to_tensors, 2, (0, 1), False)(whole)  # type: ignore[arg-type]
    assert split.sizes == (3, 2)
    assert [[plain(leaf) for leaf in part] for part in split.parts] == [[[0, 1, 2], [0, 2, 4]], [[3, 4], [6, 8]]]
