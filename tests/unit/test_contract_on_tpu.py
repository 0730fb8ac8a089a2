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
KNOWN_WRONG = {
    "update_by_hand": (
        (1, 2, 4),
        UserWarning,
        "an update by hand with combined gradients is taken for the replica's own",
    ),
    "adversarial_input": ((2, 4), UnsupportedError, "backward(inputs=) of what differs between replicas is refused"),
    "buffers_of_every_kind": ((2, 4), UnsupportedError, "a tensor of the step that becomes a buffer is refused"),
    "buffer_behind_the_hooks": ((2, 4), UnsupportedError, "a tensor of the step that becomes a buffer is refused"),
    "double_backward_across_all_reduce": ((1,), UnsupportedError, "one replica's rows are taken for a variable"),
    "inner_optimizer_over_tensors": ((2, 4), AssertionError, "a leaf tensor of the step is one for all replicas"),
}


def _marks(name, replicas):
    where, error, reason = KNOWN_WRONG.get(name, ((), None, ""))
    return [pytest.mark.xfail(reason=reason, strict=True, raises=error)] if replicas in where else []


ALONE = ("sgd_momentum", "batch_norm", "tensor_hooks", *(name for name in KNOWN_WRONG if 1 in KNOWN_WRONG[name][0]))
"""In every run on one replica, too: what nothing differs on. Other cases, and all on two, go where four do: in soak."""
CELLS = [
    pytest.param(name, replicas, marks=_marks(name, replicas) + ([] if always else [pytest.mark.soak]))
    for name in TRAINED
    for replicas, always in ((1, name in ALONE), (2, False), (4, True))
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


def test_the_lists_name_cases():
    assert set(REFUSED) <= set(CASES)
    assert set(OTHER_NUMBERS) <= set(CASES)
    assert len(TRAINED) >= 90
