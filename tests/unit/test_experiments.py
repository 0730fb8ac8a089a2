"""From settings to devices and models, and what a run writes down. Whole runs are in tests/launch/test_train.py."""

import io
import json
from dataclasses import replace

import pytest
import torch

from torchstrat import config as schema
from torchstrat.cluster import ProcessPlan
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import build, models
from torchstrat.experiments.report import (
    EvaluationRecord,
    FolderReport,
    ResultRecord,
    StepRecord,
    progress_on,
    read_metrics,
)

ALONE = None
LAUNCHED = ProcessPlan(0, 2, 0, 2, "env://", False, "rank 0 of 2")


@pytest.fixture
def created(monkeypatch):
    """What the registry would have been asked for."""
    calls = []
    monkeypatch.setattr(build.registry, "create", lambda name, **options: calls.append((name, options)))
    return calls


def options_of(created, strategy, plan=ALONE, **cluster):
    config = schema.ExperimentConfig(strategy=strategy, cluster=schema.ClusterConfig(**cluster))
    build.strategy(config, plan)
    name, options = created.pop()
    assert name == strategy.name
    return options


@pytest.fixture(params=[0, 2])
def gpus(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    return request.param


@pytest.mark.parametrize(
    ("kind", "key"), [(schema.MirroredConfig, "devices"), (schema.CentralStorageConfig, "compute_devices")]
)
class TestDevices:
    def test_by_default_all_gpus_or_two_virtual_replicas(self, created, gpus, kind, key):
        assert options_of(created, kind())[key] == (None if gpus else ["cpu:0", "cpu:1"])

    def test_so_many_replicas(self, created, gpus, kind, key):
        kind_of_device = "cuda" if gpus else "cpu"
        assert options_of(created, kind(replicas=3))[key] == [f"{kind_of_device}:{index}" for index in range(3)]

    def test_cpu_only(self, created, gpus, kind, key):
        assert options_of(created, kind(), accelerator="cpu")[key] == ["cpu:0", "cpu:1"]
        assert options_of(created, kind(), LAUNCHED, accelerator="cpu")[key] == ["cpu:0"]

    def test_named_devices_win(self, created, gpus, kind, key):
        assert options_of(created, kind(**{key: ["cpu:3"]}))[key] == ["cpu:3"]

    def test_under_a_launcher_a_process_is_a_replica(self, created, gpus, kind, key):
        assert options_of(created, kind(), LAUNCHED)[key] is None
        assert options_of(created, kind(replicas=1), LAUNCHED)[key] is None
        with pytest.raises(InvalidArgumentError, match=r"strategy\.replicas=2, but under a launcher"):
            options_of(created, kind(replicas=2), LAUNCHED)


def test_one_device_and_timeout(created, gpus):
    assert "device" not in options_of(created, schema.OneDeviceConfig())
    assert options_of(created, schema.OneDeviceConfig(), accelerator="cpu")["device"] == "cpu:0"
    assert options_of(created, schema.OneDeviceConfig(), timeout_seconds=1.5)["timeout"].total_seconds() == 1.5


def test_a_strategy_that_picks_its_device_cannot_be_kept_off_gpus(created, gpus):
    if gpus:
        with pytest.raises(InvalidArgumentError, match="CUDA_VISIBLE_DEVICES="):
            options_of(created, schema.MultiWorkerMirroredConfig(), accelerator="cpu")
    else:
        assert set(options_of(created, schema.MultiWorkerMirroredConfig(), accelerator="cpu")) == {
            "gradient_reduce_op",
            "timeout",
        }


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [("torchrun", ALONE, "was started without it"), ("local", LAUNCHED, "as one of a group")],
)
def test_the_launcher_that_was_insisted_on(created, name, plan, message):
    with pytest.raises(InvalidArgumentError, match=message):
        options_of(created, schema.MirroredConfig(), plan, name=name)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (schema.MlpConfig(), (64,)),
        (schema.MlpConfig(hidden=[]), (1, 8, 8)),
        (schema.ConvNetConfig(), (1, 8, 8)),
        (schema.ConvNetConfig(channels=[4], norm="batch"), (3, 5, 7)),
        (schema.ConvNetConfig(channels=[4, 8], groups=2), (3, 9, 7)),
    ],
)
def test_models_map_inputs_to_logits(config, shape):
    model = models.build(config, shape, classes=5)
    assert model(torch.zeros(2, *shape)).shape == (2, 5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((64,), r"needs images \(channels, height, width\); this data has inputs of shape \(64,\)"), ((1, 3, 8), "3×8")],
)
def test_a_convnet_needs_images_that_are_large_enough(shape, message):
    with pytest.raises(InvalidArgumentError, match=message):
        models.build(schema.ConvNetConfig(), shape, classes=5)


def test_group_norm_does_not_look_at_other_rows():
    model = models.build(schema.ConvNetConfig(norm="group"), (1, 8, 8), classes=3)
    rows = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(model(rows)[:2], model(rows[:2]))


STEP = StepRecord(step=1, epoch=1, loss=0.5, rows=64, examples_per_second=1000.0)
EVALUATION = EvaluationRecord(step=1, epoch=1, train_loss=0.5, loss=0.25, accuracy=0.75, rows=8)
RESULT = ResultRecord("mirrored", 1, 2, 1, 0.75, 0.25, 0.5, 1000.0, 0.064)


def test_what_is_said_of_clicks_has_the_auc(tmp_path):
    stream = io.StringIO()
    progress = progress_on(stream, "lines", total_steps=1, title="a run")
    progress.step(STEP)
    progress.evaluation(replace(EVALUATION, auc=0.875))
    assert "accuracy 0.7500  AUC 0.8750  1,000 examples/s" in stream.getvalue()
    report = FolderReport(tmp_path, schema.ExperimentConfig(progress="off", tensorboard=False), {}, 1, "a run")
    report.evaluation(replace(EVALUATION, auc=0.875))
    report.result(replace(RESULT, auc=0.875, data="synthetic_clicks"))
    report.close()
    assert read_metrics(tmp_path, "evaluation")[0]["auc"] == 0.875
    assert read_metrics(tmp_path, "result")[0]["data"] == "synthetic_clicks"
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "failed"])
def test_a_folder_holds_what_was_reported_until_then(tmp_path, finished):
    config = schema.ExperimentConfig(progress="off", tensorboard=False)
    report = FolderReport(tmp_path, config, {"epochs": 1}, total_steps=1, title="a run")
    report.step(STEP)
    report.evaluation(EVALUATION)
    if finished:
        report.parameters("parameters", {"weight": torch.ones(2)})
        report.result(RESULT)
    report.close()
    assert (tmp_path / "config.yaml").read_text() == "epochs: 1\n"
    assert read_metrics(tmp_path, "step") == [vars(STEP)]
    assert read_metrics(tmp_path, "evaluation") == [vars(EVALUATION)]
    assert len(read_metrics(tmp_path, "result")) == finished
    assert (tmp_path / "curves.png").exists() == finished
    if finished:
        assert torch.equal(torch.load(tmp_path / "parameters.pt", weights_only=True)["weight"], torch.ones(2))


def test_metrics_can_be_read_while_the_run_goes_on(tmp_path):
    report = FolderReport(tmp_path, schema.ExperimentConfig(progress="off", tensorboard=False), {}, 1, "a run")
    report.step(STEP)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    report.close()
    assert json.loads(line) == {"event": "step", **vars(STEP)}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("kind", "stream", "is_bar", "says"),
    [
        ("auto", Terminal(), True, "loss=0.5000"),
        ("auto", io.StringIO(), False, "epoch   1  loss 0.5000  accuracy 0.7500  1,000 examples/s"),
        ("lines", Terminal(), False, "epoch   1"),
        ("bar", io.StringIO(), True, "examples/s=1,000"),
        ("off", Terminal(), False, ""),
    ],
)
def test_progress(kind, stream, is_bar, says):
    progress = progress_on(stream, kind, total_steps=1, title="a run")
    progress.step(STEP)
    progress.evaluation(EVALUATION)
    progress.close()
    assert says in stream.getvalue()
    assert ("1/1" in stream.getvalue()) == is_bar
    assert bool(stream.getvalue()) == bool(says)
