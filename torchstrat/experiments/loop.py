"""Training and evaluation: the README's loop, with bookkeeping around it.

Nothing in here depends on which strategy was chosen, on how many replicas there are, or on who started the processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchstrat.config import ExperimentConfig
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import build, data, models
from torchstrat.experiments.launch import Run
from torchstrat.experiments.report import (
    EvaluationRecord,
    FolderReport,
    NoReport,
    Report,
    ResultRecord,
    StepRecord,
)


def train(run: Run) -> None:
    """Do one run, on every process of it. Leaves no process group, thread or file open.

    Raises:
        InvalidArgumentError: the data cannot be read, or the configuration does not fit it or the replicas.
    """
    config = run.config
    if config.cluster.threads_per_process is not None:
        torch.set_num_threads(config.cluster.threads_per_process)
    examples = data.load(config.data)
    strategy = build.strategy(config, run.plan)
    with closing(strategy):
        _require_enough_rows(config, examples, strategy.num_replicas_in_sync)
        steps_per_epoch = -(-len(examples.train) // config.data.global_batch)
        total_steps = min(config.epochs * steps_per_epoch, config.max_steps or config.epochs * steps_per_epoch)
        report: Report = NoReport()
        if run.is_chief:
            title = f"{config.strategy.name} ×{strategy.num_replicas_in_sync}"
            report = FolderReport(run.folder, config, run.resolved, total_steps, title)
        with closing(report):
            _Training(config, examples, strategy, report, processes=run.plan.size if run.plan else 1).run()


def _require_enough_rows(config: ExperimentConfig, examples: data.Examples, replicas: int) -> None:
    global_batch = config.data.global_batch
    if global_batch < replicas:
        raise InvalidArgumentError(
            f"data.global_batch={global_batch} is too small for {replicas} replicas, of which some would never get a "
            f"row; use at least {replicas}, or fewer replicas."
        )
    if len(examples.train) < replicas:
        raise InvalidArgumentError(
            f"data={config.data.name} has {len(examples.train)} training rows for {replicas} replicas; at least one "
            "row for each is needed."
        )


class _Training:
    """The state of one run on one process."""

    def __init__(
        self, config: ExperimentConfig, examples: data.Examples, strategy: Any, report: Report, processes: int
    ) -> None:
        self._config = config
        self._examples = examples
        self._strategy = strategy
        self._report = report
        self._processes = processes
        self._step = 0
        self._clock = _Clock()

    def run(self) -> None:
        config, strategy = self._config, self._strategy
        torch.manual_seed(config.seed)
        with strategy.scope():
            model = models.build(config.model, self._examples.input_shape, self._examples.classes)
            optimizer = build.optimizer(config.optimizer, model.parameters())

        def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            inputs, labels = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        global_batch = config.data.global_batch
        loader = self._examples.train_loader(global_batch, config.seed, config.data.workers)
        train_batches = strategy.distribute_dataset(loader)
        test_batches = strategy.distribute_dataset(self._examples.test_loader(global_batch))
        for epoch in range(1, config.epochs + 1):
            train_loss = self._train_epoch(epoch, model, train_step, train_batches)
            evaluation = self._evaluate(epoch, model, test_batches, train_loss)
            self._report.evaluation(evaluation)
            if self._is_over():
                break
        self._report.parameters("parameters", _on_cpu(model.state_dict()))
        self._report.result(self._result(evaluation))

    def _train_epoch(self, epoch: int, model: nn.Module, train_step: Any, batches: Any) -> float:
        """Train on all rows once, or until ``max_steps``. Returns the mean loss over the rows."""
        strategy = self._strategy
        model.train()
        self._clock.begin_epoch()
        total, rows_seen = 0.0, 0
        for batch, rows in zip(batches, self._rows_of_batches(), strict=True):
            per_replica = strategy.run(train_step, args=(batch,))
            loss = float(strategy.reduce("mean", per_replica, axis=None))
            self._step += 1
            self._clock.count(rows)
            total, rows_seen = total + loss * rows, rows_seen + rows
            self._report.step(StepRecord(self._step, epoch, loss, rows, self._clock.epoch_rate()))
            if self._step == self._config.snapshot_after_steps:
                self._report.parameters(f"parameters_after_step_{self._step}", _on_cpu(model.state_dict()))
            if self._is_over():
                break
        self._clock.end_epoch()
        return total / rows_seen

    def _rows_of_batches(self) -> Iterator[int]:
        rows, global_batch = len(self._examples.train), self._config.data.global_batch
        return (min(global_batch, rows - begin) for begin in range(0, rows, global_batch))

    def _is_over(self) -> bool:
        return self._step == self._config.max_steps

    def _evaluate(self, epoch: int, model: nn.Module, batches: Any, train_loss: float) -> EvaluationRecord:
        """Loss and accuracy over every held-out row, each counted once whatever the number of replicas."""
        strategy = self._strategy

        def eval_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            inputs, labels = batch
            with torch.no_grad():
                logits = model(inputs)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            correct = (logits.argmax(dim=1) == labels).sum()
            return torch.stack([loss, correct.to(loss.dtype), torch.full_like(loss, len(labels))])

        model.eval()
        total = torch.zeros(3, dtype=torch.float64)  # sums over rows of: loss, correct, 1
        for batch in batches:
            per_replica = strategy.run(eval_step, args=(batch,))
            total += strategy.reduce("sum", per_replica, axis=None).cpu()
        loss, correct, rows = total.tolist()
        assert int(rows) == len(self._examples.test), f"counted {rows} of {len(self._examples.test)} held-out rows"
        return EvaluationRecord(self._step, epoch, train_loss, loss / rows, correct / rows, int(rows))

    def _result(self, last: EvaluationRecord) -> ResultRecord:
        return ResultRecord(
            strategy=self._config.strategy.name,
            processes=self._processes,
            replicas=self._strategy.num_replicas_in_sync,
            steps=self._step,
            accuracy=last.accuracy,
            loss=last.loss,
            train_loss=last.train_loss,
            examples_per_second=self._clock.steady_rate(),
            training_seconds=self._clock.seconds,
        )


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """A copy that later steps do not change."""
    return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, torch.Tensor)}


class _Clock:
    """Rows per second of training, evaluation left out."""

    def __init__(self) -> None:
        self._epochs: list[tuple[int, float]] = []  # rows, seconds of each finished epoch
        self._rows = 0
        self._began = 0.0

    def begin_epoch(self) -> None:
        self._rows, self._began = 0, time.perf_counter()

    def count(self, rows: int) -> None:
        self._rows += rows

    def epoch_rate(self) -> float:
        return self._rows / max(time.perf_counter() - self._began, 1e-9)

    def end_epoch(self) -> None:
        self._epochs.append((self._rows, time.perf_counter() - self._began))

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self._epochs)

    def steady_rate(self) -> float:
        """The first epoch warms caches, threads and connections up; it counts only if it is the only one."""
        counted = self._epochs[1:] or self._epochs
        return sum(rows for rows, _ in counted) / max(sum(seconds for _, seconds in counted), 1e-9)
