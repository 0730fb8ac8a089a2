"""Going on with a run after its end: what is saved when, and which checkpoint a run begins from."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchstrat.app.config import ExperimentConfig
from torchstrat.app.launch import Run, RunAgain
from torchstrat.app.position import Position
from torchstrat.app.report import Report
from torchstrat.checkpoint import Checkpoint, CheckpointManager
from torchstrat.checkpoint.preemption import PreemptionHandler
from torchstrat.core.errors import InvalidArgumentError

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

    def begin(self, position: Position, report: Report, **objects: Any) -> None:
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

    def restore_on_server_loss(self, coordinator: Any, position: Position) -> None:
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
