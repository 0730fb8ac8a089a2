"""Means of metrics over all rows of some batches, each row counted once, under any strategy or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.data import unmarked
from torchstrat.strategies.strategy import Strategy

Metric = Callable[[Any, Any], Any]
"""``metric(outputs, targets)`` of one batch → a tensor ``(rows,)``, or the mean over the rows: a tensor or a number."""


def score(
    model: nn.Module, batches: Iterable[Any], metrics: Mapping[str, Metric], strategy: Strategy | None
) -> dict[str, float]:
    """The mean of each metric over the rows of all batches.

    Args:
        model: In evaluation mode; called with the inputs, in the replicas.
        batches: Pairs ``(inputs, targets)``, each a nest of tensors with rows in dim 0; distributed, with a strategy.
        metrics: Called in the replicas, without gradients.
        strategy: None: everything is computed here, where the model is.

    Raises:
        WrongTypeError: a batch is no such pair.
        InvalidArgumentError: there are no rows; a metric returns neither a number nor one for each row.
    """

    def measure(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            return _measure(model, batch, metrics)

    total = torch.zeros(1 + len(metrics), dtype=torch.float64)
    place = _device_of(model)
    for batch in batches:
        if strategy is None:
            total += measure(_moved(batch, place)).cpu()
        else:
            total += _over_replicas(strategy, strategy.run(measure, args=(batch,))).cpu()
    rows, *sums = total.tolist()
    if not rows:
        raise InvalidArgumentError("the data to evaluate on has no rows; give at least one batch.")
    return {name: value / rows for name, value in zip(metrics, sums, strict=True)}


def _over_replicas(strategy: Strategy, measured: Any) -> torch.Tensor:
    if isinstance(measured, torch.Tensor):  # there is one replica, or only one of them had rows
        return measured
    reduced: torch.Tensor = strategy.reduce("sum", measured, axis=None)
    return reduced


def _measure(model: nn.Module, batch: Any, metrics: Mapping[str, Metric]) -> torch.Tensor:
    """``(1 + metrics,)``: the batch's rows, and the sum of each metric over them."""
    inputs, targets = _pair(batch)
    first = next((leaf for leaf in nest.leaves(targets) if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
    if first is None:
        raise WrongTypeError(f"the targets of a batch have no tensor with rows in dim 0; got {type(targets).__name__}.")
    rows, device = len(first), first.device
    # Sums over many rows need the digits; accelerators other than CUDA's have no float64.
    dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    if not rows:  # a mean over no rows is not a number
        return torch.zeros(1 + len(metrics), dtype=dtype, device=device)
    outputs = model(inputs)
    sums = [_sum(name, metric(outputs, targets), rows).to(device, dtype) for name, metric in metrics.items()]
    return torch.stack([torch.tensor(rows, dtype=dtype, device=device), *sums])


def _sum(name: str, returned: Any, rows: int) -> torch.Tensor:
    value = torch.as_tensor(returned)
    if value.dtype in (torch.bool, torch.float16, torch.bfloat16) or not value.dtype.is_floating_point:
        value = value.to(torch.float32)
    if value.dim() == 0:
        return value * rows
    if value.shape != (rows,):
        raise InvalidArgumentError(
            f"metrics[{name!r}] returned shape {tuple(value.shape)} for a batch of {rows} rows; return one number, the "
            f"mean over the rows, or a tensor ({rows},) with one for each."
        )
    return value.sum()


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    raise WrongTypeError(
        f"metrics= needs batches of (inputs, targets); got {type(batch).__name__}"
        f"{f' of {len(batch)}' if isinstance(batch, list | tuple) else ''}. For other batches give evaluate_fn=, which "
        "gets the model and the data."
    )


def _device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)


def _moved(batch: Any, place: torch.device | None) -> Any:
    plain = unmarked(batch)
    if place is None:
        return plain
    return nest.map_structure(lambda leaf: leaf.to(place) if isinstance(leaf, torch.Tensor) else leaf, plain)
