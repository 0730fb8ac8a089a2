"""Asynchronous training on parameter servers: the coordinator's loop around the step of the synchronous one.

The coordinator schedules ``train_step`` and trains nothing itself; each worker draws batches from its own share of the
training rows, and goes round it again when it has seen it all. An epoch is as many steps as the training rows make
batches: a fast worker takes more of them than a slow one, so an epoch sees every row about once, not exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import nn

from torchstrat.config import ExperimentConfig, ParameterServerConfig
from torchstrat.experiments import build, data
from torchstrat.experiments.clock import Clock
from torchstrat.experiments.launch import Run
from torchstrat.experiments.loop import on_cpu, planned_steps, require_enough_rows, run_title, steps_per_epoch
from torchstrat.experiments.objectives import make_train_step, objective_of
from torchstrat.experiments.parameter_server_cluster import (
    ClusterSize,
    coordinates,
    given_resolver,
    local_cluster,
    serve,
)
from torchstrat.experiments.report import EvaluationRecord, FolderReport, Report, ResultRecord, StepRecord
from torchstrat.experiments.worker_batches import EndlessBatches, with_absolute_paths

_AHEAD_PER_WORKER = 64
"""Steps that are scheduled before the oldest one's result is asked for: enough to keep a worker busy, and few enough
that a failure or ``max_steps`` does not leave a queue behind."""


class Result(Protocol):
    """The part of `torchstrat.RemoteValue` that is used here."""

    def get(self, timeout: timedelta | float | None = None) -> Any: ...


class Coordinator(Protocol):
    """The part of `torchstrat.ClusterCoordinator` that is used here."""

    def schedule(self, fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> Result: ...

    def join(self, timeout: timedelta | float | None = None) -> None: ...

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> Any: ...

    def get_current_worker_index(self) -> int: ...


def train(run: Run, chosen: ParameterServerConfig) -> None:
    """Do one run. Returns on the coordinator when it is done, on workers and servers when their cluster is.

    Raises:
        InvalidArgumentError: the data cannot be read, or the configuration does not fit it or the cluster.
        ParameterServerUnavailable: a server was lost, and the variables it held.
    """
    config = run.config
    given = given_resolver(config.cluster, run.plan)
    if given is not None and not coordinates(given):
        serve(given)
        return
    size = ClusterSize(chosen.workers, chosen.servers) if given is None else ClusterSize.of(given.cluster_spec())
    examples = data.load(config.data)
    require_enough_rows(config, examples, size.workers, "workers")
    with local_cluster(size) if given is None else nullcontext(given) as resolver:
        with closing(build.parameter_server(config, chosen, resolver, size.servers)) as strategy:
            coordinator = _coordinator(strategy)
            title = run_title(config, f"({size})")
            total_steps = planned_steps(config, examples)
            with closing(FolderReport(run.folder, config, run.resolved, total_steps, title)) as report:
                AsynchronousTraining(config, examples, strategy, coordinator, report, size).run()


def _coordinator(strategy: Any) -> Coordinator:
    from torchstrat.parameter_server.coordinator import ClusterCoordinator  # imports torch.distributed.rpc

    coordinator: Coordinator = ClusterCoordinator(strategy)
    return coordinator


class AsynchronousTraining:
    """The state of one run on its coordinator."""

    def __init__(
        self,
        config: ExperimentConfig,
        examples: data.AnyExamples,
        strategy: Any,
        coordinator: Coordinator,
        report: Report,
        size: ClusterSize,
    ) -> None:
        self._config = config
        self._examples = examples
        self._strategy = strategy
        self._coordinator = coordinator
        self._report = report
        self._size = size
        self._timeout = timedelta(seconds=config.cluster.timeout_seconds)
        self._objective = objective_of(examples)
        self._step = 0
        self._clock = Clock()

    def run(self) -> None:
        config, strategy = self._config, self._strategy
        torch.manual_seed(config.seed)
        with strategy.scope():
            model = build.model(config.model, self._examples)
            optimizer = build.optimizer(config.optimizer, model.parameters())
        train_step = make_train_step(model, optimizer, self._objective)

        def worker_step(batches: Iterator[Any]) -> tuple[float, int]:
            """Runs on a worker: the loss of one of its batches, and the batch's rows."""
            batch = next(batches)
            loss = strategy.run(train_step, args=(batch,))
            return float(loss), len(batch[1])

        per_worker = self._coordinator.create_per_worker_dataset(self._dataset_function())
        for epoch in range(1, config.epochs + 1):
            train_loss = self._train_epoch(epoch, model, worker_step, iter(per_worker))
            evaluation = self._evaluate(epoch, model, train_loss)
            self._report.evaluation(evaluation)
            if self._step == config.max_steps:
                break
        self._report.parameters("parameters", on_cpu(model.state_dict()))
        self._report.result(self._result(evaluation))

    def _dataset_function(self) -> Callable[[], EndlessBatches]:
        """What each worker calls to make its own batches; it closes over settings, not over rows."""
        settings, seed, coordinator = with_absolute_paths(self._config.data), self._config.seed, self._coordinator
        workers = self._size.workers

        def make_batches() -> EndlessBatches:
            return EndlessBatches(settings, seed, coordinator.get_current_worker_index(), workers)

        return make_batches

    def _train_epoch(self, epoch: int, model: nn.Module, worker_step: Callable[..., Any], iterator: Any) -> float:
        """As many steps as the training rows make batches, or until ``max_steps``. The mean loss over the rows."""
        self._clock.begin_epoch()
        loss_of_rows, rows_seen = 0.0, 0
        for loss, rows in self._results(worker_step, iterator):
            self._step += 1
            self._clock.count(rows)
            loss_of_rows, rows_seen = loss_of_rows + loss * rows, rows_seen + rows
            self._report.step(StepRecord(self._step, epoch, loss, rows, self._clock.epoch_rate()))
            if self._step == self._config.snapshot_after_steps:
                self._strategy.extended.pull(model)
                self._report.parameters(f"parameters_after_step_{self._step}", on_cpu(model.state_dict()))
        self._coordinator.join(self._timeout)
        self._clock.end_epoch()
        return loss_of_rows / rows_seen

    def _results(self, worker_step: Callable[..., Any], iterator: Any) -> Iterator[tuple[float, int]]:
        """The results of an epoch's steps in the order they were scheduled, which is not that of their updates.

        Nothing is in flight when the result is yielded after which a snapshot is due.
        """
        pending: deque[Result] = deque()
        for step in self._steps_of_epoch():
            pending.append(self._coordinator.schedule(worker_step, args=(iterator,)))
            is_last_before_snapshot = step == self._config.snapshot_after_steps
            while pending and (is_last_before_snapshot or len(pending) >= _AHEAD_PER_WORKER * self._size.workers):
                yield pending.popleft().get(self._timeout)
        while pending:
            yield pending.popleft().get(self._timeout)

    def _steps_of_epoch(self) -> range:
        first = self._step + 1
        last = self._step + steps_per_epoch(self._config, self._examples)
        return range(first, min(last, self._config.max_steps or last) + 1)

    def _evaluate(self, epoch: int, model: nn.Module, train_loss: float) -> EvaluationRecord:
        """Scores over the held-out rows, computed here with the servers' values of this moment."""
        self._strategy.extended.pull(model)
        meter = self._objective.meter()
        model.eval()
        with torch.no_grad():
            for inputs, labels in self._examples.test_loader(self._config.data.global_batch):
                meter.add(meter.measure(model(inputs), labels))
        model.train()
        scores = meter.scores()
        return EvaluationRecord(self._step, epoch, train_loss, scores.loss, scores.accuracy, scores.rows, scores.auc)

    def _result(self, last: EvaluationRecord) -> ResultRecord:
        return ResultRecord(
            strategy=self._config.strategy.name,
            processes=1 + self._size.workers + self._size.servers,
            replicas=self._size.workers,
            steps=self._step,
            accuracy=last.accuracy,
            loss=last.loss,
            train_loss=last.train_loss,
            examples_per_second=self._clock.steady_rate(),
            training_seconds=self._clock.seconds,
            auc=last.auc,
            data=self._config.data.name,
        )
