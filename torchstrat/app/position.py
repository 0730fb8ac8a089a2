"""Where a run is: what its loop counts, and has to go on counting after a restart."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchstrat.app import targets
from torchstrat.app.config import ExperimentConfig
from torchstrat.core.errors import InvalidArgumentError

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


def _settings(config: ExperimentConfig) -> dict[str, Any]:
    """Setting → value, as JSON has it."""
    settings: dict[str, Any] = {"seed": config.seed, "data.global_batch": config.global_batch}
    for group in _FIXED:
        settings |= {f"{group}.{key}": value for key, value in getattr(config, group).items()}
    settings.pop("data.workers", None)  # changes no number
    copied: dict[str, Any] = json.loads(json.dumps(settings))
    return copied


def _defaults(config: ExperimentConfig) -> dict[str, Any]:
    """Of settings that a run need not mention."""
    found: dict[str, Any] = {}
    for group in _FIXED:
        call = getattr(config, group)
        for key, value in (targets.defaults(group, call) if call else {}).items():
            found[f"{group}.{key}"] = [*value] if isinstance(value, tuple) else value
    return found
