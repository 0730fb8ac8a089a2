"""Synchronous training and evaluation: the README's loop, with bookkeeping around it.

Nothing in here depends on which strategy was chosen, on how many replicas there are, or on who started the processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from torchstrat.config import ExperimentConfig, require
from torchstrat.experiments import build, data
from torchstrat.experiments.checkpoints import Checkpoints, checkpoints_of
from torchstrat.experiments.launch import Run
from torchstrat.experiments.objectives import Batch, Scores, loss_of, measure, step_of
from torchstrat.experiments.position import Position
from torchstrat.experiments.programs import StepTraffic, programs_of
from torchstrat.experiments.report import EvaluationRecord, FolderReport, Report, ResultRecord, StepRecord
from torchstrat.strategy import Strategy


def train(run: Run) -> None:
    """Do one run of a synchronous strategy, on every process of it. Leaves no process group, thread or file open.

    Raises:
        InvalidArgumentError: the data cannot be read, or the configuration does not fit it or the replicas.
    """
    config = run.config
    examples = data.load(config.data)
    strategy = build.strategy(config, run.plan)
    with closing(strategy):
        replicas = strategy.num_replicas_in_sync
        require(
            config.global_batch >= replicas,
            f"data.global_batch={config.global_batch} is too small for {replicas} replicas, of which some would never "
            f"get a row; use at least {replicas}, or fewer replicas.",
        )
        require_enough_rows(config, examples, replicas, "replicas")
        report = Report()
        if run.is_chief:
            title = run_title(config, _size(strategy))
            report = FolderReport(run.folder, config, run.resolved, planned_steps(config, examples), title)
        processes = run.plan.size if run.plan else 1
        with closing(report), checkpoints_of(run) as checkpoints:
            _Training(config, examples, strategy, report, processes, checkpoints, run.folder).run()


def _size(strategy: Strategy) -> str:
    logical = strategy.num_logical_devices
    return f"×{strategy.num_replicas_in_sync}" if logical == 1 else f"{strategy.num_replicas_in_sync}×{logical}"


def run_title(config: ExperimentConfig, size: str) -> str:
    """Stands before everything that a run says, and above its curves."""
    return f"{config.name_of('strategy')} {size}"


def planned_steps(config: ExperimentConfig, examples: data.Examples) -> int:
    steps = config.epochs * -(-len(examples.train) // config.global_batch)
    return min(steps, config.max_steps or steps)


def require_enough_rows(config: ExperimentConfig, examples: data.Examples, learners: int, what: str) -> None:
    """Raise `InvalidArgumentError` if one of so many ``what`` would never get a row, or no row is held out."""
    name = config.name_of("data")
    require(
        len(examples.train) >= learners,
        f"data={name} has {len(examples.train)} training rows for {learners} {what}; at least one row for each is "
        "needed.",
    )
    fraction = config.data.get("test_fraction")
    raise_it = "" if fraction is None else f"raise data.test_fraction={fraction}, or "
    require(len(examples.test) > 0, f"data={name} has no held-out rows; {raise_it}name a file that has some.")


class _Training:
    """The state of one run on one process."""

    def __init__(
        self,
        config: ExperimentConfig,
        examples: data.Examples,
        strategy: Any,
        report: Report,
        processes: int,
        checkpoints: Checkpoints | None = None,
        folder: Path = Path(),
    ) -> None:
        self._config = config
        self._examples = examples
        self._strategy = strategy
        self._report = report
        self._processes = processes
        self._planned_steps = planned_steps(config, examples)
        self._checkpoints = checkpoints or Checkpoints()
        self._position = Position(config, folder)
        self._loss = loss_of(config, examples)
        self._traffic = StepTraffic(strategy)

    def run(self) -> None:
        config, strategy = self._config, self._strategy
        torch.manual_seed(config.seed)
        with strategy.scope():
            model = build.model(config, self._examples)
            optimizer = build.optimizer(config, model.parameters())
        train_step = step_of(config, model, optimizer, self._loss)
        loader = self._examples.train_loader(config.global_batch, config.seed, config.data_workers)
        train_batches = strategy.distribute_dataset(loader)
        test_batches = strategy.distribute_dataset(self._examples.test_loader(config.global_batch))
        self._checkpoints.begin(self._position, self._report, model=model, optimizer=optimizer, data=train_batches)
        for epoch in range(self._position.epoch, config.epochs + 1):
            self._position.begin_epoch(epoch)
            self._train_epoch(model, train_step, train_batches)
            evaluation = self._evaluate(model, test_batches)
            self._report.evaluation(evaluation)
            if self._is_over():
                break
        self._report.parameters("parameters", on_cpu(model.state_dict()))
        self._report.result(
            ResultRecord.of(
                config,
                self._position,
                evaluation,
                processes=self._processes,
                replicas=strategy.num_replicas_in_sync,
                logical_devices=strategy.num_logical_devices,
            )
        )
        self._checkpoints.finish()
        programs = programs_of(strategy) or self._traffic.record()
        if programs is not None:
            self._report.programs(programs, ts.explain_sharding(model, strategy=strategy))

    def _train_epoch(self, model: nn.Module, train_step: Any, batches: Any) -> None:
        """Train on the rows that are left of the epoch, or until ``max_steps``."""
        strategy, position = self._strategy, self._position
        model.train()
        position.clock.begin_epoch()
        for batch, rows in self._batches_left(batches):
            self._traffic.step_begins()
            per_replica = strategy.run(train_step, args=(batch,))
            self._traffic.step_ends()
            position.count(float(strategy.reduce("mean", per_replica, axis=None)), rows)
            self._report.step(StepRecord.of(position, rows))
            if position.step == self._config.snapshot_after_steps:
                self._report.parameters(f"parameters_after_step_{position.step}", on_cpu(model.state_dict()))
            is_due = self._checkpoints.is_planned(position.step) or position.step == self._planned_steps
            if self._checkpoints.should_stop() or is_due:
                self._checkpoints.save(position)
            if self._is_over():
                break
        position.clock.end_epoch()

    def _batches_left(self, batches: Any) -> Iterator[tuple[Any, int]]:
        """The batches, each with its number of rows. None for a run that was over already and is gone on with."""
        if not self._is_over():
            yield from zip(batches, self._rows_of_batches(), strict=True)

    def _rows_of_batches(self) -> Iterator[int]:
        rows, global_batch = len(self._examples.train), self._config.global_batch
        return (min(global_batch, rows - begin) for begin in range(self._position.rows, rows, global_batch))

    def _is_over(self) -> bool:
        return self._position.step == self._config.max_steps

    def _evaluate(self, model: nn.Module, batches: Any) -> EvaluationRecord:
        """Scores over every held-out row, each counted once whatever the number of replicas."""
        strategy, measured = self._strategy, torch.zeros(3, dtype=torch.float64)

        def eval_step(batch: Batch) -> torch.Tensor:
            inputs, labels = batch
            with torch.no_grad():
                return measure(self._loss, model(inputs), labels)

        model.eval()
        for batch in batches:
            measured += strategy.reduce("sum", strategy.run(eval_step, args=(batch,)), axis=None).cpu()
        scores = Scores.of(measured)
        assert scores.rows == len(self._examples.test), f"counted {scores.rows} of {len(self._examples.test)} rows"
        return EvaluationRecord.of(self._position, scores)


def on_cpu(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A copy that later steps do not change."""
    return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
