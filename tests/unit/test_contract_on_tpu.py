"""Every training case for all replicas at once, on a runtime that computes on the CPU: every strategy's numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import torchstrat as ts
from tests.support.contract_on_tpu import OTHER_NUMBERS, REFUSED, run_case_on_tpu
from tests.support.replicas import reference
from torchstrat.errors import ReplicaDivergenceError, UnsupportedError
from torchstrat.testing import contract
from torchstrat.testing.fake_tpu import fake_tpu_strategy
from torchstrat.testing.training import regression

pytestmark = [
    pytest.mark.unit,
    # torch.vmap says so of a few functions, on the CPU alone; the numbers are right.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

CASES = {name: case for name, case in contract.CASES.items() if not case.needs_compiler}
TRAINED = [name for name in CASES if name not in REFUSED and name not in OTHER_NUMBERS]
REFUSED_ON = {
    "adversarial_input": ((2, 4), "backward.inputs=.*differs between replicas"),
    "buffers_of_every_kind": ((2, 4), "a step has kept it"),  # a tensor of the step that becomes a buffer
    "buffer_behind_the_hooks": ((2, 4), "a step has kept it"),
}
"""Cases that are refused by name on so many replicas, and right on others."""

ALONE = ("sgd_momentum", "batch_norm", "tensor_hooks", "update_by_hand", "double_backward_across_all_reduce")
"""In every run on one replica, too: what nothing differs on. Other cases, and all on two, go where four do: in soak."""
CELLS = [
    pytest.param(name, replicas, marks=[] if always else [pytest.mark.soak])
    for name in TRAINED
    for replicas, always in ((1, name in ALONE), (2, False), (4, True))
    if replicas not in REFUSED_ON.get(name, ((), ""))[0]
]


def on_fake(case: contract.Case, replicas: int):
    strategy = fake_tpu_strategy(replicas, gradient_reduce_op=case.gradient_reduce_op)
    try:
        return run_case_on_tpu(case, strategy)
    finally:
        strategy.close()


@pytest.mark.parametrize(("name", "replicas"), CELLS)
def test_numbers_of_plain_training(name, replicas):
    case = CASES[name]
    contract.check(case, on_fake(case, replicas), reference(case, replicas))


UNEVEN_ALWAYS = (
    *("blocks_over_the_whole_step", "elements_exchanged_by_optimizer", "gan", "update_by_hand", "several_backwards"),
    *("gradients_given_between_steps", "assigned_gradients_in_place"),
)
REFUSED_UNEVEN = {
    "inner_optimizer_over_a_copy": "made parameters and steps them",
    "inner_optimizer_over_tensors": "no longer make the same calls",  # as many steps as a replica has rows
    "adversarial_input": "differs between replicas",
    **dict.fromkeys(
        (
            *("layer_replaced_in_step", "parameters_replaced_in_step"),
            *("weight_replaced_in_step", "weight_replaced_in_step_in_lists"),
        ),
        "replaces .* by new parameters in a run whose replicas have different numbers of rows",
    ),
    "layers_put_in": "adds members to a Sequential in a run whose replicas have different numbers of rows",
    "buffers_of_every_kind": "outside of the run that it belongs to",
    "buffer_behind_the_hooks": "outside of the run that it belongs to",
}
EVEN = [
    name
    for name in TRAINED
    if CASES[name].batches is regression and name != "gradient_noise_drawn_in_step"  # from another stream
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in UNEVEN_ALWAYS else pytest.mark.soak) for name in EVEN]
)
def test_numbers_of_mirrored_training_on_uneven_batches(name):
    case = replace(CASES[name], batches=partial(regression, (8, 12, 5, 7, 9)))
    if name in REFUSED_UNEVEN:
        with pytest.raises((UnsupportedError, ReplicaDivergenceError), match=REFUSED_UNEVEN[name]):
            on_fake(case, 2)
        return
    mirrored = ts.MirroredStrategy(["cpu:0", "cpu:1"], gradient_reduce_op=case.gradient_reduce_op)
    try:
        expected = run_case_on_tpu(case, mirrored)
    finally:
        mirrored.close()
    contract.check(case, on_fake(case, 2), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    with pytest.raises(REFUSED[name], match=r"step|vmap"):
        on_fake(CASES[name], 2)


@pytest.mark.parametrize(
    ("name", "replicas"), [(name, replicas) for name, (where, _) in REFUSED_ON.items() for replicas in where]
)
def test_refused_on_some_numbers_of_replicas(name, replicas):
    with pytest.raises(UnsupportedError, match=REFUSED_ON[name][1]):
        on_fake(CASES[name], replicas)


def test_the_lists_name_cases():
    assert set(REFUSED_ON) <= set(CASES)
    assert set(REFUSED) <= set(CASES)
    assert set(OTHER_NUMBERS) <= set(CASES)
    assert len(TRAINED) >= 90
