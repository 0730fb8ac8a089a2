"""Epochs of leased rows while workers are killed, and across checkpoints: every row is trained on exactly once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.counting import PATIENCE_SECONDS, is_back, wait_until
from tests.faults.leased import ROWS, LeasedTraining
from torchstrat.launch import LocalCluster, RestartPolicy
from torchstrat.testing.fault_plan import Fault, FaultPlan, Phase

AT_ONCE = RestartPolicy(first_delay_seconds=0.0)
IN_A_FUNCTION: list[Phase] = [
    "while unpickling",
    "inside a function",
    "between two answers",
    "between push and answer",
]

pytestmark = [pytest.mark.deadline(420), pytest.mark.usefixtures("clusters_share_a_fork_server")]


@contextmanager
def training_on(
    workers: int, ps: int, batch_size: int, plan: FaultPlan | None = None, seed: int = 0
) -> Iterator[tuple[LocalCluster, LeasedTraining]]:
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", **(plan.environment if plan is not None else {})}
    with LocalCluster(workers, ps, env=env, restart=AT_ONCE) as cluster:
        training = LeasedTraining(cluster.resolver, batch_size, seed)
        try:
            yield cluster, training
        finally:
            training.strategy.close()


@pytest.mark.soak  # test_parameter_server.py kills in every phase, and tests/unit goes on in a cluster of threads
def test_epochs_with_kills_in_every_phase_and_one_that_goes_on_in_another_cluster(tmp_path: Path) -> None:
    """Workers are killed before and after the save, and before the end; functions run and wait while it saves."""
    plan, later_plan = FaultPlan(tmp_path / "plan"), FaultPlan(tmp_path / "later plan")
    kills = [Fault(phase) for phase in IN_A_FUNCTION]
    plan.add("worker", 1, *kills)
    with training_on(2, 2, 2, plan, seed=11) as (cluster, training):
        ended = training.train_until(
            lambda: len(plan.fired("worker", 1)) == len(kills) and is_back(plan, "worker", 1), "the kills"
        )
        ended += training.train()
        assert [line.fault for line in plan.fired("worker", 1)] == kills
        ledger = training.leased.ledger
        print(f"{ledger}")
        ledger.check()
        assert (ledger.lost, ledger.returned) == (0, 0)
        assert ledger.repeated >= len(kills) * 2, "each kill took a function's two rows with it"
        assert Counter(row for rows, _ in ended for row in rows) == Counter(range(ROWS))
        assert {worker for _, worker in ended} == {0, 1}
        training.check_counts(1)

        cluster.kill("worker", 0)  # idle, between two epochs
        training.leased.batch_size = 4
        plan.add("worker", 1, Fault("inside a function", 3), Fault("between push and answer", 3))
        training.train_until(
            lambda: len(plan.fired("worker", 1)) == len(kills) + 2 and is_back(plan, "worker", 1), "the kills"
        )
        leases = iter(training.leased)
        with training.coordinator._dispatcher.paused(PATIENCE_SECONDS, "the test"):  # or they end while it schedules
            values = training.schedule(itertools.islice(leases, 600))
        values[20].get(PATIENCE_SECONDS)
        training.checkpoint.save(tmp_path / "checkpoint")
        assert training.leased.ledger.scheduled > 0, "there was nothing to be saved in the middle of"
        for value in values:
            value.get(PATIENCE_SECONDS)
        finished = training.leased.ledger.finished
        training.leased.ledger.check(complete=False)

    later_plan.add("worker", 0, Fault("between push and answer", 5))
    with training_on(3, 2, 7, later_plan) as (_, training):
        training.checkpoint.restore(tmp_path / "checkpoint")
        leased = training.leased
        ledger = leased.ledger
        print(f"at the save: {ledger}; finished in the first job: {finished}")
        assert (leased.epoch, ledger.epoch) == (1, 1)
        assert 0 < ledger.finished < finished
        assert ledger.finished + ledger.left == ROWS
        assert ledger.repeated >= 8, "the ledger goes on"
        left = ledger.left
        ended = training.train_until(lambda: bool(later_plan.fired("worker", 0)), "the kill")
        ended += training.train()
        rows = [row for row_numbers, _ in ended for row in row_numbers]
        assert len(set(rows)) == len(rows) == left
        leased.ledger.check()
        training.check_counts(2)
        training.train()
        training.check_counts(3)


def test_the_only_worker_dies_with_rows_and_a_restore_makes_them_void(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "plan")
    with training_on(1, 2, 100, plan) as (_, training):
        training.checkpoint.save(tmp_path / "beginning")
        leases = iter(training.leased)
        training.schedule(itertools.islice(leases, 3))
        training.coordinator.join(PATIENCE_SECONDS)
        plan.add("worker", 0, Fault("inside a function", 2))
        held = training.schedule(leases)
        wait_until(lambda: bool(plan.fired("worker", 0)), "the kill")
        training.coordinator.join(PATIENCE_SECONDS)
        assert len(held) == ROWS // 100 - 3
        training.check_counts(1)
        training.leased.ledger.check()
        assert training.leased.ledger.repeated in (100, 200), "what it ran, and what may have waited there"

        training.checkpoint.restore(tmp_path / "beginning")
        assert training.leased.ledger.left == ROWS
        training.check_counts(0)
        training.train()
        training.leased.ledger.check()
        training.check_counts(1)
