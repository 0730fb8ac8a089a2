"""Functions that end their workers, or never end, in a job of real processes: they are set aside, the rest goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS, wait_until
from torchstrat.errors import FunctionSetAsideError
from torchstrat.launch import LocalCluster, RestartPolicy

pytestmark = [pytest.mark.deadline(240), pytest.mark.usefixtures("clusters_share_a_fork_server")]


def crashes() -> None:
    os._exit(1)


def hangs() -> None:
    time.sleep(600)


def test_functions_that_end_badly_are_set_aside_by_name_and_the_others_go_on(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with LocalCluster(workers=2, ps=1, restart=RestartPolicy(quick_seconds=0.0)) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        request.addfinalizer(strategy.close)
        with strategy.scope():
            counter = ts.Variable(torch.tensor(0), name="counter")
        coordinator = ts.ClusterCoordinator(strategy)

        def count() -> int:
            counter.assign_add(1)
            return coordinator.get_current_worker_index()

        done = 0
        for bad, options in ((crashes, {}), (hangs, {"timeout": 0.5, "max_attempts": 3})):
            value = coordinator.schedule(bad, **options)
            others = [coordinator.schedule(count) for _ in range(20)]
            with pytest.raises(FunctionSetAsideError, match=bad.__name__) as raised:
                coordinator.join(timeout=PATIENCE_SECONDS)
            assert len(raised.value.losses) == options.get("max_attempts", 5)
            assert [other.get(timeout=PATIENCE_SECONDS) in (0, 1) for other in others] == [True] * 20
            with pytest.raises(FunctionSetAsideError):
                value.get()
            done += 20
            assert int(counter.read_value()) == done

        def meet() -> int:
            worker = coordinator.get_current_worker_index()
            (tmp_path / str(worker)).touch()
            wait_until(lambda: len(os.listdir(tmp_path)) == 2, "the other worker")
            return worker

        values = [coordinator.schedule(meet) for _ in range(2)]  # both were replaced
        assert {value.get(timeout=PATIENCE_SECONDS) for value in values} == {0, 1}
        strategy.close()
