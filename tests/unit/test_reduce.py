"""`reduce`, `gather` and `all_reduce`: what is combined, how much each replica counts, and what cannot be combined.

`tests.conformance` replays hundreds of calls of TensorFlow's; here is what PyTorch has besides, and what errors say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import torchstrat as ts
from tests.support.replicas import STRATEGIES, opened, replica
from torchstrat.testing import fake_tpu_strategy

ROWS = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], dtype=torch.float64)


@pytest.fixture(params=[*STRATEGIES, "one device", "default"])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param in STRATEGIES:
        with opened(request.param) as made:
            yield made
    else:
        made = ts.get_strategy() if request.param == "default" else ts.OneDeviceStrategy("cpu:0")
        yield made
        made.close()


@pytest.fixture
def mirrored() -> Iterator[Any]:
    with opened("mirrored x2") as made:
        yield made


def context() -> ts.ReplicaContext:
    found = ts.get_replica_context()
    assert found is not None
    return found


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_dtypes_are_those_of_pytorch_and_nothing_is_an_alias(mirrored: Any) -> None:
    one = torch.tensor([1, 2])
    value = ts.PerReplica([one, torch.tensor([4, 6])])
    assert mirrored.reduce("sum", value).dtype == torch.int64
    mean = mirrored.reduce("mean", value)
    assert (mean.tolist(), mean.dtype) == ([2.5, 4.0], torch.get_default_dtype())
    small = mirrored.reduce("sum", ts.PerReplica([torch.full((3,), 2, dtype=torch.uint8)] * 2), axis=0)
    assert (int(small), small.dtype) == (12, torch.uint8)
    with opened("mirrored x1") as alone:
        alone.reduce("sum", ts.PerReplica([one])).zero_()
    assert one.tolist() == [1, 2]


@pytest.mark.parametrize("call", ["reduce", "reduce over an axis", "reduce by weight", "all_reduce"])
def test_means_in_half_precision_are_there_where_their_sums_are_not(mirrored: Any, call: str) -> None:
    large = torch.full((2,), 60000.0, dtype=torch.float16)

    def step() -> torch.Tensor:
        context().set_weight(100.0 + replica())
        return context().all_reduce("mean", large.clone()) if call == "all_reduce" else large.clone()

    found = mirrored.run(step)
    if call != "all_reduce":
        axis = 0 if "axis" in call else None
        found = ts.PerReplica([mirrored.reduce("mean", found, axis=axis, weighted="weight" in call)])
    for mean in found.values:
        assert (mean.unique().tolist(), mean.dtype) == ([60000.0], torch.float16)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 1), (2, 0, 5)])
@pytest.mark.parametrize("axis", [0, -2, 1, (0, 1), (-1, 0)])
def test_partial_batches_weigh_by_their_rows(sizes: tuple[int, ...], axis: Any) -> None:
    parts = torch.arange(sum(sizes) * 2, dtype=torch.float64).reshape(-1, 2).split(list(sizes))
    with opened(f"mirrored x{len(sizes)}") as strategy:
        if axis == 1 and len(set(sizes)) > 1:
            with pytest.raises(ValueError, match="shapes must be equal"):
                strategy.reduce("mean", ts.PerReplica(parts), axis=axis)
            return
        expected = torch.stack(parts).mean(dim=(0, 2)) if axis == 1 else torch.cat(parts).mean(dim=axis)
        torch.testing.assert_close(strategy.reduce("mean", ts.PerReplica(parts), axis=axis), expected)


def test_sparse_tensors_keep_their_entries(mirrored: Any) -> None:
    one = torch.sparse_coo_tensor([[1]], [[2.0]], (4, 1), check_invariants=True)
    two = torch.sparse_coo_tensor([[1, 3]], [[4.0], [6.0]], (4, 1), check_invariants=True)
    mean = mirrored.reduce("mean", ts.PerReplica([one, two]))
    assert (mean._indices().tolist(), mean._values().tolist()) == ([[1, 1, 3]], [[1], [2], [3]])
    gathered = mirrored.gather(ts.PerReplica([torch.eye(2).to_sparse()] * 2), axis=0)
    assert torch.equal(gathered, torch.cat([torch.eye(2)] * 2))


def test_gather_takes_strings_and_axes_of_one(mirrored: Any) -> None:
    strings = [np.array(["a"], dtype=object), np.array(["b", "c"], dtype=object)]
    assert mirrored.gather(ts.PerReplica(strings), axis=0).tolist() == ["a", "b", "c"]
    for axis in (torch.tensor(0), (0,)):
        assert mirrored.gather(ts.PerReplica([torch.ones(2, 2), torch.ones(0, 2)]), axis=axis).tolist() == [[1, 1]] * 2


ONES = torch.ones(1)
PAIRS: dict[str, tuple[list[Any], type[Exception], str]] = {
    "shapes": ([ONES, torch.ones(2)], ValueError, r"shape \(1,\) on replica 0 and \(2,\) on replica 1"),
    "dtypes": ([ONES, ONES.double()], ValueError, "convert to one dtype"),
    "layouts": ([ONES, ONES.to_sparse()], ValueError, "sparse_coo tensor on replica 1"),
    "bools": ([ONES.bool()] * 2, TypeError, "bool tensors; convert them to an integer"),
    "arrays of bools": ([np.array([True])] * 2, TypeError, "convert them to an integer"),
    "strings": (["a", "b"], TypeError, "needs numeric tensors"),
    "arrays of strings": ([np.array(["a"]), np.array(["b"])], TypeError, "array of dtype <U1"),
    "nothing": ([None, None], TypeError, "NoneType"),
}
AXES = [
    *[(bad, TypeError, "axis must be None, an int or a tuple of ints") for bad in (0.0, "0", np.array([]), (0, 1.0))],
    (2, ValueError, "use -2 to 1"),
    (-3, ValueError, "use -2 to 1"),
    ((0, -2), ValueError, "one dimension twice"),
]
GATHERED = [
    ([torch.ones(1, 2)] * 2, 2, ValueError, "use -2 to 1"),
    ([ONES, torch.ones(1, 1)], 0, ValueError, "ranks must be equal"),
    ([torch.ones(1, 2), torch.ones(1, 3)], 0, ValueError, "all dimensions but that one"),
    ([ONES, ONES.int()], 0, ValueError, "convert to one dtype"),
    ([], 0, ValueError, "no replica took part in the run"),
    *[([ONES] * 2, axis, error, "axis") for axis, error in ((None, ValueError), (1.0, TypeError), ((0, 1), TypeError))],
]


@pytest.mark.parametrize(("components", "error", "says"), PAIRS.values(), ids=PAIRS)
def test_components_that_cannot_be_combined(mirrored: Any, components: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        mirrored.reduce("sum", ts.PerReplica(components))


@pytest.mark.parametrize(("axis", "error", "says"), AXES, ids=str)
def test_axes_that_cannot_be_reduced(mirrored: Any, axis: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        mirrored.reduce("sum", ts.PerReplica([torch.ones(1, 2)] * 2), axis=axis)


@pytest.mark.parametrize(("components", "axis", "error", "says"), GATHERED)
def test_what_cannot_be_gathered(mirrored: Any, components: Any, axis: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        mirrored.gather(ts.PerReplica(components), axis=axis)


@pytest.mark.parametrize("bad", ["", " sum", "max", None, 0, ts.VariableAggregation.SUM])
def test_operations_that_are_none(mirrored: Any, bad: Any) -> None:
    with pytest.raises(ValueError if isinstance(bad, str) else TypeError, match="reduce_op"):
        mirrored.reduce(bad, ts.PerReplica([ONES] * 2))
    with pytest.raises(ValueError, match="is not a reduction"):
        ts.ReduceOp.from_variable_aggregation(ts.VariableAggregation.NONE)


def test_tensors_that_are_no_components(mirrored: Any) -> None:
    value = torch.tensor([1, 2])
    assert ts.OneDeviceStrategy("cpu:0").reduce("sum", value) is value
    assert mirrored.reduce("mean", value).dtype == torch.get_default_dtype()
    assert mirrored.reduce("sum", value, axis=0) == 6
    assert mirrored.reduce("mean", "text") == "text"
    assert not mirrored.reduce("sum", np.zeros(2)).any()
    for given in (value, np.float32(3), np.float64(3), np.int64(3)):  # NumPy's scalars have a dtype, and are arrays
        with pytest.raises(ValueError, match="multiply by num_replicas_in_sync"):
            mirrored.reduce("sum", given)
    for scalar in (np.float32(3), np.float64(3), np.int64(3)):
        assert mirrored.reduce("mean", scalar) is scalar
        result = mirrored.reduce("sum", mirrored.run(lambda scalar=scalar: scalar + 1))
        assert (result.dtype, float(result)) == (torch.as_tensor(scalar).dtype, 8)


# -- plain Python numbers: each replica's counts once, whether or not it is the same object ----------------------------
# CPython shares small ints and bools, and `Strategy.run` gives back one object that all replicas returned as it is.

NUMBERS: list[list[complex]] = [
    *([3, 4, 5, 6], [300] * 4, [3] * 4, [0] * 4, [0, 7, 0, 0]),
    *([0.5] * 4, [True] * 4, [1j] * 4),
]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_numbers_of_replicas(strategy: Any, numbers: list[complex]) -> None:
    count = strategy.num_replicas_in_sync
    total = sum(numbers[:count])
    returned = strategy.run(lambda: numbers[replica()])
    assert complex(strategy.reduce("sum", returned)) == total
    assert complex(strategy.reduce("mean", returned)) == pytest.approx(total / count)
    nested = strategy.run(lambda: {"loss": torch.ones(()), "rows": [numbers[replica()], 16]})
    assert [complex(one) for one in strategy.reduce("sum", nested)["rows"]] == [total, 16 * count]

    def step() -> Any:
        return context().all_reduce("sum", numbers[replica()]), context().all_reduce("mean", [numbers[replica()]])[0]

    for result in zip(*map(strategy.local_results, strategy.run(step)), strict=True):
        assert [complex(one) for one in result] == pytest.approx([total, total / count])


@pytest.mark.parametrize("number", [0, 0.0, 2, 2.5, True, False, 2j])
def test_a_number_of_nobody_in_particular(strategy: Any, number: complex) -> None:
    count = strategy.num_replicas_in_sync
    assert complex(strategy.reduce("SUM", number)) == number * count
    mean = strategy.reduce("MEAN", number)
    assert (type(mean), mean) == (type(number), number)
    merged = strategy.run(lambda: context().merge_call(lambda other: complex(other.reduce("sum", number))))
    assert strategy.local_results(merged)[0] == number * count
    [there] = strategy.extended.batch_reduce_to("sum", [(number, "cpu:0")])
    assert complex(there) == number * count


# -- weighted: means over the replicas' rows become the mean over the global batch -------------------------------------

WEIGHTED = [*STRATEGIES, "one device", "tpu x2", "tpu x3"]
every_kind = pytest.mark.parametrize("name", WEIGHTED)


def make(name: str) -> Any:
    if name in STRATEGIES:
        return STRATEGIES[name][1]()
    return fake_tpu_strategy(int(name[-1])) if name.startswith("tpu") else ts.OneDeviceStrategy("cpu:0")


@every_kind
@pytest.mark.parametrize("rows", [7, 5, 4, 1])
def test_the_mean_over_the_global_batch(name: str, rows: int) -> None:
    strategy, batch = make(name), ROWS[:rows]
    for part in strategy.distribute_dataset([batch]):
        means = strategy.run(lambda x: {"mean": x.mean(), "both": [torch.stack([x.mean(), -x.mean()])]}, args=(part,))
        found = strategy.reduce("mean", means, weighted=True)
        torch.testing.assert_close(found["mean"].cpu(), batch.mean(), rtol=1e-12, atol=0)
        torch.testing.assert_close(found["both"][0].cpu(), batch.mean() * ROWS.new_tensor([1, -1]), rtol=1e-12, atol=0)
    strategy.close()


@pytest.mark.parametrize("name", ["mirrored x2", "mirrored x4", "central x3"])
def test_a_replica_of_no_weight_is_left_out(name: str) -> None:
    """What it computes of no rows is nan."""
    with opened(name) as strategy:
        for part in strategy.distribute_dataset([ROWS[:1]], ts.InputOptions(empty_replicas="run")):
            means = strategy.run(torch.mean, args=(part,))
            assert strategy.reduce("mean", means).isnan()
            assert strategy.reduce("mean", means, weighted=True) == 1.0


UNKNOWN = "nothing says how much each replica counts"


@pytest.mark.parametrize("name", ["mirrored x2", "central x3", "tpu x2"])
def test_the_weights_are_what_the_step_said(name: str) -> None:
    strategy = make(name)
    count = strategy.num_replicas_in_sync
    values = strategy.distribute_values_from_function(lambda c: torch.tensor(c.replica_id_in_sync_group + 1.0))

    def weighed(weight: Any) -> Any:
        def step(value: torch.Tensor, weight: Any) -> torch.Tensor:
            if weight is not None:
                context().set_weight(weight)
            return value

        return strategy.reduce("mean", strategy.run(step, args=(values, weight)), weighted=True)

    with pytest.raises(ValueError, match=UNKNOWN):
        weighed(None)
    assert weighed(3.0) == (count + 1) / 2
    if name != "tpu x2":  # there replicas run as one program, in which a weight of their own is a tensor
        weights = ts.PerReplica([float(2**replica) for replica in range(count)])
        expected = sum((replica + 1) * 2**replica for replica in range(count)) / (2**count - 1)
        torch.testing.assert_close(weighed(weights), torch.tensor(expected))
        assert weighed(0.0) == (count + 1) / 2
    strategy.close()


def test_a_weight_that_only_the_program_of_a_tpu_knows_is_refused() -> None:
    strategy = fake_tpu_strategy(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        context().set_weight((x > 2).sum())  # type: ignore[arg-type]
        return x.mean()

    for part in strategy.distribute_dataset([ROWS]):
        means = strategy.run(step, args=(part,))
        with pytest.raises(ValueError, match=UNKNOWN):
            strategy.reduce("mean", means, weighted=True)
    strategy.close()


def test_merge_calls_know_the_rows(mirrored: Any) -> None:
    def step(x: torch.Tensor, _: torch.Tensor) -> Any:
        return context().merge_call(lambda other, mean: other.reduce("mean", mean, weighted=True), args=(x.mean(),))

    for part in mirrored.distribute_dataset([(ROWS[:6].reshape(3, 2), torch.tensor([0, 1, 2]))]):
        assert mirrored.local_results(mirrored.run(step, args=part))[0] == ROWS[:6].mean()


@every_kind
def test_what_weights_mean_nothing_for(name: str) -> None:
    strategy = make(name)
    assert strategy.reduce("mean", 2.5, weighted=True) == 2.5
    assert strategy.reduce("mean", torch.tensor(3), weighted=True) == 3
    value = strategy.run(lambda: torch.ones(2))
    with pytest.raises(ValueError, match="got 'sum' and axis=None"):
        strategy.reduce("sum", value, weighted=True)
    with pytest.raises(ValueError, match="got 'mean' and axis=0"):
        strategy.reduce("mean", value, axis=0, weighted=True)
    if not name.startswith("tpu"):
        with strategy.scope():
            variable = ts.Variable(1.0)
        with pytest.raises(ValueError, match="a Variable, which has no rows"):
            strategy.reduce("mean", variable, weighted=True)
    strategy.close()
