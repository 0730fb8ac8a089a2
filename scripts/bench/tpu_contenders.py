"""What ``tpu_step.py`` compares: the same two models, by TPUStrategy and by annotations of torch_xla written by hand.

Four replicas of two logical devices. By hand there is one global batch, whose rows are cut over the replicas; its
BatchNorm takes the statistics of each replica's rows, as the strategy's does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

REPLICAS, LOGICAL_DEVICES = 4, 2
LEARNING_RATE = 1e-3

Split = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Cuts a replica's tensor over its logical devices, so many parts along each dimension."""
Batch = tuple[torch.Tensor, torch.Tensor]


class Mlp(nn.Module):
    """256 → 1024 → 1024 → 10. Hidden features, and the weights beside them, are cut over the logical devices."""

    input_shape = (256,)
    replica_rows = 32

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(256, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10)

    def cut_variables(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Parameters, and into how many parts along each dimension."""
        return [(self.up.weight, (2, 1)), (self.up.bias, (2,)), (self.down.weight, (1, 2))]

    def forward(self, inputs: torch.Tensor, split: Split) -> torch.Tensor:
        hidden = split(F.relu(self.up(inputs)), (1, 2))
        return self.head(F.relu(self.down(hidden)))


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm on 32 × 32 images, whose rows are cut over the logical devices."""

    input_shape = (1, 32, 32)
    replica_rows = 8

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.first_norm, self.second_norm = norm(16), norm(32)
        self.head = nn.Linear(32, 10)

    def cut_variables(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        return []

    def forward(self, inputs: torch.Tensor, split: Split) -> torch.Tensor:
        images = split(inputs, (1, 1, 2, 1))
        images = F.relu(self.first_norm(self.first(images)))
        images = F.relu(self.second_norm(self.second(images)))
        return self.head(images.mean((2, 3)))


class NormOfEachReplica(nn.Module):
    """BatchNorm of a global batch in training: each replica's rows by their own statistics; running ones averaged."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.unflatten(0, (REPLICAS, -1))
        mean = rows.mean((1, 3, 4), keepdim=True)
        variance = (rows - mean).square().mean((1, 3, 4), keepdim=True)
        count = rows[0].numel() // rows.shape[2]
        with torch.no_grad():
            self.running_mean.lerp_(mean.mean(0).flatten(), 0.1)
            self.running_var.lerp_(variance.mean(0).flatten() * (count / (count - 1)), 0.1)
            self.num_batches_tracked.add_(1)
        scaled = (rows - mean) * torch.rsqrt(variance + 1e-5) * self.weight[:, None, None] + self.bias[:, None, None]
        return scaled.flatten(0, 1)


@dataclass(frozen=True)
class Contender:
    """``step``: one training step on one batch for each replica, on the host; returns what `loss` reads.

    ``loss``: of what a step returned, to the host.
    """

    step: Callable[[list[Batch]], Any]
    loss: Callable[[Any], float]


def batches(model: type[Mlp] | type[ConvNet], seed: int) -> list[Batch]:
    """One for each replica, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(model.replica_rows, *model.input_shape, generator=generator),
            torch.randint(0, 10, (model.replica_rows,), generator=generator),
        )
        for _ in range(REPLICAS)
    ]


def by_strategy(model_class: type[Mlp] | type[ConvNet]) -> Contender:
    import torchstrat as ts

    topology = ts.tpu.initialize_tpu_system(virtual_devices=REPLICAS * LOGICAL_DEVICES)
    # Pairs of neighbours along the first axis that has an even number of cores.
    shape = [1] * topology.mesh_rank
    axis = next(axis for axis, size in enumerate(topology.mesh_shape) if size % LOGICAL_DEVICES == 0)
    shape[axis] = LOGICAL_DEVICES
    assignment = ts.tpu.DeviceAssignment.build(topology, computation_shape=shape, num_replicas=REPLICAS)
    strategy = ts.TPUStrategy(device_assignment=assignment)
    torch.manual_seed(0)
    with strategy.scope():
        model = model_class()
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for variable, partition in model.cut_variables():
        strategy.split_to_logical_devices(variable, partition)

    def train_step(batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs, strategy.split_to_logical_devices), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step(parts: list[Batch]) -> Any:
        batch = strategy.distribute_values_from_function(lambda context: parts[context.replica_id_in_sync_group])
        return strategy.run(train_step, args=(batch,))

    return Contender(step, lambda losses: float(strategy.reduce("mean", losses, axis=None)))


def by_hand(model_class: type[Mlp] | type[ConvNet], about_to_execute: Callable[[], None]) -> Contender:
    """``about_to_execute`` is called when a step has been traced."""
    import torch_xla
    from torch_xla import runtime
    from torch_xla.distributed import spmd

    if not runtime.is_spmd():
        runtime.use_spmd()
    device = torch_xla.device()
    mesh = spmd.Mesh(np.arange(REPLICAS * LOGICAL_DEVICES), (REPLICAS, LOGICAL_DEVICES), ("replica", "d0"))

    class Annotated(torch.autograd.Function):
        """The annotation, on the gradient too."""

        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, axes: tuple[str | None, ...]) -> torch.Tensor:
            ctx.axes = axes
            return _annotated(tensor, axes)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return _annotated(gradient, ctx.axes), None

    def _annotated(tensor: torch.Tensor, axes: tuple[str | None, ...]) -> torch.Tensor:
        # A clone of an input is the input to torch_xla, which has its annotation already.
        result = tensor.unsqueeze(0).squeeze(0)
        spmd.mark_sharding(result, mesh, axes)
        return result

    def split(tensor: torch.Tensor, partition: Sequence[int]) -> torch.Tensor:
        return Annotated.apply(tensor, ("replica", *("d0" if parts > 1 else None for parts in partition[1:])))

    torch.manual_seed(0)
    model = model_class() if model_class is Mlp else model_class(NormOfEachReplica)
    model = model.to(device)
    cut = {id(variable): partition for variable, partition in model.cut_variables()}
    for variable in [*model.parameters(), *model.buffers()]:
        partition = cut.get(id(variable), (1,) * variable.dim())
        spmd.mark_sharding(variable, mesh, tuple("d0" if parts > 1 else None for parts in partition))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def step(parts: list[Batch]) -> torch.Tensor:
        inputs, targets = (torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True))
        spmd.mark_sharding(inputs, mesh, ("replica", *[None] * (inputs.dim() - 1)))
        spmd.mark_sharding(targets, mesh, ("replica",))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs, split), targets)
        loss.backward()
        optimizer.step()
        about_to_execute()
        torch_xla.sync()
        return loss.detach()

    return Contender(step, lambda loss: float(loss.cpu()))


def feeding_by_strategy(parts: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Each device gets its own piece of ``parts``, one tensor for each replica."""
    from torchstrat.sharding.grid import DeviceGrid, Sharding
    from torchstrat.sharding.tpu.runtime import xla_runtime

    pairs = np.arange(REPLICAS * LOGICAL_DEVICES).reshape(REPLICAS, LOGICAL_DEVICES).tolist()
    grid = DeviceGrid(tuple(map(tuple, pairs)))
    sharding = Sharding.replicated(parts[0].dim(), LOGICAL_DEVICES).stacked()
    return lambda: xla_runtime().place(parts, sharding, grid)


def feeding_by_hand(parts: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    import torch_xla
    from torch_xla.distributed import spmd

    mesh = spmd.Mesh(np.arange(REPLICAS * LOGICAL_DEVICES), (REPLICAS, LOGICAL_DEVICES), ("replica", "d0"))

    def feed() -> torch.Tensor:
        batch = torch.cat(parts).to(torch_xla.device())
        spmd.mark_sharding(batch, mesh, ("replica", *[None] * (batch.dim() - 1)))
        return batch

    return feed
