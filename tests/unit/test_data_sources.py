"""Everything that may be given as a dataset, split over the replicas of one process. Pipelines are recorded in
tests/conformance, and what batches hold is asked by `tests.matrix.batches`."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

import torchstrat as ts
from tests.support.input_ranks import components, distribute, joined, layout_in_process, on_ranks
from torchstrat import PerReplica, data
from torchstrat.data import (
    ArrayDataset,
    AutoShardPolicy,
    InputContext,
    InputLayout,
    InputOptions,
    InputReplicationMode,
    Pipeline,
    TextLineDataset,
)
from torchstrat.errors import InvalidArgumentError, StructureMismatchError, WrongTypeError
from torchstrat.testing import fake_tpu_strategy


def read(dataset: Any, replicas: int = 2, **options: Any) -> list[Any]:
    """The components of every step, as lists."""
    batches = list(distribute(dataset, replicas, **options))
    assert all(isinstance(batch, PerReplica) for batch in batches)
    return [components(batch) for batch in batches]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(5).split(2)


class Items(Dataset[Any]):
    """A map-style data set of these items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Opening(Items):
    """One of files, which opens one for each of its items."""

    files = ("0", "1", "2")

    def open(self, file: str) -> Any:
        return self.items[int(file)]

    def __getitem__(self, index: int) -> Any:
        return self.open(self.files[index])


class Files:
    """A user's own file source."""

    def __init__(self, *files: str) -> None:
        self.files = files

    def open(self, files: Any) -> Iterator[torch.Tensor]:
        for name in files:
            yield torch.arange(int(name), min(5, int(name) + 2))


NATURAL_SPELLINGS: dict[str, Any] = {
    "DataLoader": lambda: DataLoader(range(5), batch_size=2),  # type: ignore[arg-type]
    "DataLoader with workers": lambda: DataLoader(range(5), batch_size=2, num_workers=1),  # type: ignore[arg-type]
    "DataLoader of an iterable dataset": lambda: DataLoader(Stream(), batch_size=None),
    "list of tensors": lambda: list(torch.arange(5).split(2)),
    "list of arrays": lambda: [np.arange(2), np.arange(2, 4), np.arange(4, 5)],
    "generator": lambda: (batch for batch in torch.arange(5).split(2)),
    "IterableDataset": Stream,
    "Dataset of batches": lambda: Items(*torch.arange(5).split(2)),
    "Dataset of batches, each in a file": lambda: Opening(*torch.arange(5).split(2)),
    "ArrayDataset": lambda: ArrayDataset(np.arange(5)).batch(2),
    "file source of one's own": lambda: Files("0", "2", "4"),
}


@pytest.mark.parametrize("spelling", NATURAL_SPELLINGS)
def test_natural_spellings(spelling: str) -> None:
    assert read(NATURAL_SPELLINGS[spelling]()) == [[[0], [1]], [[2], [3]], [[4], []]]


@pytest.mark.parametrize("spelling", [name for name in NATURAL_SPELLINGS if "Dataset of batches" not in name])
@pytest.mark.parametrize("policy", ["OFF", "FILE", "HINT"])
def test_the_fixed_size_rule_finds_the_batch_size(spelling: str, policy: str) -> None:
    dataset = NATURAL_SPELLINGS[spelling]()
    assert read(dataset, 3, auto_shard_policy=policy) == [[[0], [1], []], [[2], [3], []], [[4], [], []]]


def test_arrays_of_different_lengths_are_split_each_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    found = list(distribute({"x": np.zeros((2, 4)), "y": torch.ones(2, 2)}))
    assert "batch['x'] has 4, batch['y'] has 2. Each is split by itself" in caplog.text
    assert [{key: value.values[0].shape for key, value in batch.items()} for batch in found] == [
        {"x": (2,), "y": (1,)}
    ] * 2


def test_the_policy_may_be_carried_by_the_dataset() -> None:
    class Carrier(Stream):
        auto_shard_policy = AutoShardPolicy.OFF

    assert read(Carrier(), 2) == [[[0], [1]], [[2], [3]], [[4], []]]
    assert read(DataLoader(Carrier(), batch_size=None), 4)[0] == [[0], [1], [], []]
    fives = [torch.arange(5)]
    assert read(fives, 4) == [[[0, 1], [2, 3], [4], []]]
    assert read(fives, 4, auto_shard_policy="OFF") == [[[0, 1], [2], [3], [4]]]


def test_a_single_replica_gets_the_very_batches() -> None:
    batches = [torch.arange(2), {"x": torch.ones(1), "name": "last"}]
    assert all(given is found for given, found in zip(batches, distribute(batches, 1), strict=True))
    assert [value.item() for value in distribute(torch.arange(3), 1)] == [0, 1, 2]
    assert next(iter(distribute(Items((1, "a")), 1))) == (1, "a"), "what is not split may be anything"
    [wrapped] = distribute([torch.tensor(3)], layout_in_process(1, always_wrap=True))
    assert (wrapped.values[0].item(), wrapped.batch_info.rows) == (3, (1,))


def test_batch_info_is_one_object_per_step() -> None:
    [batch] = distribute([(torch.arange(3), torch.arange(3))])
    assert batch[0].batch_info is batch[1].batch_info
    assert (batch[0].batch_info.rows, batch[0].batch_info.run_empty) == ((2, 1), False)
    [batch] = distribute([torch.arange(3)], empty_replicas="run")
    assert batch.batch_info.run_empty


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ([1, 2, 3], WrongTypeError, "a list of int is no dataset"),
        (range(3), WrongTypeError, "range is no dataset"),
        (torch.arange(3), InvalidArgumentError, "scalars, which cannot be split"),
        ([(torch.zeros(2), torch.tensor(1))], InvalidArgumentError, "holds a scalar"),
        ((torch.arange(3), torch.arange(2)), InvalidArgumentError, r"same number of rows; got \[3, 2\]"),
    ],
)
def test_what_is_no_dataset_is_refused_at_once(dataset: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        distribute(dataset)


@pytest.mark.parametrize(
    "item",
    [
        (torch.arange(4.0), torch.ones(1)),
        {"x": torch.ones(3, 2), "y": torch.tensor(1)},
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
        (torch.ones(3), "a label"),
        (torch.ones(3), 1),
        ["a", "b"],
        None,
    ],
)
def test_items_that_are_no_batches_are_refused(item: Any) -> None:
    batches = iter(distribute(Items((torch.ones(4, 2), torch.ones(4)), item)))
    assert [part.shape[0] for part in next(batches)[0].values] == [2, 2]
    message = (
        r"item 1 of Items is no batch of tensors with equally many.*A dataset of single examples needs a DataLoader"
    )
    with pytest.raises(WrongTypeError, match=message):
        next(batches)


def test_that_items_are_taken_for_batches_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Named(Items): ...

    Named.__qualname__ = "Named"
    with caplog.at_level(logging.WARNING, "torchstrat.data"):
        for _ in range(2):
            [batch] = distribute(Named({"x": torch.ones(4, 2), "names": ["a", "b", "c", "d"]}))
    assert batch["names"].values == (["a", "b"], ["c", "d"])
    [record] = caplog.records
    assert record.message.startswith("each item of Named is taken for a global batch, ")


def test_an_iterator_is_read_once() -> None:
    dataset = distribute(batch for batch in torch.arange(4).split(2))
    assert dataset.element_spec.shape == (None,)
    assert len(list(dataset)) == 2
    with pytest.raises(InvalidArgumentError, match="can be read once"):
        list(dataset)


@pytest.mark.parametrize("buffer", [1, 2])
def test_asking_for_the_spec_of_an_iterator_takes_nothing_from_who_reads_it(buffer: int) -> None:
    dataset = distribute((batch for batch in torch.arange(8).split(2)), per_replica_buffer_size=buffer)
    iterator = iter(dataset)
    with pytest.raises(InvalidArgumentError, match=r"before iter\(\), or after"):
        _ = dataset.element_spec
    batches = [components(next(iterator))]
    assert dataset.element_spec.shape == (None,)
    assert [*batches, *map(components, iterator)] == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]


def _own_collate(samples: list[Any]) -> Any:
    return default_collate(samples)


EIGHT = TensorDataset(torch.zeros(8, 3))


@pytest.mark.parametrize(
    ("dataset", "replicas", "shape"),
    [
        (DataLoader(TensorDataset(torch.zeros(0, 3)), batch_size=4), 2, (None, 3)),
        (DataLoader(EIGHT, batch_size=4, drop_last=True), 2, (2, 3)),
        (DataLoader(EIGHT, batch_size=4, drop_last=True), 3, (None, 3)),
        (DataLoader(EIGHT, batch_size=4, collate_fn=_own_collate), 2, (None, None)),
        ([(torch.zeros(4, 3),), (torch.zeros(4, 3),)], 2, (None, 3)),
        ([(torch.zeros(4, 3),), (torch.zeros(4, 5),)], 2, (None, None)),
        ((torch.zeros(5, 4, 3),), 2, (2, 3)),
        (ArrayDataset((torch.zeros(8, 3),)).batch(4, drop_remainder=True), 2, (2, 3)),
    ],
)
def test_element_spec(dataset: Any, replicas: int, shape: tuple[int | None, ...]) -> None:
    [spec] = distribute(dataset, replicas).element_spec
    assert spec.shape == shape
    assert spec.dtype is torch.float32
    assert [part.shape for part in spec.values] == [shape] * replicas


def test_batches_of_which_no_shape_holds_for_all_have_no_spec() -> None:
    with pytest.raises(InvalidArgumentError, match=r"have \[1, 2\] dimensions"):
        _ = distribute([torch.zeros(4, 3), torch.zeros(4)]).element_spec


def test_a_stream_that_knows_where_it_stands_stands_there_after_its_spec_could_not_be_read() -> None:
    class Broken(Stream):
        stands = 0

        def state_dict(self) -> int:
            return self.stands

        def load_state_dict(self, stands: int) -> None:
            self.stands = stands

        def __iter__(self) -> Iterator[torch.Tensor]:
            self.stands += 1
            raise OSError("not there")

    for broken in (Broken(), DataLoader(Broken(), batch_size=None)):
        with pytest.raises(OSError, match="not there"):
            _ = distribute(broken).element_spec
        assert getattr(broken, "dataset", broken).stands == 0


def test_asking_for_the_spec_writes_to_no_example() -> None:
    example = torch.ones(3)
    loader = DataLoader([example], 1, collate_fn=lambda found: torch.stack([one.mul_(2) for one in found]))  # type: ignore[arg-type]
    assert distribute(loader).element_spec.shape == (None, None)
    assert example.tolist() == [1, 1, 1]


class NothingAsStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("dataset", [Items(), NothingAsStream(), ArrayDataset(torch.ones(2)).take(0)])
def test_the_spec_of_an_empty_loader(dataset: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="of the DataLoader is empty"):
        _ = distribute(DataLoader(dataset, 2)).element_spec


def test_asking_for_the_spec_draws_nothing() -> None:
    class Noise(Items):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(3) + np.random.rand()

    bits = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))  # without a word about states of the old form
    assert distribute(DataLoader(Noise(1, 2), batch_size=2)).element_spec.shape == (None, 3)
    np.random.set_bit_generator(bits)
    before = torch.get_rng_state(), np.random.get_state()[2]
    assert distribute(DataLoader(Noise(1, 2), batch_size=2)).element_spec.shape == (None, 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[2]


@pytest.mark.parametrize(
    ("pipeline", "expected", "cardinality"),
    [
        (lambda rows: rows.batch(2), [[0, 1], [2, 3], [4]], 3),
        (lambda rows: rows.batch(2, drop_remainder=True), [[0, 1], [2, 3]], 2),
        (lambda rows: rows.take(3), [0, 1, 2], 3),
        (lambda rows: rows.repeat(2).batch(4), [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]], 3),
        (lambda rows: rows.shard(2, 1), [1, 3], 2),
        (lambda rows: rows.batch(2).unbatch().batch(3), [[0, 1, 2], [3, 4]], -2),
        (lambda rows: rows.batch(4).rebatch([1, 2]), [[0], [1, 2], [3], [4]], -2),
        (lambda rows: rows.repeat().take(7).batch(7), [[0, 1, 2, 3, 4, 0, 1]], 1),
        (lambda rows: rows.repeat(-1).take(7).batch(7), [[0, 1, 2, 3, 4, 0, 1]], 1),
        (lambda rows: rows.take(-1).batch(5), [[0, 1, 2, 3, 4]], 1),
        (lambda rows: rows.repeat(0), [], 0),
        (lambda rows: rows.repeat().repeat(0), [], 0),
        (lambda rows: rows.batch(np.int64(4)).rebatch(np.int64(3)), [[0, 1, 2], [3, 4]], -2),
    ],
)
def test_pipelines(pipeline: Any, expected: list[Any], cardinality: int) -> None:
    made = pipeline(ArrayDataset(torch.arange(5)))
    assert [element.tolist() for element in made] == expected
    assert made.cardinality == cardinality


def test_rows_are_taken_out_of_columns_of_one_length() -> None:
    batches = ArrayDataset(torch.arange(4)).batch(2).map(lambda batch: (batch, torch.arange(3)))
    with pytest.raises(InvalidArgumentError, match=r"batch\[0\] has 2, batch\[1\] has 3"):
        list(batches.unbatch())


def test_rows_are_taken_out_of_columns_that_are_marked() -> None:
    def mark(batch: torch.Tensor) -> dict[str, Any]:
        rows = batch.expand(3, -1)
        images = [torch.full((int(row),), 1) for row in batch]
        marked = data.axis({"x": rows, "array": rows.numpy(), "sparse": rows.to_sparse()}, 1)
        return {**marked, "images": data.examples(images), "plain": batch}

    def shapes_of(dataset: Pipeline) -> dict[str, Any]:
        specs: Any = dataset.element_spec
        return {name: leaf.shape for name, leaf in specs.items()}

    batches = ArrayDataset(torch.arange(1, 5)).batch(2).map(mark)
    rows = batches.unbatch()
    found = list(rows)
    for number, row in enumerate(found, 1):
        assert [row[name].tolist() for name in ("x", "array")] == [[number] * 3] * 2
        assert row["sparse"].to_dense().tolist() == [number] * 3
        assert (len(row["images"]), row["plain"].item()) == (number, number)
    assert len(found) == 4
    assert shapes_of(rows) == {"x": (3,), "array": (3,), "sparse": (3,), "images": (), "plain": ()}
    along_one = dict.fromkeys(("x", "array", "sparse"), (3, 4))
    assert shapes_of(batches.rebatch(4, drop_remainder=True)) == {**along_one, "images": (4,), "plain": (4,)}


def test_a_batch_that_is_none_does_not_end_a_stream_of_rows() -> None:
    batches = ArrayDataset(torch.arange(6)).batch(2).map(lambda batch: None if 2 in batch else batch)
    with pytest.raises(WrongTypeError, match="no tensor and no array"):
        list(batches.rebatch(3))


def in_order_of(first: int, columns: dict[str, Any]) -> dict[str, Any]:
    """As what follows the keys of a first row."""
    return dict(sorted(columns.items(), reverse=first % 4 > 1))


def test_columns_go_by_their_names() -> None:
    def columns(batch: torch.Tensor) -> dict[str, Any]:
        return in_order_of(int(batch[0]), {"x": batch, "y": batch + 10})

    batches = ArrayDataset(torch.arange(7)).batch(2).map(columns)
    for batch in batches.rebatch(3):
        assert torch.equal(batch["x"] + 10, batch["y"])
    for batch in distribute(DataLoader(batches, batch_size=None), auto_shard_policy="OFF"):
        assert [(x + 10).tolist() for x in batch["x"].values] == [y.tolist() for y in batch["y"].values]
    pairs = batches.map(lambda batch: [*batch.values()] if 2 in batch["x"] else tuple(batch.values()))
    assert [len(pair[0]) for pair in pairs.rebatch(3)] == [3, 3, 1]
    with pytest.raises(StructureMismatchError, match="a dict beside a list, or with another number"):
        list(batches.map(lambda batch: batch if 0 in batch["x"] else [*batch.values()]).rebatch(3))
    with pytest.raises(StructureMismatchError, match=r"keys \['x', 'y'\] beside one with \['x', 'z'\]"):
        list(batches.map(lambda batch: batch if 0 in batch["x"] else {"x": batch["x"], "z": batch["y"]}).rebatch(3))


def test_what_every_replica_gets_goes_by_its_name() -> None:
    def collate(rows: list[int]) -> dict[str, Any]:
        marked = data.same({"count": len(rows), "last": rows[-1]})
        return in_order_of(rows[0], {**marked, "packed": torch.cat([torch.arange(row) for row in rows])})

    loader: Any = DataLoader([1, 2, 3, 4], batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    [batch] = distribute(loader)
    assert {name: batch[name].values for name in ("count", "last")} == {"count": (4, 4), "last": (4, 4)}
    assert [part.numel() for part in batch["packed"].values] == [3, 7]


@pytest.mark.parametrize("make", [lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]), lambda: fake_tpu_strategy(2)])
def test_batches_of_replicas_with_their_keys_in_other_orders(make: Callable[[], Any]) -> None:
    strategy = make()
    batches = [in_order_of(first, {"x": torch.arange(2) + first, "y": torch.zeros(2).long()}) for first in (0, 2)]
    [batch] = strategy.distribute_datasets_from_function(lambda _: batches)
    result = strategy.run(lambda batch: batch["x"] + batch["y"], args=(batch,))
    assert [part.tolist() for part in strategy.local_results(result)] == [[0, 1], [2, 3]]
    strategy.close()


def test_only_a_pipeline_over_files_looks_like_a_file_source() -> None:
    rows, lines = ArrayDataset(torch.arange(3)).batch(2), TextLineDataset(["a", "b"]).map(str.upper).batch(2)
    assert not hasattr(rows, "files")
    assert not hasattr(rows, "open")
    assert lines.files == ("a", "b")
    assert callable(lines.open)


def test_equal_sets_and_dicts_are_equal_data_on_all_ranks() -> None:
    def read(layout: InputLayout) -> list[Any]:
        tags = {0, 8} if layout.worker_index else {8, 0}
        columns = in_order_of(
            2 * layout.worker_index, {"x": torch.arange(2), "y": torch.zeros(2), "t": data.same(tags)}
        )
        return [components(batch["x"]) for batch in distribute([columns], layout)]

    assert repr({0, 8}) != repr({8, 0})
    assert on_ranks(2, read)[0] == [[[[0]]], [[[1]]]]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda files: files, None),
        (lambda files: [file.replace("/here/", "/mounted/elsewhere/") for file in files], None),
        (lambda files: files[::-1], r"rank\(s\) \[1\] .* file 0 is a.txt on rank 0 and d.txt on rank 1.*sorted\("),
        (lambda files: files[:3], "file 3 is d.txt on rank 0 and missing on rank 1"),
    ],
)
def test_all_ranks_share_out_one_list_of_files(tmp_path: Path, other: Any, message: str | None) -> None:
    files = [f"{tmp_path}/here/{name}.txt" for name in "abcd"]
    for file in [*files, *(file.replace("/here/", "/mounted/elsewhere/") for file in files)]:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(f"{Path(file).stem}\n")

    def read(layout: InputLayout) -> list[str]:
        lines = TextLineDataset(other(files) if layout.worker_index else files).batch(1)
        return joined(part.tolist() for batch in distribute(lines, layout) for part in batch.values)

    found, _ = on_ranks(2, read)
    if message is None:
        assert found == [["a", "c"], ["b", "d"]]
    else:
        for error in found:
            with pytest.raises(InvalidArgumentError, match=message):
                raise error


# -- `InputOptions`, the enumerations in it, and `InputContext` --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fetch_to_device", False),
        ("replication_mode", InputReplicationMode.PER_REPLICA),
        ("place_dataset_on_device", True),
        ("per_replica_buffer_size", 3),
    ],
)
def test_every_field_has_two_names(name: str, value: Any) -> None:
    short, long = InputOptions(**{name: value}), InputOptions(**{f"experimental_{name}": value})
    assert short == long
    assert getattr(short, name) == getattr(short, f"experimental_{name}") == value
    with pytest.raises(WrongTypeError, match=f"both {name} and experimental_{name}"):
        InputOptions(**{name: value, f"experimental_{name}": value})


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, "DATA", "data", 2])
def test_a_policy_may_be_named(policy: Any) -> None:
    assert InputOptions(auto_shard_policy=policy).auto_shard_policy is AutoShardPolicy.DATA


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("auto_shard_policy", "ROWS"),
        ("auto_shard_policy", False),
        ("replication_mode", "PER_HOST"),
        ("per_replica_buffer_size", 0),
        ("empty_replicas", "drop"),
        ("collate", "replica"),
    ],
)
def test_a_value_that_a_field_cannot_have(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field}={value!r}"):
        InputOptions(**{field: value})


def test_options_do_not_change_and_can_be_copied() -> None:
    options = InputOptions(auto_shard_policy="OFF", empty_replicas="run", fetch_to_device=False)
    with pytest.raises(AttributeError):
        options.experimental_fetch_to_device = True  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options
    changed = methodcaller("_replace", empty_replicas="skip")(options)  # public, of a named tuple
    assert (changed.auto_shard_policy, changed.empty_replicas) == (AutoShardPolicy.OFF, "skip")
    assert methodcaller("_replace", auto_shard_policy="file")(options).auto_shard_policy is AutoShardPolicy.FILE
    with pytest.raises(InvalidArgumentError, match="per_replica_buffer_size=0"):
        methodcaller("_replace", experimental_per_replica_buffer_size=0)(options)


@pytest.mark.parametrize(
    ("size", "message"), [(30, "=30 .* over 4 replicas; .* such as 28 or 32"), (3, "such as 4 or 8")]
)
def test_a_batch_that_does_not_divide_names_ones_that_do(size: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"global_batch_size.*{message}"):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)


# -- `Pipeline.shuffle` and `Pipeline.prefetch`: orders that every process shares, and reading ahead that ends ---------


ROWS = 24
ALL = list(range(ROWS))


def numbers() -> Pipeline:
    return ArrayDataset(torch.arange(ROWS))


def orders(dataset: Any, passes: int = 2) -> list[list[int]]:
    return [[int(row) for row in dataset] for _ in range(passes)]


def distributed_rows(dataset: Pipeline, layout: InputLayout, policy: str = "DATA", passes: int = 1) -> list[list[int]]:
    found = distribute(dataset, layout, auto_shard_policy=policy)
    return [joined(part.tolist() for batch in found for part in batch.values) for _ in range(passes)]


@pytest.mark.parametrize("seed", [None, 3])
def test_every_pass_is_another_order_of_the_same_rows(seed: int | None) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = orders(numbers().shuffle(ROWS, seed=seed))
    assert torch.get_rng_state().equal(before) == (seed is not None)
    assert sorted(first) == sorted(second) == ALL
    assert len({tuple(ALL), tuple(first), tuple(second)}) == 3
    torch.manual_seed(0)
    assert orders(numbers().shuffle(ROWS, seed=seed)) == [first, second]
    assert orders(numbers().shuffle(ROWS, seed=4)) != [first, second]


def test_repetitions_are_shuffled_anew() -> None:
    [order] = orders(numbers().shuffle(ROWS, seed=3).repeat(3), passes=1)
    rounds = [order[start : start + ROWS] for start in range(0, 3 * ROWS, ROWS)]
    assert all(sorted(one) == ALL for one in rounds)
    assert len({tuple(one) for one in rounds}) == 3


def test_rows_come_from_the_next_of_the_buffer() -> None:
    [order] = orders(numbers().shuffle(4), passes=1)
    assert sorted(order) == ALL
    assert all(row < position + 4 for position, row in enumerate(order))


def test_what_does_not_shuffle_draws_nothing() -> None:
    before = torch.get_rng_state()
    orders(numbers().batch(2).unbatch())
    distributed_rows(numbers().batch(4), layout_in_process(2))
    assert torch.get_rng_state().equal(before)


def test_shuffled_rows_over_the_workers_of_a_loader() -> None:
    first, second = orders(DataLoader(numbers().shuffle(ROWS), batch_size=None, num_workers=2))
    assert sorted(first) == sorted(second) == ALL
    assert first != second


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    ("policy", "prepare"),
    [
        ("DATA", lambda dataset: dataset.batch(4)),
        ("HINT", lambda dataset: dataset.shard(data.SHARD_HINT, data.SHARD_HINT).batch(4)),
    ],
)
def test_all_processes_shuffle_as_rank_zero(policy: str, prepare: Callable[[Pipeline], Pipeline], seed: Any) -> None:
    # The ranks are threads, which draw different numbers from one generator.
    results, _ = on_ranks(
        2, lambda layout: distributed_rows(prepare(numbers().shuffle(ROWS, seed)), layout, policy, passes=2)
    )
    epochs = [[passes[epoch] for passes in results] for epoch in range(2)]
    for shares in epochs:
        assert sorted(joined(shares)) == ALL
        assert [len(share) for share in shares] == [ROWS // 2] * 2
        assert joined(shares) != ALL
    assert epochs[0] != epochs[1]


# -- prefetch ---------------------------------------------------------------------------------------------------------


def test_prefetch_changes_nothing_but_the_time_of_reading() -> None:
    plain, ahead = numbers().batch(4), numbers().batch(4).prefetch(3)
    assert [batch.tolist() for batch in ahead] == [batch.tolist() for batch in plain]
    assert (ahead.cardinality, ahead.batch_size, ahead.element_spec) == (6, 4, plain.element_spec)
    assert distributed_rows(ahead, layout_in_process(2)) == [ALL]


def test_prefetch_reads_in_another_thread_and_that_many_ahead() -> None:
    threads: list[threading.Thread] = []
    third_read = threading.Event()

    def note(row: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread())
        if len(threads) == 3:
            third_read.set()
        return row

    iterator = iter(numbers().map(note).prefetch(data.AUTOTUNE))
    assert int(next(iterator)) == 0
    assert third_read.wait(30)
    assert threading.current_thread() not in threads
    del iterator
    threads[0].join(30)
    assert not threads[0].is_alive()
    assert len(threads) == 3


def test_prefetch_hands_on_what_reading_raised() -> None:
    iterator = iter(numbers().map(lambda row: row // (1 - row)).prefetch(2))
    assert int(next(iterator)) == 0
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        next(iterator)


@pytest.mark.parametrize("size", [0, -2, 1.5, True])
def test_sizes(size: Any) -> None:
    for method in (numbers().shuffle, numbers().prefetch):
        with pytest.raises(InvalidArgumentError, match="buffer_size"):
            method(size)
    with pytest.raises(InvalidArgumentError, match="batch_sizes"):
        numbers().batch(2).rebatch([size])
    for method in (numbers().take, numbers().repeat) if size else ():
        with pytest.raises(InvalidArgumentError, match=f"count={size} must be an int of at least 0"):
            method(size)
