"""Rows that lookups with ``max_norm`` have scaled in the components of one variable, one per replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from torchstrat.replicas.renormed_rows import may_be_table, renormed_weights, scaled_rows
from torchstrat.replicas.state import TensorSlot


def has_scaled_rows(slot: TensorSlot, replicas: list[int]) -> bool:
    """Whether one replica has what another has but for some rows, which it has scaled."""
    editors = [replica for replica in replicas if slot.is_edited(replica)]
    if not editors or not may_be_table(slot.tensor):
        return False
    first = slot.data[replicas[0]]
    others = [slot.data[replica].to(first.device) for replica in replicas[1:]]
    pairs = [pair for one in others if one.shape == first.shape for pair in ((first, one), (one, first))]
    return any(len(scaled_rows(*pair, is_known=False)) for pair in pairs)


def rows_scaled_by_others(
    slot: TensorSlot, replicas: list[int], modules: Callable[[], Iterable[nn.Module]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Which rows of the first one's component, and the component from which each is to be taken."""
    mine, editors = slot.data[replicas[0]], [replica for replica in replicas[1:] if slot.is_edited(replica)]
    is_known = bool(editors) and id(slot.tensor) in renormed_weights(modules())
    for replica in editors:
        theirs = slot.data[replica].to(mine.device)
        if theirs.shape == mine.shape and len(rows := scaled_rows(mine, theirs, is_known=is_known)):
            yield rows, theirs
