"""What holds for any input: batches of any nest, components of any shape, any number of replicas and shards.

Of their own kind are `test_data_rebatch` (the two rules, by numbers of rows), `test_partitioners` (the numbers of
shards), `test_tpu_device_assignment` and `test_sharded_variable`.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrat as ts
from tests.unit.data_ranks import InMemoryCommunicator, InMemoryGroup
from torchstrat import ReduceOp, nest, partitioners, reduction
from torchstrat.data import rows
from torchstrat.data.rebatch import equal_chunks
from torchstrat.data.streams import cut_stream
from torchstrat.replicas import exchange

examples = settings(max_examples=60, deadline=None, derandomize=True)
Pair = namedtuple("Pair", ["left", "right"])


# -- batches -----------------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64, torch.bool, torch.complex64])


@st.composite
def dense(draw: st.DrawFn, count: int) -> torch.Tensor:
    shape = (count, *draw(st.lists(st.integers(0, 3), max_size=2)))
    return (torch.arange(math.prod(shape)).reshape(shape) + draw(st.integers(0, 9))).to(draw(DTYPES))


def strings(count: int) -> np.ndarray[Any, Any]:
    return np.array([f"row {number}" for number in range(count)], dtype=object)


def column(count: int) -> list[str]:
    return [f"row {number}" for number in range(count)]


@st.composite
def jagged(draw: st.DrawFn, count: int) -> torch.Tensor:
    lengths = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    return torch.nested.nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)


@st.composite
def sparse(draw: st.DrawFn, count: int) -> torch.Tensor:
    return draw(dense(count)).to(torch.float64).to_sparse().coalesce()


def leaves(count: int) -> st.SearchStrategy[Any]:
    """A leaf of any kind, with that many rows."""
    kinds = [dense(count), st.just(strings(count)), st.just(column(count)), sparse(count)]
    return st.one_of(*kinds, jagged(count))


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


def same(found: Any, expected: Any) -> bool:
    """Equal in structure, kinds, dtypes and every row."""
    if rows.is_row_list(expected) or not nest.is_nested(expected):
        return type(found) is type(expected) and same_leaf(found, expected)
    if type(found) is not type(expected) or len(found) != len(expected):
        return False
    pairs = zip(nest.children(found), nest.children(expected), strict=True)
    return all(key == wanted_key and same(child, wanted) for (key, child), (wanted_key, wanted) in pairs)


def same_leaf(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and found.tolist() == expected.tolist()
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    if found.dtype != expected.dtype or found.layout != expected.layout:
        return False
    if expected.is_nested:
        return [row.tolist() for row in found.unbind()] == [row.tolist() for row in expected.unbind()]
    return torch.equal(found.to_dense(), expected.to_dense())


def rejoined(parts: Sequence[Any]) -> Any:
    """The parts that have rows, one after the other."""
    return rows.join_batches([part for part in parts if rows.count_rows(part)])


@examples
@given(batch=batches(), replicas=st.integers(1, 5))
def test_splitting_equally_and_joining_is_the_identity(batch: tuple[int, Any], replicas: int) -> None:
    count, value = batch
    parts = rows.split_equally(value, replicas)
    assert tuple(rows.count_rows(part) for part in parts) == equal_chunks(count, replicas)
    assert same(rejoined(parts), value)


@examples
@given(batch=batches(), data=st.data())
def test_cutting_anywhere_and_joining_is_the_identity(batch: tuple[int, Any], data: st.DataObject) -> None:
    count, value = batch
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    sizes = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, count], strict=True))
    parts = rows.split_by_sizes(value, sizes)
    assert tuple(rows.count_rows(part) for part in parts) == sizes
    assert same(rejoined(parts), value)


@examples
@given(batch=batches(most_rows=12), data=st.data())
def test_a_stream_cut_anew_is_the_same_stream(batch: tuple[int, Any], data: st.DataObject) -> None:
    count, value = batch
    first = data.draw(st.integers(0, count))
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any))
    incoming = [part for part in rows.split_by_sizes(value, (first, count - first)) if rows.count_rows(part)]
    parts = list(cut_stream(iter(incoming), sizes))
    found = [rows.count_rows(part) for part in parts]
    assert all(size <= sizes[number % len(sizes)] for number, size in enumerate(found))
    assert same(rejoined(parts), value)


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[int, ts.Strategy]]:
    """By their number of replicas."""
    made: dict[int, ts.Strategy] = {
        count: ts.MirroredStrategy([f"cpu:{index}" for index in range(count)]) for count in (1, 2, 3, 4)
    }
    yield made
    for strategy in made.values():
        strategy.close()


@examples
@given(
    batch=batches(),
    replicas=st.integers(1, 4),
    policy=st.sampled_from([ts.AutoShardPolicy.DATA, ts.AutoShardPolicy.OFF]),
    last=st.integers(0, 9),
)
def test_a_distributed_dataset_hands_out_every_row_in_order(
    strategies: dict[int, ts.Strategy], batch: tuple[int, Any], replicas: int, policy: ts.AutoShardPolicy, last: int
) -> None:
    count, value = batch
    strategy = strategies[replicas]
    short = rows.cut_batch(value, 0, min(last, count))
    incoming = [value, short] if last else [value]
    distributed = strategy.distribute_dataset(incoming, ts.InputOptions(auto_shard_policy=policy))
    parts = [part for step in distributed for part in strategy.local_results(step)]
    assert same(rejoined(parts), rows.join_batches(incoming))


# -- components --------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([torch.float64, torch.float32, torch.int64, torch.int32])


@st.composite
def components(draw: st.DrawFn, *, uneven_along: int | None) -> list[torch.Tensor]:
    """One small tensor for each of one to four replicas, of equal shapes but for the dimension ``uneven_along``.

    The entries are whole numbers, so that their sums are exact in any order.
    """
    shape = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    dtype, made = draw(NUMBERS), []
    for number in range(draw(st.integers(1, 4))):
        if uneven_along is not None:
            shape[uneven_along] = draw(st.integers(0 if number else 1, 4))
        values = draw(st.lists(st.integers(-9, 9), min_size=math.prod(shape), max_size=math.prod(shape)))
        made.append(torch.tensor(values, dtype=dtype).reshape(shape))
    return made


def expected_reduction(op: ReduceOp, whole: torch.Tensor, dims: Any) -> torch.Tensor:
    """``op`` on one tensor, with the dtypes of torch: a mean of integers is of the default floating dtype."""
    if op is ReduceOp.SUM:
        return whole.sum(dim=dims, dtype=whole.dtype)
    return whole.to(whole.dtype if whole.is_floating_point() else torch.get_default_dtype()).mean(dim=dims)


@examples
@given(values=components(uneven_along=None), op=st.sampled_from(ReduceOp))
def test_reduce_over_replicas_is_that_of_the_stack(
    strategies: dict[int, ts.Strategy], values: list[torch.Tensor], op: ReduceOp
) -> None:
    found = strategies[len(values)].reduce(op, ts.PerReplica(values), axis=None)
    torch.testing.assert_close(found, expected_reduction(op, torch.stack(values), 0))


@examples
@given(values=components(uneven_along=0), op=st.sampled_from(ReduceOp), negative=st.booleans(), data=st.data())
def test_reduce_of_uneven_batches_is_that_of_the_concatenation(
    strategies: dict[int, ts.Strategy], values: list[torch.Tensor], op: ReduceOp, negative: bool, data: st.DataObject
) -> None:
    rank = values[0].dim()
    others = data.draw(st.lists(st.integers(1, rank - 1), unique=True))
    dims = [dim - rank if negative else dim for dim in (0, *others)]
    axis = dims[0] if len(dims) == 1 else tuple(dims)
    found = strategies[len(values)].reduce(op, ts.PerReplica(values), axis=axis)
    torch.testing.assert_close(found, expected_reduction(op, torch.cat(values), tuple(dims)))


@examples
@given(data=st.data(), dim=st.integers(0, 1), negative=st.booleans())
def test_gather_is_the_concatenation(
    strategies: dict[int, ts.Strategy], data: st.DataObject, dim: int, negative: bool
) -> None:
    values = data.draw(components(uneven_along=dim))
    found = strategies[len(values)].gather(ts.PerReplica(values), dim - values[0].dim() if negative else dim)
    torch.testing.assert_close(found, torch.cat(values, dim), rtol=0, atol=0)


# -- in one process as in several --------------------------------------------------------------------------------------


class Rank(InMemoryCommunicator):
    """One rank of a group of threads that also moves tensors."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        found = self.all_gather_object(tensor.clone(), what)
        assert len({one.shape for one in found}) == 1, "gloo needs tensors of one shape"
        return found

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Any:
        total = torch.stack(self.all_gather(tensor, what)).sum(0, dtype=tensor.dtype)
        tensor.copy_(total)
        return mock.Mock(spec=["wait"])


def on_every_rank(values: list[torch.Tensor], work: Any) -> list[Any]:
    """``work(communicator, [value])`` on a rank for each value: the results, or the errors."""
    group = InMemoryGroup(len(values))

    def run(rank: int) -> Any:
        try:
            return work(Rank(group, rank), [values[rank]])
        except ValueError as error:
            return error

    with ThreadPoolExecutor(len(values), thread_name_prefix="rank") as pool:
        return list(pool.map(run, range(len(values))))


def in_one_process(work: Any) -> Any:
    try:
        return work()
    except ValueError as error:
        return error


def assert_equal_everywhere(found: list[Any], expected: Any) -> None:
    for one in found:
        if isinstance(expected, Exception):
            assert (type(one), str(one)) == (type(expected), str(expected))
        else:
            torch.testing.assert_close(one, expected, rtol=0, atol=0)


@examples
@given(
    data=st.data(),
    op=st.sampled_from(ReduceOp),
    axis=st.sampled_from([None, 0, -1, 1, (0, 1)]),
    large=st.booleans(),
)
def test_reduce_between_processes_is_that_of_one_process(
    data: st.DataObject, op: ReduceOp, axis: Any, large: bool
) -> None:
    values = data.draw(components(uneven_along=data.draw(st.sampled_from([None, 0]))))
    expected = in_one_process(lambda: reduction.reduce_components(op, values, axis))
    # Large tensors are added up on the way, small ones are collected.
    with mock.patch.object(exchange, "_LARGE_BYTES", -1 if large else 1 << 20):
        found = on_every_rank(values, lambda communicator, local: exchange.reduce_values(communicator, op, local, axis))
    assert_equal_everywhere(found, expected)


@examples
@given(data=st.data(), axis=st.sampled_from([0, 1, -1]))
def test_gather_between_processes_is_that_of_one_process(data: st.DataObject, axis: int) -> None:
    values = data.draw(components(uneven_along=data.draw(st.sampled_from([None, 0, 1]))))
    expected = in_one_process(lambda: reduction.gather_components(values, axis))
    found = on_every_rank(values, lambda communicator, local: exchange.gather_components(communicator, local, axis))
    assert_equal_everywhere(found, expected)


# -- shards ------------------------------------------------------------------------------------------------------------

PARTITIONERS = st.one_of(
    st.builds(partitioners.FixedShardsPartitioner, st.integers(1, 12)),
    st.builds(partitioners.MinSizePartitioner, st.integers(1, 600), st.integers(1, 12)),
    st.builds(partitioners.MaxSizePartitioner, st.integers(1, 600), st.none() | st.integers(1, 12)),
)


@examples
@given(partitioner=PARTITIONERS, shape=st.lists(st.integers(1, 30), min_size=1, max_size=2))
def test_a_partitioned_variable_has_every_row_once(partitioner: Any, shape: list[int]) -> None:
    value = torch.arange(math.prod(shape)).reshape(shape)
    spans = partitioners.row_offsets(shape[0], partitioners.shards_of(partitioner, shape, value.dtype))
    shards = [torch.nn.Parameter(value[start:stop].clone(), requires_grad=False) for start, stop in spans]
    assert all(len(shard) for shard in shards)
    variable = ts.ShardedVariable(shards)
    assert list(variable.row_spans) == spans
    assert torch.equal(torch.as_tensor(variable), value)
    assert all(torch.equal(variable[row], value[row]) for row in (0, shape[0] // 2, shape[0] - 1))


@examples
@given(shape=st.lists(st.integers(1, 50), min_size=1, max_size=3), wanted=st.integers(1, 60))
def test_a_fixed_number_of_shards_is_that_number_or_one_per_row(shape: list[int], wanted: int) -> None:
    partitioner = partitioners.FixedShardsPartitioner(wanted)
    assert partitioner(shape, torch.float32) == [min(wanted, shape[0]), *[1] * (len(shape) - 1)]
    assert len(partitioners.row_offsets(shape[0], partitioners.shards_of(partitioner, shape, torch.float32))) == min(
        wanted, shape[0]
    )


@examples
@given(shape=st.lists(st.integers(1, 50), min_size=1, max_size=3), limit=st.integers(4, 5000))
def test_shards_as_they_are_cut_keep_their_largest_size(shape: list[int], limit: int) -> None:
    count = partitioners.shards_of(partitioners.MaxSizePartitioner(limit), shape, torch.float32)
    row_bytes = 4 * math.prod(shape[1:])
    for start, stop in partitioners.row_offsets(shape[0], count):
        assert stop - start == 1 or (stop - start) * row_bytes <= limit


@examples
@given(shape=st.lists(st.integers(1, 50), min_size=1, max_size=3), least=st.integers(1, 5000), most=st.integers(1, 12))
def test_shards_as_they_are_cut_fall_below_their_least_size_by_rounding_only(
    shape: list[int], least: int, most: int
) -> None:
    count = partitioners.shards_of(partitioners.MinSizePartitioner(least, most), shape, torch.float32)
    spans = partitioners.row_offsets(shape[0], count)
    assert len(spans) <= most
    # One shard fewer would be of at least that size; so much is lost to rounding, and one row more to uneven cuts.
    total, row_bytes = 4 * math.prod(shape), 4 * math.prod(shape[1:])
    smallest = min(stop - start for start, stop in spans) * row_bytes
    assert count == 1 or smallest > least * (count - 1) / count - row_bytes
    assert sum(stop - start for start, stop in spans) * row_bytes == total
