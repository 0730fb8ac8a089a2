"""How components are combined: pure functions, checked against the obvious arithmetic on one tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torchstrat as ts
from torchstrat import ReduceOp, reduction

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


def parts(*sizes: int) -> list[torch.Tensor]:
    return list(torch.arange(sum(sizes) * 2, dtype=torch.float64).reshape(-1, 2).split(list(sizes)))


@pytest.mark.parametrize(("text", "op"), [("sum", SUM), ("Mean", MEAN), (MEAN, MEAN)])
def test_parse(text: Any, op: ReduceOp) -> None:
    assert ReduceOp.parse(text) is op


@pytest.mark.parametrize("bad", ["", " sum", "max", None, 0, ts.VariableAggregation.SUM])
def test_parse_refuses(bad: Any) -> None:
    with pytest.raises(ValueError if isinstance(bad, str) else TypeError, match="reduce_op"):
        ReduceOp.parse(bad)


def test_combine() -> None:
    one, two = torch.tensor([1, 2]), torch.tensor([4, 6])
    assert reduction.combine(SUM, [one, two]).dtype == torch.int64
    mean = reduction.combine(MEAN, [one, two])
    assert (mean.tolist(), mean.dtype) == ([2.5, 4.0], torch.get_default_dtype())
    alone = reduction.combine(SUM, [one])
    alone.zero_()
    assert one.tolist() == [1, 2], "a result is never an alias"


def test_a_small_integer_dtype_survives_a_sum_over_an_axis() -> None:
    components = [torch.full((3,), 2, dtype=torch.uint8)] * 2
    total = reduction.reduce_components(SUM, components, 0)
    assert (int(total), total.dtype) == (12, torch.uint8)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 1), (2, 0, 5)])
@pytest.mark.parametrize("axis", [0, -2, 1, (0, 1), (-1, 0)])
def test_partial_batches_weigh_by_their_rows(sizes: tuple[int, ...], axis: Any) -> None:
    components = parts(*sizes)
    whole = torch.cat(components)
    if axis == 1:
        if len(set(sizes)) > 1:
            with pytest.raises(ValueError, match="shapes must be equal"):
                reduction.reduce_components(MEAN, components, axis)
            return
        expected = torch.stack(components).mean(dim=(0, 2))
    else:
        expected = whole.mean(dim=axis)
    torch.testing.assert_close(reduction.reduce_components(MEAN, components, axis), expected)


def test_a_mean_of_nothing_is_nan() -> None:
    assert reduction.reduce_components(MEAN, [torch.ones(0), torch.ones(0)], 0).isnan()


def test_sparse_tensors_keep_their_entries() -> None:
    one = torch.sparse_coo_tensor([[1]], [[2.0]], (4, 1), check_invariants=True)
    two = torch.sparse_coo_tensor([[1, 3]], [[4.0], [6.0]], (4, 1), check_invariants=True)
    mean = reduction.combine(MEAN, [one, two])
    assert mean._indices().tolist() == [[1, 1, 3]]
    assert mean._values().tolist() == [[1], [2], [3]]
    assert torch.equal(mean.to_dense(), (one.to_dense() + two.to_dense()) / 2)


@pytest.mark.parametrize(
    ("components", "error", "message"),
    [
        ([torch.ones(1), torch.ones(2)], ValueError, r"shape \(1,\) on replica 0 and \(2,\) on replica 1"),
        ([torch.ones(1), torch.ones(1).double()], ValueError, "convert to one dtype"),
        ([torch.ones(1), torch.ones(1).to_sparse()], ValueError, "sparse_coo tensor on replica 1"),
        ([torch.ones(1, dtype=torch.bool)] * 2, TypeError, "bool tensors"),
        (["a", "b"], TypeError, "needs numeric tensors"),
        ([np.array(["a"]), np.array(["b"])], TypeError, "array of dtype <U1"),
        ([None, None], TypeError, "NoneType"),
    ],
)
def test_components_that_cannot_be_combined(components: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        reduction.reduce_components(SUM, components, None)


@pytest.mark.parametrize(
    ("axis", "expected"), [(None, None), ((), None), (2, 2), (True, 1), ((0, -1), (0, -1)), (np.int64(1), 1)]
)
def test_parse_axis(axis: Any, expected: Any) -> None:
    assert reduction.parse_axis(axis, SUM) == expected


@pytest.mark.parametrize("axis", [[0], 0.0, "0", torch.tensor(0), np.array([]), (0, 1.0)])
def test_parse_axis_refuses(axis: Any) -> None:
    with pytest.raises(TypeError, match="axis must be None, an int or a tuple of ints"):
        reduction.parse_axis(axis, SUM)


@pytest.mark.parametrize(
    ("axis", "message"), [(2, "use -2 to 1"), (-3, "use -2 to 1"), ((0, -2), "one dimension twice")]
)
def test_axes_out_of_range(axis: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reduction.reduce_components(SUM, parts(1, 1), axis)
    with pytest.raises(ValueError, match="scalars have no axis"):
        reduction.reduce_components(SUM, [torch.tensor(1.0)], 0)


@pytest.mark.parametrize("axis", [0, -2, torch.tensor(0), (0,)])
def test_gather(axis: Any) -> None:
    components = parts(2, 0, 3)
    gathered = reduction.gather_components(components, reduction.parse_gather_axis(axis))
    assert torch.equal(gathered, torch.cat(components))


def test_gather_of_strings_and_sparse_tensors() -> None:
    strings = [np.array(["a"], dtype=object), np.array(["b", "c"], dtype=object)]
    assert reduction.gather_components(strings, 0).tolist() == ["a", "b", "c"]
    sparse = [torch.eye(2).to_sparse()] * 2
    assert torch.equal(reduction.gather_components(sparse, 0), torch.cat([torch.eye(2)] * 2))


@pytest.mark.parametrize(
    ("components", "axis", "message"),
    [
        (parts(1, 1), 2, "use -2 to 1"),
        ([torch.tensor(1.0)] * 2, 0, "reshape them to"),
        ([torch.ones(1), torch.ones(1, 1)], 0, "ranks must be equal"),
        ([torch.ones(1, 2), torch.ones(1, 3)], 0, "all dimensions but that one"),
        ([torch.ones(1), torch.ones(1).int()], 0, "convert to one dtype"),
    ],
)
def test_gather_refuses(components: list[Any], axis: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reduction.gather_components(components, axis)


@pytest.mark.parametrize(("axis", "error"), [(None, ValueError), (1.0, TypeError), ((0, 1), TypeError)])
def test_gather_axes_that_are_none(axis: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="axis"):
        reduction.parse_gather_axis(axis)


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [1 / 3] * 3])
def test_weighted_sum(weights: list[float]) -> None:
    components = [torch.tensor([1.0, 3.0], dtype=torch.float64) * (index + 1) for index in range(len(weights))]
    expected = sum(weight * component for weight, component in zip(weights, components, strict=True))
    total = reduction.weighted_sum(components, weights)
    torch.testing.assert_close(total, expected)
    total.zero_()
    assert components[0].tolist() == [1, 3]


def test_values_that_are_not_distributed() -> None:
    value = torch.tensor([1, 2])
    assert reduction.reduce_plain(SUM, value, None, 1) is value
    assert reduction.reduce_plain(MEAN, value, None, 3).dtype == torch.get_default_dtype()
    assert reduction.reduce_plain(SUM, value, 0, 2) == 6
    assert reduction.reduce_plain(MEAN, "text", None, 2) == "text"
    assert not reduction.reduce_plain(SUM, np.zeros(2), None, 3).any()
    with pytest.raises(ValueError, match="multiply by num_replicas_in_sync"):
        reduction.reduce_plain(SUM, value, None, 2)


def test_reductions_of_variable_aggregations() -> None:
    assert ReduceOp.from_variable_aggregation(ts.VariableAggregation.MEAN) is MEAN
    with pytest.raises(ValueError, match="is not a reduction"):
        ReduceOp.from_variable_aggregation(ts.VariableAggregation.NONE)
