"""A forward pass without values: what it keeps for the backward pass, and how many rows of tables it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError


@dataclass(frozen=True)
class Forward:
    saved_bytes: int
    """Of tensors that the backward pass needs, without parameters, buffers and the batch."""
    rows_read: dict[int, int]
    """``id`` of an embedding's weight → how many of its rows a step reads, at the most."""


def run_without_values(model: nn.Module, batch: Any, parts: int) -> Forward:
    """One of ``parts`` equal parts of ``batch``, the larger where they are uneven, through ``model``, which lives on
    ``torch.device("meta")``.

    Args:
        batch: A tensor, or a tuple of the model's arguments. Rows are along dim 0.

    Raises `InvalidArgumentError` where the model cannot be called with it.
    """
    arguments = batch if isinstance(batch, tuple) else (batch,)
    arguments = nest.map_structure(lambda leaf: _part_of(leaf, parts), arguments)
    own = {_key(one) for one in (*model.parameters(), *model.buffers(), *nest.leaves(list(arguments)))}
    kept: dict[Any, torch.UntypedStorage] = {}
    rows: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in own:
            kept[_key(tensor)] = tensor.untyped_storage()
        return tensor

    def note_rows(module: Any, called_with: tuple[Any, ...]) -> None:
        weight: torch.Tensor = module.weight
        ids = next((one.numel() for one in called_with if isinstance(one, torch.Tensor)), 0)
        rows[id(weight)] = min(rows.get(id(weight), 0) + ids, len(weight))

    handles = [
        module.register_forward_pre_hook(note_rows)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    try:
        with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the model cannot be called with this batch, without values: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return Forward(sum(storage.nbytes() for storage in kept.values()), rows)


def _key(value: Any) -> Any:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _part_of(leaf: Any, parts: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = (math.ceil(leaf.shape[0] / parts), *leaf.shape[1:]) if leaf.dim() else ()
    return torch.empty(shape, dtype=leaf.dtype, device="meta")
