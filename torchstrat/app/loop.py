"""Synchronous training and evaluation: the README's step and loop, with bookkeeping around them.

Nothing in here depends on which strategy was chosen, on how many replicas there are, or on who started the processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from torchstrat.app import build, data, targets
from torchstrat.app.checkpoints import Checkpoints, Position, checkpoints_of
from torchstrat.app.config import ExperimentConfig, require
from torchstrat.app.data import Examples, Loss
from torchstrat.app.launch import Run
from torchstrat.app.report import FolderReport, Report, StepTraffic, programs_of, told

Batch = tuple[Any, torch.Tensor]
"""Inputs, a tensor or a nest of tensors as the model takes them, and labels."""


def train(run: Run) -> None:
    """Do one run of a synchronous strategy, on every process of it. Leaves no process group, thread or file open.

    Raises:
        InvalidArgumentError: the data cannot be read, or the configuration does not fit it or the replicas.
    """
    config = run.config
    examples = data.load(config.data)
    with closing(build.strategy(config, run.plan)) as strategy:
        replicas, logical = strategy.num_replicas_in_sync, strategy.num_logical_devices
        require(
            config.global_batch >= replicas,
            f"data.global_batch={config.global_batch} is too small for {replicas} replicas, of which some would never "
            f"get a row; use at least {replicas}, or fewer replicas.",
        )
        require_enough_rows(config, examples, replicas, "replicas")
        report = report_of(run, examples, f"×{replicas}" if logical == 1 else f"{replicas}×{logical}")
        with closing(report), checkpoints_of(run) as checkpoints:
            training = Training(run, examples, strategy, report, checkpoints)
            SynchronousLoop(training).run(processes=run.plan.size if run.plan else 1)


def report_of(run: Run, examples: Examples, size: str) -> Report:
    """``size``: of the run, for its title, which stands before everything that it says."""
    if run.plan is not None and run.plan.rank > 0:
        return Report()
    title = f"{run.config.name_of('strategy')} {size}"
    return FolderReport(run.folder, run.config, run.resolved, planned_steps(run.config, examples), title)


def planned_steps(config: ExperimentConfig, examples: Examples) -> int:
    steps = config.epochs * -(-len(examples.train) // config.global_batch)
    return min(steps, config.max_steps or steps)


def require_enough_rows(config: ExperimentConfig, examples: Examples, learners: int, what: str) -> None:
    """Raise `InvalidArgumentError` if one of so many ``what`` would never get a row, or no row is held out."""
    name, rows = config.name_of("data"), len(examples.train)
    require(rows >= learners, f"data={name} has {rows} training rows for {learners} {what}; each needs one at least.")
    require(len(examples.test) > 0, f"data={name} has no held-out rows; hold out one at least.")


class Training:
    """What both loops hold of a run on one process: its parts, and where it is."""

    def __init__(self, run: Run, examples: Examples, strategy: Any, report: Report, checkpoints: Checkpoints) -> None:
        self.config = config = run.config
        self.examples, self.strategy, self.report, self.checkpoints = examples, strategy, report, checkpoints
        self.position = Position(config, run.folder)
        self.loss = loss_of(config, examples)
        self._planned_steps = planned_steps(config, examples)
        self._last: dict[str, Any] = {}
        torch.manual_seed(config.seed)
        with strategy.scope():
            self.model = build.model(config, examples)
            self.optimizer = build.optimizer(config, self.model.parameters())
        self.train_step = step_of(config, self.model, self.optimizer, self.loss)

    @property
    def is_over(self) -> bool:
        """Before its epochs are."""
        return self.position.step == self.config.max_steps

    def begin(self, rows: object) -> None:
        """``rows``: the distributed or leased data set, whose place is saved and restored with the rest."""
        self.checkpoints.begin(self.position, self.report, model=self.model, optimizer=self.optimizer, data=rows)

    def count(self, loss: float, rows: int) -> None:
        """A step was taken."""
        position = self.position
        position.count(loss, rows)
        rate = position.examples_per_second()
        self.report.tell(
            "step", step=position.step, epoch=position.epoch, loss=loss, rows=rows, examples_per_second=rate
        )

    def is_saved_after(self, step: int) -> bool:
        """In any case, that is."""
        return self.checkpoints.is_planned(step) or step == self._planned_steps

    def save_parameters(self, name: str) -> None:
        """A copy that later steps do not change."""
        values = {key: value for key, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)}
        self.report.parameters(name, {key: value.detach().cpu().clone() for key, value in values.items()})

    def evaluated(self, *, rows: int, **scores: float | None) -> None:
        """The epoch is over, up to this."""
        self._last = {"train_loss": self.position.train_loss, **scores}
        self.report.tell("evaluation", step=self.position.step, epoch=self.position.epoch, rows=rows, **self._last)

    def end(self, *, processes: int, replicas: int, logical_devices: int = 1) -> None:
        """After the last evaluation."""
        self.save_parameters("parameters")
        self.report.tell(
            "result",
            strategy=self.config.name_of("strategy"),
            data=self.config.name_of("data"),
            processes=processes,
            replicas=replicas,
            logical_devices=logical_devices,
            steps=self.position.step,
            training_seconds=self.position.training_seconds(),
            examples_per_second=self.position.steady_examples_per_second(),
            **self._last,
        )
        self.checkpoints.finish()


class SynchronousLoop:
    """The loop of every process."""

    def __init__(self, training: Training) -> None:
        self._training, self._strategy = training, training.strategy
        self._traffic = StepTraffic(training.strategy)

    def run(self, processes: int = 1) -> None:
        training, strategy, config = self._training, self._strategy, self._training.config
        loader = training.examples.train_loader(config.global_batch, config.seed, config.data_workers)
        train_batches = strategy.distribute_dataset(loader)
        test_batches = strategy.distribute_dataset(training.examples.test_loader(config.global_batch))
        training.begin(train_batches)
        for epoch in range(training.position.epoch, config.epochs + 1):
            self._train_epoch(epoch, train_batches)
            training.evaluated(**self._evaluate(test_batches))
            if training.is_over:
                break
        replicas, logical = strategy.num_replicas_in_sync, strategy.num_logical_devices
        training.end(processes=processes, replicas=replicas, logical_devices=logical)
        programs = programs_of(strategy) or self._traffic.record()
        if programs is not None:
            training.report.tell(**programs)
            for line in told(programs):
                training.report.say(line)
            training.report.sharding(ts.explain_sharding(training.model, strategy=strategy))

    def _train_epoch(self, epoch: int, batches: Iterable[Batch]) -> None:
        """Train on the rows that are left of the epoch, or until ``max_steps``."""
        training, strategy, position = self._training, self._strategy, self._training.position
        training.model.train()
        position.begin_epoch(epoch)
        for batch in () if training.is_over else batches:  # over already: a run that is gone on with at its end
            rows = min(training.config.global_batch, len(training.examples.train) - position.rows)
            per_replica = self._traffic.of_step(partial(strategy.run, training.train_step, args=(batch,)))
            training.count(float(strategy.reduce("mean", per_replica, axis=None)), rows)
            if position.step == training.config.snapshot_after_steps:
                training.save_parameters(f"parameters_after_step_{position.step}")
            if training.checkpoints.should_stop() or training.is_saved_after(position.step):
                training.checkpoints.save(position)
            if training.is_over:
                break
        position.end_epoch()

    def _evaluate(self, batches: Iterable[Batch]) -> dict[str, Any]:
        """Scores over every held-out row, each counted once whatever the number of replicas."""
        training, strategy, measured = self._training, self._strategy, torch.zeros(3, dtype=torch.float64)

        def eval_step(batch: Batch) -> torch.Tensor:
            inputs, labels = batch
            with torch.no_grad():
                return measure(training.loss, training.model(inputs), labels)

        training.model.eval()
        for batch in batches:
            measured += strategy.reduce("sum", strategy.run(eval_step, args=(batch,)), axis=None).cpu()
        scores, rows = scores_of(measured), len(training.examples.test)
        assert scores["rows"] == rows, f"counted {scores['rows']} of {rows} rows"
        return scores


def loss_of(config: ExperimentConfig, examples: Examples) -> Loss:
    """The configuration's loss, or that of the data."""
    loss: Loss = targets.make("loss", config.loss) if config.loss else examples.loss
    return loss


def step_of(
    config: ExperimentConfig, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss
) -> Callable[[Batch], torch.Tensor]:
    """The configuration's step for ``strategy.run``, or `make_train_step`'s."""
    call = config.step or {"_target_": f"{__name__}.{make_train_step.__name__}"}
    step: Callable[[Batch], torch.Tensor] = targets.make("step", call, model=model, optimizer=optimizer, loss=loss)
    return step


def make_train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Callable[[Batch], torch.Tensor]:
    """The README's step: a batch → the mean loss before the update."""

    def train_step(batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        optimizer.zero_grad()
        value = loss(model(inputs), labels)
        value.backward()
        optimizer.step()
        return value.detach()

    return train_step


def measure(loss: Loss, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sums over a batch's rows, of: the loss, right answers, 1.

    Answers are right or wrong where labels are classes, else nan: outputs ``(batch, classes, …)``, labels
    ``(batch, …)`` integers.
    """
    rows = len(labels)
    mean = loss(outputs, labels)
    total = mean.to(torch.promote_types(mean.dtype, torch.float32)) * rows  # bfloat16 does not count to 301
    correct = torch.full_like(total, math.nan)
    if not labels.is_floating_point() and outputs.ndim == labels.ndim + 1:
        correct = (outputs.argmax(dim=1) == labels).sum().to(total.dtype) * (rows / max(labels.numel(), 1))
    return torch.stack([total, correct, torch.full_like(total, rows)])


def scores_of(measured: torch.Tensor) -> dict[str, object]:
    """``loss`` and ``accuracy`` in the mean over the ``rows``, of which there must be one; no ``accuracy`` is None.

    ``measured``: what `measure` returned, summed over all batches.
    """
    loss, correct, rows = measured.tolist()
    return {"loss": loss / rows, "accuracy": None if math.isnan(correct) else correct / rows, "rows": round(rows)}


def score(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> dict[str, Any]:
    """`scores_of` a model that is whole in this process."""
    measured = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for inputs, labels in batches:
            measured += measure(loss, model(inputs), labels)
    return scores_of(measured)
