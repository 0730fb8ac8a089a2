"""`reduce` and `all_reduce` of plain Python numbers: each replica's counts once, whether or not it is the same object.

CPython shares small ints and bools, and `Strategy.run` gives back one object that all replicas returned as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import torchstrat as ts
from tests.unit.in_process_strategies import STRATEGIES, opened

pytestmark = pytest.mark.unit
Numbers = list[complex]
NUMBERS: list[Numbers] = [[3, 4, 5, 6], [300] * 4, [3] * 4, [0] * 4, [0, 7, 0, 0], [0.5] * 4, [True] * 4, [1j] * 4]


@pytest.fixture(params=[*STRATEGIES, "one device", "default"])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param in STRATEGIES:
        with opened(request.param) as made:
            yield made
    elif request.param == "default":
        yield ts.get_strategy()
    else:
        made = ts.OneDeviceStrategy("cpu:0")
        yield made
        made.close()


def _context() -> ts.ReplicaContext:
    context = ts.get_replica_context()
    assert context is not None
    return context


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_numbers_that_replicas_return(strategy: Any, numbers: Numbers) -> None:
    count = strategy.num_replicas_in_sync
    total = sum(numbers[:count])

    def step() -> complex:
        return numbers[_context().replica_id_in_sync_group]

    assert complex(strategy.reduce("sum", strategy.run(step))) == total
    assert complex(strategy.reduce("mean", strategy.run(step))) == pytest.approx(total / count)
    nested = strategy.run(lambda: {"loss": torch.ones(()), "rows": [step(), 16]})
    assert complex(strategy.reduce("sum", nested)["rows"][0]) == total
    assert float(strategy.reduce("sum", nested)["rows"][1]) == 16 * count


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_numbers_within_a_step(strategy: Any, numbers: Numbers) -> None:
    count = strategy.num_replicas_in_sync
    total = sum(numbers[:count])

    def step() -> Any:
        own = numbers[_context().replica_id_in_sync_group]
        return _context().all_reduce("sum", own), _context().all_reduce("mean", [own])[0]

    for result in zip(*map(strategy.local_results, strategy.run(step)), strict=True):
        assert [complex(one) for one in result] == pytest.approx([total, total / count])


@pytest.mark.parametrize("number", [0, 0.0, 2, 2.5, True, False, 2j])
def test_a_number_of_nobody_in_particular(strategy: Any, number: complex) -> None:
    count = strategy.num_replicas_in_sync
    assert complex(strategy.reduce("SUM", number)) == number * count
    mean = strategy.reduce("MEAN", number)
    assert (type(mean), mean) == (type(number), number)
    in_the_middle = lambda other: complex(other.reduce("sum", number))  # noqa: E731
    assert strategy.local_results(strategy.run(lambda: _context().merge_call(in_the_middle)))[0] == number * count
    [there] = strategy.extended.batch_reduce_to("sum", [(number, "cpu:0")])
    assert complex(there) == number * count


def test_numpy_scalars_are_arrays() -> None:
    """They have a dtype, and a sum of what is no component stays ambiguous, as that of a tensor."""
    with opened("mirrored x2") as strategy:
        for scalar in (np.float32(3), np.float64(3), np.int64(3)):
            assert strategy.reduce("mean", scalar) is scalar
            with pytest.raises(ValueError, match="multiply by num_replicas_in_sync"):
                strategy.reduce("sum", scalar)
            result = strategy.reduce("sum", strategy.run(lambda scalar=scalar: scalar + 1))
            assert (result.dtype, float(result)) == (torch.as_tensor(scalar).dtype, 8)


def test_arrays_and_tensors_of_bools_are_refused() -> None:
    with opened("mirrored x2") as strategy:
        for flag in (torch.tensor(True), np.array([True])):
            with pytest.raises(TypeError, match="convert them to an integer"):
                strategy.reduce("sum", strategy.run(lambda flag=flag: flag | (_context().replica_id_in_sync_group > 9)))
