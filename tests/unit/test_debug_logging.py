"""``logging.getLogger("torchstrat").setLevel(logging.DEBUG)`` tells what happens."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

import torchstrat as ts
from tests.support.replicas import cpus
from torchstrat.testing.fake_cluster import FakeCluster


def test_strategies_scopes_and_checkpoints(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for level in (logging.WARNING, logging.DEBUG):
        assert caplog.text == "", "nothing is said below warnings unless asked"
        caplog.set_level(level, logger="torchstrat")
        strategy = ts.CentralStorageStrategy(cpus(2), "cpu:1")
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
        checkpoint = ts.Checkpoint(model=model)
        checkpoint.save(tmp_path / str(level))
        checkpoint.restore(tmp_path / str(level))
        strategy.close()
    assert "CentralStorageStrategy is made: replicas here on cpu:0, cpu:1, variables on cpu:1." in caplog.text
    assert "is left; it knows 1 modules, 0 bare tensors, 0 optimizers." in caplog.text
    assert f"the checkpoint {tmp_path / str(level)} is saved." in caplog.text
    assert f"<Checkpoint of model> is restored from {tmp_path / str(level)}." in caplog.text


def test_a_cluster(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="torchstrat")
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        coordinator = ts.ClusterCoordinator(strategy)
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
        assert coordinator.schedule(lambda: 3).fetch() == 3
        cluster.kill_worker(0)
        cluster.start_worker(0)
        assert coordinator.schedule(lambda: 3).fetch() == 3
    assert len(re.findall(r"worker 0 \(.*\) has joined\.", caplog.text)) == 2
    assert re.search(r"worker 0 \(.*\) was lost", caplog.text)
    assert f"of shape {tuple(model.weight.shape)} is placed on parameter servers [0]." in caplog.text
