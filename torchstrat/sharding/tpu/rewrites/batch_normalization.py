"""`batch_norm` and `instance_norm` written out, with running statistics that plain tensors can hold.

Besides what `torchstrat.tpu.rewrites.normalization` says of the other normalisations, an input that differs between
replicas meets running statistics here that are one for all of them. Under ``vmap`` PyTorch refuses to update them, and
torch_xla cannot even read them. They get the statistics of the first replica.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from torchstrat.core.errors import ContextError, InvalidArgumentError
from torchstrat.core.half_precision import widen
from torchstrat.sharding.tpu.rewrites.normalization import per_channel, scale_and_shift, standardize

TensorMap = Callable[[torch.Tensor], torch.Tensor]


class BatchNormalization:
    """The functions that read or update running statistics, for the replicas of one run.

    ``first_replica`` gives the first replica's part of a tensor that differs between replicas, and any other tensor
    itself. ``sum_over_replicas``, for `sync_batch_norm`, gives every replica the sum and is differentiable.
    """

    def __init__(self, first_replica: TensorMap, sum_over_replicas: TensorMap | None = None) -> None:
        self._first_replica = first_replica
        self._sum_over_replicas = sum_over_replicas

    def batch_norm(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """`torch.nn.functional.batch_norm`: each replica normalises with the statistics of its own rows.

        ``input``: ``(rows, channels, …)``; everything else is ``(channels,)``.
        """
        usable = input.numel() > input.shape[1] if training else running_mean is not None and running_var is not None
        if not usable:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)  # raises
        _check_channels(input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
        x = widen(input)
        if training:
            mean, var = _statistics(x)
            count = x.numel() // x.shape[1]
            self._track(running_mean, running_var, mean, var * (count / (count - 1)), momentum)
        else:
            assert running_mean is not None
            assert running_var is not None
            mean, var = running_mean.to(x.dtype), running_var.to(x.dtype)
        return _standardize_with(x, mean, var, weight, bias, eps).to(input.dtype)

    def sync_batch_norm(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """`batch_norm` in training, with the statistics of the rows of all replicas, for two or more replicas.

        Every replica calls it, at the same place of the step. Raises `ContextError` where replicas cannot be summed.
        """
        if self._sum_over_replicas is None:
            raise ContextError(
                "batch normalisation over all replicas was called where nothing adds up over replicas; "
                "call the model within Strategy.run."
            )
        _check_channels(input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
        x = widen(input)
        own_sum = x.sum(dim=_all_but_channels(x))
        count = self._sum_over_replicas(torch.full_like(own_sum.detach(), x.numel() // x.shape[1]))
        mean = self._sum_over_replicas(own_sum) / count
        # Squares of what is left after the mean of all replicas, in a second sum: a difference of large sums cancels.
        centred = x - mean.reshape(-1, *[1] * (x.dim() - 2))
        squares = self._sum_over_replicas(centred.square().sum(dim=_all_but_channels(x)))
        self._track(running_mean, running_var, mean, squares / (count - 1), momentum)
        return _standardize_with(x, mean, squares / count, weight, bias, eps).to(input.dtype)

    def instance_norm(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        running_mean: torch.Tensor | None = None,
        running_var: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """`torch.nn.functional.instance_norm`. ``input``: ``(rows, channels, …)``, the rest ``(channels,)``."""
        rows, channels = input.shape[:2]
        if not use_input_stats and running_mean is not None and running_var is not None:
            return self.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        if not use_input_stats or input.numel() <= rows * channels:
            return F.instance_norm(  # raises
                input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
            )
        _check_channels(input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
        x, dims = widen(input), list(range(2, input.dim()))
        if running_mean is not None or running_var is not None:
            with torch.no_grad():
                mean, var = x.mean(dim=dims).mean(dim=0), x.var(dim=dims).mean(dim=0)
            self._track(running_mean, running_var, mean, var, momentum)
        y = standardize(x, dims, eps)
        return scale_and_shift(y, per_channel(weight, y.dim()), per_channel(bias, y.dim())).to(input.dtype)

    # Where torch.nn.functional's functions lead, and what older programs call. The parameters come in another order.

    def torch_batch_norm(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        """`torch.batch_norm`."""
        return self.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

    def torch_instance_norm(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        use_input_stats: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        """`torch.instance_norm`."""
        return self.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)

    @torch.no_grad()
    def _track(
        self,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        mean: torch.Tensor,
        unbiased_var: torch.Tensor,
        momentum: float,
    ) -> None:
        """All ``(channels,)``. Half-precision running statistics are updated in single precision and rounded once."""
        for running, now in ((running_mean, mean), (running_var, unbiased_var)):
            if running is not None:
                own = self._first_replica(now.detach())
                running.copy_((1 - momentum) * running.to(own.dtype) + momentum * own)


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance per channel, each ``(channels,)``."""
    dims = _all_but_channels(x)
    mean = x.mean(dim=dims, keepdim=True)
    return mean.flatten(), (x - mean).square().mean(dim=dims)


def _standardize_with(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """``x``: ``(rows, channels, …)``, everything else ``(channels,)``."""
    shape = [-1] + [1] * (x.dim() - 2)
    y = (x - mean.reshape(shape)) * torch.rsqrt(var + eps).reshape(shape)
    return scale_and_shift(y, per_channel(weight, x.dim()), per_channel(bias, x.dim()))


def _check_channels(x: torch.Tensor, **per_channel_tensors: torch.Tensor | None) -> None:
    """One element would silently stand for all channels."""
    for name, tensor in per_channel_tensors.items():
        if tensor is not None and tensor.shape != (x.shape[1],):
            raise InvalidArgumentError(
                f"{name} has shape {tuple(tensor.shape)}; an input of shape {tuple(x.shape)} needs one value for each "
                f"of its {x.shape[1]} channels."
            )
