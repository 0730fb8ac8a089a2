"""The schema of an experiment: what may be set, its type, its default, and which combinations mean nothing.

Plain dataclasses; YAML files under ``configs/`` only set values of them. Strategy, model, data, optimizer, loss and
step are calls: ``_target_`` names a function or a class, of this package or of any other, and the rest are its
arguments (`torchstrat.app.targets`)::

    model = {"_target_": "torchstrat.app.models.Mlp", "name": "mlp", "hidden": [64]}
    config = experiment_from_mapping({"model": model, "epochs": 3})

The classes are not frozen because OmegaConf turns a frozen dataclass into a read-only node, which no override could
set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchstrat.core.errors import InvalidArgumentError

MISSING: Any = "???"
"""OmegaConf's mark for a value that has no default and must be given."""

CALLS = ("strategy", "model", "data", "optimizer", "loss", "step")
"""Mappings: ``_target_`` and its arguments, ``name`` for what it is called in a run's records, and what the application
itself reads beside them: ``strategy.gradient_reduce_op``, ``data.global_batch``, ``data.workers``."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidArgumentError(message)


def require_positive(name: str, value: float | None) -> None:
    require(value is None or value > 0, f"{name}={value} must be greater than 0.")
    require(value is None or value < math.inf, f"{name}={value} must be a finite number, such as 86400.")


def require_count(name: str, value: object) -> None:
    """For what no schema has converted: the arguments of calls."""
    if value is not None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidArgumentError(f"{name}={value} must be a whole number.")
        require_positive(name, value)


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    require(value in choices, f"{name}={value} is not known; choose one of {', '.join(choices)}.")


@dataclass
class ClusterConfig:
    """How this run was started, and how long its processes wait for each other."""

    name: str = "auto"
    """``auto``: torchrun's processes if torchrun started this, otherwise this process alone. ``local`` and
    ``torchrun`` insist on one of the two, so that a forgotten launcher is an error and not a slow run."""
    timeout_seconds: float = 300.0
    """After this long without an answer a process gives up, naming the one it waited for."""
    accelerator: str = "auto"
    """``auto``: GPUs where there are any. ``cpu``: leave them alone."""
    threads_per_process: int | None = None
    """CPU threads of PyTorch in each process. None: PyTorch's own choice (torchrun sets 1)."""

    def __post_init__(self) -> None:
        require_one_of("cluster.name", self.name, ("auto", "local", "torchrun"))
        require_one_of("cluster.accelerator", self.accelerator, ("auto", "cpu"))
        require_positive("cluster.timeout_seconds", self.timeout_seconds)
        require_positive("cluster.threads_per_process", self.threads_per_process)


@dataclass
class CheckpointConfig:
    """Whether a run can be gone on with after its end. It keeps checkpoints if ``every_steps`` is set, or ``resume`` is
    not ``never``; then it also saves when it is told to end (SIGTERM, SIGUSR1), and exits with 75: "run me again".
    """

    every_steps: int | None = None
    """Save after so many steps. None: only when it is told to end, and after the last step."""
    max_to_keep: int | None = 5
    """So many of the newest stay. None: all."""
    keep_every: int | None = None
    """Those after a multiple of so many steps stay as well."""
    asynchronous: bool = False
    """Go on with the training while a checkpoint is written."""
    directory: str | None = None
    """Where they are. None: ``outputs/<name>/checkpoints``, the same for all runs of this ``name``, since a run that is
    started again has a new folder of its own. One run at a time writes to a directory."""
    grace_seconds: float = 25.0
    """From SIGTERM until the save has ended; later than that, the process ends without. Less than whoever sends it
    waits before it kills: torchrun and Kubernetes 30 s."""

    def __post_init__(self) -> None:
        for key in ("every_steps", "max_to_keep", "keep_every", "grace_seconds"):
            require_positive(f"checkpoint.{key}", getattr(self, key))
        require(self.directory != "", "checkpoint.directory='' is no directory; name one, or leave it null.")


@dataclass
class EvaluatorConfig:
    """Of a process that evaluates the run's checkpoints beside it (``torchstrat launch --evaluator``)."""

    newest_only: bool = False
    """Leave checkpoints out that are not the newest, to keep up with the training."""
    timeout_seconds: float | None = None
    """Give up when there was no new checkpoint for so long. None: wait for as long as it takes."""

    def __post_init__(self) -> None:
        require_positive("evaluator.timeout_seconds", self.timeout_seconds)


@dataclass
class ExperimentConfig:
    """One run of ``scripts/train.py``."""

    name: str = "experiment"
    """Names the folder that the run's own folder is made in, and that of its checkpoints."""
    strategy: dict[str, Any] = field(default_factory=dict)
    """``gradient_reduce_op=sum`` is for a ``step`` of your own whose losses are sums, as in TensorFlow."""
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """``global_batch``: rows per step, over all replicas together; with ``strategy=parameter_server``, of one worker's
    step. ``workers``: data-loading processes of the ``DataLoader``; 0 loads in the training process. Workers of
    parameter servers read the rows of a step when they come to it, whatever this says."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    """``(outputs, labels)`` → the mean over the batch. Empty: what the data says."""
    step: dict[str, Any] = field(default_factory=dict)
    """``(model, optimizer, loss)`` → a training step. Empty: `torchstrat.app.loop.make_train_step`."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    resume: str = "never"
    """``auto``: go on from the newest intact checkpoint in ``checkpoint.directory``; begin where there is none. A path:
    go on from that checkpoint, or from the newest in that directory. ``never``: begin; an error if
    ``checkpoint.directory`` has checkpoints of another run. Strategy, cluster, ``epochs`` and ``max_steps`` may be
    others than they were; seed, model, data and optimizer may not."""
    seed: int = 0
    """Initial values, the order of the examples, dropout."""
    epochs: int = 20
    max_steps: int | None = None
    """End the training after this many steps, even inside an epoch."""
    snapshot_after_steps: int | None = None
    """Save the parameters as they are after this many steps (``parameters_after_step_<n>.pt``)."""
    progress: str = "auto"
    """``bar``, ``lines`` (one line per epoch), ``off``; ``auto`` is a bar on a terminal and lines elsewhere."""
    tensorboard: bool = True
    curves: bool = True
    """Draw ``curves.png`` at the end."""

    def __post_init__(self) -> None:
        for key in ("epochs", "max_steps", "snapshot_after_steps"):
            require_positive(key, getattr(self, key))
        require(self.resume != "", "resume='' is no path; use auto, never, or the path of a checkpoint.")
        require_one_of("progress", self.progress, ("auto", "bar", "lines", "off"))
        for key in ("global_batch", "workers"):
            value = self.data.get(key, 0)
            require(type(value) is int, f"data.{key}={value!r} is not of type int.")
        require_positive("data.global_batch", self.global_batch)
        require(self.data_workers >= 0, f"data.workers={self.data_workers} must not be negative.")
        reduce_op = self.strategy.get("gradient_reduce_op", "mean")
        require_one_of("strategy.gradient_reduce_op", reduce_op, ("mean", "sum"))
        require(
            reduce_op == "mean" or bool(self.step),
            "strategy.gradient_reduce_op=sum belongs to losses that are sums; this experiment's train_step computes a "
            "mean loss, so leave it at mean, or set step._target_ to a step of your own.",
        )
        lost = self.strategy.get("on_server_loss", "auto")
        require_one_of("strategy.on_server_loss", lost, ("auto", "raise", "restore"))
        require(
            self.keeps_checkpoints or lost != "restore",
            "strategy.on_server_loss=restore needs checkpoints to restore; set checkpoint.every_steps.",
        )

    def name_of(self, group: str) -> str:
        """What a choice is called: its ``name``, or the last word of its ``_target_``."""
        call: Mapping[str, Any] = getattr(self, group)
        return str(call.get("name") or str(call.get("_target_")).rpartition(".")[2])

    @property
    def global_batch(self) -> int:
        return int(self.data.get("global_batch", 64))

    @property
    def data_workers(self) -> int:
        return int(self.data.get("workers", 0))

    @property
    def keeps_checkpoints(self) -> bool:
        return self.checkpoint.every_steps is not None or self.resume != "never"

    @property
    def restores_servers(self) -> bool:
        """Whether the run goes on from its newest checkpoint when a parameter server was lost."""
        has_servers = self.name_of("strategy") == "parameter_server"
        return self.keeps_checkpoints and has_servers and self.strategy.get("on_server_loss", "auto") != "raise"


def experiment_from_mapping(values: Mapping[str, Any]) -> ExperimentConfig:
    """Build a checked `ExperimentConfig` from nested plain mappings, as read from JSON or YAML.

    Raises `InvalidArgumentError` naming the key for unknown keys, values of other types and meaningless combinations.
    Arguments of calls are checked by `torchstrat.app.targets.check`.
    """
    from omegaconf import OmegaConf  # optional
    from omegaconf.errors import OmegaConfBaseException

    calls = {key: dict(values.get(key) or {}) for key in CALLS}
    others = {key: value for key, value in values.items() if key not in CALLS}
    try:
        experiment: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ExperimentConfig), others))
    except OmegaConfBaseException as error:
        raise InvalidArgumentError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    checked: ExperimentConfig = replace(experiment, **calls)
    return checked
