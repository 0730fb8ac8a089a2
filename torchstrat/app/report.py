"""What one run leaves in its folder, what it says while it runs, and what a sweep says of its runs.

::

    config.yaml            the resolved configuration
    metrics.jsonl          one JSON object per line, see below
    curves.png             training loss and held-out accuracy
    tensorboard/           the same numbers as event files
    parameters.pt          the model's state_dict after training
    parameters_after_step_20.pt    the same after 20 steps, with snapshot_after_steps=20
    sharding.png           which device holds which part of the parameters; with logical devices, and with
                           strategy=tpu
    .hydra/                Hydra's record of how the configuration came about

The events of ``metrics.jsonl``; steps and epochs are counted from 1 over the whole run:

===============  ===================================================================================================
step             ``step``, ``epoch``, ``loss`` (mean over the replicas), ``rows`` (of the global batch),
                 ``examples_per_second`` (over the epoch so far, all replicas together)
ledger           ``step``, ``epoch``, and what became of the epoch's rows under parameter servers, as
                 `torchstrat.Ledger` counts them: ``rows``, ``handed_out``, ``finished``, …
evaluation       ``step``, ``epoch``, ``train_loss`` (mean over the epoch), and of all held-out ``rows``: ``loss``,
                 ``accuracy`` (null where labels are no classes)
result           ``strategy``, ``data``, ``processes``, ``replicas``, ``logical_devices`` (of each replica),
                 ``steps``, ``training_seconds``, ``examples_per_second`` (without the first epoch, if there was a
                 second), and of the last evaluation ``train_loss``, ``loss``, ``accuracy``
programs         as `programs_of` says, with ``strategy=tpu``
logical_devices  ``replicas``, ``logical_devices``, and ``sent_bytes_per_step`` by each process to the other logical
                 devices of its replica, in the mean training step
===============  ===================================================================================================

A run that goes on with an earlier one (``resume=auto``) begins with that one's record up to where it goes on, so that
each folder tells the whole story. Checkpoints are elsewhere: see `torchstrat.app.checkpoints.directory_of`.

Only the chief has a `FolderReport`; every other process has a `Report`, which writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from torchstrat.app.config import ExperimentConfig
from torchstrat.sharding.explain import Explanation
from torchstrat.strategies.strategy import Strategy
from torchstrat.strategies.tpu import TPUStrategy

_SCALARS = {
    "step": {"loss": "loss", "examples_per_second": "examples_per_second"},
    "evaluation": {"test_loss": "loss", "test_accuracy": "accuracy"},
}
"""Event → TensorBoard's tag → the record's key."""


class Report:
    """Told about a run as it goes, on every process. This one, of processes that are not the chief, writes nothing."""

    def begin(self, earlier: Path | None = None, step: int = 0, epoch: int = 1, checkpoint: Path | None = None) -> None:
        """Before anything else. ``earlier``: the folder of the run that this one goes on with after ``step`` steps, in
        ``epoch``, as it was in ``checkpoint``; it may be this one's. Again, where a run goes back to a checkpoint of
        its own."""

    def tell(self, event: str, **values: object) -> None:
        """A line of the record."""

    def parameters(self, name: str, state: Mapping[str, object]) -> None:
        """A ``state_dict`` of CPU tensors, kept as ``<name>.pt``."""

    def say(self, text: str) -> None:
        """A line for people."""

    def sharding(self, sharding: Explanation) -> None:
        """After the result: what each device held of the parameters."""

    def flush(self) -> None:
        """Return when all that was reported is on the disk."""

    def close(self) -> None:
        """Also after a failure: what was measured until then stays readable."""


class FolderReport(Report):
    """Writes the files named above into ``folder`` (which exists) and shows progress on stderr."""

    def __init__(
        self, folder: Path, config: ExperimentConfig, resolved: Mapping[str, object], total_steps: int, title: str
    ) -> None:
        from omegaconf import OmegaConf

        OmegaConf.save(OmegaConf.create(dict(resolved)), folder / "config.yaml")
        self._folder, self._config, self._title = folder, config, title
        self._metrics = MetricsFile(folder)
        self._records: list[Record] = []
        self._tensorboard: Any = None
        self._progress = Progress(sys.stderr, config.progress, total_steps, title)

    def begin(self, earlier: Path | None = None, step: int = 0, epoch: int = 1, checkpoint: Path | None = None) -> None:
        kept = [] if earlier is None else records_until(earlier, step, epoch)
        self._metrics.begin(kept)
        self._close_tensorboard()
        if earlier is not None:
            for events in (self._folder / "tensorboard").glob("events.out.tfevents.*"):
                events.unlink()  # its own of before, which have steps that are taken again; what was kept is in metrics
        self._records = []
        for record in kept:
            self._remember(record)
        if earlier is None:
            return
        self._progress.go_on(step)
        self.say(f"goes on after step {step}, from {checkpoint}")
        steps = sum(record["event"] == "step" for record in kept)
        if steps != step:
            self.say(f"{earlier} has the record of {steps} of these {step} steps; the others are missing in this one")
        for file in earlier.glob("parameters_after_step_*.pt"):
            if file.parent != self._folder.resolve() and int(file.stem.rpartition("_")[2]) <= step:
                shutil.copyfile(file, self._folder / file.name)

    def tell(self, event: str, **values: object) -> None:
        record = {"event": event, **values}
        self._metrics.write(record)
        self._remember(record)
        if event == "step":
            self._progress.step(record)
        elif event == "evaluation":
            self._progress.evaluation(record)
        elif event == "result":
            self._progress.close()
            rate = f"{record['examples_per_second']:,.0f} examples/s"
            self.say(f"{shown_accuracy(record, ', ')}loss {record['loss']:.4f}, {rate} → {self._folder}")
            if self._config.curves:
                draw_curves(self._folder / "curves.png", {self._title: self._records})

    def parameters(self, name: str, state: Mapping[str, object]) -> None:
        torch.save(dict(state), self._folder / f"{name}.pt")

    def sharding(self, sharding: Explanation) -> None:
        self.say(sharding.totals())
        if self._config.curves:
            sharding.save_png(self._folder / "sharding.png")

    def flush(self) -> None:
        self._metrics.flush()

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        self._close_tensorboard()

    def say(self, text: str) -> None:
        print(f"{self._title}: {text}", file=sys.stderr, flush=True)

    def _remember(self, record: Record) -> None:
        self._records.append(record)
        scalars = _SCALARS.get(record["event"], {}) if self._config.tensorboard else {}
        if scalars and self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"))
        for tag, key in scalars.items():
            if record[key] is not None:
                self._tensorboard.add_scalar(tag, record[key], record["step"])

    def _close_tensorboard(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None


class Progress:
    """Shows how far a run is, as ``config.progress`` asks for it: a bar, or a line for each epoch."""

    def __init__(self, stream: TextIO, kind: str, total_steps: int, title: str) -> None:
        from tqdm import tqdm

        if kind == "auto":
            kind = "bar" if stream.isatty() else "lines"
        self._stream, self._kind, self._title = stream, kind, title
        look = {"desc": title, "unit": "step", "file": stream, "dynamic_ncols": True}
        self._bar = tqdm(total=total_steps, disable=kind != "bar", **look)
        self._shown: dict[str, str] = {}

    def go_on(self, step: int) -> None:
        """The first steps were taken before."""
        self._bar.n = self._bar.initial = step
        self._bar.refresh()

    def step(self, record: Record) -> None:
        self._shown["loss"] = f"{record['loss']:.4f}"
        self._shown["examples/s"] = f"{record['examples_per_second']:,.0f}"
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update()

    def evaluation(self, record: Record) -> None:
        if record["accuracy"] is not None:
            self._shown["accuracy"] = f"{record['accuracy']:.4f}"
        if self._kind == "lines":
            scores = f"loss {record['train_loss']:.4f}  {shown_accuracy(record, '  ')}"
            line = f"{self._title}: epoch {record['epoch']:>3}  {scores}{self._shown.get('examples/s', '0')} examples/s"
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        self._bar.close()


def shown_accuracy(record: Record, separator: str) -> str:
    return "" if record["accuracy"] is None else f"accuracy {record['accuracy']:.4f}{separator}"


def draw_curves(file: Path, runs: Mapping[str, Sequence[Record]]) -> None:
    """A picture of training loss and held-out accuracy over the steps, for runs by name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: that picks a backend for the whole process, and keeps every figure
    losses, scores = figure.subplots(1, 2)
    for axes, event, value in ((losses, "step", "loss"), (scores, "evaluation", "accuracy")):
        for name, records in runs.items():
            points = [(one["step"], one[value]) for one in records if one["event"] == event and one[value] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=name)
        axes.grid(alpha=0.3)
    losses.set(xlabel="step", ylabel="training loss", yscale="log")
    scores.set(xlabel="step", ylabel="held-out accuracy")
    figure.legend(*losses.get_legend_handles_labels(), loc="outside upper center")
    figure.savefig(file, dpi=120)


_SWEEP_COLUMNS = {"accuracy": ".4f", "loss": ".4f", "examples_per_second": ",.0f"}


def show_sweep(runs: Sequence[tuple[Path, Sequence[str], bool]]) -> None:
    """What a sweep says when it ends: a table of its runs, and a picture of their curves.

    ``runs``: of each its folder, its overrides, and whether it succeeded.
    """
    lines = [["run", *(name.replace("_per_second", "/s") for name in _SWEEP_COLUMNS), "settings"]]
    varying = [text for text in runs[0][1] if any(text not in overrides for _, overrides, _ in runs)]
    keys = {text.partition("=")[0] for text in varying}
    for folder, overrides, succeeded in runs:
        results = read_metrics(folder, "result") if succeeded else []
        values = results[-1] if results else {}
        numbers = [
            format(values[name], spec) if values.get(name) is not None else "-" for name, spec in _SWEEP_COLUMNS.items()
        ]
        settings = " ".join(text for text in overrides if text.partition("=")[0] in keys)
        lines.append([folder.name, *numbers, settings if results else f"{settings} (failed)"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(file=sys.stderr)
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), file=sys.stderr)
    drawn = [folder for folder, _, _ in runs if (folder / "curves.png").exists()]
    if drawn:
        file = drawn[0].parent / "sweep.png"
        draw_curves(file, {folder.name: read_records(folder) for folder in drawn})
        print(f"curves: {file}", file=sys.stderr)


def programs_of(strategy: Strategy) -> Record | None:
    """What ``strategy`` has compiled so far; None if it is not one that compiles.

    ``devices`` are those of the whole system; those that no replica uses compute along and count nothing.
    ``compilations`` have the run that each was made for, counted from 0 over training and evaluation, and the reason.
    """
    if not isinstance(strategy, TPUStrategy):
        return None
    assignment = strategy.device_assignment
    return {
        "event": "programs",
        "devices": assignment.topology.num_tasks * assignment.topology.num_tpus_per_task,
        "replicas": assignment.num_replicas,
        "logical_devices": assignment.num_cores_per_replica,
        "compilations": [f"run {one.run}: {one.reason}" for one in strategy.compilations],
    }


class StepTraffic:
    """Adds up what training steps send to other logical devices of a replica; what evaluation sends is left out."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._traffic = strategy, strategy.extended.logical_traffic
        self._steps = self._sent = 0

    def of_step(self, step: Callable[[], Any]) -> Any:
        """What ``step()`` returns."""
        if self._traffic is None:  # replicas have one logical device, or nobody counts
            return step()
        before = self._traffic.total_bytes
        returned = step()
        self._steps, self._sent = self._steps + 1, self._sent + self._traffic.total_bytes - before
        return returned

    def record(self) -> Record | None:
        """None where nothing was counted."""
        if self._traffic is None:
            return None
        return {
            "event": "logical_devices",
            "replicas": self._strategy.num_replicas_in_sync,
            "logical_devices": self._strategy.num_logical_devices,
            "sent_bytes_per_step": self._sent // max(1, self._steps),
        }


def told(record: Record) -> list[str]:
    """What `programs_of` or `StepTraffic.record` returned, for people."""
    if record["event"] == "logical_devices":
        size = f"{record['replicas']} × {record['logical_devices']} processes"
        sent = f"{record['sent_bytes_per_step']:,} bytes per step"
        return [f"{size}; each sent {sent} to the other logical devices of its replica"]
    devices, replicas, logical = record["devices"], record["replicas"], record["logical_devices"]
    idle, compilations = devices - replicas * logical, record["compilations"]
    size = f"{_count(devices, 'device')}, {_count(replicas, 'replica')} × {_count(logical, 'logical device')}"
    return [f"{size}{f', {idle} idle' if idle else ''}, {_count(len(compilations), 'compilation')}", *compilations]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


NAME = "metrics.jsonl"

Record = dict[str, Any]
"""With an ``event``; `torchstrat.app.report` says which there are, and what each has."""


class MetricsFile:
    """Adds to the file in ``folder``, a line at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def begin(self, kept: list[Record]) -> None:
        """Start with these records, in place of what is there. However it ends, the file is the old or the new one."""
        part = self._path.with_name(f".{NAME}.part")
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        self.close()
        part.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """Return when all of it is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(folder: Path) -> list[Record]:
    """Of the run in ``folder``, in order; empty where there are none. One that was killed may have left half a line."""
    records: list[Record] = []
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / NAME).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return records


def records_until(folder: Path, step: int, epoch: int) -> list[Record]:
    """What the run in ``folder`` had recorded when it saved after ``step`` steps, in ``epoch``.

    What comes after the steps themselves, such as the evaluation of the epoch that the step ended, is done again by
    who goes on in that epoch; who goes on at the beginning of the next one does not.
    """
    return [
        record
        for record in read_records(folder)
        if record.get("step", step) < step
        or (record.get("step") == step and (record["event"] == "step" or record.get("epoch", epoch) < epoch))
    ]


def read_metrics(folder: Path, event: str) -> list[Record]:
    """The records of one kind, without their ``event``."""
    return [record for record in read_records(folder) if record.pop("event") == event]
