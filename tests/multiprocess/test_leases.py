"""Leased rows in a cluster of processes: what travels, who reads what, and a worker with other rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrat as ts
from torchstrat.errors import ClosureInputError, LedgerError
from torchstrat.launch import LocalCluster

ROWS = 500
PATIENCE_SECONDS = 120.0

pytestmark = [pytest.mark.multiprocess, pytest.mark.deadline(300)]


@contextmanager
def coordinator_of(workers: int) -> Iterator[ts.ClusterCoordinator]:
    with LocalCluster(workers, 1, env={"TORCH_CPP_LOG_LEVEL": "ERROR"}) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        try:
            yield ts.ClusterCoordinator(strategy)
        finally:
            strategy.close()


def wait_for_both_workers(coordinator: ts.ClusterCoordinator, folder: Path) -> None:
    """Two functions that wait for each other, hence one on each worker: a fast one shall not do everything alone."""

    def meet() -> int:
        worker = coordinator.get_current_worker_index()
        (folder / f"worker {worker}").touch()
        until = time.monotonic() + PATIENCE_SECONDS
        while not all((folder / f"worker {index}").exists() for index in range(2)):
            assert time.monotonic() < until, "the other worker did not come"
            time.sleep(0.01)
        return worker

    assert {value.get() for value in [coordinator.schedule(meet) for _ in range(2)]} == {0, 1}


def test_two_processes_share_an_epoch(tmp_path: Path) -> None:
    with coordinator_of(2) as coordinator:
        built = tmp_path / "built"
        built.mkdir()

        def make() -> Any:
            import os

            (built / str(os.getpid())).touch()
            return torch.utils.data.TensorDataset(torch.arange(ROWS), torch.arange(ROWS) * 2.0)

        leased = coordinator.create_leased_dataset(make, 7, shuffle=True, seed=1, rows=ROWS)
        expected = [lease.rows.tolist() for lease in leased]

        def step(batch: Any) -> tuple[list[int], list[float], int]:
            rows, doubles = batch
            return rows.tolist(), doubles.tolist(), coordinator.get_current_worker_index()

        wait_for_both_workers(coordinator, tmp_path)
        workers = set()
        for epoch in range(2):
            values = [coordinator.schedule(step, args=(lease,)) for lease in leased]
            coordinator.join(PATIENCE_SECONDS)
            results = [value.get() for value in values]
            if epoch == 0:
                assert [rows for rows, _, _ in results] == expected, "the unscheduled leases' rows came again"
            assert Counter(row for rows, _, _ in results for row in rows) == Counter(range(ROWS))
            assert all(doubles == [2.0 * row for row in rows] for rows, doubles, _ in results)
            workers |= {worker for _, _, worker in results}
            leased.ledger.check()
        assert workers == {0, 1}
        assert leased.ledger.repeated == 0
        assert len(list(built.iterdir())) == 2, "each worker made the dataset once, and the coordinator never"


def test_a_worker_with_fewer_rows_is_named_and_its_rows_are_not_lost(tmp_path: Path) -> None:
    with coordinator_of(1) as coordinator:
        rows_there = tmp_path / "rows"
        rows_there.write_text("400")

        def make() -> range:
            return range(int(rows_there.read_text()))

        leased = coordinator.create_leased_dataset(make, 100, rows=ROWS)
        values = [coordinator.schedule(lambda batch: batch.tolist(), args=(lease,)) for lease in leased]
        with pytest.raises(ClosureInputError, match="has 400 rows on worker 0, and 500 on the coordinator"):
            coordinator.join(PATIENCE_SECONDS)
        assert len(values) == 5
        with pytest.raises(LedgerError, match="500 rows were not finished"):
            leased.ledger.check()
        assert leased.ledger.returned == ROWS

        rows_there.write_text("500")
        again = [coordinator.schedule(lambda batch: batch.tolist(), args=(lease,)) for lease in leased]
        coordinator.join(PATIENCE_SECONDS)
        assert [row for value in again for row in value.get()] == list(range(ROWS))
        leased.ledger.check()
