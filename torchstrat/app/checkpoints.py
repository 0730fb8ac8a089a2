"""Going on with a run after its end: what is saved when, and which checkpoint a run begins from."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torchstrat.app import targets
from torchstrat.app.config import ExperimentConfig
from torchstrat.app.launch import Run, RunAgain
from torchstrat.app.report import Report
from torchstrat.checkpoint import Checkpoint, CheckpointManager
from torchstrat.checkpoint.preemption import PreemptionHandler
from torchstrat.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torchstrat.parameter_server.coordinator import ClusterCoordinator

_FIXED = ("model", "data", "optimizer", "loss", "step")
"""Calls without which the rest of a run would not be that of the run that was begun."""


class Position:
    """Part of every checkpoint of a run. ``folder``: the run's own, where its record is.

    As JSON text, so that a checkpoint of an earlier version, which counted less, can still be read.
    """

    def __init__(self, config: ExperimentConfig, folder: Path) -> None:
        self.step = 0
        """Steps taken."""
        self.epoch = 1
        """The epoch under way; its evaluation may be all that is left of it."""
        self.rows = 0
        """Rows of the epoch that were trained on."""
        self.begun_in: Path | None = None
        """The folder of the run that was gone on from, which may be this one's; None: it began here."""
        self._loss_of_rows = 0.0
        self._epochs: list[tuple[int, float]] = []  # rows, seconds of each finished epoch; evaluation is left out
        self._began = 0.0
        self._seconds_before = 0.0  # of the epoch in the process that this one goes on from
        self._settings = _settings(config)
        self._folder = folder.resolve()

    def begin_epoch(self, epoch: int) -> None:
        """Or go on with it, if it is the one under way."""
        if epoch != self.epoch:
            self.epoch, self.rows, self._loss_of_rows = epoch, 0, 0.0
        self._began = time.perf_counter() - self._seconds_before
        self._seconds_before = 0.0

    def count(self, loss: float, rows: int) -> None:
        """A step was taken on so many rows, with this mean loss."""
        self.step += 1
        self.rows += rows
        self._loss_of_rows += loss * rows

    def end_epoch(self) -> None:
        """Of its training, that is."""
        self._epochs.append((self.rows, self._seconds_of_epoch()))

    @property
    def train_loss(self) -> float:
        """Mean over the rows of the epoch so far."""
        return self._loss_of_rows / max(self.rows, 1)

    def examples_per_second(self) -> float:
        """In this epoch so far."""
        return self.rows / max(self._seconds_of_epoch(), 1e-9)

    def training_seconds(self) -> float:
        return sum(seconds for _, seconds in self._epochs)

    def steady_examples_per_second(self) -> float:
        """The first epoch warms caches, threads and connections up; it counts only if it is the only one."""
        counted = self._epochs[1:] or self._epochs
        return sum(rows for rows, _ in counted) / max(sum(seconds for _, seconds in counted), 1e-9)

    def _seconds_of_epoch(self) -> float:
        return time.perf_counter() - self._began

    def require_fits(self, config: ExperimentConfig, checkpoint: Path) -> None:
        """Raise `InvalidArgumentError` unless ``config`` goes on with the run whose position was loaded."""
        defaults = _defaults(config)
        was, now = {**defaults, **self._settings}, {**defaults, **_settings(config)}
        changed = [
            f"{name} was {was.get(name)!r} and is {now.get(name)!r}"
            for name in sorted(was.keys() | now.keys())
            if was.get(name) != now.get(name)
        ]
        if changed:
            raise InvalidArgumentError(
                f"{checkpoint} is of a run with other settings: {'; '.join(changed)}. Set them as they were, or begin "
                "a new run with resume=never and another name or checkpoint.directory."
            )
        if self.step > (config.max_steps or self.step) or self.epoch > config.epochs:
            raise InvalidArgumentError(
                f"{checkpoint} is of step {self.step} in epoch {self.epoch}, and this run is to end before that, with "
                f"epochs={config.epochs} and max_steps={config.max_steps}; raise them, or begin a new run with "
                "resume=never and another name or checkpoint.directory."
            )

    def state_dict(self) -> dict[str, str]:
        position = {
            "step": self.step,
            "epoch": self.epoch,
            "rows": self.rows,
            "loss_of_rows": self._loss_of_rows,  # in decimals that give back the same bits
            "clock": {"epochs": self._epochs, "epoch": (self.rows, self._seconds_of_epoch())},
            "folder": str(self._folder),
            "settings": self._settings,
        }
        return {"position": json.dumps(position)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        position = json.loads(state["position"])
        self.step, self.epoch, self.rows = position["step"], position["epoch"], position["rows"]
        self._loss_of_rows = position["loss_of_rows"]
        self._epochs = [(rows, seconds) for rows, seconds in position["clock"]["epochs"]]
        _, self._seconds_before = position["clock"]["epoch"]
        self.begun_in = Path(position["folder"])
        self._settings = position["settings"]


def _settings(config: ExperimentConfig) -> dict[str, object]:
    """Setting → value, as JSON has it."""
    settings: dict[str, object] = {"seed": config.seed, "data.global_batch": config.global_batch}
    for group in _FIXED:
        settings |= {f"{group}.{key}": value for key, value in getattr(config, group).items()}
    settings.pop("data.workers", None)  # changes no number
    copied: dict[str, object] = json.loads(json.dumps(settings))
    return copied


def _defaults(config: ExperimentConfig) -> dict[str, object]:
    """Of settings that a run need not mention."""
    found: dict[str, object] = {}
    for group in _FIXED:
        call = getattr(config, group)
        for key, value in (targets.defaults(group, call) if call else {}).items():
            found[f"{group}.{key}"] = [*value] if isinstance(value, tuple) else value
    return found


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class WentBack(Exception):  # noqa: N818  # no error: the loop begins again at its position
    """A parameter server was lost. All servers, the position and the record are as in the newest checkpoint."""


@contextmanager
def checkpoints_of(run: Run) -> Iterator[Checkpoints]:
    """What the run's settings ask for. Enter it in the main thread, within the strategy's life."""
    config = run.config
    if not config.keeps_checkpoints:
        yield Checkpoints(config)
        return
    grace = timedelta(seconds=config.checkpoint.grace_seconds)
    with (
        PreemptionHandler(grace, signals=_SIGNALS) as preemption,
        CheckpointManager(directory_of(config), config.checkpoint.max_to_keep, config.checkpoint.keep_every) as manager,
    ):
        yield Checkpoints(config, manager, preemption)


def directory_of(config: ExperimentConfig) -> Path:
    """Where the checkpoints of all runs of this name are, unless the settings say otherwise."""
    chosen = config.checkpoint.directory
    return Path("outputs", config.name, "checkpoints") if chosen is None else Path(chosen).expanduser()


class Checkpoints:
    """What a training loop does about checkpoints: nothing, in a run that keeps none, and has no ``manager``.

    Every process of a run makes the same calls after the same steps, while ``manager`` and ``preemption`` are open.
    """

    _checkpoint: Checkpoint
    _report: Report

    def __init__(
        self,
        config: ExperimentConfig,
        manager: CheckpointManager | None = None,
        preemption: PreemptionHandler | None = None,
    ) -> None:
        self._config, self._manager, self._preemption = config, manager, preemption
        self._stops = False

    @property
    def drain_seconds(self) -> float | None:
        """What steps that are under way may take to end when the process is told to; None: as long as they like."""
        return None if self._manager is None else self._config.checkpoint.grace_seconds / 4

    def begin(self, position: Position, report: Report, **objects: object) -> None:
        """Name what is saved; restore what the run goes on from, if anything, and tell the report.

        Raises `InvalidArgumentError` where ``resume`` and what is there do not fit; see `ExperimentConfig`.
        """
        if self._manager is None:
            report.begin()
            return
        self._checkpoint, self._report = Checkpoint(position=position, **objects), report
        self._manager.claim()
        restored = self._restore(self._manager)
        if restored is None:
            report.begin()
        else:
            position.require_fits(self._config, restored)
            report.begin(position.begun_in, position.step, position.epoch, restored)

    def _restore(self, own: CheckpointManager) -> Path | None:
        """The checkpoint that was restored; None if the run begins."""
        resume = self._config.resume
        asked = None if resume in ("auto", "never") else Path(resume).expanduser().resolve()
        if asked is not None and asked != own.directory.resolve() and not asked.exists():
            raise InvalidArgumentError(
                f"resume={resume}: there is nothing at {asked}. Give a checkpoint or a directory of some, "
                "auto, or never."
            )
        if resume == "auto" or asked == own.directory.resolve():
            restored = self._newest_of(own)
            if restored is None and asked is not None:
                raise InvalidArgumentError(f"resume={resume}: there is no checkpoint in that directory.")
            return restored
        for step, path in own.checkpoints:
            if asked == path.resolve():
                own.restore(self._checkpoint, step=step)
                return path
        if own.latest is not None:
            raise InvalidArgumentError(
                f"resume={resume}, and {own.directory} has checkpoints already, the newest of them {own.latest.name}: "
                "those of this run would be mixed up with them. Go on from it with resume=auto, choose another name or "
                "checkpoint.directory, or remove them."
            )
        if asked is None:
            return None
        with CheckpointManager(asked) as others:  # reads only
            if others.latest is not None:
                return self._newest_of(others)
        self._checkpoint.restore(asked)
        return asked

    def _newest_of(self, manager: CheckpointManager) -> Path | None:
        step = manager.restore(self._checkpoint)
        return None if step is None else dict(manager.checkpoints)[step]

    def should_stop(self) -> bool:
        """Whether this run has been told to end. Called after every step, once; then `save` is to be called."""
        self._stops = self._preemption is not None and self._preemption.should_stop()
        return self._stops

    def is_planned(self, step: int) -> bool:
        """Whether `save` is to be called after this step in any case. Asks nobody."""
        every = self._config.checkpoint.every_steps
        return every is not None and step % every == 0

    def save(self, position: Position) -> None:
        """Save, and raise `RunAgain` if `should_stop` was true."""
        if self._manager is None:
            return
        self._report.flush()  # what the checkpoint counts has to be in the record, whatever happens after it
        asynchronous = self._config.checkpoint.asynchronous and not self._stops
        self._manager.save(self._checkpoint, position.step, asynchronous=asynchronous)
        if self._stops:
            self._report.say(f"told to end; saved after step {position.step} in {self._manager.directory}")
            raise RunAgain

    def restore_on_server_loss(self, coordinator: ClusterCoordinator, position: Position) -> None:
        """After `begin`: from now on a call that meets the loss of a parameter server raises `WentBack`, if the run's
        settings ask for that."""
        manager = self._manager
        if manager is None or not self._config.restores_servers:
            return
        if manager.latest is None:
            manager.save(self._checkpoint, position.step)

        def went_back(step: int) -> None:
            self._report.begin(position.begun_in, position.step, position.epoch, dict(manager.checkpoints)[step])
            raise WentBack

        coordinator.restore_on_server_loss(manager, self._checkpoint, on_restored=went_back)

    def finish(self) -> None:
        """The run is done."""
        if self._manager is not None:
            self._manager.close(finished=True)
