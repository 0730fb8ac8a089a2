"""From settings to objects: strategies as the configuration's calls (`targets`), model and optimizer in their scope."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from torchstrat.app import targets
from torchstrat.app.config import ExperimentConfig, require, require_count
from torchstrat.app.data import Examples
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.sharding import logical_axis
from torchstrat.sharding.tpu import DeviceAssignment, initialize_tpu_system
from torchstrat.strategies import registry
from torchstrat.strategies.strategy import Strategy

CPU_REPLICAS = 2
"""Replicas in one process on a machine without GPUs, where nothing was asked for: enough to see a strategy at work."""

_DEVICES = ("devices", "compute_devices")
"""Constructors' arguments for where replicas of this process are, of strategies that have any."""


def strategy(config: ExperimentConfig, plan: ProcessPlan | None) -> Strategy:
    """The configured strategy; under a launcher all processes call this, and form a process group.

    Raises:
        InvalidArgumentError: the settings do not fit how the processes were started, or each other.
    """
    how = "without it; run torchrun --nproc-per-node N" if plan is None else "as one of a group; run python"
    require(
        config.cluster.name != ("torchrun" if plan is None else "local"),
        f"cluster={config.cluster.name}, but this process was started {how} scripts/train.py …, or use cluster=auto.",
    )
    built: Strategy = targets.make("strategy", config.strategy, config=config, plan=plan)
    return built


def synchronous(
    config: ExperimentConfig,
    plan: ProcessPlan | None,
    name: str,
    replicas: int | None = None,
    logical_devices: int | None = None,
    logical_mesh_shape: list[int] | None = None,
    sharding_rules: dict[str, object] | None = None,
    **options: Any,
) -> Strategy:
    """One of the registry's synchronous strategies. All other settings are arguments of its constructor, or of
    `on_tpu`.

    Args:
        replicas: in this process: that many GPUs, or virtual replicas of the CPU (``cpu:0``, ``cpu:1``, …). None: every
            GPU, or two virtual replicas where there is none. Under torchrun each process is one replica, or one of its
            ``logical_devices``. A strategy without replicas in a process says that it ignores this.
        logical_devices: Devices of one replica, over which models with ``tensor_parallel`` or ``spatially_parallel``
            are cut. None: as many as ``logical_mesh_shape`` has places, otherwise 1. On a TPU one process drives all
            of them; elsewhere each is a process, and torchrun starts replicas times so many.
        logical_mesh_shape: How ``sharding_rules`` see a replica's logical devices: the sizes of ``d0``, ``d1``, ….
            None: all are ``d0``.
        sharding_rules: Parameters to be cut, by name: ``{*.weight: [d0, null]}`` cuts rows. Without rules, what the
            model asks for.
    """
    require_count("strategy.replicas", replicas)
    options = {key: value for key, value in options.items() if value is not None}
    logical = math.prod(logical_mesh_shape or [1]) if logical_devices is None else logical_devices
    mesh = logical_mesh_shape or [logical]
    cut = rules(config, mesh, sharding_rules)
    if name == "tpu":
        reduce_op = config.strategy.get("gradient_reduce_op", "mean")
        return on_tpu(
            plan,
            replicas,
            logical,
            logical_mesh_shape=mesh,
            sharding_rules=cut,
            gradient_reduce_op=reduce_op,
            **options,
        )
    if logical != 1 or mesh != [1]:
        options |= {"logical_devices_per_replica": logical, "logical_mesh_shape": mesh, "sharding_rules": cut}
    parameters = inspect.signature(registry.get(name)).parameters
    if key := next((one for one in _DEVICES if one in parameters), None):
        options[key] = _devices(key, config, plan, replicas, options.get(key))
    else:
        ignore_replicas(config, plan, replicas, "it has one" if name == "one_device" else "every process is one")
    cpu_only = config.cluster.accelerator == "cpu"
    if name == "one_device" and cpu_only:
        options.setdefault("device", "cpu:0")
    if name == "multi_worker_mirrored" and cpu_only and torch.cuda.is_available():
        raise InvalidArgumentError(
            "cluster.accelerator=cpu, but strategy=multi_worker_mirrored takes its process's GPU where there is one; "
            "hide the GPUs from it with CUDA_VISIBLE_DEVICES= in the environment."
        )
    return create(name, config, **options)


def on_tpu(
    plan: ProcessPlan | None,
    replicas: int | None,
    logical_devices: int,
    virtual_devices: int | None = None,
    **options: object,
) -> Strategy:
    """Replicas times logical devices on a TPU, all driven by one process. Starts the TPU runtime of it if need be.

    Args:
        replicas: None: as many as there are devices for. Devices that are left over compute along and count nothing.
        virtual_devices: Let the CPU pretend to be so many devices. None: a TPU, or what ``PJRT_DEVICE`` in the
            environment says.
        options: Of the strategy's constructor.

    Raises:
        InvalidArgumentError: a launcher started several processes; there are not so many devices, or they cannot be
            cut into such replicas.
        DeviceError, UnsupportedError, ContextError: see `initialize_tpu_system`.
    """
    require_count("strategy.virtual_devices", virtual_devices)
    require(
        plan is None or plan.size == 1,
        f"strategy=tpu drives all devices from one process, and a launcher started {plan.size if plan else 1}; run "
        "python scripts/train.py …, with strategy.replicas for their number.",
    )
    topology = initialize_tpu_system(virtual_devices=virtual_devices)
    mesh_shape: list[int] = topology.mesh_shape.tolist()
    shape = computation_shape(mesh_shape, logical_devices)
    most = math.prod(mesh_shape) // math.prod(shape)
    require(
        replicas is None or replicas <= most,
        f"strategy.replicas={replicas} with {math.prod(shape)} logical device(s) each do not fit on "
        f"{math.prod(mesh_shape)} devices; use at most {most}, or fewer logical devices.",
    )
    assignment = DeviceAssignment.build(topology, shape, num_replicas=replicas or most)
    return registry.create("tpu", device_assignment=assignment, **options)


def computation_shape(mesh_shape: Sequence[int], logical_devices: int) -> list[int]:
    """The block of cores that becomes a replica: ``logical_devices`` of them, such that blocks fill the mesh.

    All cores of a chip before a second chip, and chips as near to a cube as they can be: what neighbours exchange then
    has the shortest way.

    Args:
        mesh_shape: devices along each axis of the topology, ``[x, y, z, core]``.

    Returns:
        The block's cores along each axis, for `DeviceAssignment.build`.

    Raises:
        InvalidArgumentError: no block of that size fills the mesh; the message has the sizes that do.
    """
    divisors = [[size for size in range(1, extent + 1) if extent % size == 0] for extent in mesh_shape]
    blocks = [*itertools.product(*divisors)]
    fitting = [block for block in blocks if math.prod(block) == logical_devices]
    if not fitting:
        possible = sorted({math.prod(block) for block in blocks})
        raise InvalidArgumentError(
            f"strategy.logical_devices={logical_devices}: blocks of so many devices do not fill the mesh "
            f"{list(mesh_shape)} (x, y, z, core); use one of {', '.join(map(str, possible))}."
        )
    return [*min(fitting, key=lambda block: (-block[-1], max(block[:-1]), [-size for size in block]))]


def create(name: str, config: ExperimentConfig, **options: object) -> Strategy:
    """The strategy of that name in the registry, with what every one is told."""
    if "gradient_reduce_op" in config.strategy:  # else the strategy has none, or its own default
        options["gradient_reduce_op"] = config.strategy["gradient_reduce_op"]
    return registry.create(name, timeout=timedelta(seconds=config.cluster.timeout_seconds), **options)


def ignore_replicas(config: ExperimentConfig, plan: ProcessPlan | None, replicas: int | None, why: str) -> None:
    """Say that ``strategy.replicas`` has no effect: a sweep over strategies sets it for those that have it."""
    if replicas not in (None, 1) and (plan is None or plan.rank == 0):
        ignored = f"strategy={config.name_of('strategy')}: strategy.replicas={replicas} is ignored, {why}"
        print(ignored, file=sys.stderr, flush=True)


def rules(config: ExperimentConfig, mesh: Sequence[int], given: dict[str, object] | None) -> object:
    """How the model's parameters are cut over a replica's logical devices: as it is ``given``, or as the model asks by
    a static method ``sharding_rules(axes, **settings)``. None: they are not."""
    of_model = getattr(targets.locate("model", config.model), "sharding_rules", None)
    if given or of_model is None:
        return given
    return of_model([logical_axis(index) for index in range(len(mesh))], **targets.arguments("model", config.model))


def _devices(
    key: str, config: ExperimentConfig, plan: ProcessPlan | None, replicas: int | None, devices: list[str] | None
) -> list[str] | None:
    """The constructor's list of devices, one per replica of this process; None leaves the choice to the strategy."""
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
    built: torch.nn.Module = targets.make("model", config.model, **examples.facts)
    made = f"model._target_={config.model['_target_']} made {type(built).__name__}"
    require(isinstance(built, torch.nn.Module), f"{made}; a torch.nn.Module is needed.")
    return built


def optimizer(config: ExperimentConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A plain PyTorch optimizer. Call it inside ``strategy.scope()``."""
    if config.optimizer.get("_target_") == "torch.optim.Adagrad":
        # Its step builds sparse tensors out of valid ones. PyTorch warns unless told whether to check them again.
        torch.sparse.check_sparse_tensor_invariants.disable()
    built: torch.optim.Optimizer = targets.make("optimizer", config.optimizer, params=parameters)
    return built
