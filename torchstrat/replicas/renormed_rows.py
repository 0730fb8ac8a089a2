"""Embedding tables with ``max_norm``, whose forward pass scales the rows that it looks up, in place.

Each replica scales the rows of its own ids. A single device would have scaled all of these, so all of them count: a
row that the leader did not touch is taken from a replica that did.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from torchstrat.replicas.tensor_slot import TensorSlot


def renormed_tables(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [
        module
        for module in modules
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]


def merge_renormed_rows(slot: TensorSlot, leader: int, replicas: list[int]) -> None:
    """``slot`` is a table's weight, (rows, width), with the components of all replicas parked."""
    editors = [replica for replica in replicas if replica != leader and slot.is_edited(replica)]
    if not editors:
        return
    mine = slot.data[leader]
    before = slot.unedited if slot.is_edited(leader) else mine.clone()
    if before is None:  # no replica has the value from before any more; the leader's edits count
        return
    slot.unedited = before
    untouched = (mine == before).all(dim=1)
    for replica in editors:
        theirs = slot.data[replica].to(mine.device)
        rows = (theirs != before).any(dim=1) & untouched
        mine[rows] = theirs[rows]
        untouched &= ~rows
