"""`convert_sync_batchnorm`: batch normalisation whose statistics are those of the global batch.

Replicas exchange one row of statistics each per layer and forward pass, by the differentiable `all_gather`, and put
them together as one device would have computed them. Counts, means and centred squares travel rather than sums of
squares: subtracting the square of a large mean from a large mean of squares would cancel in single precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from torchstrat.core.context import ReplicaContext, engine_of, get_replica_context
from torchstrat.core.engine import ReplicaEngine
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError

_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


def convert_sync_batchnorm(module: nn.Module, leave: tuple[type[nn.Module], ...] = ()) -> nn.Module:
    """Make every `torch.nn.BatchNorm1d`, ``2d`` and ``3d`` in ``module`` normalise with statistics over all replicas.

    The layers are changed where they are, ``module`` itself included: parameters, buffers, hooks and ``state_dict``
    stay as they were, and they still are instances of the class they had. In evaluation mode, with one replica, and
    outside of `Strategy.run` they do what they did. Subclasses of the three keep the forward of their own, in which
    ``torch.nn.functional.batch_norm`` takes the statistics of all replicas, also where ``super().forward`` calls it.
    A `torch.nn.SyncBatchNorm` is one of them from then on.

    In training mode within `Strategy.run` every replica has to call the layers in the same order. Outputs, gradients
    and running statistics are those of one device on the global batch, also when replicas differ in their rows.

    Args:
        leave: classes whose layers stay as they are.

    Returns ``module``. Raises `ValueError` for lazy layers that have not seen an input yet, and for a
    ``torch.nn.SyncBatchNorm`` of a part of the processes. A subclass that normalises without ``batch_norm`` raises
    `NotImplementedError` in its first forward pass on several replicas.
    """
    if not isinstance(module, nn.Module):
        raise WrongTypeError(f"convert_sync_batchnorm needs a torch.nn.Module; got {type(module).__name__}.")
    if not isinstance(leave, tuple | list) or not all(isinstance(one, type) for one in leave):
        raise WrongTypeError(f"leave must be a tuple of classes; got {leave!r:.80}. Write leave=(nn.BatchNorm2d,).")
    for layer in module.modules():
        if isinstance(layer, (*_SYNCHRONISED, *_LAZY)) and not isinstance(layer, (_OverReplicas, _OwnForward, *leave)):
            _require_convertible(layer)
            layer.__class__ = _synchronised(type(layer))
    return module


def _require_convertible(layer: object) -> None:
    if isinstance(layer, _LAZY) and layer.has_uninitialized_params():
        raise InvalidArgumentError(
            f"convert_sync_batchnorm got a {type(layer).__name__} that has not seen an input yet; run one batch "
            "through the model first."
        )
    if isinstance(layer, nn.SyncBatchNorm) and layer.process_group is not None:
        raise InvalidArgumentError(
            f"convert_sync_batchnorm got a {type(layer).__name__} with a process_group of its own; the statistics of a "
            f"strategy are those of all its replicas. Use BatchNorm2d, or leave={type(layer).__name__} as it is."
        )


def _several_replicas(layer: nn.Module) -> ReplicaContext | None:
    """The running replica, where its statistics are not all there is."""
    replica = get_replica_context()
    return replica if layer.training and replica is not None and replica.num_replicas_in_sync > 1 else None


class _OverReplicas(nn.Module):
    """The forward that the classes below share."""

    _ranks: tuple[int, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        replica = _several_replicas(self)
        if replica is None:
            plain: torch.Tensor = super().forward(input)
            return plain
        if input.dim() not in self._ranks:
            wanted = " or ".join(f"{rank}D" for rank in self._ranks)
            raise InvalidArgumentError(f"{type(self).__name__} needs {wanted} input; got shape {tuple(input.shape)}.")
        return _over_replicas(self, input, replica)


class SyncBatchNorm1d(_OverReplicas, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` with the statistics of the global batch; input ``(rows, channels[, length])``."""

    _ranks = (2, 3)


class SyncBatchNorm2d(_OverReplicas, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` with the statistics of the global batch; input ``(rows, channels, height, width)``."""

    _ranks = (4,)


class SyncBatchNorm3d(_OverReplicas, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` with the statistics of the global batch; input ``(rows, channels, d, h, w)``."""

    _ranks = (5,)


class TorchSyncBatchNorm(_OverReplicas, nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` over the replicas of a strategy, wherever they are; input ``(rows, channels, …)``."""

    _ranks = (2, 3, 4, 5)


_SYNCHRONISED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: TorchSyncBatchNorm,
}


# -- subclasses -------------------------------------------------------------------------------------------------------


class _OwnForward(nn.Module):
    """What is put before a subclass: its forward, in which batch normalisation is over all replicas."""

    _of: type[nn.Module]

    def forward(self, *args: object, **kwargs: object) -> object:
        replica = _several_replicas(self)
        if replica is None:
            return super().forward(*args, **kwargs)
        with _BatchNormOverReplicas(replica) as calls:
            result = super().forward(*args, **kwargs)
        if not calls.seen:
            raise UnsupportedError(
                f"{self._of.__name__} is a subclass of torch's batch normalisation whose forward does not call "
                "torch.nn.functional.batch_norm, so that its statistics cannot be taken over all replicas. Call it "
                f"there (or super().forward), or leave the layers as they are: leave=({self._of.__name__},)."
            )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made here and cannot be found by its name; the one that it was made of can."""
        reduced = cast(tuple[Any, ...], super().__reduce_ex__(max(int(protocol), 2)))
        return (_new, (self._of, *reduced[1][1:]), *reduced[2:])


def _new(subclass: type[nn.Module], *arguments: object) -> object:
    made = _synchronised(subclass)
    return made.__new__(made, *arguments)


def _synchronised(kind: type[nn.Module]) -> type[nn.Module]:
    """What layers of this class become."""
    if kind not in _made:
        namespace = {"_of": kind, "__doc__": f"{kind.__name__} with the statistics of the global batch."}
        _made[kind] = type(f"Sync{kind.__name__}", (_OwnForward, kind), namespace)
    return _made[kind]


_made = dict(_SYNCHRONISED)


@dataclass(frozen=True)
class _Call:
    """The arguments of one call of ``batch_norm``; its caller has counted the batch."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    momentum: float
    eps: float
    num_batches_tracked: None = None

    @property
    def track_running_stats(self) -> bool:
        return self.running_mean is not None


class _BatchNormOverReplicas(TorchFunctionMode):
    """``batch_norm`` in training takes the statistics of all replicas. ``seen``: it was called, in whatever mode."""

    def __init__(self, replica: ReplicaContext) -> None:
        super().__init__()
        self._replica = replica
        self.seen = False

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        read = _READ.get(func)
        if read is None:
            return func(*args, **(kwargs or {}))
        self.seen = True
        x, is_training, call = read(*args, **(kwargs or {}))
        if not is_training:
            return func(*args, **(kwargs or {}))
        return _over_replicas(call, x, self._replica)


_Read = tuple[torch.Tensor, bool, _Call]


def _read_functional(
    input: torch.Tensor,  # noqa: A002 - torch's name
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> _Read:
    return input, training, _Call(weight, bias, running_mean, running_var, momentum, eps)


def _read_operation(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> _Read:
    return input, training, _Call(weight, bias, running_mean, running_var, momentum, eps)


_READ: dict[object, Callable[..., _Read]] = {F.batch_norm: _read_functional, torch.batch_norm: _read_operation}


# -- numbers ----------------------------------------------------------------------------------------------------------


def _over_replicas(layer: object, x: torch.Tensor, replica: ReplicaContext) -> torch.Tensor:
    engine = engine_of(replica.strategy)
    normalised = engine.sync_batch_norm(layer, x)
    return _normalise(layer, x, engine) if normalised is None else normalised


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
