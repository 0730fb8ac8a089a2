"""Batches as rows: they are told apart, and marks say where their rows are. Cutting them: `test_properties`."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader

import torchstrat as ts
from tests.support.input_ranks import components, distribute, on_ranks
from torchstrat.errors import InvalidArgumentError, StructureMismatchError, WrongTypeError


def jagged(*values: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in values], layout=torch.jagged)


def test_parts_of_a_dense_tensor_share_its_memory() -> None:
    whole = torch.zeros(4)
    [batch] = distribute([whole])
    batch.values[1].fill_(1)
    assert whole.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"x": torch.zeros(2), "epoch": 3}, WrongTypeError, "3 of type int"),
        (pack_padded_sequence(torch.zeros(2, 2), torch.tensor([2, 1])), InvalidArgumentError, "PackedSequence"),
        ([], WrongTypeError, "no tensor"),
    ],
)
def test_what_has_no_rows_is_refused(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(distribute(iter([batch])))


def test_numpy_becomes_tensors_and_strings_object_arrays() -> None:
    read_only = np.arange(3)
    read_only.flags.writeable = False
    [found] = distribute([[np.arange(2), np.float32(1.5), np.array(["a", "b"]), torch.ones(1), read_only]], 1)
    assert [value.dtype for value in found[:3]] == [torch.int64, torch.float32, np.dtype(object)]
    assert found[1].shape == ()
    assert found[4].tolist() == [0, 1, 2]


TOLD_APART = [
    torch.arange(4), torch.arange(4).flip(0), torch.arange(4).reshape(2, 2), torch.arange(4.0),
    torch.zeros(0), torch.ones(2, dtype=torch.bfloat16), jagged([1], [2, 2]), torch.eye(2).to_sparse(),
    np.array(["a"], dtype=object), ["b"], {"x": torch.ones(2)}, {"x": ts.data.axis(torch.ones(1, 2), 1)},
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(range(len(TOLD_APART)), 2)])
def test_processes_tell_their_batches_apart_by_content_dtype_and_shape(one: int, other: int) -> None:
    def read(layout: Any) -> list[Any]:
        return list(distribute([TOLD_APART[(one, other)[layout.worker_index]]], layout))

    for error in on_ranks(2, read)[0]:
        assert isinstance(error, InvalidArgumentError)
        assert "rank(s) [1] read another first batch" in str(error)


# -- marks ------------------------------------------------------------------------------------------------------------


def marked(start: int, stop: int) -> dict[str, Any]:
    """The rows of a batch of three."""
    return {
        "x": ts.data.axis(torch.arange(6).reshape(2, 3)[:, start:stop], 1),
        "names": ts.data.examples(("a", "b", "c")[start:stop]),
        "mask": ts.data.same({"m": torch.ones(4), "n": 2}),
    }


class Declared:
    """Says of how many rows its batches are, and gives fewer."""

    def __init__(self, batches: list[Any], batch_size: int) -> None:
        self.batches, self.batch_size = batches, batch_size

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_marked_leaves_are_cut_joined_and_emptied_as_said() -> None:
    [cut] = distribute([marked(0, 3)], 4)
    assert components(cut["x"]) == [[[0], [3]], [[1], [4]], [[2], [5]], [[], []]]
    assert cut["names"].values == (("a",), ("b",), ("c",), ())
    [joined] = distribute(Declared([marked(0, 1), marked(1, 3)], 3), auto_shard_policy="OFF")
    assert components(joined["x"]) == [[[0, 1], [3, 4]], [[2], [5]]]
    assert joined["names"].values == (("a", "b"), ("c",))
    for batch, replicas in ((cut, 4), (joined, 2)):
        assert components(batch["mask"]["m"]) == [[1] * 4] * replicas
        assert batch["mask"]["n"].values == (2,) * replicas


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
def test_sparse_rows_are_joined_in_their_layout(layout: str) -> None:
    def sparse(rows: torch.Tensor) -> torch.Tensor:
        return (
            rows.to_sparse_bsr((1, 2)) if layout == "bsr" else rows.to_sparse(layout=getattr(torch, f"sparse_{layout}"))
        )

    rows = torch.arange(12.0).reshape(3, 4)
    [joined] = distribute(Declared([sparse(rows[:1]), sparse(rows[1:])], 3), auto_shard_policy="OFF")
    assert [part.to_dense().tolist() for part in joined.values] == [rows[:2].tolist(), rows[2:].tolist()]
    assert {part.layout for part in joined.values} == {getattr(torch, f"sparse_{layout}")}


@pytest.mark.parametrize(
    "other", [None, torch.ones(3, 3), ts.data.axis(torch.ones(3, 3), 0), ts.data.same(1), ts.data.examples([1, 2, 3])]
)
def test_marks_that_differ_between_batches_whose_rows_are_joined(other: Any) -> None:
    batches = [(torch.ones(3), ts.data.axis(torch.ones(3, 3), 1)), (torch.ones(3), other)]
    with pytest.raises(StructureMismatchError, match=r"(?s)in different ways: Along\(.*Mark all batches alike"):
        list(distribute(Declared(batches, 4), auto_shard_policy="OFF"))


def test_marks_survive_pickling_and_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self + 1)
    for mark in (ts.data.same(torch.ones(2)), ts.data.axis(torch.ones(2, 2), -1)):
        again = pickle.loads(pickle.dumps(mark)).pin_memory()
        assert type(again) is type(mark)
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


# -- what a collate function makes: where its rows are is asked by `tests.matrix.batches` -----------------------------


def test_looking_for_the_rows_moves_no_random_stream_and_no_example() -> None:
    def collate(found: list[Any]) -> Any:
        torch.rand(1)
        return torch.stack([one.pop("x") for one in found])

    dataset = distribute(DataLoader([{"x": torch.ones(3)} for _ in range(3)], 3, collate_fn=collate))  # type: ignore[arg-type]
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()  # a loader's seed for its workers
    expected = torch.rand(2)[1]
    torch.manual_seed(0)
    [batch] = dataset
    assert [part.shape for part in batch.values] == [(2, 3), (1, 3)]
    assert torch.rand(1) == expected


MADE: dict[str, Callable[[float], Any]] = {
    "tensors": lambda number: torch.full((2,), number),
    "arrays": lambda number: np.full(2, number),
    "dictionaries": lambda number: {"x": torch.full((2,), number)},
}


class Fresh(list[Any]):
    """An example is another object each time, with its number in it."""

    def __init__(self, kind: str) -> None:
        super().__init__(map(float, range(8)))
        self.kind = kind

    def __getitem__(self, index: Any) -> Any:
        return MADE[self.kind](super().__getitem__(index))


def _written(example: Any) -> torch.Tensor:
    found = example.pop("x") if isinstance(example, dict) else example
    found *= 10
    return torch.as_tensor(found)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_collate_function_that_writes_to_its_examples(kind: str, is_packed: bool) -> None:
    def collate(found: list[Any]) -> Any:
        written = [_written(one) for one in found]
        return torch.cat(written) if is_packed else written

    batches = list(distribute(DataLoader(Fresh(kind), 4, collate_fn=collate)))
    parts = [[torch.cat(part) if isinstance(part, list) else part for part in batch.values] for batch in batches]
    assert [[part[::2].tolist() for part in of_batch] for of_batch in parts] == [
        [[0, 10], [20, 30]],
        [[40, 50], [60, 70]],
    ]


def test_what_nothing_tells_is_told_once() -> None:
    def only_whole(found: list[Any]) -> torch.Tensor:
        assert len(found) == 3
        return torch.stack(found)

    dataset = distribute(DataLoader(list(torch.ones(6, 3)), 3, collate_fn=only_whole))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [[len(part) for part in batch.values] for batch in dataset] == [[2, 1]] * 2
    [told] = [str(one.message) for one in caught]
    for said in ("made batch of 3 examples", "along dims [0, 1]", "ts.data.axis(x, 0)"):
        assert said in told


def test_nested_tensors_with_holes_or_transposed_are_cut() -> None:
    full = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    [turned] = distribute([full.transpose(1, 2)])
    assert [[row.shape for row in part.unbind()] for part in turned.values] == [[(3, 2)], [(3, 1)]]
    even = torch.nested.nested_tensor([torch.ones(2, 3)] * 2, layout=torch.jagged).transpose(1, 2)
    [whole] = ts.data.ArrayDataset(torch.arange(4)).batch(2).map(lambda _: even).rebatch(4)
    assert whole.shape[:2] == (4, 3)
    holes = torch.nested.narrow(
        torch.arange(20).reshape(2, 10), 1, torch.tensor([1, 2]), torch.tensor([3, 4]), layout=torch.jagged
    )
    [cut] = distribute([holes], 3)
    assert [[row.tolist() for row in part.unbind()] for part in cut.values] == [[[1, 2, 3]], [[12, 13, 14, 15]], []]


def test_a_data_set_that_makes_batches_of_many_rows_is_split_by_rows() -> None:
    class Together(list[Any]):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.tensor(indices), torch.tensor(indices) * 2

    loader = DataLoader(Together(range(5)), 5, collate_fn=lambda made: made)  # type: ignore[arg-type]
    [batch] = distribute(loader)
    assert [components(leaf) for leaf in batch] == [[[0, 1, 2], [3, 4]], [[0, 2, 4], [6, 8]]]
    assert batch[0].batch_info.rows == (3, 2)
