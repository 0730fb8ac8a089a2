"""Normalisations written out, so that a compiler that cuts tensors can cut them.

As single operations of torch_xla they become an XLA operation which the SPMD partitioner does not split: it gathers the
whole activation on every device first. Means and products it splits along any dimension.

All of them compute as the originals do: half precision in single precision, rounded once at the end; the variance from
centred values, so that a large mean does not cancel it.

In `batch_norm` and `instance_norm` an input that differs between replicas meets running statistics that are one for all
of them. Under ``vmap`` PyTorch refuses to update them, and torch_xla cannot even read them. They get the statistics of
the first replica, and plain tensors can hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.reduction import widen


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """`torch.nn.functional.layer_norm` and `torch.layer_norm`. ``input``: ``(…, *normalized_shape)``."""
    if not _is_tail(normalized_shape, input, weight, bias):
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)  # raises, in PyTorch's words
    dims = list(range(-len(normalized_shape), 0))
    return scale_and_shift(standardize(widen(input), dims, eps), weight, bias).to(input.dtype)


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` and `torch.rms_norm`. ``input``: ``(…, *normalized_shape)``."""
    if not _is_tail(normalized_shape, input, weight):
        return F.rms_norm(input, list(normalized_shape), weight, eps)  # raises, in PyTorch's words
    x = widen(input)
    dims = list(range(-len(normalized_shape), 0))
    # Without a number it is that of the type computed in: half precision too gets that of single precision.
    smallest = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * torch.rsqrt(x.square().mean(dim=dims, keepdim=True) + smallest)
    return scale_and_shift(y, weight, None).to(input.dtype)


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """`torch.nn.functional.group_norm` and `torch.group_norm`. ``input``: ``(rows, channels, …)``."""
    if not _has_groups(num_groups, input, weight, bias):
        return F.group_norm(input, num_groups, weight, bias, eps)  # raises, in PyTorch's words
    # The dimensions after the channels stay as they are: one that is cut over devices must not be merged with others.
    grouped = widen(input).unflatten(1, (num_groups, input.shape[1] // num_groups))
    y = standardize(grouped, list(range(2, grouped.dim())), eps).flatten(1, 2)
    return scale_and_shift(y, per_channel(weight, y.dim()), per_channel(bias, y.dim())).to(input.dtype)


def standardize(x: torch.Tensor, dims: list[int], eps: float) -> torch.Tensor:
    """``x`` with mean 0 and (biased) variance 1 over ``dims``."""
    centred = x - x.mean(dim=dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim=dims, keepdim=True) + eps)


def scale_and_shift(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """In the type of ``x``: parameters of half precision are widened, the result is not rounded in between."""
    if weight is not None:
        x = x * weight.to(x.dtype)
    return x if bias is None else x + bias.to(x.dtype)


def per_channel(parameter: torch.Tensor | None, rank: int) -> torch.Tensor | None:
    """``(channels,)`` made ``(channels, 1, …)``, to go with a tensor ``(rows, channels, …)`` of ``rank`` dimensions."""
    return None if parameter is None else parameter.reshape(-1, *[1] * (rank - 2))


def _is_tail(normalized_shape: Sequence[int], x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    shape = tuple(normalized_shape)
    tensors = [one.shape for one in parameters if one is not None]
    return 0 < len(shape) <= x.dim() and all(shape == found for found in (x.shape[-len(shape) :], *tensors))


def _has_groups(num_groups: int, x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    if x.dim() < 2 or num_groups < 1 or x.shape[1] % num_groups != 0:
        return False
    channels = (x.shape[1],)
    # Groups of one value over the whole batch have no variance, and PyTorch refuses them.
    return x.numel() > num_groups and all(one is None or one.shape == channels for one in parameters)


TensorMap = Callable[[torch.Tensor], torch.Tensor]


class BatchNormalization:
    """The functions that read or update running statistics, for the replicas of one run.

    ``first_replica`` gives the first replica's part of a tensor that differs between replicas, and any other tensor
    itself. ``sum_over_replicas``, for `sync_batch_norm`, gives every replica the sum and is differentiable. ``is_own``
    tells of running statistics whether they are each replica's own. ``on_reading`` is called where others are read
    that were changed by each replica's rows before.
    """

    def __init__(
        self,
        first_replica: TensorMap,
        sum_over_replicas: TensorMap | None = None,
        is_own: Callable[[torch.Tensor], bool] | None = None,
        on_reading: Callable[[], None] = lambda: None,
    ) -> None:
        self._first_replica = first_replica
        self._on_reading, self._averaged = on_reading, list[torch.Tensor]()
        self._is_own = is_own or (lambda running: False)
        self._sum_over_replicas = sum_over_replicas

    def batch_norm(
        self,
        input: torch.Tensor,
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
            if any(one is running for one in self._averaged for running in (running_mean, running_var)):
                self._on_reading()
            mean, var = running_mean.to(x.dtype), running_var.to(x.dtype)
        return _standardize_with(x, mean, var, weight, bias, eps).to(input.dtype)

    def sync_batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """`batch_norm` in training, with the statistics of the rows of all replicas, for two or more replicas.

        Every replica calls it, at the same place of the step.
        """
        assert self._sum_over_replicas is not None
        _check_channels(input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
        x = widen(input)
        own_sum = x.sum(dim=_all_but_channels(x))
        count = self._sum_over_replicas(torch.full_like(own_sum.detach(), x.numel() // x.shape[1]))
        mean = self._sum_over_replicas(own_sum) / count
        # Squares of what is left after the mean of all replicas, in a second sum: a difference of large sums cancels.
        centred = x - mean.reshape(-1, *[1] * (x.dim() - 2))
        squares = self._sum_over_replicas(centred.square().sum(dim=_all_but_channels(x)))
        self._track(running_mean, running_var, mean, squares / (count - 1), momentum, are_alike=True)
        return _standardize_with(x, mean, squares / count, weight, bias, eps).to(input.dtype)

    def instance_norm(
        self,
        input: torch.Tensor,
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

    @torch.no_grad()
    def _track(
        self,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        mean: torch.Tensor,
        unbiased_var: torch.Tensor,
        momentum: float,
        *,
        are_alike: bool = False,
    ) -> None:
        """All ``(channels,)``. Half-precision running statistics are updated in single precision and rounded once.
        ``are_alike``: on all replicas."""
        for running, now in ((running_mean, mean), (running_var, unbiased_var)):
            if running is not None:
                own, is_own = now.detach(), self._is_own(running)
                if not is_own and (averaged := self._first_replica(own)) is not own:
                    own = averaged
                    if not are_alike:
                        self._averaged.append(running)
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
