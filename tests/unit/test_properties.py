"""What holds for batches of any nest, on any number of replicas.

Of their own kind are `test_tpu_device_assignment` and `test_sharded_variable`.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrat as ts
from torchstrat.errors import InvalidArgumentError, WrongTypeError

examples = settings(max_examples=60, derandomize=True)
Pair = namedtuple("Pair", ["left", "right"])


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[int, ts.Strategy]]:
    """By their number of replicas."""
    made: dict[int, ts.Strategy] = {
        count: ts.MirroredStrategy([f"cpu:{index}" for index in range(count)]) for count in (1, 2, 3, 4, 5)
    }
    yield made
    for strategy in made.values():
        strategy.close()


# -- batches ----------------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64, torch.bool, torch.complex64])


@st.composite
def dense(draw: st.DrawFn, count: int) -> torch.Tensor:
    shape = (count, *draw(st.lists(st.integers(0, 3), max_size=2)))
    return (torch.arange(math.prod(shape)).reshape(shape) + draw(st.integers(0, 9))).to(draw(DTYPES))


@st.composite
def jagged(draw: st.DrawFn, count: int) -> torch.Tensor:
    lengths = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    return torch.nested.nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)


@st.composite
def sparse(draw: st.DrawFn, count: int) -> torch.Tensor:
    return draw(dense(count)).real.to(torch.float64).to_sparse().coalesce()


def leaves(count: int) -> st.SearchStrategy[Any]:
    """A leaf of any kind, with that many rows."""
    column = [f"row {number}" for number in range(count)]
    kinds = [dense(count), st.just(np.array(column, dtype=object)), st.just(column), sparse(count), jagged(count)]
    return st.one_of(*kinds)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, st.none()),
        st.builds(Pair, children, children),
        st.dictionaries(st.sampled_from(["x", "y", "z"]), children, min_size=1),
    )


@st.composite
def batches(draw: st.DrawFn, most_rows: int = 9) -> tuple[int, Any]:
    """A number of rows, and a nest whose leaves all have that many, a dense tensor among them."""
    count = draw(st.integers(1, most_rows))
    return count, (draw(dense(count)), draw(st.recursive(leaves(count), containers, max_leaves=4)))


def described(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], tuple[Any, list[Any]]]:
    """By the place of each leaf, containers' types in it: its kind, and its rows."""
    if value is None:
        return {path: (None, [])}
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return {path: ((value.dtype, value.layout), [row.tolist() for row in value.unbind()])}
        return {path: ((value.dtype, value.layout, value.shape[1:]), value.to_dense().tolist())}
    if isinstance(value, np.ndarray):
        return {path: (value.dtype, value.tolist())}
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return {path: (list, value)}
    children = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        place: found for key, child in children for place, found in described(child, (*path, type(value), key)).items()
    }


def rejoined(parts: list[Any]) -> dict[tuple[Any, ...], tuple[Any, list[Any]]]:
    """`described`, of parts one after the other."""
    first, *others = map(described, parts)
    for other in others:
        assert other.keys() == first.keys()
        for place, (kind, found) in other.items():
            assert kind == first[place][0]
            first[place] = kind, first[place][1] + found
    return first


class Batches:
    """Batches that are made one by one, of at most ``batch_size`` rows."""

    def __init__(self, made: list[Any], batch_size: int | None = None) -> None:
        self.made, self.batch_size = made, batch_size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made)


def split(strategy: ts.Strategy, incoming: Any, policy: str) -> tuple[list[Any], list[int]]:
    """What the replicas get of each step, one after the other; and how many rows that are said to be."""
    steps = list(strategy.distribute_dataset(incoming, ts.InputOptions(auto_shard_policy=policy)))
    parts = [part for step in steps for part in strategy.local_results(step)]
    if strategy.num_replicas_in_sync == 1:
        return parts, [len(part[0]) for part in parts]
    return parts, [rows for step in steps for rows in step[0].batch_info.rows]


def fixed_sizes(rows: int, replicas: int) -> tuple[int, ...]:
    each, left_over = divmod(rows, replicas)
    return tuple(each + (replica < left_over) for replica in range(replicas))


@examples
@given(batch=batches(), replicas=st.integers(1, 5), policy=st.sampled_from(["DATA", "OFF"]), again=st.booleans())
def test_a_distributed_dataset_hands_out_every_row_in_order(
    strategies: dict[int, ts.Strategy], batch: tuple[int, Any], replicas: int, policy: str, again: bool
) -> None:
    count, value = batch
    incoming = [value] * (1 + again)
    parts, rows = split(strategies[replicas], incoming, policy)
    assert [len(part[0]) for part in parts] == rows
    if policy == "OFF":
        expected = fixed_sizes(count, replicas)
    else:
        chunk = -(-count // replicas)
        expected = tuple(max(0, min(chunk, count - chunk * replica)) for replica in range(replicas))
    assert rows == [*expected] * (1 + again)
    assert rejoined(parts) == rejoined(incoming)


@examples
@given(batch=batches(most_rows=12), pieces=st.integers(1, 5), replicas=st.integers(2, 5), declared=st.integers(1, 9))
def test_a_stream_cut_anew_is_the_same_stream(
    strategies: dict[int, ts.Strategy], batch: tuple[int, Any], pieces: int, replicas: int, declared: int
) -> None:
    """Across the borders of the batches that come, and with replicas that get none of a step's rows."""
    _, value = batch
    incoming = [part for part in split(strategies[pieces], [value], "DATA")[0] if len(part[0])]
    parts, rows = split(strategies[replicas], Batches(incoming, declared), "OFF")
    assert [len(part[0]) for part in parts] == rows
    sizes = fixed_sizes(declared, replicas)
    assert all(found <= sizes[number % replicas] for number, found in enumerate(rows))
    assert rejoined(parts) == described(value)


@examples
@given(rows=st.integers(1, 20), batch=st.integers(1, 8), sizes=st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_a_pipeline_in_batches_of_other_sizes_keeps_every_row(rows: int, batch: int, sizes: list[int]) -> None:
    pipeline = ts.data.ArrayDataset(torch.arange(rows)).batch(batch)
    if not any(sizes):
        with pytest.raises(InvalidArgumentError, match=r"batch_sizes=\[0.*one of them must be positive"):
            pipeline.rebatch(sizes)
        return
    parts = list(pipeline.rebatch(sizes))
    assert [row for part in parts for row in part.tolist()] == list(range(rows))
    with pytest.raises(InvalidArgumentError, match=r"batch\[0\] has .*, batch\[1\] has 0"):
        list(pipeline.map(lambda batch: (batch, batch[:0])).rebatch(sizes))


@examples
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 3))
def test_workers_sizes_add_up_to_the_global_batch_in_every_step(batch: int, workers: int, local: int) -> None:
    cycles = [ts.data.batch_sizes_for_worker(batch, workers, local, worker) for worker in range(workers)]
    assert cycles[0] == fixed_sizes(batch, workers * local)
    for step in range(0, workers * local, local):
        assert sum(sum(cycle[step : step + local]) for cycle in cycles) == batch


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 1, 1, 0), InvalidArgumentError, "global_batch=-1"),
        ((4, 0, 1, 0), InvalidArgumentError, "num_workers=0"),
        ((4, 2, 1, 2), InvalidArgumentError, "worker_index=2"),
        ((4.0, 1, 1, 0), WrongTypeError, r"global_batch must be an int; got 4\.0"),
    ],
)
def test_impossible_workers_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ts.data.batch_sizes_for_worker(*arguments)
