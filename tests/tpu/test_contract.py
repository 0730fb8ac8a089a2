"""Training cases that all strategies share, on eight virtual devices: in double precision, the same numbers to 1e-9.

The rest of them runs on a runtime of the tests that computes on the CPU (``tests/unit/test_contract_on_tpu.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.contract_on_tpu import REFUSED, REFUSED_ON_DEVICES, run_case_on_tpu
from tests.tpu.models import make_strategy
from torchstrat.testing import contract

pytestmark = pytest.mark.tpu

REPLICAS, LOGICAL_DEVICES = 4, 2

CHOSEN = [
    "adam_amsgrad",
    "adagrad",  # state that is made on the host
    "count_in_optimizer_state",  # and under a name, where it stays on the host
    "closure_of_sgd",
    "one_cycle_scheduler_in_step",
    "clip_twice",
    "targets_moved_to_the_outputs",
    "several_backwards",
    "weight_tying",
    "transformer_encoder",
    "batch_norm_empty",
    "gan",
    "gradient_penalty",
    "func_grad",
    "uneven_batches_clipped",
    "sum_loss_uneven",
    "weights_exchanged_as_a_vector_uneven",
    "parameter_decay_through_data_uneven",
    "weights_averaged_as_lists_uneven",
    "all_gather_in_step",
    "all_reduce_sum_in_step_uneven",
]
REFUSALS = {**REFUSED, **REFUSED_ON_DEVICES}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Cases of uneven batches are compiled more often, which is reported and not looked at here."""
    logger = logging.getLogger("torchstrat.tpu")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def run(case: contract.Case):
    strategy = make_strategy(REPLICAS, LOGICAL_DEVICES, gradient_reduce_op=case.gradient_reduce_op)
    try:
        return run_case_on_tpu(case, strategy)
    finally:
        strategy.close()


IN_SOAK = {
    "transformer_encoder",  # half a minute: test_training.py trains a Transformer's layer too, and cuts its weights
    # Of kinds that others here have too, and all of them on the tests' own runtime; each compiles for a quarter minute.
    *("adam_amsgrad", "several_backwards", "weight_tying", "gan", "weights_exchanged_as_a_vector_uneven"),
    "all_reduce_sum_in_step_uneven",  # compiled for each number of rows, as uneven_batches_clipped is
    "sum_loss_uneven",
    "parameter_decay_through_data_uneven",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in IN_SOAK else []) for name in CHOSEN]
)
def test_numbers_of_plain_training(name):
    case = contract.CASES[name]
    contract.check(case, run(case), contract.reference(case, REPLICAS))
    assert case.tolerance <= 1e-9


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_the_reason(name):
    with pytest.raises(REFUSALS[name], match=r"step|vmap"):
        run(contract.CASES[name])
