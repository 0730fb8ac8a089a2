"""A run that ended and was gone on with is the run that did not end: every number of it, to the bit.

In one process. Real launchers, signals from outside and kill -9 are in tests/launch/test_resume.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("hydra")
pytest.importorskip("cloudpickle")

from tests.choices import chosen
from tests.support.checkpoints import data_file, flip, same
from tests.unit.fake_coordinator import FakeCoordinator, FakeStrategy
from torchstrat import CheckpointManager, DistributedDataset
from torchstrat import config as schema
from torchstrat.checkpoint.items import Reads
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import asynchronous, build, data, loop
from torchstrat.experiments.checkpoints import Checkpoints, checkpoints_of, directory_of
from torchstrat.experiments.launch import Run, RunAgain
from torchstrat.experiments.metrics_file import MetricsFile, read_metrics, records_until
from torchstrat.experiments.parameter_server_cluster import ClusterSize
from torchstrat.experiments.position import Position
from torchstrat.experiments.report import FolderReport, Report

ROWS, BATCH = 60, 9
STEPS_PER_EPOCH, EPOCHS = 6, 2  # 48 rows to train on: five batches of 9, and one of 3
STEPS = STEPS_PER_EPOCH * EPOCHS

STRATEGIES: dict[str, dict[str, Any]] = {
    "one_device": chosen("strategy=one_device"),
    "mirrored": chosen("strategy=mirrored", replicas=2),
    "central_storage": chosen("strategy=central_storage", replicas=2),
    "parameter_server": chosen("strategy=parameter_server", workers=1, on_server_loss="raise"),
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    file = tmp_path / "rows.npz"
    np.savez(file, x=generator.normal(size=(ROWS, 5)).astype(np.float32), y=generator.integers(0, 3, ROWS))
    return file


@pytest.fixture
def with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every step needs random numbers too."""
    plain = build.model

    def model(config: Any, examples: Any) -> torch.nn.Module:
        layers = list(plain(config, examples))  # type: ignore[call-overload]
        return torch.nn.Sequential(layers[0], torch.nn.Dropout(0.5), *layers[1:])

    monkeypatch.setattr(build, "model", model)


class Runs:
    """Runs of one experiment in one place. ``at``: step → what happens once it was reported."""

    def __init__(self, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = rows.parent
        self.config = schema.ExperimentConfig(
            strategy=chosen("strategy=one_device"),
            model=chosen("model=mlp", hidden=[6]),
            data=chosen("data=npz", path=str(rows), global_batch=BATCH),
            optimizer=chosen("optimizer=adam"),
            cluster=schema.ClusterConfig(accelerator="cpu"),
            checkpoint=schema.CheckpointConfig(directory=str(self.folder / "checkpoints"), grace_seconds=600),
            epochs=EPOCHS,
            progress="off",
            tensorboard=False,
            curves=False,
        )
        self.at: dict[int, Callable[[], object]] = {}
        tell = FolderReport.tell

        def and_then(report: FolderReport, event: str, **values: Any) -> None:
            tell(report, event, **values)
            if event == "step":
                self.at.get(values["step"], lambda: None)()

        monkeypatch.setattr(FolderReport, "tell", and_then)

    def run(self, name: str, **changes: Any) -> Path:
        """``checkpoint``: changes of these settings."""
        kept = replace(self.config.checkpoint, **changes.pop("checkpoint", {}))
        config = replace(self.config, checkpoint=kept, **changes)
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        run = self._run_on_servers if config.name_of("strategy") == "parameter_server" else loop.train
        try:
            run(Run(config, {}, folder, None))
        finally:
            self.at.clear()
        return folder

    def resumed(self, name: str = "second", **changes: Any) -> Path:
        return self.run(name, resume="auto", **changes)

    def interrupted(self, name: str, step: int, **changes: Any) -> Path:
        """A run that SIGTERM ends after ``step`` steps."""
        self.at[step] = lambda: os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(RunAgain) as ended:
            self.resumed(name, **changes)
        assert ended.value.code == 75
        return self.folder / name

    def _run_on_servers(self, run: Run) -> None:
        config, examples = run.config, data.load(run.config.data)
        with contextlib.ExitStack() as stack:
            strategy = stack.enter_context(contextlib.closing(FakeStrategy()))
            coordinator = FakeCoordinator(
                strategy, config.strategy["workers"], (torch.nn.Module, torch.optim.Optimizer)
            )
            report = stack.enter_context(contextlib.closing(FolderReport(run.folder, config, {}, STEPS, "")))
            checkpoints = stack.enter_context(checkpoints_of(run))
            size = ClusterSize(config.strategy["workers"], 2)
            training = loop.Training(run, examples, strategy, report, checkpoints)
            asynchronous.AsynchronousLoop(training, coordinator, size).run()


@pytest.fixture
def runs(rows: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(rows, monkeypatch)


def story(folder: Path) -> list[dict[str, Any]]:
    """All that a run recorded, but for what clocks said."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]


def assert_the_same_run(one: Path, other: Path) -> None:
    assert story(one) == story(other)
    found, wanted = (torch.load(run / "parameters.pt", weights_only=True) for run in (one, other))
    assert same(found, wanted)


@pytest.mark.parametrize("step", [2, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 3, STEPS])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_was_told_to_end_goes_on_as_if_it_had_not(
    runs: Runs, with_dropout: None, strategy: str, step: int
) -> None:
    trains_on = STRATEGIES[strategy]
    undisturbed = runs.run("undisturbed", strategy=trains_on)
    taken = [record["step"] for record in read_metrics(runs.interrupted("first", step, strategy=trains_on), "step")]
    assert taken == list(range(1, len(taken) + 1))
    # On servers, steps that were under way end before the save.
    assert len(taken) == step or (strategy == "parameter_server" and len(taken) > step)
    assert_the_same_run(runs.resumed(strategy=trains_on), undisturbed)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_done_after_the_last_checkpoint_is_done_again(runs: Runs, strategy: str, asynchronous: bool) -> None:
    """As after kill -9, of which the process itself knows nothing. All in one folder: nothing doubled, nothing lost."""

    def end() -> None:
        raise RuntimeError("on purpose")

    changes = {"strategy": STRATEGIES[strategy], "checkpoint": {"every_steps": 4, "asynchronous": asynchronous}}
    undisturbed = runs.run("undisturbed", strategy=STRATEGIES[strategy])
    for step in (7, 10):
        runs.at[step] = end
        with pytest.raises(RuntimeError, match="on purpose"):
            runs.resumed("one folder", **changes)
        with (runs.folder / "one folder" / "metrics.jsonl").open("a") as file:
            file.write('{"event": "st')  # a process that is killed may leave half a line
    assert_the_same_run(runs.resumed("one folder", **changes), undisturbed)


def test_another_number_of_replicas_computes_the_same_but_for_rounding(runs: Runs) -> None:
    undisturbed = runs.run("undisturbed")
    for step, replicas in ((2, 2), (5, 3), (9, 1)):
        runs.interrupted(f"with {replicas}", step, strategy=chosen("strategy=mirrored", replicas=replicas))
    last = runs.resumed("last", strategy=chosen("strategy=central_storage", replicas=4))
    assert [record["rows"] for record in read_metrics(last, "step")] == [9, 9, 9, 9, 9, 3] * EPOCHS
    found, wanted = (torch.load(run / "parameters.pt", weights_only=True) for run in (last, undisturbed))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("left_alone", ["the data's position", "the random numbers", "neither"])
def test_the_comparison_sees_what_is_not_restored(
    runs: Runs, with_dropout: None, monkeypatch: pytest.MonkeyPatch, left_alone: str
) -> None:
    undisturbed = runs.run("undisturbed")
    runs.interrupted("first", 2)
    if left_alone == "the data's position":
        monkeypatch.setattr(DistributedDataset, "load_state_dict", lambda self, state: None)
    if left_alone == "the random numbers":
        monkeypatch.setattr("torchstrat.checkpoint.job_state.reads", lambda *_: Reads())
    assert (story(runs.resumed()) == story(undisturbed)) == (left_alone == "neither")


def test_without_these_settings_nothing_is_kept(runs: Runs) -> None:
    handlers = [signal.getsignal(signal.SIGTERM)]
    runs.at[1] = lambda: handlers.append(signal.getsignal(signal.SIGTERM))
    runs.run("plain")
    assert handlers[0] == handlers[1]
    assert not (runs.folder / "checkpoints").exists()
    assert directory_of(schema.ExperimentConfig(name="digits")) == Path("outputs/digits/checkpoints")


def test_so_many_are_kept(runs: Runs) -> None:
    runs.run("first", checkpoint={"every_steps": 2, "max_to_keep": 2, "keep_every": 4})
    kept = sorted(path.name for path in (runs.folder / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (4, 8, 10, 12)]


@pytest.mark.parametrize("max_steps", [None, 4, STEPS_PER_EPOCH])
def test_a_run_that_is_over_has_nothing_left_to_do(runs: Runs, max_steps: int | None) -> None:
    first = runs.resumed("first", max_steps=max_steps)
    assert_the_same_run(runs.resumed("again", max_steps=max_steps), first)


def test_a_longer_run_goes_on_where_a_shorter_one_ended(runs: Runs) -> None:
    undisturbed = runs.run("undisturbed")
    runs.resumed("short", max_steps=4)
    runs.resumed("shorter than an epoch", epochs=1)
    assert_the_same_run(runs.resumed("long"), undisturbed)


def test_a_damaged_checkpoint_is_passed_over(runs: Runs) -> None:
    undisturbed = runs.run("undisturbed")
    runs.interrupted("first", 8, checkpoint={"every_steps": 3})
    flip(data_file(runs.folder / "checkpoints" / "step-00000008"))
    with pytest.warns(UserWarning, match="step-00000008"):
        second = runs.resumed(checkpoint={"every_steps": 3})
    assert_the_same_run(second, undisturbed)


def test_an_earlier_checkpoint_can_be_gone_back_to(runs: Runs) -> None:
    first = runs.run("first", checkpoint={"every_steps": 3, "max_to_keep": None})
    checkpoints = runs.folder / "checkpoints"
    again = runs.run("again", resume=str(checkpoints / "step-00000003"), checkpoint={"every_steps": 5})
    assert_the_same_run(again, first)
    names = {path.name for path in checkpoints.glob("step-*")}
    assert {"step-00000003", "step-00000005", "step-00000006.aside", "step-00000012"} <= names


@pytest.mark.parametrize("which", ["checkpoints", "checkpoints/step-00000006"])
def test_a_checkpoint_of_another_directory(runs: Runs, which: str) -> None:
    undisturbed = runs.run("undisturbed")
    runs.interrupted("first", 6)
    elsewhere = {"resume": str(runs.folder / which), "checkpoint": {"directory": str(runs.folder / "elsewhere")}}
    assert_the_same_run(runs.run("second", **elsewhere), undisturbed)
    assert (runs.folder / "elsewhere" / "step-00000012").is_dir()
    with pytest.raises(InvalidArgumentError, match="has checkpoints already, the newest of them step-00000012"):
        runs.run("third", **elsewhere)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": chosen("optimizer=adam", lr=0.5), "resume": "auto"}, r"optimizer\.lr was 0\.001 and is 0\.5"),
        ({"loss": {"_target_": "torch.nn.MSELoss"}, "resume": "auto"}, r"loss\._target_ was None and is 'torch.nn.MSE"),
        ({"seed": 7, "resume": "auto"}, "seed was 0 and is 7"),
        ({"epochs": 1, "resume": "auto"}, r"is of step 8 in epoch 2, .* epochs=1"),
        ({"max_steps": 7, "resume": "auto"}, "max_steps=7"),
        ({"checkpoint": {"every_steps": 2}}, r"resume=never, and .*step-00000008.*resume=auto"),
        ({"checkpoint": {"directory": "{0}/new"}, "resume": "{0}/nowhere"}, "nowhere"),
        ({"checkpoint": {"directory": "{0}/new"}, "resume": "{0}/new"}, "there is no checkpoint in that directory"),
    ],
)
def test_a_run_with_other_settings_is_another_run(runs: Runs, changes: dict[str, Any], says: str) -> None:
    first = runs.interrupted("first", 8)
    before = story(first)
    placed = json.loads(json.dumps(changes).replace("{0}", str(runs.folder)))
    with pytest.raises(InvalidArgumentError, match=says):
        runs.run("first", **placed)
    assert story(first) == before, "what was recorded stays"


def test_settings_that_change_no_number_may_change(runs: Runs) -> None:
    undisturbed = runs.run("undisturbed")
    runs.interrupted("first", 8)
    default = {**runs.config.optimizer, "eps": 1e-8}  # which need not be said
    changed = {"data": {**runs.config.data, "workers": 1}, "optimizer": default, "progress": "lines"}
    assert_the_same_run(runs.resumed(**changed), undisturbed)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"every_steps": 0}, r"checkpoint\.every_steps=0"),
        ({"max_to_keep": -1}, r"checkpoint\.max_to_keep"),
        ({"grace_seconds": 0.0}, r"checkpoint\.grace_seconds"),
        ({"directory": ""}, r"checkpoint\.directory"),
        ({"every": 5}, r"checkpoint\.every: Key 'every' not in 'CheckpointConfig'"),
        ({"every_steps": 2.5}, r"checkpoint\.every_steps: Value '2\.5' of type 'float' could not be converted to Int"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        schema.experiment_from_mapping({"checkpoint": settings})


def test_an_earlier_record_that_is_gone_is_missed_aloud(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    first = runs.interrupted("first", 8, snapshot_after_steps=3)
    (first / "metrics.jsonl").unlink()
    second = runs.resumed(snapshot_after_steps=3)
    assert "has the record of 0 of these 8 steps" in capsys.readouterr().err
    assert [record["step"] for record in read_metrics(second, "step")] == list(range(9, STEPS + 1))
    assert (second / "parameters_after_step_3.pt").is_file(), "snapshots come along"


def test_clocks_go_on_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 10.0, 14.0, 1000.0, 1006.0, 1006.0])
    monkeypatch.setattr("torchstrat.experiments.position.time.perf_counter", lambda: next(now))
    position, later = (Position(schema.ExperimentConfig(), Path()) for _ in range(2))
    position.begin_epoch(1)  # at 0
    position.count(0.5, 100)
    position.end_epoch()  # at 10
    position.begin_epoch(2)  # at 10
    position.count(0.5, 20)
    later.load_state_dict(position.state_dict())  # at 14
    later.begin_epoch(2)  # at 1000, as if it were 996
    later.count(0.5, 80)
    assert later.examples_per_second() == 10.0
    later.end_epoch()
    assert (later.training_seconds(), later.steady_examples_per_second()) == (20.0, 10.0)


def test_records_until(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        metrics.write({"event": "step", "step": step, "epoch": step})
        metrics.write({"event": "evaluation", "step": step, "epoch": step})
    metrics.write({"event": "result", "steps": 3})
    metrics.close()
    at_the_end = [("step", 1), ("evaluation", 1), ("step", 2)]
    for epoch, kept in ((2, at_the_end), (3, [*at_the_end, ("evaluation", 2)])):  # or when the next one had begun
        assert [(record["event"], record["step"]) for record in records_until(tmp_path, 2, epoch)] == kept
    assert records_until(tmp_path / "nowhere", 2, 1) == []


def test_steps_under_way_are_fewer_where_they_are_slow(runs: Runs) -> None:
    """All of them have to end within the grace, and then the save."""
    config = replace(runs.config, strategy=chosen("strategy=parameter_server", workers=2, on_server_loss="raise"))
    strategy = FakeStrategy()
    coordinator = FakeCoordinator(strategy, 2, ())
    kept = Checkpoints(
        replace(config, checkpoint=schema.CheckpointConfig(grace_seconds=40.0)), CheckpointManager(runs.folder)
    )
    training = loop.Training(Run(config, {}, runs.folder, None), data.load(config.data), strategy, Report(), kept)
    steps_ahead = asynchronous.AsynchronousLoop(training, coordinator, ClusterSize(2, 1))._steps_ahead
    assert [steps_ahead(*done) for done in ((0, 0.0), (1000, 1.0), (10, 10.0), (1, 60.0))] == [128, 128, 10, 4]
    strategy.close()
