"""The steps that engines easily get wrong, with one replica per process: two processes as torchrun starts them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.test_in_process_numbers import CASES
from torchstrat.testing import Workers, contract

pytestmark = pytest.mark.multiprocess

PROCESSES = 2
BY_NAME = {case.name: case for case in CASES}
EVERYWHERE = tuple(contract.TORCHRUN)
KNOWN_WRONG = {
    "B10": ("lookahead", ("central_storage", "central_storage on sockets"), "attributes of a wrapper that one steps"),
    "B18": ("parameter_made_in_forward", EVERYWHERE, "a leaf tensor first made in the step"),
}


def run_case(name: str, row_name: str) -> contract.Snapshot:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if any(name == wrong for wrong, _, _ in KNOWN_WRONG.values()):
            warnings.filterwarnings("ignore", message="the replicas have changed")  # which is noticed, at least
        return contract.run_row(BY_NAME[name], contract.TORCHRUN[row_name])


def _parameters() -> list[object]:
    return [
        pytest.param(
            case.name,
            row,
            id=f"{case.name}-{row}",
            marks=[
                pytest.mark.xfail(reason=f"{number}: {cause}", strict=True, raises=AssertionError)
                for number, (name, rows, cause) in KNOWN_WRONG.items()
                if case.name == name and row in rows
            ],
        )
        for row in EVERYWHERE
        for case in CASES
    ]


@pytest.mark.parametrize(("name", "row"), _parameters())
def test_numbers_of_a_plain_loop(name: str, row: str, two_processes: Workers) -> None:
    snapshots = two_processes.run(run_case, name, row)
    expected = contract.reference(BY_NAME[name], PROCESSES)
    for snapshot in snapshots:
        contract.check(BY_NAME[name], snapshot, expected)


def run_hooked_half_way(row_name: str) -> tuple[list[float], list[float]]:
    """Each rank uses a layer of its own. What a hook on the first rank's sees that comes between two runs, and the
    gradients that there are in the end."""
    strategy = contract.TORCHRUN[row_name].make()
    try:
        with strategy.scope():
            layers = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(PROCESSES)])
        seen: list[float] = []

        def step() -> None:
            layers.zero_grad()
            own = layers[ts.get_replica_context().replica_id_in_sync_group]
            own(torch.full((1, 2), 6.0)).sum().backward()

        strategy.run(step)
        layers[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
        strategy.run(step)
        return seen, [float(layer.weight.grad.sum()) for layer in layers]
    finally:
        strategy.close()


@pytest.mark.parametrize("row", EVERYWHERE)
def test_a_hook_that_comes_between_runs(row: str, two_processes: Workers) -> None:
    """A rank that does without a gradient meets those whose hooks look at it, though nobody did in earlier runs."""
    seen, gradients = zip(*two_processes.run(run_hooked_half_way, row), strict=True)
    assert seen == ([6.0], [])
    assert gradients == ([6.0, 6.0],) * PROCESSES
