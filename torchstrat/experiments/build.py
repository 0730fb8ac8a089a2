"""From settings to objects: the strategy by its registry name, model and optimizer by their own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from torchstrat import registry
from torchstrat.cluster import ProcessPlan
from torchstrat.cluster_resolver import ClusterResolver
from torchstrat.config import (
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    CentralStorageConfig,
    ClusterConfig,
    CollectiveConfig,
    ExperimentConfig,
    LogicalDevicesConfig,
    MirroredConfig,
    ModelConfig,
    OneDeviceConfig,
    OptimizerConfig,
    ParameterServerConfig,
    SgdConfig,
    TpuConfig,
    WideAndDeepConfig,
)
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import models
from torchstrat.experiments.click_logs import ClickExamples
from torchstrat.experiments.data import AnyExamples
from torchstrat.experiments.wide_and_deep import WideAndDeep
from torchstrat.sharding import logical_axis
from torchstrat.strategy import Strategy

CPU_REPLICAS = 2
"""Replicas in one process on a machine without GPUs, where nothing was asked for: enough to see a strategy at work."""


def strategy(config: ExperimentConfig, plan: ProcessPlan | None) -> Strategy:
    """The configured strategy; under a launcher all processes call this, and form a process group.

    Raises:
        InvalidArgumentError: the settings do not fit how the processes were started, or each other.
    """
    launched = plan is not None
    _require_launcher(config.cluster, launched)
    if isinstance(config.strategy, TpuConfig):
        from torchstrat.experiments import tpu

        return tpu.strategy(config, config.strategy, plan)
    options: dict[str, Any] = {
        "gradient_reduce_op": config.strategy.gradient_reduce_op,
        "timeout": timedelta(seconds=config.cluster.timeout_seconds),
    }
    chosen = config.strategy
    cpu_only = config.cluster.accelerator == "cpu"
    if isinstance(chosen, LogicalDevicesConfig):
        options |= _logical_devices(chosen, config.model)
    if isinstance(chosen, CollectiveConfig):
        options["collectives"] = chosen.collectives
    if isinstance(chosen, OneDeviceConfig):
        if chosen.device is not None or cpu_only:
            options["device"] = chosen.device or "cpu:0"
    elif isinstance(chosen, MirroredConfig):
        options["devices"] = _devices(chosen.replicas, chosen.devices, launched, cpu_only)
    elif isinstance(chosen, CentralStorageConfig):
        options["compute_devices"] = _devices(chosen.replicas, chosen.compute_devices, launched, cpu_only)
        options["parameter_device"] = chosen.parameter_device
        options["gradients"] = chosen.gradients
    elif cpu_only and torch.cuda.is_available():
        raise InvalidArgumentError(
            f"cluster.accelerator=cpu, but strategy={chosen.name} takes its process's GPU where there is one; hide the "
            "GPUs from it with CUDA_VISIBLE_DEVICES= in the environment."
        )
    built: Strategy = registry.create(chosen.name, **options)
    return built


def _logical_devices(chosen: LogicalDevicesConfig, model: ModelConfig) -> dict[str, Any]:
    mesh = chosen.logical_mesh
    if math.prod(mesh) == 1:
        return {}
    axes = [logical_axis(index) for index in range(len(mesh))]
    return {
        "logical_devices_per_replica": math.prod(mesh),
        "logical_mesh_shape": mesh,
        "sharding_rules": chosen.sharding_rules or models.sharding_rules(model, axes),
    }


def parameter_server(
    config: ExperimentConfig, chosen: ParameterServerConfig, resolver: ClusterResolver, servers: int
) -> Strategy:
    """The strategy for the cluster that ``resolver`` describes, connected to its ``servers`` servers."""
    from torchstrat.partitioners import MinSizePartitioner

    return registry.create(
        chosen.name,
        cluster_resolver=resolver,
        variable_partitioner=MinSizePartitioner(chosen.min_shard_bytes, chosen.max_shards or servers),
        rows_only=chosen.rows_only,
        gradient_reduce_op=chosen.gradient_reduce_op,
        on_server_loss="restore" if config.restores_servers else "raise",
        timeout=timedelta(seconds=config.cluster.timeout_seconds),
    )


def _require_launcher(cluster: ClusterConfig, launched: bool) -> None:
    if cluster.name == "torchrun" and not launched:
        raise InvalidArgumentError(
            "cluster=torchrun, but this process was started without it; run torchrun --nproc-per-node N "
            "scripts/train.py …, or use cluster=auto."
        )
    if cluster.name == "local" and launched:
        raise InvalidArgumentError(
            "cluster=local, but a launcher started this process as one of a group; run python scripts/train.py …, or "
            "use cluster=auto."
        )


def _devices(replicas: int | None, devices: list[str] | None, launched: bool, cpu_only: bool) -> list[str] | None:
    """The constructor's list of devices, one per replica of this process; None leaves the choice to the strategy."""
    if devices is not None:
        return devices
    if launched:
        if replicas not in (None, 1):
            raise InvalidArgumentError(
                f"strategy.replicas={replicas}, but under a launcher each process is one replica; start {replicas} "
                "processes instead (torchrun --nproc-per-node)."
            )
        return ["cpu:0"] if cpu_only else None
    has_gpus = torch.cuda.is_available() and not cpu_only
    if replicas is None:
        return None if has_gpus else [f"cpu:{index}" for index in range(CPU_REPLICAS)]
    return [f"{'cuda' if has_gpus else 'cpu'}:{index}" for index in range(replicas)]


def model(config: ModelConfig, examples: AnyExamples) -> torch.nn.Module:
    """A fresh model for these examples. Call it inside ``strategy.scope()``.

    Raises:
        InvalidArgumentError: the model is not for such examples.
    """
    if isinstance(config, WideAndDeepConfig):
        if not isinstance(examples, ClickExamples):
            raise InvalidArgumentError(
                "model=wide_and_deep is for click logs; use data=click_logs or data=synthetic_clicks, or model=mlp or "
                "model=convnet."
            )
        return WideAndDeep(examples.category_rows, config)
    if isinstance(examples, ClickExamples):
        raise InvalidArgumentError(
            f"model={config.name} is for inputs of one tensor, and click logs have integers and categories; use "
            "model=wide_and_deep."
        )
    return models.build(config, examples.input_shape, examples.classes)


def optimizer(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A plain PyTorch optimizer. Call it inside ``strategy.scope()``."""
    if isinstance(config, SgdConfig):
        return torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
    if isinstance(config, AdamConfig | AdamWConfig):
        kind = torch.optim.Adam if isinstance(config, AdamConfig) else torch.optim.AdamW
        first, second = config.betas
        return kind(parameters, lr=config.lr, betas=(first, second), weight_decay=config.weight_decay)
    if isinstance(config, AdagradConfig):
        # Its step builds sparse tensors out of valid ones. PyTorch warns unless told whether to check them again.
        torch.sparse.check_sparse_tensor_invariants.disable()
        return torch.optim.Adagrad(
            parameters,
            lr=config.lr,
            initial_accumulator_value=config.initial_accumulator_value,
            weight_decay=config.weight_decay,
        )
    raise InvalidArgumentError(f"optimizer.name={config.name} is not known; choose one of sgd, adam, adamw, adagrad.")
