"""`convert_sync_batchnorm`: batch normalisation whose statistics are those of the global batch.

Replicas exchange one row of statistics each per layer and forward pass, by the differentiable `all_gather`, and put
them together as one device would have computed them. Counts, means and centred squares travel rather than sums of
squares: subtracting the square of a large mean from a large mean of squares would cancel in single precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchstrat.context import get_replica_context
from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.replicas.engine import ReplicaEngine

_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Make every `torch.nn.BatchNorm1d`, ``2d`` and ``3d`` in ``module`` normalise with statistics over all replicas.

    The layers are changed where they are, ``module`` itself included: parameters, buffers, hooks and ``state_dict``
    stay as they were, and they still are instances of the class they had. In evaluation mode, with one replica, and
    outside of `Strategy.run` they do what they did. Subclasses of the three, which may do anything, are left alone.

    In training mode within `Strategy.run` every replica has to call the layers in the same order. Outputs, gradients
    and running statistics are those of one device on the global batch, also when replicas differ in their rows.

    Returns ``module``. Raises `ValueError` for lazy layers that have not seen an input yet.
    """
    if not isinstance(module, nn.Module):
        raise WrongTypeError(f"convert_sync_batchnorm needs a torch.nn.Module; got {type(module).__name__}.")
    for layer in module.modules():
        if isinstance(layer, _LAZY) and layer.has_uninitialized_params():
            raise InvalidArgumentError(
                f"convert_sync_batchnorm got a {type(layer).__name__} that has not seen an input yet; run one batch "
                "through the model first."
            )
        synchronised = _SYNCHRONISED.get(type(layer))
        if synchronised is not None:
            layer.__class__ = synchronised
    return module


class _OverReplicas(nn.Module):
    """The forward that the three classes below share."""

    _ranks: tuple[int, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        replica = get_replica_context()
        if not self.training or replica is None or replica.num_replicas_in_sync == 1:
            plain: torch.Tensor = super().forward(input)
            return plain
        if input.dim() not in self._ranks:
            wanted = " or ".join(f"{rank}D" for rank in self._ranks)
            raise InvalidArgumentError(f"{type(self).__name__} needs {wanted} input; got shape {tuple(input.shape)}.")
        engine = replica.strategy._engine
        normalised = engine.sync_batch_norm(self, input)
        return _normalise(self, input, engine) if normalised is None else normalised


class SyncBatchNorm1d(_OverReplicas, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` with the statistics of the global batch; input ``(rows, channels[, length])``."""

    _ranks = (2, 3)


class SyncBatchNorm2d(_OverReplicas, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` with the statistics of the global batch; input ``(rows, channels, height, width)``."""

    _ranks = (4,)


class SyncBatchNorm3d(_OverReplicas, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` with the statistics of the global batch; input ``(rows, channels, d, h, w)``."""

    _ranks = (5,)


_SYNCHRONISED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


def _normalise(layer: Any, x: torch.Tensor, engine: ReplicaEngine) -> torch.Tensor:
    """``x``: ``(rows, channels, …)`` of this replica. The statistics are in single precision at least."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    mean, var, count = _global_statistics(wide, dims, shape, engine)
    if layer.track_running_stats:
        _track(layer, mean.detach(), var.detach(), count)
    scale = torch.rsqrt(var + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    y = (wide - mean.view(shape)) * scale.view(shape)
    if layer.bias is not None:
        y = y + layer.bias.view(shape)
    return y.to(x.dtype)


def _global_statistics(
    x: torch.Tensor, dims: list[int], shape: list[int], engine: ReplicaEngine
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance per channel over all replicas, each ``(channels,)``, and of how many entries."""
    channels = x.shape[1]
    own_count = x.numel() // max(channels, 1)
    own_mean = x.sum(dim=dims) / max(own_count, 1)
    own_squares = (x - own_mean.view(shape)).square().sum(dim=dims)
    row = torch.cat([own_mean, own_squares, own_mean.new_tensor([own_count])])
    rows = engine.all_gather(row.unsqueeze(0), 0)  # (replicas, 2 * channels + 1)
    means, squares, counts = rows.split([channels, channels, 1], dim=1)
    count = counts.detach().sum()
    if own_count <= 1 and float(count) <= 1:
        raise InvalidArgumentError(
            "batch normalisation needs more than one value per channel in training; all replicas together got "
            f"{float(count):g}."
        )
    shares = counts.detach() / count
    mean = (shares * means).sum(dim=0)
    between = (shares * (means - mean).square()).sum(dim=0)
    return mean, squares.sum(dim=0) / count + between, count


@torch.no_grad()
def _track(layer: Any, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
    """As torch's layers do: the unbiased variance, with ``momentum=None`` the average over all batches so far."""
    factor = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    unbiased = var * (count / (count - 1))
    for running, now in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        if running is not None:
            running.mul_(1 - factor).add_(now.to(running), alpha=factor)
