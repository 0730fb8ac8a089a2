"""Replicas of several processes: the same numbers as plain PyTorch, and the bytes that the sharding has to move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.dtensor import training
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess

DTYPES = ["float32", "float64"]
LOSSES = {"float32": 1e-6, "float64": 1e-9}
PARAMETERS = {"float32": 1e-5, "float64": 1e-9}


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Workers]:
    with Workers(4, timeout_seconds=300) as workers:
        yield workers


def check(outcomes: list[dict[tuple[str, str], training.Outcome]], replicas: int) -> None:
    for (kind, dtype), first in outcomes[0].items():
        losses, state, last = training.train_by_hand(kind, first.initial, replicas)
        for of_rank in outcomes:
            found = of_rank[kind, dtype]
            assert found.losses == pytest.approx(losses, abs=LOSSES[dtype]), kind
            assert training.distance(found.state, state) < PARAMETERS[dtype], kind
            # Adam makes as much of the rounding of a single row's gradients as of the gradients.
            assert training.distance(found.last, last) < 10 * PARAMETERS[dtype], kind
            assert all(torch.equal(one, found.state[name]) for name, one in first.state.items()), kind
        assert losses[-1] != losses[0], kind
        assert training.distance(state, first.initial) > 0.01, kind  # there was something to be wrong about


@pytest.mark.deadline(400)
def test_two_logical_devices(two_processes: Workers) -> None:
    outcomes = two_processes.run(training.train_all, [*training.KINDS], 2, DTYPES, timeout_seconds=300)
    check(outcomes, replicas=1)
    kinds = outcomes[0]["mlp", "float32"].kinds
    assert {name for name, kind in kinds.items() if kind == "CutTensor"} == {
        *("1.weight", "1.bias", "3.weight", "5.weight", "5.bias", "7.weight"),
    }


@pytest.mark.deadline(400)
def test_two_replicas_of_two_logical_devices(four_processes: Workers) -> None:
    check(four_processes.run(training.train_all, [*training.KINDS], 2, DTYPES), replicas=2)


@pytest.mark.deadline(400)
def test_four_logical_devices(four_processes: Workers) -> None:
    outcomes = four_processes.run(training.train_all, [*training.KINDS], 4, DTYPES)
    check(outcomes, replicas=1)
    # By hand: layers are 6 → 16 → 12 → 8 → 4, of which 16 and 8 are cut. Forward, the two layers behind these add up
    # their outputs, 12 and 4 wide; backward, the layer 12 → 8 adds up the gradient of its input, and the first needs
    # none. A sum of n bytes over 4 processes makes each send 2 n 3 / 4.
    for dtype, item_bytes in (("float32", 4), ("float64", 8)):
        expected = 2 * training.ROWS * (12 + 4 + 12) * item_bytes * 3 // 4
        for of_rank in outcomes:
            assert of_rank["mlp", dtype].sent_bytes[: training.STEPS] == [expected] * training.STEPS
    print(f"bytes that each process sends per step: {outcomes[0]['mlp', 'float32'].sent_bytes[0]}")
