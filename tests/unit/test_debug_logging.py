"""``logging.getLogger("torchstrat").setLevel(logging.DEBUG)`` tells what happens."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

import torchstrat as ts
from torchstrat.testing.fake_cluster import FakeCluster


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="torchstrat")
    return caplog


def test_strategies_scopes_and_checkpoints(told: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    strategy = ts.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:1")
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    checkpoint = ts.Checkpoint(model=model)
    checkpoint.save(tmp_path / "a")
    checkpoint.restore(tmp_path / "a")
    strategy.close()
    assert "CentralStorageStrategy is made: replicas here on cpu:0, cpu:1, variables on cpu:1." in told.text
    assert "is left; it knows 1 modules, 0 bare tensors, 0 optimizers." in told.text
    assert f"the checkpoint {tmp_path / 'a'} is saved." in told.text
    assert f"<Checkpoint of model> is restored from {tmp_path / 'a'}." in told.text


def test_a_cluster(told: pytest.LogCaptureFixture) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        coordinator = ts.ClusterCoordinator(strategy)
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
        assert coordinator.schedule(lambda: 3).fetch() == 3
        cluster.kill_worker(0)
        cluster.start_worker(0)
        assert coordinator.schedule(lambda: 3).fetch() == 3
    assert len(re.findall(r"worker 0 \(.*\) has joined\.", told.text)) == 2
    assert re.search(r"worker 0 \(.*\) was lost", told.text)
    assert f"of shape {tuple(model.weight.shape)} is placed on parameter servers [0]." in told.text


def test_nothing_is_said_below_warnings_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="torchstrat")
    ts.MirroredStrategy(["cpu:0", "cpu:1"]).close()
    assert caplog.text == ""
