"""`explain_sharding`: where each piece of a tensor or a model lives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchstrat.core.context import get_strategy
from torchstrat.core.errors import WrongTypeError
from torchstrat.sharding.explain import Explanation, explain_tensors

if TYPE_CHECKING:
    from torchstrat.strategies.strategy import Strategy


def explain_sharding(
    value: torch.Tensor | nn.Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str] | None = None,
    *,
    strategy: Strategy | None = None,
) -> Explanation:
    """Say which device holds which piece of ``value``; ``print`` what comes back.

    Works in the scope, in a step (for tensors that an annotation returned) and outside. Nothing is computed or moved.

    Args:
        value: a variable, an annotated tensor, a dict of them by name, or a model, whose parameters and buffers are
            meant.
        path: where to write the same as a picture, a PNG; needs matplotlib.
        strategy: whose devices; None: the current one's.

    Raises:
        InvalidArgumentError: nobody has said how a tensor is cut: it is no variable of the strategy and was not
            returned by an annotation.
    """
    chosen = get_strategy() if strategy is None else strategy
    entries = {name: chosen._sharded_entry(name, tensor) for name, tensor in _named(value).items()}
    grid, names = chosen._device_grid()
    explanation = explain_tensors(entries, grid, names)
    if path is not None:
        explanation.save_png(path)
    return explanation


def _named(value: torch.Tensor | nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {"tensor": value}
    if isinstance(value, nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if isinstance(value, Mapping) and all(isinstance(one, torch.Tensor) for one in value.values()):
        return {str(name): tensor for name, tensor in value.items()}
    raise WrongTypeError(
        f"explain_sharding needs a tensor, a module or a dict of tensors; got {type(value).__name__} {value!r:.80}."
    )
