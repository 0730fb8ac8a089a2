"""A run of `scripts/train.py` on parameter servers, one of which dies: the run goes on, its record tells one story."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hydra")
pytest.importorskip("cloudpickle")

from tests.choices import chosen
from torchstrat import CheckpointManager, ClusterCoordinator, PreemptionHandler
from torchstrat import config as schema
from torchstrat.errors import InvalidArgumentError, ParameterServerUnavailable
from torchstrat.experiments import data
from torchstrat.experiments.asynchronous import AsynchronousLoop
from torchstrat.experiments.checkpoints import Checkpoints
from torchstrat.experiments.launch import Run
from torchstrat.experiments.loop import Training
from torchstrat.experiments.metrics_file import read_metrics
from torchstrat.experiments.parameter_server_cluster import ClusterSize
from torchstrat.experiments.report import FolderReport
from torchstrat.testing.fake_cluster import FakeCluster

STEPS_PER_EPOCH = 10


def settings(folder: Path, **strategy: Any) -> schema.ExperimentConfig:
    """320 rows to train on, in batches of 32."""
    inputs = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
    np.savez(folder / "rows.npz", x=inputs, y=(inputs[:, 0] > 0).astype(np.int64))
    return schema.ExperimentConfig(
        strategy=chosen("strategy=parameter_server", **strategy),
        model=chosen("model=mlp", hidden=[4]),
        data=chosen("data=npz", path=str(folder / "rows.npz"), global_batch=32),
        optimizer=chosen("optimizer=adagrad"),
        checkpoint=schema.CheckpointConfig(every_steps=4),
        epochs=2,
        tensorboard=False,
        curves=False,
        progress="off",
    )


def train(folder: Path, config: schema.ExperimentConfig, lost_after: dict[int, int]) -> None:
    """``lost_after``: after which step of the record, for the first time, which server dies; another one is there at
    once."""
    run = folder / "run"
    run.mkdir()
    lost = dict(lost_after)

    class DyingServers(FolderReport):
        def tell(self, event: str, **values: Any) -> None:
            super().tell(event, **values)
            if event == "step" and values["step"] in lost:
                server = lost.pop(values["step"])
                cluster.kill_server(server)
                cluster.start_server(server)

    examples = data.load(config.data)
    policy = "restore" if config.restores_servers else "raise"
    with FakeCluster(workers=2, ps=2) as cluster:
        strategy = cluster.strategy(on_server_loss=policy, timeout=timedelta(seconds=60))
        report = DyingServers(run, config, {}, 20, "run")
        with (
            CheckpointManager(folder / "checkpoints") as manager,
            PreemptionHandler(timedelta(seconds=25)) as preemption,
        ):
            checkpoints = Checkpoints(config, manager, preemption)
            coordinator: Any = ClusterCoordinator(strategy)
            size = ClusterSize(2, 2)
            try:
                training = Training(Run(config, {}, run, None), examples, strategy, report, checkpoints)
                AsynchronousLoop(training, coordinator, size).run()
            finally:
                report.close()
    assert not lost


@pytest.mark.parametrize("lost_after", [{2: 1}, {6: 0, 7: 1}, {STEPS_PER_EPOCH + 1: 1}, {2 * STEPS_PER_EPOCH: 0}])
def test_the_run_goes_on_and_its_record_has_every_step_once(lost_after: dict[int, int], tmp_path: Path) -> None:
    train(tmp_path, settings(tmp_path), lost_after)
    run = tmp_path / "run"
    steps = read_metrics(run, "step")
    assert [record["step"] for record in steps] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert [record["epoch"] for record in steps] == [1] * STEPS_PER_EPOCH + [2] * STEPS_PER_EPOCH
    assert [record["epoch"] for record in read_metrics(run, "evaluation")] == [1, 2]
    for ledger in read_metrics(run, "ledger"):
        assert ledger["finished"] == ledger["rows"] == 320
        assert ledger["lost"] == 0
    (result,) = read_metrics(run, "result")
    assert result["steps"] == 2 * STEPS_PER_EPOCH


def test_with_raise_it_ends(tmp_path: Path) -> None:
    with pytest.raises(ParameterServerUnavailable, match="parameter server 1"):
        train(tmp_path, settings(tmp_path, on_server_loss="raise"), {2: 1})


def test_restore_needs_checkpoints(tmp_path: Path) -> None:
    restore = chosen("strategy=parameter_server", on_server_loss="restore")
    with pytest.raises(
        InvalidArgumentError, match=r"on_server_loss=restore needs checkpoints.*checkpoint\.every_steps"
    ):
        schema.ExperimentConfig(strategy=restore)
    assert not schema.ExperimentConfig(strategy=chosen("strategy=parameter_server")).restores_servers
    assert settings(tmp_path).restores_servers
    with pytest.raises(InvalidArgumentError, match=r"strategy\.on_server_loss"):
        schema.ExperimentConfig(strategy=chosen("strategy=parameter_server", on_server_loss="ignore"))
