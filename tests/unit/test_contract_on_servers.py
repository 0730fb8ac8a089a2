"""Every training case on parameter servers with one worker: the numbers of one device, or an error that says why."""

from __future__ import annotations

import pytest

import torchstrat as ts
from tests.support.contract_on_servers import PYTHON_STATE, REFUSED, run_case_on_servers
from tests.support.replicas import reference
from torchstrat.testing import cases_optimizers, contract
from torchstrat.testing.fake_cluster import FakeCluster

pytestmark = [pytest.mark.unit, pytest.mark.deadline(120)]

CASES = {name: case for name, case in contract.CASES.items() if not case.needs_compiler}
TRAINED = [name for name in CASES if name not in REFUSED and name not in PYTHON_STATE]


def on_servers(case: contract.Case, shards: int | None):
    partitioner = None if shards is None else ts.partitioners.FixedShardsPartitioner(shards)
    with FakeCluster(workers=1, ps=2) as cluster:
        # The numbers of one device are those of dense gradients; what rows_only does is compared elsewhere.
        strategy = cluster.strategy(partitioner, rows_only=False, gradient_reduce_op=case.gradient_reduce_op)
        return run_case_on_servers(case, strategy)


STEPPED_IN_SHARDS = {case.name for case in cases_optimizers.CASES}
"""In every run; what else a function does, it does with whole tensors, however they are kept: in soak."""
CELLS = [
    pytest.param(name, shards, marks=[] if always else [pytest.mark.soak])
    for name in TRAINED
    for shards, always in ((None, True), (5, name in STEPPED_IN_SHARDS))
]


@pytest.mark.parametrize(("name", "shards"), CELLS)
def test_numbers_of_one_device(name, shards):
    case = CASES[name]
    contract.check(case, on_servers(case, shards), reference(case, 1))


LEAVING = [
    *("accumulation_no_sync", "accumulation_uneven", "accumulation_idle", "accumulation_idle_at_first"),
    *("accumulated_sums_idle", "no_sync_within_the_step", "no_sync_up_to_the_next_run"),
]
"""Without the one that clips, for clipping sees the gradients of its own function."""


@pytest.mark.parametrize("shards", [None, 5])
@pytest.mark.parametrize("name", LEAVING)
def test_with_two_workers_what_is_accumulated_under_no_sync_has_the_numbers_of_one_device(name, shards):
    case = CASES[name]
    partitioner = None if shards is None else ts.partitioners.FixedShardsPartitioner(shards)
    with FakeCluster(workers=2, ps=2) as cluster:
        strategy = cluster.strategy(partitioner, rows_only=False, gradient_reduce_op=case.gradient_reduce_op)
        contract.check(case, run_case_on_servers(case, strategy, workers=2), reference(case, 1))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    with pytest.raises(REFUSED[name], match=r"function|server|scope"):
        on_servers(CASES[name], None)


def test_the_lists_name_cases():
    assert set(REFUSED) <= set(CASES)
    assert set(PYTHON_STATE) <= set(CASES)
    assert len(TRAINED) >= 80
