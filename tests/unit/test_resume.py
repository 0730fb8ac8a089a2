"""Runs that end and are gone on with, and the coordinator's loop on a cluster of threads, of which servers may die.

A run that ended and was gone on with is the run that did not end: every number of it, to the bit. Real launchers,
signals from outside and kill -9 are in tests/launch/test_resume.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("hydra")
pytest.importorskip("cloudpickle")

from tests.choices import chosen
from tests.support.checkpoints import data_file, flip, same
from tests.support.turns import every_second
from torchstrat import CheckpointManager, ClusterCoordinator, DistributedDataset, OneDeviceStrategy, PreemptionHandler
from torchstrat.app import asynchronous, build, data, loop
from torchstrat.app import config as schema
from torchstrat.app.asynchronous import AsynchronousLoop, LoaderOrder
from torchstrat.app.checkpoints import Checkpoints, Position, checkpoints_of, directory_of
from torchstrat.app.launch import Run, RunAgain
from torchstrat.app.parameter_server_cluster import ClusterSize, cluster_of, given_resolver, serve
from torchstrat.app.report import FolderReport, MetricsFile, Report, read_metrics, records_until
from torchstrat.checkpoint.items import Reads
from torchstrat.cluster_resolver import SimpleClusterResolver, TFConfigClusterResolver
from torchstrat.distributed.cluster import ClusterSpec, ProcessPlan
from torchstrat.errors import InvalidArgumentError, ParameterServerUnavailable
from torchstrat.testing.fake_cluster import FakeCluster

TRAINED, PER_EPOCH = 320, 10
"""To train on in an epoch."""
Settings = Callable[..., schema.ExperimentConfig]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """400 rows, of which 320 are to train on, in batches of 32, twice."""
    inputs = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=inputs, y=(inputs[:, 0] + inputs[:, 1] > 0).astype(np.int64))
    defaults = {
        "strategy": chosen("strategy=parameter_server"),
        "model": chosen("model=mlp", hidden=[4]),
        "data": chosen("data=npz", path=str(tmp_path / "rows.npz"), global_batch=32),
        "optimizer": chosen("optimizer=adagrad"),
        "epochs": 2,
    }
    return lambda **changes: schema.ExperimentConfig(**{**defaults, **changes})


# -- the loop ----------------------------------------------------------------------------------------------------------


class Recorder(Report):
    """A report that keeps what it is told."""

    def __init__(self) -> None:
        self.steps, self.ledgers, self.evaluations, self.results, self.states = [], [], [], [], {}

    def tell(self, event: str, **values: Any) -> None:
        getattr(self, f"{event}s").append(SimpleNamespace(**values))

    def parameters(self, name: str, state: Any) -> None:
        self.states[name] = state


class Watched:
    """A coordinator, and how many results its program has yet to ask for."""

    def __init__(self, coordinator: ClusterCoordinator) -> None:
        self._coordinator = coordinator
        self.scheduled = self.in_flight = self.most_in_flight = self.joins = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def schedule(self, fn: Any, args: Any) -> Any:
        value = self._coordinator.schedule(fn, args)
        self.scheduled += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return SimpleNamespace(get=lambda timeout: self._got(value.get(timeout)))

    def _got(self, result: Any) -> Any:
        self.in_flight -= 1
        return result

    def join(self, timeout: Any) -> None:
        self.joins += 1
        self._coordinator.join(timeout)


def train(config: Any, workers: int = 2) -> tuple[Watched, Recorder, list[Any]]:
    """A run, and at each pull (steps reported, steps scheduled, steps in flight)."""
    with FakeCluster(workers=workers, ps=2) as cluster:
        strategy: Any = cluster.strategy()
        coordinator, report, pulls = Watched(ClusterCoordinator(strategy)), Recorder(), []
        pull = type(strategy.extended).pull

        def watched(extended: Any, module: torch.nn.Module | None = None) -> None:
            assert coordinator.done(), "nothing changes the values meanwhile"
            pulls.append((len(report.steps), coordinator.scheduled, coordinator.in_flight))
            pull(extended, module)

        run, size = Run(config, {}, Path(), None), ClusterSize(workers, 2)
        with mock.patch.object(type(strategy.extended), "pull", watched):
            training = loop.Training(run, data.load(config.data), strategy, report, Checkpoints(config))
            AsynchronousLoop(training, coordinator, size).run()
    return coordinator, report, pulls


def test_a_run(settings: Settings) -> None:
    coordinator, report, pulls = train(settings())
    assert [record.step for record in report.steps] == list(range(1, 2 * PER_EPOCH + 1))
    assert [record.epoch for record in report.steps] == [1] * PER_EPOCH + [2] * PER_EPOCH
    assert coordinator.joins == 2
    assert [pull for pull in pulls if pull[0]] == [(PER_EPOCH, PER_EPOCH, 0), (2 * PER_EPOCH, 2 * PER_EPOCH, 0)]
    counts = {"rows": TRAINED, "handed_out": TRAINED, "finished": TRAINED, "repeated": 0, "returned": 0, "lost": 0}
    assert report.ledgers == [SimpleNamespace(step=epoch * PER_EPOCH, epoch=epoch, **counts) for epoch in (1, 2)]
    assert [(record.rows, record.step) for record in report.evaluations] == [(80, PER_EPOCH), (80, 2 * PER_EPOCH)]
    assert report.evaluations[-1].train_loss < report.evaluations[0].train_loss
    (result,) = report.results
    assert (result.strategy, result.processes, result.replicas) == ("parameter_server", 5, 2)
    assert (result.steps, result.data) == (2 * PER_EPOCH, "npz")
    assert list(report.states) == ["parameters"]


def test_one_worker_computes_what_the_synchronous_loop_computes(settings: Settings) -> None:
    """The same step, the same batches in the same order, over two epochs: every number is equal."""
    _, found, _ = train(settings(), workers=1)
    expected, run = Recorder(), Run(settings(), {}, Path(), None)
    with contextlib.closing(OneDeviceStrategy("cpu:0")) as one_device:
        examples = data.load(run.config.data)
        loop.SynchronousLoop(loop.Training(run, examples, one_device, expected, Checkpoints(run.config))).run()
    assert [record.loss for record in found.steps] == [record.loss for record in expected.steps]
    for name, value in expected.states["parameters"].items():
        assert torch.equal(found.states["parameters"][name], value), name
    for one, other in zip(found.evaluations, expected.evaluations, strict=True):
        assert (one.loss, one.accuracy) == (other.loss, other.accuracy)
        assert one.train_loss == pytest.approx(other.train_loss)


@pytest.mark.parametrize("max_steps", [3, 10, 13])
def test_max_steps_and_snapshots(settings: Settings, max_steps: int) -> None:
    coordinator, report, pulls = train(settings(max_steps=max_steps, snapshot_after_steps=3))
    assert len(report.steps) == coordinator.scheduled == max_steps
    assert sum(record.finished for record in report.ledgers) == sum(record.rows for record in report.steps)
    assert not any(record.lost for record in report.ledgers)
    assert pulls[0][1:] == (3, 0), "nothing is in flight, nor was more done, when the snapshot is taken"
    assert list(report.states) == ["parameters_after_step_3", "parameters"]
    pairs = zip(*(state.values() for state in report.states.values()), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs) == (max_steps == 3)


@pytest.mark.parametrize("ahead", [1, 2, 100])
def test_only_so_many_steps_are_scheduled_ahead(settings, monkeypatch, ahead) -> None:
    monkeypatch.setattr(asynchronous, "_AHEAD_PER_WORKER", ahead)
    coordinator, report, _ = train(settings())
    assert coordinator.most_in_flight == min(2 * ahead, PER_EPOCH)
    assert [record.step for record in report.steps] == list(range(1, 2 * PER_EPOCH + 1))


# -- the order of rows -------------------------------------------------------------------------------------------------


def test_epochs_have_the_order_that_a_run_on_one_device_has_and_may_be_left_and_begun_again() -> None:
    table = torch.utils.data.TensorDataset(torch.arange(300), torch.zeros(300))
    examples = data.Examples(train=table, test=table)
    loader = examples.train_loader(32, 5, 0)
    loader.collate_fn = list
    numbers = {repr(row): number for number, row in enumerate(loader.dataset)}
    expected = [[numbers[repr(row)] for batch in loader for row in batch] for _ in range(3)]
    assert expected[0] != expected[1]
    assert sorted(expected[0]) == list(range(len(expected[0])))
    order, later = LoaderOrder(examples.train_loader(32, 5, 0)), LoaderOrder(examples.train_loader(32, 5, 0))
    assert [list(order(epoch)) for epoch in range(3)] == expected
    assert list(later(2)) == expected[2]
    for epoch in (1, 1, 0, 2):
        assert list(itertools.islice(later(epoch), 40)) == expected[epoch][:40]
    assert [list(later(epoch)) for epoch in (1, 2, 0)] == [expected[1], expected[2], expected[0]]


# -- on servers that die -----------------------------------------------------------------------------------------------


def train_on_servers(folder: Path, config: schema.ExperimentConfig, lost_after: dict[int, int]) -> Path:
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

    policy: Any = "restore" if config.restores_servers else "raise"
    with (
        FakeCluster(workers=2, ps=2) as cluster,
        CheckpointManager(folder / "checkpoints") as manager,
        PreemptionHandler(timedelta(seconds=25)) as preemption,
        contextlib.closing(DyingServers(run, config, {}, 20, "run")) as report,
    ):
        strategy = cluster.strategy(on_server_loss=policy, timeout=timedelta(seconds=60))
        checkpoints = Checkpoints(config, manager, preemption)
        training = loop.Training(Run(config, {}, run, None), data.load(config.data), strategy, report, checkpoints)
        AsynchronousLoop(training, ClusterCoordinator(strategy), ClusterSize(2, 2)).run()
    assert not lost
    return run


SAVING: dict[str, Any] = {
    "checkpoint": schema.CheckpointConfig(every_steps=4),
    "tensorboard": False,
    "curves": False,
    "progress": "off",
}


@pytest.mark.parametrize("lost_after", [{2: 1}, {6: 0, 7: 1}, {PER_EPOCH + 1: 1}, {2 * PER_EPOCH: 0}])
def test_the_run_goes_on_and_its_record_has_every_step_once(settings, lost_after, tmp_path) -> None:
    run = train_on_servers(tmp_path, settings(**SAVING), lost_after)
    steps = read_metrics(run, "step")
    assert [record["step"] for record in steps] == list(range(1, 2 * PER_EPOCH + 1))
    assert [record["epoch"] for record in steps] == [1] * PER_EPOCH + [2] * PER_EPOCH
    assert [record["epoch"] for record in read_metrics(run, "evaluation")] == [1, 2]
    for ledger in read_metrics(run, "ledger"):
        assert (ledger["finished"], ledger["rows"], ledger["lost"]) == (TRAINED, TRAINED, 0)
    (result,) = read_metrics(run, "result")
    assert result["steps"] == 2 * PER_EPOCH


def test_with_raise_it_ends_and_what_was_measured_stays(settings: Settings, tmp_path: Path) -> None:
    config = settings(**SAVING, strategy=chosen("strategy=parameter_server", on_server_loss="raise"))
    with pytest.raises(ParameterServerUnavailable, match="parameter server 1"):
        train_on_servers(tmp_path, config, {PER_EPOCH + 2: 1})
    assert len(read_metrics(tmp_path / "run", "evaluation")) == 1
    assert read_metrics(tmp_path / "run", "result") == []


def test_restore_needs_checkpoints(settings: Settings) -> None:
    restore = chosen("strategy=parameter_server", on_server_loss="restore")
    message = r"on_server_loss=restore needs checkpoints.*checkpoint\.every_steps"
    with pytest.raises(InvalidArgumentError, match=message):
        schema.ExperimentConfig(strategy=restore)
    assert not settings().restores_servers
    assert settings(**SAVING).restores_servers
    with pytest.raises(InvalidArgumentError, match=r"strategy\.on_server_loss"):
        settings(strategy=chosen("strategy=parameter_server", on_server_loss="ignore"))


# -- the cluster -------------------------------------------------------------------------------------------------------

CLUSTER = {"worker": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"], "ps": ["127.0.0.1:4"]}


def described(task: Any = None, cluster: Any = CLUSTER) -> str:
    return json.dumps({"cluster": cluster, **({"task": task} if task else {})})


def test_without_one_in_the_environment_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert given_resolver(schema.ClusterConfig(), None) is None


def test_a_cluster_that_is_started_is_announced_and_ended(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    events: list[Any] = []

    class Started(contextlib.AbstractContextManager[Any]):
        resolver = SimpleClusterResolver(ClusterSpec(CLUSTER))

        def __init__(self, workers: int, ps: int, keep_pages: bool) -> None:
            events.append((workers, ps, keep_pages))

        def __exit__(self, *_: object) -> None:
            events.append("ended")

    monkeypatch.setattr("torchstrat.launch.Cluster", Started)
    with (
        contextlib.suppress(ParameterServerUnavailable),
        cluster_of(None, ClusterSize(3, 1), keep_pages=False) as resolver,
    ):
        assert resolver is Started.resolver
        assert events == [(3, 1, False)]
        raise ParameterServerUnavailable("a run that fails")
    assert events[-1] == "ended"
    assert capsys.readouterr().err == "no cluster in the environment: starting 3 workers, 1 server on this machine\n"


def test_one_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    chief = {"type": "chief", "index": 0}
    monkeypatch.setenv("TF_CONFIG", described(chief, {**CLUSTER, "chief": ["127.0.0.1:5"]}))
    resolver = given_resolver(schema.ClusterConfig(), None)
    assert resolver is not None
    size = ClusterSize.of(resolver.cluster_spec())
    assert size == ClusterSize(3, 1)
    assert (str(size), str(ClusterSize(1, 2))) == ("3 workers, 1 server", "1 worker, 2 servers")
    assert not serve(resolver)
    for task in (chief, None):  # who coordinates
        monkeypatch.setenv("TF_CONFIG", described(task))
        assert not serve(TFConfigClusterResolver())


@pytest.mark.parametrize(
    ("environment", "cluster", "plan", "message"),
    [
        (None, "auto", ProcessPlan(0, 2, 0, 2, "env://", False, "rank 0"), "torchrun started 2 equal processes"),
        (None, "torchrun", None, "cluster=torchrun, but strategy=parameter_server .* TF_CONFIG describes none"),
        (described(), "local", None, "cluster=local, but .* TF_CONFIG describes one"),
    ],
)
def test_starts_that_do_not_fit(monkeypatch, environment, cluster, plan, message) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if environment:
        monkeypatch.setenv("TF_CONFIG", environment)
    with pytest.raises(InvalidArgumentError, match=message):
        given_resolver(schema.ClusterConfig(name=cluster), plan)


# -- a run that ended and was gone on with -----------------------------------------------------------------------------

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
        workers = config.strategy["workers"]
        with (
            FakeCluster(workers=workers, ps=2) as cluster,
            contextlib.closing(FolderReport(run.folder, config, {}, STEPS, "")) as report,
            checkpoints_of(run) as checkpoints,
        ):
            strategy = cluster.strategy()
            training = loop.Training(run, examples, strategy, report, checkpoints)
            asynchronous.AsynchronousLoop(training, ClusterCoordinator(strategy), ClusterSize(workers, 2)).run()


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


@pytest.mark.parametrize(
    ("strategy", "step"), every_second(STRATEGIES, [2, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 3, STEPS])
)
def test_a_run_that_was_told_to_end_goes_on_as_if_it_had_not(runs, with_dropout, strategy, step) -> None:
    trains_on = STRATEGIES[strategy]
    undisturbed = runs.run("undisturbed", strategy=trains_on)
    taken = [record["step"] for record in read_metrics(runs.interrupted("first", step, strategy=trains_on), "step")]
    assert taken == list(range(1, len(taken) + 1))
    # On servers, steps that were under way end before the save.
    assert len(taken) == step or (strategy == "parameter_server" and len(taken) > step)
    assert_the_same_run(runs.resumed(strategy=trains_on), undisturbed)


@pytest.mark.parametrize(("strategy", "asynchronous"), every_second(STRATEGIES, [False, True]))
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
def test_the_comparison_sees_what_is_not_restored(runs, with_dropout, monkeypatch, left_alone) -> None:
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
        ({"resume": "{0}/nowhere"}, "there is nothing at .*/nowhere"),
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
    monkeypatch.setattr("torchstrat.app.checkpoints.time.perf_counter", lambda: next(now))
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
    limits = replace(config, checkpoint=schema.CheckpointConfig(grace_seconds=40.0))
    kept = Checkpoints(limits, CheckpointManager(runs.folder))
    with FakeCluster(workers=2, ps=1) as cluster:
        strategy = cluster.strategy()
        training = loop.Training(Run(config, {}, runs.folder, None), data.load(config.data), strategy, Report(), kept)
        one = asynchronous.AsynchronousLoop(training, ClusterCoordinator(strategy), ClusterSize(2, 1))
        assert [one._steps_ahead(*done) for done in ((0, 0.0), (1000, 1.0), (10, 10.0), (1, 60.0))] == [128, 128, 10, 4]
