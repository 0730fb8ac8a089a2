"""Every training case for all replicas at once, on a runtime that computes on the CPU: every strategy's numbers."""

from __future__ import annotations

import pytest

from tests.support.replicas import reference
from torchstrat.errors import UnsupportedError
from torchstrat.testing import contract
from torchstrat.testing.contract_on_tpu import OTHER_NUMBERS, REFUSED, run_case_on_tpu
from torchstrat.testing.fake_tpu import fake_tpu_strategy

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
