"""From settings to objects: strategies as the configuration's calls (`targets`), model and optimizer in their scope."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from torchstrat import registry
from torchstrat.cluster import ProcessPlan
from torchstrat.config import ExperimentConfig, require, require_one_of, require_positive
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import models, targets
from torchstrat.experiments.data import Examples
from torchstrat.sharding import logical_axis
from torchstrat.strategy import Strategy

CPU_REPLICAS = 2
"""Replicas in one process on a machine without GPUs, where nothing was asked for: enough to see a strategy at work."""


def strategy(config: ExperimentConfig, plan: ProcessPlan | None) -> Strategy:
    """The configured strategy; under a launcher all processes call this, and form a process group.

    Raises:
        InvalidArgumentError: the settings do not fit how the processes were started, or each other.
    """
    require(
        config.cluster.name != "torchrun" or plan is not None,
        "cluster=torchrun, but this process was started without it; run torchrun --nproc-per-node N scripts/train.py "
        "…, or use cluster=auto.",
    )
    require(
        config.cluster.name != "local" or plan is None,
        "cluster=local, but a launcher started this process as one of a group; run python scripts/train.py …, or use "
        "cluster=auto.",
    )
    built: Strategy = targets.make("strategy", config.strategy, config=config, plan=plan)
    return built


def one_device(
    config: ExperimentConfig, plan: ProcessPlan | None, device: str | None = None, replicas: int | None = None
) -> Strategy:
    """``device``: a PyTorch device string. None: the first GPU, or the CPU where there is none."""
    ignore_replicas(config, plan, replicas, "it has one")
    device = device or ("cpu:0" if config.cluster.accelerator == "cpu" else None)
    return create("one_device", config, **({} if device is None else {"device": device}))


def mirrored(
    config: ExperimentConfig,
    plan: ProcessPlan | None,
    replicas: int | None = None,
    devices: list[str] | None = None,
    collectives: str = "auto",
    logical_devices: int | None = None,
    logical_mesh_shape: list[int] | None = None,
    sharding_rules: dict[str, Any] | None = None,
) -> Strategy:
    """Synchronous training, every replica with a copy of the variables.

    Args:
        replicas: in this process: that many GPUs, or virtual replicas of the CPU (``cpu:0``, ``cpu:1``, …). None: every
            GPU, or two virtual replicas where there is none. Under torchrun each process is one replica, or one of its
            ``logical_devices``.
        devices: The replicas' devices one by one, instead of ``replicas``.
        collectives: How processes talk: ``auto`` (in memory that they share, where all are on one host and compute on
            CPUs), ``process_group`` (gloo, NCCL) or ``shared_memory`` (an error where it cannot be had).
        logical_devices: Devices of one replica, over which models with ``tensor_parallel`` or ``spatially_parallel``
            are cut. None: as many as ``logical_mesh_shape`` has places, otherwise 1. On a TPU one process drives all
            of them; elsewhere each is a process, and torchrun starts replicas times so many.
        logical_mesh_shape: How ``sharding_rules`` see a replica's logical devices: the sizes of ``d0``, ``d1``, ….
            None: all are ``d0``.
        sharding_rules: Parameters to be cut, by name: ``{*.weight: [d0, null]}`` cuts rows. Without rules, what the
            model asks for.
    """
    return create(
        "mirrored",
        config,
        **_logical_devices(config, logical_mesh(logical_devices, logical_mesh_shape), sharding_rules),
        collectives=_known_collectives(collectives),
        devices=_devices("devices", config, plan, replicas, devices),
    )


def multi_worker_mirrored(
    config: ExperimentConfig,
    plan: ProcessPlan | None,
    replicas: int | None = None,
    collectives: str = "auto",
    logical_devices: int | None = None,
    logical_mesh_shape: list[int] | None = None,
    sharding_rules: dict[str, Any] | None = None,
) -> Strategy:
    """As `mirrored`. Processes are found from the launcher's environment; one started alone is a cluster of one."""
    ignore_replicas(config, plan, replicas, "every process is one")
    if config.cluster.accelerator == "cpu" and torch.cuda.is_available():
        raise InvalidArgumentError(
            "cluster.accelerator=cpu, but strategy=multi_worker_mirrored takes its process's GPU where there is one; "
            "hide the GPUs from it with CUDA_VISIBLE_DEVICES= in the environment."
        )
    return create(
        "multi_worker_mirrored",
        config,
        **_logical_devices(config, logical_mesh(logical_devices, logical_mesh_shape), sharding_rules),
        collectives=_known_collectives(collectives),
    )


def central_storage(
    config: ExperimentConfig,
    plan: ProcessPlan | None,
    replicas: int | None = None,
    compute_devices: list[str] | None = None,
    parameter_device: str | None = None,
    gradients: str = "everywhere",
    collectives: str = "auto",
) -> Strategy:
    """Synchronous training on variables that are kept once.

    Args:
        replicas, collectives: As for `mirrored`.
        compute_devices: The replicas' devices one by one, instead of ``replicas``.
        parameter_device: Where parameters and optimizer state live. None: the compute device if there is one,
            otherwise the CPU.
        gradients: Which process sees the combined gradients under torchrun: ``everywhere``, or ``owner``, which is
            quicker and for steps that neither clip nor read them.
    """
    require_one_of("strategy.gradients", gradients, ("everywhere", "owner"))
    return create(
        "central_storage",
        config,
        collectives=_known_collectives(collectives),
        compute_devices=_devices("compute_devices", config, plan, replicas, compute_devices),
        parameter_device=parameter_device,
        gradients=gradients,
    )


def create(name: str, config: ExperimentConfig, **options: Any) -> Strategy:
    """The strategy of that name in the registry, with what every one is told."""
    built: Strategy = registry.create(
        name,
        gradient_reduce_op=config.strategy.get("gradient_reduce_op", "mean"),
        timeout=timedelta(seconds=config.cluster.timeout_seconds),
        **options,
    )
    return built


def ignore_replicas(config: ExperimentConfig, plan: ProcessPlan | None, replicas: int | None, why: str) -> None:
    """Say that ``strategy.replicas`` has no effect: a sweep over strategies sets it for those that have it."""
    if replicas not in (None, 1) and (plan is None or plan.rank == 0):
        name = config.name_of("strategy")
        print(f"strategy={name}: strategy.replicas={replicas} is ignored, {why}", file=sys.stderr, flush=True)


def _known_collectives(collectives: str) -> str:
    require_one_of("strategy.collectives", collectives, ("auto", "process_group", "shared_memory"))
    return collectives


def logical_mesh(logical_devices: int | None, shape: list[int] | None) -> list[int]:
    """The sizes of ``d0``, ``d1``, …"""
    require_positive("strategy.logical_devices", logical_devices)
    require(
        shape is None or (bool(shape) and all(size > 0 for size in shape)),
        f"strategy.logical_mesh_shape={shape} must be positive sizes, at least one.",
    )
    require(
        shape is None or logical_devices in (None, math.prod(shape)),
        f"strategy.logical_mesh_shape={shape} has {math.prod(shape or [])} places for "
        f"strategy.logical_devices={logical_devices}; these must agree, or leave one of them null.",
    )
    return shape or [logical_devices or 1]


def rules(config: ExperimentConfig, mesh: Sequence[int], given: dict[str, Any] | None) -> Any:
    """How the model's parameters are cut over a replica's logical devices; None: they are not."""
    return given or models.sharding_rules(config.model, [logical_axis(index) for index in range(len(mesh))])


def _logical_devices(config: ExperimentConfig, mesh: list[int], given: dict[str, Any] | None) -> dict[str, Any]:
    if math.prod(mesh) == 1:
        return {}
    return {
        "logical_devices_per_replica": math.prod(mesh),
        "logical_mesh_shape": mesh,
        "sharding_rules": rules(config, mesh, given),
    }


def _devices(
    key: str, config: ExperimentConfig, plan: ProcessPlan | None, replicas: int | None, devices: list[str] | None
) -> list[str] | None:
    """The constructor's list of devices, one per replica of this process; None leaves the choice to the strategy."""
    require_positive("strategy.replicas", replicas)
    require(
        replicas is None or devices is None,
        f"strategy.replicas={replicas} and strategy.{key}={devices} were both given; set one of them and leave the "
        "other null.",
    )
    if devices is not None:
        return devices
    cpu_only = config.cluster.accelerator == "cpu"
    if plan is not None:
        require(
            replicas in (None, 1),
            f"strategy.replicas={replicas}, but under a launcher each process is one replica; start {replicas} "
            "processes instead (torchrun --nproc-per-node).",
        )
        return ["cpu:0"] if cpu_only else None
    has_gpus = torch.cuda.is_available() and not cpu_only
    if replicas is None:
        return None if has_gpus else [f"cpu:{index}" for index in range(CPU_REPLICAS)]
    return [f"{'cuda' if has_gpus else 'cpu'}:{index}" for index in range(replicas)]


def model(config: ExperimentConfig, examples: Examples) -> torch.nn.Module:
    """A fresh model for these examples. Call it inside ``strategy.scope()``.

    Raises:
        InvalidArgumentError: the model is not for such examples.
    """
    built = targets.make("model", config.model, **examples.facts)
    require(
        isinstance(built, torch.nn.Module),
        f"model._target_={config.model['_target_']} made {type(built).__name__}; a torch.nn.Module is needed.",
    )
    return built  # type: ignore[no-any-return]


def optimizer(config: ExperimentConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A plain PyTorch optimizer. Call it inside ``strategy.scope()``."""
    if config.optimizer.get("_target_") == "torch.optim.Adagrad":
        # Its step builds sparse tensors out of valid ones. PyTorch warns unless told whether to check them again.
        torch.sparse.check_sparse_tensor_invariants.disable()
    built: torch.optim.Optimizer = targets.make("optimizer", config.optimizer, params=parameters)
    return built
