"""The coordinator's loop and its cluster, on fakes. The real thing is in tests/launch."""

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("hydra")
pytest.importorskip("cloudpickle")

from tests.choices import chosen
from tests.unit.fake_coordinator import FakeCoordinator, FakeStrategy
from torchstrat import config as schema
from torchstrat.cluster import ProcessPlan
from torchstrat.cluster_resolver import SimpleClusterResolver, TFConfigClusterResolver
from torchstrat.cluster_spec import ClusterSpec
from torchstrat.errors import InvalidArgumentError, ParameterServerUnavailable
from torchstrat.experiments import asynchronous, data, loop
from torchstrat.experiments.asynchronous import AsynchronousLoop, LoaderOrder
from torchstrat.experiments.checkpoints import Checkpoints
from torchstrat.experiments.launch import Run
from torchstrat.experiments.parameter_server_cluster import ClusterSize, cluster_of, given_resolver, serve
from torchstrat.experiments.report import Report

SENT_AS_REFERENCES = (torch.nn.Module, torch.optim.Optimizer)


class Recorder(Report):
    """A report that keeps what it is told."""

    def __init__(self):
        self.steps, self.ledgers, self.evaluations, self.results, self.states = [], [], [], [], {}

    def tell(self, event, **values):
        getattr(self, f"{event}s").append(SimpleNamespace(**values))

    def parameters(self, name, state):
        self.states[name] = state


@pytest.fixture
def settings(tmp_path):
    """400 rows: 320 to train on, in batches of 32."""
    inputs = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=inputs, y=(inputs[:, 0] + inputs[:, 1] > 0).astype(np.int64))

    def make(**changes):
        return schema.ExperimentConfig(
            **{
                "strategy": chosen("strategy=parameter_server"),
                "model": chosen("model=mlp", hidden=[4]),
                "data": chosen("data=npz", path=str(tmp_path / "rows.npz"), global_batch=32),
                "optimizer": chosen("optimizer=adagrad"),
                "epochs": 2,
                **changes,
            }
        )

    return make


@pytest.fixture
def strategy():
    with contextlib.closing(FakeStrategy()) as strategy:
        yield strategy


def train(config, strategy, workers=2):
    examples = data.load(config.data)
    coordinator, report = FakeCoordinator(strategy, workers, SENT_AS_REFERENCES), Recorder()
    training = loop.Training(Run(config, {}, Path(), None), examples, strategy, report, Checkpoints(config))
    return AsynchronousLoop(training, coordinator, ClusterSize(workers, 2)), coordinator, report, examples


def test_a_run(settings, strategy):
    config = settings()
    training, coordinator, report, examples = train(config, strategy)
    pulls = []
    strategy.on_pull = lambda module: pulls.append((len(report.steps), len(coordinator.in_flight)))
    training.run()
    per_epoch = -(-len(examples.train) // 32)
    assert [record.step for record in report.steps] == list(range(1, 2 * per_epoch + 1))
    assert [record.epoch for record in report.steps] == [1] * per_epoch + [2] * per_epoch
    assert coordinator.scheduled == [step % 2 for step in range(2 * per_epoch)]
    assert coordinator.joins == 2
    assert pulls == [(per_epoch, 0), (2 * per_epoch, 0)], "evaluation reads values that nothing changes meanwhile"
    rows = len(examples.train)
    assert report.ledgers == [
        SimpleNamespace(
            step=epoch * per_epoch,
            epoch=epoch,
            rows=rows,
            handed_out=rows,
            finished=rows,
            repeated=0,
            returned=0,
            lost=0,
        )
        for epoch in (1, 2)
    ]
    assert [record.rows for record in report.evaluations] == [len(examples.test)] * 2
    assert [record.step for record in report.evaluations] == [per_epoch, 2 * per_epoch]
    assert report.evaluations[-1].train_loss < report.evaluations[0].train_loss
    (result,) = report.results
    assert (result.strategy, result.processes, result.replicas) == ("parameter_server", 5, 2)
    assert (result.steps, result.data) == (2 * per_epoch, "npz")
    assert list(report.states) == ["parameters"]


def test_one_worker_computes_what_the_synchronous_loop_computes(settings, strategy):
    """The same step, the same batches in the same order, over two epochs: every number is equal."""
    training, _, found, examples = train(settings(), strategy, workers=1)
    training.run()
    expected = Recorder()
    run = Run(settings(), {}, Path(), None)
    plainly = loop.Training(run, examples, strategy_with_reduce(strategy), expected, Checkpoints(run.config))
    loop.SynchronousLoop(plainly).run()
    assert [record.loss for record in found.steps] == [record.loss for record in expected.steps]
    for name, value in expected.states["parameters"].items():
        assert torch.equal(found.states["parameters"][name], value), name
    for one, other in zip(found.evaluations, expected.evaluations, strict=True):
        assert (one.loss, one.accuracy) == (other.loss, other.accuracy)
        assert one.train_loss == pytest.approx(other.train_loss)


def strategy_with_reduce(strategy):
    return strategy._inner


def test_digits_can_be_trained_the_same_way(settings, strategy):
    pytest.importorskip("sklearn")
    config = settings(
        data=chosen("data=digits"), model=chosen("model=mlp", hidden=[32]), optimizer=chosen("optimizer=sgd"), epochs=3
    )
    training, _, report, _ = train(config, strategy)
    training.run()
    assert report.evaluations[-1].accuracy > 0.85


@pytest.mark.parametrize("max_steps", [3, 10, 13])
def test_max_steps_and_snapshots(settings, strategy, max_steps):
    training, coordinator, report, _ = train(settings(max_steps=max_steps, snapshot_after_steps=3), strategy)
    at_pull = []
    strategy.on_pull = lambda module: at_pull.append((len(coordinator.scheduled), len(coordinator.in_flight)))
    training.run()
    assert len(report.steps) == len(coordinator.scheduled) == max_steps
    assert sum(record.finished for record in report.ledgers) == sum(record.rows for record in report.steps)
    assert not any(record.lost for record in report.ledgers)
    assert at_pull[0] == (3, 0), "nothing is in flight, nor was more done, when the snapshot is taken"
    assert list(report.states) == ["parameters_after_step_3", "parameters"]
    same = all(
        torch.equal(one, other)
        for one, other in zip(*(state.values() for state in report.states.values()), strict=True)
    )
    assert same == (max_steps == 3)


@pytest.mark.parametrize("ahead", [1, 2, 100])
def test_only_so_many_steps_are_scheduled_ahead(settings, strategy, monkeypatch, ahead):
    monkeypatch.setattr(asynchronous, "_AHEAD_PER_WORKER", ahead)
    training, coordinator, report, _ = train(settings(), strategy)
    training.run()
    assert coordinator.most_in_flight == min(2 * ahead, len(report.steps) // 2)
    assert [record.step for record in report.steps] == list(range(1, len(report.steps) + 1))


def test_a_lost_server_ends_the_run_and_what_was_measured_stays(settings, strategy):
    training, coordinator, report, _ = train(settings(), strategy)
    schedule, calls = coordinator.schedule, itertools.count()

    def lose_a_server(fn, args=()):
        if next(calls) == 12:
            raise ParameterServerUnavailable("parameter server 1 was lost")
        return schedule(fn, args)

    coordinator.schedule = lose_a_server
    with pytest.raises(ParameterServerUnavailable, match="parameter server 1 was lost"):
        training.run()
    assert len(report.evaluations) == 1
    assert report.results == []


class TestWorkerBatches:
    @pytest.fixture
    def loader(self):
        """Makes the loader of a run on one device, each time as at its beginning."""
        table = torch.utils.data.TensorDataset(torch.arange(300), torch.zeros(300))
        examples = data.Examples(train=table, test=table)
        return lambda: examples.train_loader(32, 5, 0)

    def expected(self, loader, epochs):
        """The rows of each epoch, as that run goes through them."""
        loader.collate_fn = list
        numbers = {repr(row): number for number, row in enumerate(loader.dataset)}
        return [[numbers[repr(row)] for batch in loader for row in batch] for _ in range(epochs)]

    def test_epochs_have_the_order_that_a_run_on_one_device_has(self, loader):
        expected = self.expected(loader(), 3)
        order = LoaderOrder(loader())
        found = [list(order(epoch)) for epoch in range(3)]
        assert found == expected
        assert found[0] != found[1]
        assert sorted(found[0]) == list(range(len(found[0])))

    def test_an_epoch_that_was_left_may_be_begun_again_and_a_later_one_be_the_first(self, loader):
        expected = self.expected(loader(), 3)
        order = LoaderOrder(loader())
        assert list(order(2)) == expected[2]
        for epoch in (1, 1, 0, 2):
            left = order(epoch)
            assert list(itertools.islice(left, 40)) == expected[epoch][:40]
        assert [list(order(epoch)) for epoch in (1, 2, 0)] == [expected[1], expected[2], expected[0]]


CLUSTER = {"worker": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"], "ps": ["127.0.0.1:4"]}


def described(task=None, cluster=CLUSTER) -> str:
    return json.dumps({"cluster": cluster, **({"task": task} if task else {})})


class TestCluster:
    def test_without_one_in_the_environment_there_is_none(self, monkeypatch):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        assert given_resolver(schema.ClusterConfig(), None) is None

    def test_a_cluster_that_is_started_is_announced_and_ended(self, monkeypatch, capsys):
        events = []

        class FakeCluster(contextlib.AbstractContextManager):
            resolver = SimpleClusterResolver(ClusterSpec(CLUSTER))

            def __init__(self, workers, ps, keep_pages):
                events.append((workers, ps, keep_pages))

            def __exit__(self, *_):
                events.append("ended")

        monkeypatch.setattr("torchstrat.launch.Cluster", FakeCluster)
        with (
            contextlib.suppress(ParameterServerUnavailable),
            cluster_of(None, ClusterSize(3, 1), keep_pages=False) as resolver,
        ):
            assert resolver is FakeCluster.resolver
            assert events == [(3, 1, False)]
            raise ParameterServerUnavailable("a run that fails")
        assert events[-1] == "ended"
        assert capsys.readouterr().err == (
            "no cluster in the environment: starting 3 workers, 1 server on this machine\n"
        )

    def test_one_in_the_environment_is_used(self, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", described({"type": "chief", "index": 0}, {**CLUSTER, "chief": ["127.0.0.1:5"]}))
        resolver = given_resolver(schema.ClusterConfig(), None)
        assert ClusterSize.of(resolver.cluster_spec()) == ClusterSize(3, 1)
        assert not serve(resolver)

    @pytest.mark.parametrize("task", [{"type": "chief", "index": 0}, None])
    def test_who_coordinates(self, monkeypatch, task):
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
    def test_starts_that_do_not_fit(self, monkeypatch, environment, cluster, plan, message):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        if environment:
            monkeypatch.setenv("TF_CONFIG", environment)
        with pytest.raises(InvalidArgumentError, match=message):
            given_resolver(schema.ClusterConfig(name=cluster), plan)

    @pytest.mark.parametrize(
        ("size", "text"),
        [(ClusterSize(1, 1), "1 worker, 1 server"), (ClusterSize(4, 2), "4 workers, 2 servers")],
    )
    def test_a_size_reads_as_english(self, size, text):
        assert str(size) == text
