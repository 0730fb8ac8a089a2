"""The schema of an experiment: what may be set, its type, its default, and which combinations mean nothing.

Plain dataclasses. YAML files under ``configs/`` only set values of these classes, Hydra is not needed to use them, and
this module does not import it::

    config = experiment_from_mapping({"strategy": {"name": "mirrored", "replicas": 2}, "model": {"name": "mlp"}})

Every choice (strategy, model, data, optimizer, cluster) is made by ``name``, from the tables at the end. The classes
are not frozen because OmegaConf turns a frozen dataclass into a read-only node, which no override could set.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchstrat.errors import InvalidArgumentError

MISSING: Any = "???"
"""OmegaConf's mark for a value that has no default and must be given."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidArgumentError(message)


def _require_positive(name: str, value: float | None) -> None:
    _require(value is None or value > 0, f"{name}={value} must be greater than 0.")


def _require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{name}={value} is not known; choose one of {', '.join(choices)}.")


@dataclass
class StrategyConfig:
    """What every strategy is told. ``name`` is its name in `torchstrat.registry`."""

    name: str = MISSING
    gradient_reduce_op: str = "mean"
    """``mean``: the losses of ``train_step`` are means over its batch. ``sum``: they are sums, as in TensorFlow."""

    def __post_init__(self) -> None:
        _require_one_of("strategy.gradient_reduce_op", self.gradient_reduce_op, ("mean", "sum"))


@dataclass
class OneDeviceConfig(StrategyConfig):
    name: str = "one_device"
    device: str | None = None
    """A PyTorch device string. None: the first GPU, or the CPU where there is none."""


@dataclass
class CollectiveConfig(StrategyConfig):
    """What the strategies with synchronous replicas are told besides."""

    collectives: str = "auto"
    """How processes talk: ``auto`` (in memory that they share, where all are on one host and compute on CPUs),
    ``process_group`` (gloo, NCCL) or ``shared_memory`` (an error where it cannot be had)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_of("strategy.collectives", self.collectives, ("auto", "process_group", "shared_memory"))


@dataclass
class LogicalDevicesConfig(StrategyConfig):
    """What the strategies are told whose replicas may have several logical devices."""

    logical_devices: int | None = None
    """Devices of one replica, over which models with ``tensor_parallel`` or ``spatially_parallel`` are cut.

    None: as many as ``logical_mesh_shape`` has places, otherwise 1. On a TPU one process drives all of them; elsewhere
    each is a process, and torchrun starts replicas times so many.
    """
    logical_mesh_shape: list[int] | None = None
    """How ``sharding_rules`` see a replica's logical devices: the sizes of ``d0``, ``d1``, …. None: all are ``d0``."""
    sharding_rules: dict[str, Any] = field(default_factory=dict)
    """Parameters to be cut, by name: ``{*.weight: [d0, null]}`` cuts rows. Without rules, what the model asks for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("strategy.logical_devices", self.logical_devices)
        mesh = self.logical_mesh_shape
        _require(
            mesh is None or (bool(mesh) and all(size > 0 for size in mesh)),
            f"strategy.logical_mesh_shape={mesh} must be positive sizes, at least one.",
        )
        _require(
            mesh is None or self.logical_devices in (None, math.prod(mesh)),
            f"strategy.logical_mesh_shape={mesh} has {math.prod(mesh or [])} places for "
            f"strategy.logical_devices={self.logical_devices}; these must agree, or leave one of them null.",
        )

    @property
    def logical_mesh(self) -> list[int]:
        """The sizes of ``d0``, ``d1``, …"""
        return self.logical_mesh_shape or [self.logical_devices or 1]


@dataclass
class MirroredConfig(CollectiveConfig, LogicalDevicesConfig):
    name: str = "mirrored"
    replicas: int | None = None
    """Replicas in this process: that many GPUs, or virtual replicas of the CPU (``cpu:0``, ``cpu:1``, …).

    None: every GPU, or two virtual replicas where there is none. Under torchrun each process is one replica, or one of
    its ``logical_devices``.
    """
    devices: list[str] | None = None
    """The replicas' devices one by one, instead of ``replicas``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_replicas_or_devices("devices", self.replicas, self.devices)


@dataclass
class MultiWorkerMirroredConfig(CollectiveConfig, LogicalDevicesConfig):
    """Processes are found from the launcher's environment; a process started alone is a cluster of one worker."""

    name: str = "multi_worker_mirrored"


@dataclass
class CentralStorageConfig(CollectiveConfig):
    name: str = "central_storage"
    replicas: int | None = None
    """As for ``mirrored``."""
    compute_devices: list[str] | None = None
    """The replicas' devices one by one, instead of ``replicas``."""
    parameter_device: str | None = None
    """Where parameters and optimizer state live. None: the compute device if there is one, otherwise the CPU."""
    gradients: str = "everywhere"
    """Which process sees the combined gradients under torchrun: ``everywhere``, or ``owner``, which is quicker and for
    steps that neither clip nor read them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_of("strategy.gradients", self.gradients, ("everywhere", "owner"))
        _require_replicas_or_devices("compute_devices", self.replicas, self.compute_devices)


def _require_replicas_or_devices(key: str, replicas: int | None, devices: list[str] | None) -> None:
    _require_positive("strategy.replicas", replicas)
    _require(
        replicas is None or devices is None,
        f"strategy.replicas={replicas} and strategy.{key}={devices} were both given; set one of them and leave the "
        "other null.",
    )


@dataclass
class ParameterServerConfig(StrategyConfig):
    """Asynchronous training: every worker takes its own steps, on variables that the servers hold.

    ``workers`` and ``servers`` are for a run that finds no cluster in the environment and starts one on this machine;
    a cluster that is described there (``torchstrat launch``, ``TF_CONFIG``) has as many of each as it says.
    """

    name: str = "parameter_server"
    workers: int = 2
    servers: int = 2
    max_shards: int | None = None
    """A variable is cut into at most this many pieces by rows. None: as many as there are servers."""
    min_shard_bytes: int = 256 << 10
    """No piece needs to be smaller than this: what is smaller as a whole stays on one server."""
    rows_only: bool = True
    """Rows of an embedding table that no gradient touches stay as they are, whatever the optimizer does to them on one
    device by momentum, running averages or weight decay. False: the numbers of one device, stepping whole tables."""
    keep_pages: bool = True
    """The processes of a cluster that the run starts keep the pages of memory that they have freed: steps are faster,
    their resident size stays at its peak. In a cluster that is there already, each task's ``TORCHSTRAT_KEEP_PAGES``
    decides."""
    on_server_loss: str = "auto"
    """When a server dies: ``restore`` takes all servers back to the newest checkpoint, and the run goes on from there;
    ``raise`` ends it. ``auto`` restores in a run that keeps checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_of("strategy.on_server_loss", self.on_server_loss, ("auto", "raise", "restore"))
        _require_positive("strategy.workers", self.workers)
        _require_positive("strategy.servers", self.servers)
        _require_positive("strategy.max_shards", self.max_shards)
        _require_positive("strategy.min_shard_bytes", self.min_shard_bytes)


@dataclass
class TpuConfig(LogicalDevicesConfig):
    """Replicas times logical devices on a TPU, all driven by one process."""

    name: str = "tpu"
    replicas: int | None = None
    """None: as many as there are devices for. Devices that are left over compute along and count nothing."""
    virtual_devices: int | None = None
    """Let the CPU pretend to be so many devices. None: a TPU, or what ``PJRT_DEVICE`` in the environment says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("strategy.replicas", self.replicas)
        _require_positive("strategy.virtual_devices", self.virtual_devices)


@dataclass
class ModelConfig:
    name: str = MISSING


@dataclass
class MlpConfig(ModelConfig):
    name: str = "mlp"
    hidden: list[int] = field(default_factory=lambda: [128, 128])
    """Widths of the hidden layers; the input is flattened, the output has one logit per class."""
    tensor_parallel: bool = False
    """Cut the layers, two by two, over a replica's logical devices. The numbers are the same."""

    def __post_init__(self) -> None:
        _require(all(width > 0 for width in self.hidden), f"model.hidden={self.hidden} must be positive widths.")


@dataclass
class ConvNetConfig(ModelConfig):
    name: str = "convnet"
    channels: list[int] = field(default_factory=lambda: [16, 32, 32])
    """Output channels of the 3×3 convolutions. Each but the first is followed by a 2×2 average pooling."""
    norm: str = "group"
    """``group``: per example, equal on any number of replicas. ``batch``: statistics of each replica's own rows.
    ``sync_batch``: statistics over all replicas' rows, which gives the numbers of one device."""
    groups: int = 4
    """Groups of ``norm=group``; each entry of ``channels`` must be a multiple."""
    spatially_parallel: bool = False
    """Cut images into bands of rows over a replica's logical devices. The numbers are the same."""

    def __post_init__(self) -> None:
        _require_one_of("model.norm", self.norm, ("group", "batch", "sync_batch"))
        _require_positive("model.groups", self.groups)
        _require(
            bool(self.channels) and all(width > 0 for width in self.channels),
            f"model.channels={self.channels} must name at least one positive number of channels.",
        )
        _require(
            self.norm != "group" or all(width % self.groups == 0 for width in self.channels),
            f"model.channels={self.channels} cannot be split into model.groups={self.groups} groups; use multiples of "
            f"{self.groups}, or another model.groups.",
        )


@dataclass
class TransformerConfig(ModelConfig):
    """A small Transformer for images, whose tokens are rows of pixels."""

    name: str = "transformer"
    width: int = 64
    heads: int = 4
    blocks: int = 2
    tensor_parallel: bool = False
    """Cut heads and hidden units over a replica's logical devices. The numbers are the same."""

    def __post_init__(self) -> None:
        for key in ("width", "heads", "blocks"):
            _require_positive(f"model.{key}", getattr(self, key))
        _require(
            self.width % self.heads == 0,
            f"model.width={self.width} cannot be split into model.heads={self.heads} heads; use a multiple.",
        )


@dataclass
class WideAndDeepConfig(ModelConfig):
    """Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016): for click logs."""

    name: str = "wide_and_deep"
    embedding_width: int = 16
    """Numbers that the deep part keeps for a category; the wide part keeps one."""
    hidden: list[int] = field(default_factory=lambda: [128, 64])
    """Widths of the deep part's hidden layers."""
    sparse_gradients: bool = True
    """The gradient of a table has only the rows that a batch looks up. SGD and Adagrad can use it, Adam cannot."""

    def __post_init__(self) -> None:
        _require_positive("model.embedding_width", self.embedding_width)
        _require(all(width > 0 for width in self.hidden), f"model.hidden={self.hidden} must be positive widths.")


@dataclass
class DataConfig:
    """Where examples come from. Rows are split once into training and held-out rows, by ``split_seed``."""

    name: str = MISSING
    global_batch: int = 64
    """Rows per step, over all replicas together; with ``strategy=parameter_server``, of one worker's step."""
    test_fraction: float = 0.2
    """Share of the rows held out for evaluation, where the source does not bring its own."""
    split_seed: int = 0
    workers: int = 0
    """Data-loading processes of the ``DataLoader``; 0 loads in the training process. Workers of parameter servers read
    the rows of a step when they come to it, whatever this says."""

    def __post_init__(self) -> None:
        _require_positive("data.global_batch", self.global_batch)
        _require(
            0.0 < self.test_fraction < 1.0,
            f"data.test_fraction={self.test_fraction} must lie strictly between 0 and 1.",
        )
        _require(self.workers >= 0, f"data.workers={self.workers} must not be negative.")


@dataclass
class DigitsConfig(DataConfig):
    """scikit-learn's 1,797 handwritten digits: grey images ``(1, 8, 8)``, ten classes."""

    name: str = "digits"


@dataclass
class CsvConfig(DataConfig):
    """A text file of numbers, one example a line; a first line that is not numbers is taken as a header."""

    name: str = "csv"
    path: str = MISSING
    test_path: str | None = None
    """A second file with the held-out rows, instead of ``test_fraction``."""
    label_column: int = -1
    """The column of the integer class label, counted from 0; negative counts from the end."""
    delimiter: str = ","
    image_shape: list[int] | None = None
    """``[channels, height, width]`` of a line's numbers, for models that want images."""
    standardize: bool = True
    """Shift and scale each feature to mean 0, variance 1 over the training rows."""


@dataclass
class NpzConfig(DataConfig):
    """A NumPy archive with the arrays ``inputs`` ``(rows, …)`` and ``labels`` ``(rows,)``.

    With ``<inputs>_test`` and ``<labels>_test`` in the archive these are the held-out rows.
    """

    name: str = "npz"
    path: str = MISSING
    inputs: str = "x"
    labels: str = "y"
    standardize: bool = True
    """Shift and scale all inputs by the mean and deviation of the training rows."""


@dataclass
class ClickLogsConfig(DataConfig):
    """A click log in the format of Criteo's data sets, one impression a line, without a header.

    40 fields with tabs between them: the label (1: clicked, 0: not), 13 integers, 26 categories as hexadecimal
    numbers; an empty field is a missing value. The end of the log is held out, since a log is in order of time and
    what has to be predicted is the future: ``split_seed`` has no effect.
    """

    name: str = "click_logs"
    path: str = MISSING
    test_path: str | None = None
    """A second log with the held-out rows, instead of ``test_fraction``."""
    category_rows: int = 1 << 16
    """Rows of the tables that categories are hashed into, over all 26 fields together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("data.category_rows", self.category_rows)


@dataclass
class SyntheticClicksConfig(DataConfig):
    """A synthetic click log, written by a seeded generator in the format of `ClickLogsConfig`. No real clicks."""

    name: str = "synthetic_clicks"
    rows: int = 20_000
    """Of the whole log, held-out rows included."""
    seed: int = 0
    folder: str = "outputs/synthetic_clicks"
    """Where the log is kept; a run that finds it there does not write it again."""
    category_rows: int = 1 << 16
    """As for ``click_logs``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("data.rows", self.rows)
        _require(self.seed >= 0, f"data.seed={self.seed} must not be negative.")
        _require_positive("data.category_rows", self.category_rows)


@dataclass
class OptimizerConfig:
    name: str = MISSING
    lr: float = 1e-3
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _require_positive("optimizer.lr", self.lr)
        _require(self.weight_decay >= 0, f"optimizer.weight_decay={self.weight_decay} must not be negative.")


@dataclass
class SgdConfig(OptimizerConfig):
    name: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    nesterov: bool = False


@dataclass
class AdamConfig(OptimizerConfig):
    name: str = "adam"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])


@dataclass
class AdamWConfig(OptimizerConfig):
    name: str = "adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.01


@dataclass
class AdagradConfig(OptimizerConfig):
    """A rate of its own for each row of a table: rare categories keep learning after frequent ones have settled."""

    name: str = "adagrad"
    lr: float = 0.05
    initial_accumulator_value: float = 0.1
    """What the sums of squared gradients start from; 0 makes every first step as long as ``lr``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.initial_accumulator_value >= 0,
            f"optimizer.initial_accumulator_value={self.initial_accumulator_value} must not be negative.",
        )


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
        _require_one_of("cluster.name", self.name, ("auto", "local", "torchrun"))
        _require_one_of("cluster.accelerator", self.accelerator, ("auto", "cpu"))
        _require_positive("cluster.timeout_seconds", self.timeout_seconds)
        _require_positive("cluster.threads_per_process", self.threads_per_process)


@dataclass
class LocalClusterConfig(ClusterConfig):
    name: str = "local"


@dataclass
class TorchrunClusterConfig(ClusterConfig):
    name: str = "torchrun"


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
        _require_positive("checkpoint.every_steps", self.every_steps)
        _require_positive("checkpoint.max_to_keep", self.max_to_keep)
        _require_positive("checkpoint.keep_every", self.keep_every)
        _require_positive("checkpoint.grace_seconds", self.grace_seconds)
        _require(self.directory != "", "checkpoint.directory='' is no directory; name one, or leave it null.")


@dataclass
class EvaluatorConfig:
    """Of a process that evaluates the run's checkpoints beside it (``torchstrat launch --evaluator``)."""

    newest_only: bool = False
    """Leave checkpoints out that are not the newest, to keep up with the training."""
    timeout_seconds: float | None = None
    """Give up when there was no new checkpoint for so long. None: wait for as long as it takes."""

    def __post_init__(self) -> None:
        _require_positive("evaluator.timeout_seconds", self.timeout_seconds)


@dataclass
class ExperimentConfig:
    """One run of ``scripts/train.py``."""

    name: str = "experiment"
    """Names the folder that the run's own folder is made in, and that of its checkpoints."""
    strategy: StrategyConfig = field(default_factory=OneDeviceConfig)
    model: ModelConfig = field(default_factory=ConvNetConfig)
    data: DataConfig = field(default_factory=DigitsConfig)
    optimizer: OptimizerConfig = field(default_factory=SgdConfig)
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
        _require_positive("epochs", self.epochs)
        _require_positive("max_steps", self.max_steps)
        _require_positive("snapshot_after_steps", self.snapshot_after_steps)
        _require(self.resume != "", "resume='' is no path; use auto, never, or the path of a checkpoint.")
        _require_one_of("progress", self.progress, ("auto", "bar", "lines", "off"))
        _require(
            self.keeps_checkpoints or not self._must_restore_servers,
            "strategy.on_server_loss=restore needs checkpoints to restore; set checkpoint.every_steps.",
        )
        _require(
            self.strategy.gradient_reduce_op == "mean",
            "strategy.gradient_reduce_op=sum belongs to losses that are sums; this experiment's train_step computes a "
            "mean loss, so leave it at mean.",
        )
        if isinstance(self.model, WideAndDeepConfig) and self.model.sparse_gradients:
            _require_sparse_gradients(self.optimizer)
            _require(
                not isinstance(self.strategy, TpuConfig),
                "strategy=tpu has no sparse gradients, and model=wide_and_deep makes them; set "
                "model.sparse_gradients=false.",
            )

    @property
    def keeps_checkpoints(self) -> bool:
        return self.checkpoint.every_steps is not None or self.resume != "never"

    @property
    def restores_servers(self) -> bool:
        """Whether the run goes on from its newest checkpoint when a parameter server was lost."""
        chosen = self.strategy
        return self.keeps_checkpoints and isinstance(chosen, ParameterServerConfig) and chosen.on_server_loss != "raise"

    @property
    def _must_restore_servers(self) -> bool:
        return isinstance(self.strategy, ParameterServerConfig) and self.strategy.on_server_loss == "restore"


def _require_sparse_gradients(optimizer: OptimizerConfig) -> None:
    """PyTorch would say so too, but in the first step, and without the names of the settings."""
    dense = "or set model.sparse_gradients=false, which updates whole tables at every step."
    _require(
        not isinstance(optimizer, AdamConfig | AdamWConfig),
        f"optimizer={optimizer.name} cannot use the sparse gradients of model=wide_and_deep; use optimizer=adagrad or "
        f"optimizer=sgd, {dense}",
    )
    _require(
        optimizer.weight_decay == 0,
        f"optimizer.weight_decay={optimizer.weight_decay} shrinks every row, and the gradients of model=wide_and_deep "
        f"are sparse; set it to 0, {dense}",
    )


GROUPS: Mapping[str, Mapping[str, type]] = {
    "strategy": {
        "one_device": OneDeviceConfig,
        "mirrored": MirroredConfig,
        "multi_worker_mirrored": MultiWorkerMirroredConfig,
        "central_storage": CentralStorageConfig,
        "tpu": TpuConfig,
        "parameter_server": ParameterServerConfig,
    },
    "model": {
        "mlp": MlpConfig,
        "convnet": ConvNetConfig,
        "transformer": TransformerConfig,
        "wide_and_deep": WideAndDeepConfig,
    },
    "data": {
        "digits": DigitsConfig,
        "csv": CsvConfig,
        "npz": NpzConfig,
        "click_logs": ClickLogsConfig,
        "synthetic_clicks": SyntheticClicksConfig,
    },
    "optimizer": {"sgd": SgdConfig, "adam": AdamConfig, "adamw": AdamWConfig, "adagrad": AdagradConfig},
    "cluster": {"auto": ClusterConfig, "local": LocalClusterConfig, "torchrun": TorchrunClusterConfig},
}
"""Config group → name → schema. The ``name`` of a mapping picks its class, ``configs/<group>/<name>.yaml`` sets it."""


def experiment_from_mapping(values: Mapping[str, Any]) -> ExperimentConfig:
    """Build a checked `ExperimentConfig` from nested plain mappings, as read from JSON or YAML.

    Raises `InvalidArgumentError` naming the key for unknown keys, names, missing values and meaningless combinations.
    Types are not converted: ``"64"`` is not 64.
    """
    groups = {group: _group_from_mapping(group, values[group]) for group in GROUPS if values.get(group) is not None}
    if values.get("checkpoint") is not None:
        groups["checkpoint"] = _build(CheckpointConfig, values["checkpoint"], "checkpoint.")
    if values.get("evaluator") is not None:
        groups["evaluator"] = _build(EvaluatorConfig, values["evaluator"], "evaluator.")
    experiment: ExperimentConfig = _build(ExperimentConfig, {**values, **groups}, "")
    return experiment


def _group_from_mapping(group: str, values: Mapping[str, Any]) -> Any:
    name = str(values.get("name"))
    if name not in GROUPS[group]:
        raise InvalidArgumentError(f"{group}.name={name} is not known; choose one of {', '.join(GROUPS[group])}.")
    return _build(GROUPS[group][name], values, f"{group}.")


def _build(schema: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(schema)
    for key, value in values.items():
        if key not in hints:
            raise InvalidArgumentError(f"{prefix}{key} is not a setting; there are {', '.join(hints)}.")
        if not _is_of_type(value, hints[key]):
            raise InvalidArgumentError(f"{prefix}{key}={value!r} is not of type {_spell(hints[key])}.")
    for entry in dataclasses.fields(schema):
        if values.get(entry.name, entry.default) == MISSING:
            raise InvalidArgumentError(f"{prefix}{entry.name} has no default; set {prefix}{entry.name}=…")
    return schema(**values)


def _is_of_type(value: Any, hint: Any) -> bool:
    """Whether ``value`` may stand for ``hint``: a class, ``list[class]``, ``dict[str, Any]``, or a union."""
    if typing.get_origin(hint) is list:
        (entry,) = typing.get_args(hint)
        return isinstance(value, list) and all(_is_of_type(item, entry) for item in value)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if typing.get_args(hint):
        return any(_is_of_type(value, option) for option in typing.get_args(hint))
    if isinstance(value, bool):  # a bool is an int to Python, and a mistake where a number is meant
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
