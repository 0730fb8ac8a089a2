"""Asynchronous training on parameter servers: the coordinator's loop around the step of the synchronous one.

The coordinator schedules ``train_step`` and trains nothing itself. It leases the training rows to the workers, a batch
for each step: a fast worker takes more of them than a slow one, one that is lost leaves its rows to another, and an
epoch sees every row exactly once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchstrat.config import ExperimentConfig
from torchstrat.errors import CancelledByServerLossError
from torchstrat.experiments import build, data, targets
from torchstrat.experiments.checkpoints import Checkpoints, WentBack, checkpoints_of
from torchstrat.experiments.launch import Run
from torchstrat.experiments.loop import on_cpu, planned_steps, require_enough_rows, run_title
from torchstrat.experiments.objectives import Batch, loss_of, score, step_of
from torchstrat.experiments.parameter_server_cluster import (
    ClusterSize,
    ParameterServers,
    coordinates,
    given_resolver,
    local_cluster,
    serve,
)
from torchstrat.experiments.position import Position
from torchstrat.experiments.report import (
    EvaluationRecord,
    FolderReport,
    LedgerRecord,
    Report,
    ResultRecord,
    StepRecord,
)
from torchstrat.experiments.worker_batches import LoaderOrder, TrainingRows

_AHEAD_PER_WORKER = 64
"""Steps that are scheduled before the oldest one's result is asked for: enough to keep a worker busy, and few enough
that a failure or ``max_steps`` does not leave a queue behind."""

_LEAST_AHEAD_PER_WORKER = 2
"""However long a step takes: one that runs, and one that comes next."""


def train(run: Run) -> None:
    """Do one run. Returns on the coordinator when it is done, on workers and servers when their cluster is.

    Raises:
        InvalidArgumentError: the data cannot be read, or the configuration does not fit it or the cluster.
        ParameterServerUnavailable: a server was lost, and the variables it held.
    """
    config = run.config
    chosen: ParameterServers = targets.make("strategy", config.strategy, config=config, plan=run.plan)
    given = given_resolver(config.cluster, run.plan)
    if given is not None and not coordinates(given):
        serve(given)
        return
    size = ClusterSize(chosen.workers, chosen.servers) if given is None else ClusterSize.of(given.cluster_spec())
    examples = data.load(config.data)
    require_enough_rows(config, examples, size.workers, "workers")
    started = local_cluster(size, keep_pages=chosen.keep_pages)
    with started if given is None else nullcontext(given) as resolver:
        with closing(chosen.strategy(resolver, size.servers)) as strategy:
            from torchstrat.parameter_server.coordinator import ClusterCoordinator  # imports torch.distributed.rpc

            coordinator = ClusterCoordinator(strategy)
            title = run_title(config, f"({size})")
            total_steps = planned_steps(config, examples)
            with (
                closing(FolderReport(run.folder, config, run.resolved, total_steps, title)) as report,
                checkpoints_of(run) as kept,
            ):
                training = AsynchronousTraining(config, examples, strategy, coordinator, report, size, kept, run.folder)
                training.run()


class AsynchronousTraining:
    """The state of one run on its coordinator."""

    def __init__(
        self,
        config: ExperimentConfig,
        examples: data.Examples,
        strategy: Any,
        coordinator: Any,
        report: Report,
        size: ClusterSize,
        checkpoints: Checkpoints | None = None,
        folder: Path = Path(),
    ) -> None:
        self._config = config
        self._examples = examples
        self._strategy = strategy
        self._coordinator = coordinator
        self._report = report
        self._size = size
        self._timeout = timedelta(seconds=config.cluster.timeout_seconds)
        self._loss = loss_of(config, examples)
        self._checkpoints = checkpoints or Checkpoints()
        self._position = Position(config, folder)
        self._planned_steps = planned_steps(config, examples)

    def run(self) -> None:
        config, strategy = self._config, self._strategy
        torch.manual_seed(config.seed)
        with strategy.scope():
            model = build.model(config, self._examples)
            optimizer = build.optimizer(config, model.parameters())
        train_step = step_of(config, model, optimizer, self._loss)

        def worker_step(batch: Batch) -> tuple[float, int]:
            """Runs on a worker: the loss of a batch, and the batch's rows."""
            loss = strategy.run(train_step, args=(batch,))
            return float(loss), len(batch[1])

        leased = self._leased_rows()
        position = self._position
        self._checkpoints.begin(position, self._report, model=model, optimizer=optimizer, data=leased)
        self._checkpoints.restore_on_server_loss(self._coordinator, position)
        epoch = position.epoch
        while epoch <= config.epochs:
            try:
                evaluation = self._epoch(epoch, model, worker_step, leased)
            except WentBack:
                epoch = position.epoch
                continue
            if position.step == config.max_steps:
                break
            epoch += 1
        self._report.parameters("parameters", on_cpu(model.state_dict()))
        self._report.result(
            ResultRecord.of(
                config,
                position,
                evaluation,
                processes=1 + self._size.workers + self._size.servers,
                replicas=self._size.workers,
            )
        )
        self._checkpoints.finish()

    def _epoch(self, epoch: int, model: nn.Module, worker_step: Callable[..., Any], leased: Any) -> EvaluationRecord:
        position = self._position
        position.begin_epoch(epoch)
        try:
            self._train_epoch(model, worker_step, leased)
        except CancelledByServerLossError:
            self._coordinator.join(self._timeout)  # raises the loss, or `WentBack` after the restore
            raise
        self._report.ledger(LedgerRecord.of(position.step, epoch, leased.ledger))
        evaluation = self._evaluate(model)
        self._report.evaluation(evaluation)
        return evaluation

    def _leased_rows(self) -> Any:
        """The training rows, in batches and in an order like those of a run on one device."""
        global_batch = self._config.global_batch
        loader = self._examples.train_loader(global_batch, self._config.seed, workers=0)
        return self._coordinator.create_leased_dataset(
            TrainingRows(self._config.data),
            global_batch,
            shuffle=LoaderOrder(loader),
            collate_fn=loader.collate_fn,
            rows=len(self._examples.train),
        )

    def _train_epoch(self, model: nn.Module, worker_step: Callable[..., Any], leased: Any) -> None:
        """Train on the rows that are left of the epoch, or until ``max_steps``."""
        position, kept = self._position, self._checkpoints
        self._position.clock.begin_epoch()
        for loss, rows in self._results(worker_step, leased):
            position.count(loss, rows)
            self._report.step(StepRecord.of(position, rows))
            if position.step == self._config.snapshot_after_steps:
                self._strategy.extended.pull(model)
                self._report.parameters(f"parameters_after_step_{position.step}", on_cpu(model.state_dict()))
            if self._is_saved_after(position.step):
                kept.save(position)
        self._coordinator.join(self._timeout)
        if kept.should_stop():
            kept.save(position)
        leased.ledger.check(complete=position.step != self._config.max_steps)
        self._position.clock.end_epoch()

    def _results(self, worker_step: Callable[..., Any], leased: Any) -> Iterator[tuple[float, int]]:
        """The results of an epoch's steps in the order they were scheduled, which is not that of their updates.

        Nothing is in flight when the result is yielded after which a snapshot or a checkpoint is due: it has the
        updates of the steps that were counted, and of no others.
        """
        pending: deque[Any] = deque()
        first_step, began = self._position.step, time.perf_counter()
        for step, lease in enumerate(self._leases_left(leased), first_step + 1):
            if self._checkpoints.should_stop():
                break  # this lease's rows count as not handed out
            pending.append(self._coordinator.schedule(worker_step, args=(lease,)))
            ahead = self._steps_ahead(self._position.step - first_step, time.perf_counter() - began)
            is_last_in_flight = step == self._config.snapshot_after_steps or self._is_saved_after(step)
            while pending and (is_last_in_flight or len(pending) >= ahead):
                yield pending.popleft().get(self._timeout)
        while pending:
            yield pending.popleft().get(self._timeout)

    def _leases_left(self, leased: Any) -> Iterator[Any]:
        """Of this epoch. None where all its rows are finished, as in a run that goes on at its end: a loop over them
        would begin the next one."""
        if leased.epoch >= self._position.epoch or self._position.step == self._config.max_steps:
            return iter(())
        steps_left = None if self._config.max_steps is None else self._config.max_steps - self._position.step
        return islice(leased, steps_left)

    def _steps_ahead(self, steps: int, seconds: float) -> int:
        """How many may be scheduled at a time, after so many steps in so many seconds: those that are under way when
        the run is told to end have to end before it can save."""
        workers, drain_seconds = self._size.workers, self._checkpoints.drain_seconds
        most = _AHEAD_PER_WORKER * workers
        if drain_seconds is None or not steps:
            return most
        return max(min(most, int(drain_seconds * steps / max(seconds, 1e-9))), _LEAST_AHEAD_PER_WORKER * workers)

    def _is_saved_after(self, step: int) -> bool:
        return self._checkpoints.is_planned(step) or step == self._planned_steps

    def _evaluate(self, model: nn.Module) -> EvaluationRecord:
        """Scores over the held-out rows, computed here with the servers' values of this moment."""
        self._strategy.extended.pull(model)
        model.eval()
        scores = score(model, self._examples.test_loader(self._config.global_batch), self._loss)
        model.train()
        return EvaluationRecord.of(self._position, scores)
