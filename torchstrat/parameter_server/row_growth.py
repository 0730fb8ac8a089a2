"""`grow_rows`: a table gets rows for ids that were not there when it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchstrat.core import context
from torchstrat.core.errors import ContextError, InvalidArgumentError, UnsupportedError, WrongTypeError

if TYPE_CHECKING:
    from torchstrat.strategies.strategy import Strategy


def grow_rows(
    table: nn.Embedding | nn.EmbeddingBag | torch.Tensor,
    rows: int,
    *,
    init: Callable[[torch.Tensor], Any] | None = None,
) -> None:
    """Give an embedding table on parameter servers more rows, while it is trained. Called on the coordinator::

        if max_id >= model.table.num_embeddings:
            ts.grow_rows(model.table, 2 * model.table.num_embeddings)

    Rows that are there stay where they are, with their optimizer state; new ones are behind them, on the server of the
    last ones, with the state of rows that no step has touched. ``table.weight`` stays the same parameter, with another
    shape, here and on workers; ``num_embeddings`` of its modules follows. Works on ``device="meta"``, too.

    It waits until no function is half-way; no update is lost. Functions that are in the queue, and those that run again
    because their worker was lost, find the larger table. A checkpoint of before does not fit afterwards, and is an
    error that says so (``restore(path, strict=False)`` leaves the table out): save one when the table has grown, and
    make the larger table in the program that goes on from it.

    Args:
        table: the module, or its weight. Of a `ParameterServerStrategy`, and stepped by optimizers that treat each row
            by itself (all elementwise ones).
        rows: how many there are then. As many as there are does nothing.
        init: fills the new rows in place, or returns them: ``(new rows, dim)``, on the CPU; for tables on ``meta`` on
            ``meta``, by random or constant fillers. None: as the table's own were filled within the scope
            (``normal_`` by ``nn.Embedding``, or what came after it).

    Raises:
        InvalidArgumentError: fewer rows than there are; how to initialise new ones is not known (rows were copied from
            elsewhere, say), or ``init`` has made others; something here shows the memory of the table; a server has no
            room for them. Nothing has changed.
        UnsupportedError: the table is not on parameter servers; or an optimizer, or another module that has it too,
            depends on the number of rows.
        ContextError: called in a scheduled function, or within a replica.
        CommunicationTimeoutError: functions ran for longer than the strategy's ``timeout``.
        ParameterServerUnavailable: a server is gone.
    """
    weight = table.weight if isinstance(table, nn.Embedding | nn.EmbeddingBag) else table
    if not isinstance(weight, torch.Tensor):
        raise WrongTypeError(
            f"grow_rows got a {type(table).__name__} as table; give it the nn.Embedding or nn.EmbeddingBag, or its "
            "weight."
        )
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise WrongTypeError(f"grow_rows got rows={rows!r:.80}; give it the number of rows that there are to be.")
    if rows < 1:
        raise InvalidArgumentError(f"grow_rows got rows={rows}; tables only grow.")
    if init is not None and not callable(init):
        raise WrongTypeError(f"grow_rows got init={init!r:.80}; give it a function that fills rows.")
    is_worker = getattr(context.get_strategy(), "_is_worker", False)
    if is_worker or (context.has_strategy() and context.get_replica_context() is not None):
        raise ContextError(
            "grow_rows was called in a scheduled function, or within a replica; call it on the coordinator, between "
            "calls of schedule."
        )
    owner = _owner_of(weight)
    grow = getattr(owner, "_grow_rows", None)
    if grow is None:
        held = "belongs to no strategy" if owner is None else f"belongs to a {type(owner).__name__}"
        raise UnsupportedError(
            f"grow_rows: the table of shape {tuple(weight.shape)} {held}, and tables grow on parameter servers alone. "
            "Save a checkpoint, make the larger table in a new program, restore the rest with strict=False, and copy "
            "the rows: new.weight[:old_rows] = old_weight, within torch.no_grad()."
        )
    grow(weight, rows, init)
    if isinstance(table, nn.Embedding | nn.EmbeddingBag):
        table.num_embeddings = rows


def _owner_of(weight: torch.Tensor) -> Strategy | None:
    still_open = (one for one in context.strategies if not one._closed)
    return next((one for one in still_open if one.extended.variable_created_in_scope(weight)), None)
