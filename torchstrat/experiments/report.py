"""What one run leaves in its folder, and what it says while it runs.

::

    config.yaml            the resolved configuration
    metrics.jsonl          one JSON object per line, "event" is step, ledger, evaluation, result, programs or
                           logical_devices
    curves.png             training loss and held-out accuracy
    tensorboard/           the same numbers as event files
    parameters.pt          the model's state_dict after training
    parameters_after_step_20.pt    the same after 20 steps, with snapshot_after_steps=20
    sharding.png           which device holds which part of the parameters; with logical devices, and with
                           strategy=tpu
    .hydra/                Hydra's record of how the configuration came about

A run that goes on with an earlier one (``resume=auto``) begins with that one's record up to where it goes on, so that
each folder tells the whole story. Checkpoints are elsewhere: see `torchstrat.experiments.checkpoints.directory_of`.

Only the chief has a `FolderReport`; every other process has a `Report`, which writes nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from torchstrat.config import ExperimentConfig
from torchstrat.experiments.metrics_file import MetricsFile, records_until
from torchstrat.experiments.objectives import Scores
from torchstrat.experiments.position import Position
from torchstrat.experiments.programs import ProgramRecord, TrafficRecord
from torchstrat.parameter_server.leases.ledger import Ledger
from torchstrat.sharding.explain import Explanation


@dataclass(frozen=True)
class StepRecord:
    step: int
    """Counted from 1 over the whole run."""
    epoch: int
    loss: float
    """Mean over the replicas of the step's loss."""
    rows: int
    """Rows of the global batch."""
    examples_per_second: float
    """Over the training steps of this epoch so far, all replicas together."""

    @classmethod
    def of(cls, position: Position, rows: int) -> StepRecord:
        return cls(position.step, position.epoch, position.loss, rows, position.clock.epoch_rate())


@dataclass(frozen=True)
class EvaluationRecord:
    step: int
    epoch: int
    train_loss: float
    """Mean over the rows of the epoch."""
    loss: float
    """Mean over the held-out rows."""
    accuracy: float | None
    """None where labels are no classes."""
    rows: int
    """Held-out rows counted, over all replicas; always all of them."""

    @classmethod
    def of(cls, position: Position, scores: Scores) -> EvaluationRecord:
        return cls(position.step, position.epoch, position.train_loss, **asdict(scores))


@dataclass(frozen=True)
class LedgerRecord:
    """What became of an epoch's training rows under parameter servers; see `torchstrat.Ledger`."""

    step: int
    epoch: int
    rows: int
    handed_out: int
    finished: int
    """Equal to ``rows``, but for an epoch that ``max_steps`` cut short."""
    repeated: int
    """Sent to another worker, because the first was lost."""
    returned: int
    lost: int

    @classmethod
    def of(cls, step: int, epoch: int, ledger: Ledger) -> LedgerRecord:
        """``epoch``: counted from 1, as in the other records."""
        counts = ("rows", "handed_out", "finished", "repeated", "returned", "lost")
        return cls(step, epoch, *(getattr(ledger, name) for name in counts))


@dataclass(frozen=True)
class ResultRecord:
    strategy: str
    processes: int
    replicas: int
    steps: int
    accuracy: float | None
    loss: float
    """Held-out, after the last epoch."""
    train_loss: float
    examples_per_second: float
    """Over all training steps but those of the first epoch, if there was a second."""
    training_seconds: float
    data: str = ""
    """``data.name``."""
    logical_devices: int = 1
    """Of each replica."""

    @classmethod
    def of(cls, config: ExperimentConfig, position: Position, last: EvaluationRecord, **sizes: int) -> ResultRecord:
        return cls(
            strategy=config.name_of("strategy"),
            steps=position.step,
            accuracy=last.accuracy,
            loss=last.loss,
            train_loss=last.train_loss,
            examples_per_second=position.clock.steady_rate(),
            training_seconds=position.clock.seconds,
            data=config.name_of("data"),
            **sizes,
        )


class Report:
    """Told about a run as it goes, on every process. This one, of processes that are not the chief, writes nothing."""

    def begin(self, earlier: Path | None = None, step: int = 0, checkpoint: Path | None = None) -> None:
        """Before anything else. ``earlier``: the folder of the run that this one goes on with after ``step`` steps, as
        it was in ``checkpoint``; it may be this one's. Again, where a run goes back to a checkpoint of its own."""

    def flush(self) -> None:
        """Return when all that was reported is on the disk."""

    def interrupted(self, step: int, checkpoints: Path) -> None:
        """The run was told to end, and its checkpoint of this step is in that directory."""

    def step(self, record: StepRecord) -> None:
        """A step was taken."""

    def parameters(self, name: str, state: Mapping[str, Any]) -> None:
        """A ``state_dict`` of CPU tensors, kept as ``<name>.pt``."""

    def ledger(self, record: LedgerRecord) -> None:
        """Before the epoch's evaluation; parameter servers only."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """An epoch is over."""

    def result(self, record: ResultRecord) -> None:
        """So is the training."""

    def programs(self, record: ProgramRecord | TrafficRecord, sharding: Explanation) -> None:
        """After the result: what was compiled for which devices, or sent between them, and what each of them held of
        the parameters."""

    def close(self) -> None:
        """Also after a failure: what was measured until then stays readable."""


class FolderReport(Report):
    """Writes the files named above into ``folder`` (which exists) and shows progress on stderr."""

    def __init__(
        self, folder: Path, config: ExperimentConfig, resolved: Mapping[str, Any], total_steps: int, title: str
    ) -> None:
        self._folder = folder
        self._draws_curves = config.curves
        self._title = title
        from omegaconf import OmegaConf

        OmegaConf.save(OmegaConf.create(dict(resolved)), folder / "config.yaml")
        self._metrics = MetricsFile(folder)
        self._wants_tensorboard = config.tensorboard
        self._tensorboard: Any = None
        self._progress = progress_on(sys.stderr, config.progress, total_steps, title)
        self._evaluations: list[EvaluationRecord] = []
        self._steps: list[StepRecord] = []

    def begin(self, earlier: Path | None = None, step: int = 0, checkpoint: Path | None = None) -> None:
        kept = [] if earlier is None else records_until(earlier, step)
        self._metrics.begin(kept)
        self._steps, self._evaluations = [], []
        self._close_tensorboard()
        if earlier is not None:
            for events in (self._folder / "tensorboard").glob("events.out.tfevents.*"):
                events.unlink()  # its own of before, which have steps that are taken again; what was kept is in metrics
        for record in kept:
            self._take_over(dict(record))
        if earlier is None:
            return
        self._progress.go_on(step)
        print(f"{self._title}: goes on after step {step}, from {checkpoint}", file=sys.stderr, flush=True)
        if len(self._steps) != step:
            print(
                f"{self._title}: {earlier} has the record of {len(self._steps)} of these {step} steps; the others are "
                "missing in this one",
                file=sys.stderr,
            )
        for file in earlier.glob("parameters_after_step_*.pt"):
            if file.parent != self._folder.resolve() and int(file.stem.rpartition("_")[2]) <= step:
                shutil.copyfile(file, self._folder / file.name)

    def _take_over(self, record: dict[str, Any]) -> None:
        event = record.pop("event")
        if event == "step":
            self._remember_step(StepRecord(**record))
        elif event == "evaluation":
            self._remember_evaluation(EvaluationRecord(**record))

    def flush(self) -> None:
        self._metrics.flush()

    def interrupted(self, step: int, checkpoints: Path) -> None:
        self._progress.close()
        print(f"{self._title}: told to end; saved after step {step} in {checkpoints}", file=sys.stderr, flush=True)

    def step(self, record: StepRecord) -> None:
        self._write("step", record)
        self._remember_step(record)
        self._progress.step(record)

    def _remember_step(self, record: StepRecord) -> None:
        self._steps.append(record)
        self._scalars(record.step, loss=record.loss, examples_per_second=record.examples_per_second)

    def parameters(self, name: str, state: Mapping[str, Any]) -> None:
        torch.save(dict(state), self._folder / f"{name}.pt")

    def ledger(self, record: LedgerRecord) -> None:
        self._write("ledger", record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write("evaluation", record)
        self._remember_evaluation(record)
        self._progress.evaluation(record)

    def _remember_evaluation(self, record: EvaluationRecord) -> None:
        self._evaluations.append(record)
        self._scalars(record.step, test_loss=record.loss, test_accuracy=record.accuracy)

    def result(self, record: ResultRecord) -> None:
        self._write("result", record)
        self._progress.close()
        print(
            f"{self._title}: {_scores(record, ', ')}loss {record.loss:.4f}, "
            f"{record.examples_per_second:,.0f} examples/s → {self._folder}",
            file=sys.stderr,
        )
        if self._draws_curves:
            draw_curves(self._folder / "curves.png", self._title, self._steps, self._evaluations)

    def programs(self, record: ProgramRecord | TrafficRecord, sharding: Explanation) -> None:
        self._write(record.event, record)
        for line in [*record.lines(), sharding.totals()]:
            print(f"{self._title}: {line}", file=sys.stderr)
        if self._draws_curves:
            sharding.save_png(self._folder / "sharding.png")

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        self._close_tensorboard()

    def _close_tensorboard(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def _write(self, event: str, record: Any) -> None:
        self._metrics.write({"event": event, **asdict(record)})

    def _scalars(self, step: int, **values: float | None) -> None:
        if not self._wants_tensorboard:
            return
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"))
        for name, value in values.items():
            if value is not None:
                self._tensorboard.add_scalar(name, value, step)


def _scores(record: EvaluationRecord | ResultRecord, separator: str) -> str:
    return "" if record.accuracy is None else f"accuracy {record.accuracy:.4f}{separator}"


def read_metrics(folder: Path, event: str) -> list[dict[str, Any]]:
    """The records of one kind in a run's ``metrics.jsonl``, in order."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record.pop("event") == event]


def draw_curves(file: Path, title: str, steps: list[StepRecord], evaluations: list[EvaluationRecord]) -> None:
    """A picture of training loss per step and held-out accuracy per epoch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: that picks a backend for the whole process, and keeps every figure
    losses, scores = figure.subplots(1, 2)
    losses.plot([record.step for record in steps], [record.loss for record in steps], linewidth=0.8, label="training")
    losses.plot([record.step for record in evaluations], [record.loss for record in evaluations], label="held out")
    losses.set(title=title, xlabel="step", ylabel="loss", yscale="log")
    losses.legend()
    points = [(record.epoch, record.accuracy) for record in evaluations if record.accuracy is not None]
    if points:
        scores.plot(*zip(*points, strict=True), marker=".")
    scores.set(title="held out", xlabel="epoch", ylabel="accuracy")
    scores.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (losses, scores):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def progress_on(stream: TextIO, kind: str, total_steps: int, title: str) -> _Bar | _Lines:
    """Shows progress as ``config.progress`` asks for it."""
    if kind == "auto":
        kind = "bar" if stream.isatty() else "lines"
    if kind == "bar":
        return _Bar(total_steps, title, stream)
    return _Lines(title, stream if kind == "lines" else None)


class _Bar:
    def __init__(self, total_steps: int, title: str, stream: TextIO) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total_steps, desc=title, unit="step", file=stream, dynamic_ncols=True)
        self._accuracy: float | None = None

    def go_on(self, step: int) -> None:
        """The first steps were taken before."""
        self._bar.n = self._bar.initial = step
        self._bar.refresh()

    def step(self, record: StepRecord) -> None:
        shown = {"loss": f"{record.loss:.4f}", "examples/s": f"{record.examples_per_second:,.0f}"}
        if self._accuracy is not None:
            shown["accuracy"] = f"{self._accuracy:.4f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def evaluation(self, record: EvaluationRecord) -> None:
        self._accuracy = record.accuracy

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """One line per epoch, for logs."""

    def __init__(self, title: str, stream: TextIO | None) -> None:
        self._title = title
        self._stream = stream
        self._examples_per_second = 0.0

    def go_on(self, step: int) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        self._examples_per_second = record.examples_per_second

    def evaluation(self, record: EvaluationRecord) -> None:
        if self._stream is not None:
            print(
                f"{self._title}: epoch {record.epoch:>3}  loss {record.train_loss:.4f}  "
                f"{_scores(record, '  ')}{self._examples_per_second:,.0f} examples/s",
                file=self._stream,
                flush=True,
            )

    def close(self) -> None:
        pass
