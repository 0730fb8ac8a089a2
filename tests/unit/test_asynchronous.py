"""The coordinator's loop on a cluster of threads, of which servers may die, and its own cluster, on fakes."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
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
from torchstrat import CheckpointManager, ClusterCoordinator, OneDeviceStrategy, PreemptionHandler
from torchstrat import config as schema
from torchstrat.cluster import ProcessPlan
from torchstrat.cluster_resolver import SimpleClusterResolver, TFConfigClusterResolver
from torchstrat.cluster_spec import ClusterSpec
from torchstrat.errors import InvalidArgumentError, ParameterServerUnavailable
from torchstrat.experiments import asynchronous, data, loop
from torchstrat.experiments.asynchronous import AsynchronousLoop, LoaderOrder
from torchstrat.experiments.checkpoints import Checkpoints
from torchstrat.experiments.launch import Run
from torchstrat.experiments.metrics_file import read_metrics
from torchstrat.experiments.parameter_server_cluster import ClusterSize, cluster_of, given_resolver, serve
from torchstrat.experiments.report import FolderReport, Report
from torchstrat.testing.fake_cluster import FakeCluster

ROWS, STEPS = 320, 10
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
    assert [record.step for record in report.steps] == list(range(1, 2 * STEPS + 1))
    assert [record.epoch for record in report.steps] == [1] * STEPS + [2] * STEPS
    assert coordinator.joins == 2
    assert [pull for pull in pulls if pull[0]] == [(STEPS, STEPS, 0), (2 * STEPS, 2 * STEPS, 0)]
    counts = {"rows": ROWS, "handed_out": ROWS, "finished": ROWS, "repeated": 0, "returned": 0, "lost": 0}
    assert report.ledgers == [SimpleNamespace(step=epoch * STEPS, epoch=epoch, **counts) for epoch in (1, 2)]
    assert [(record.rows, record.step) for record in report.evaluations] == [(80, STEPS), (80, 2 * STEPS)]
    assert report.evaluations[-1].train_loss < report.evaluations[0].train_loss
    (result,) = report.results
    assert (result.strategy, result.processes, result.replicas) == ("parameter_server", 5, 2)
    assert (result.steps, result.data) == (2 * STEPS, "npz")
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
def test_only_so_many_steps_are_scheduled_ahead(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(asynchronous, "_AHEAD_PER_WORKER", ahead)
    coordinator, report, _ = train(settings())
    assert coordinator.most_in_flight == min(2 * ahead, STEPS)
    assert [record.step for record in report.steps] == list(range(1, 2 * STEPS + 1))


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


@pytest.mark.parametrize("lost_after", [{2: 1}, {6: 0, 7: 1}, {STEPS + 1: 1}, {2 * STEPS: 0}])
def test_the_run_goes_on_and_its_record_has_every_step_once(
    settings: Settings, lost_after: dict[int, int], tmp_path: Path
) -> None:
    run = train_on_servers(tmp_path, settings(**SAVING), lost_after)
    steps = read_metrics(run, "step")
    assert [record["step"] for record in steps] == list(range(1, 2 * STEPS + 1))
    assert [record["epoch"] for record in steps] == [1] * STEPS + [2] * STEPS
    assert [record["epoch"] for record in read_metrics(run, "evaluation")] == [1, 2]
    for ledger in read_metrics(run, "ledger"):
        assert (ledger["finished"], ledger["rows"], ledger["lost"]) == (ROWS, ROWS, 0)
    (result,) = read_metrics(run, "result")
    assert result["steps"] == 2 * STEPS


def test_with_raise_it_ends_and_what_was_measured_stays(settings: Settings, tmp_path: Path) -> None:
    config = settings(**SAVING, strategy=chosen("strategy=parameter_server", on_server_loss="raise"))
    with pytest.raises(ParameterServerUnavailable, match="parameter server 1"):
        train_on_servers(tmp_path, config, {STEPS + 2: 1})
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
def test_starts_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, cluster: str, plan: Any, message: str
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if environment:
        monkeypatch.setenv("TF_CONFIG", environment)
    with pytest.raises(InvalidArgumentError, match=message):
        given_resolver(schema.ClusterConfig(name=cluster), plan)
