"""`prefetch_rows`: a table's rows for the next batch, gathered while this one computes."""

from __future__ import annotations

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from torchstrat.core.errors import WrongTypeError
from torchstrat.core.sparse_ids import ID_DTYPES


def prefetch_rows(table: nn.Embedding | nn.EmbeddingBag | torch.Tensor, ids: torch.Tensor) -> None:
    """Ask for the rows that a coming lookup needs, and return at once: they are gathered while this step goes on.

    For functions that run on a worker of parameter servers, before what takes long, with the ids of the next batch::

        def dataset_fn(context):  # each batch with the one after it
            return itertools.pairwise(itertools.chain(loader, [None]))

        def train_step(batch, following):
            optimizer.zero_grad()
            loss = loss_of(model(batch.ids), batch.labels)
            if following is not None:
                ts.prefetch_rows(model.table, following.ids)
            loss.backward()
            optimizer.step()

    The next lookup of ``table`` in this function or in the next one on this worker takes the rows that were asked for,
    and reads those of its ids that were not. Each request serves one lookup (of several, the one that has most of its
    ids). What no lookup has taken is dropped when the function after the next one begins.

    **The rows are as of the gather**: what was pushed since is not in them, this worker's own last push included. The
    gradients are computed at those values, and applied to the ones that the servers have by then: no update is lost.
    Rows that nobody has pushed to in the meantime are exact. A function that comes to a worker which had nothing to do,
    as the first ones after `ClusterCoordinator.join`, reads everything anew.

    Everywhere but in a function on such a worker, and there for a parameter that is held whole instead of by rows, this
    does nothing: the same step runs under every strategy. Lookups with ``max_norm`` read everything anew, since they
    write rows back. No more than 256 MiB of rows wait on a worker: what was asked for first makes room.

    Args:
        table: The module that looks rows up, or its weight.
        ids: int32 or int64, any shape, on any device. Repetitions are fine. May be changed afterwards.

    Raises:
        InvalidArgumentError: an id is not in the table; nothing was asked for. On a worker; elsewhere ids are not read.
        WrongTypeError: ``table`` or ``ids`` is something else. Everywhere.

    A server that is lost meanwhile is an error of the lookup, not of this call.
    """
    if isinstance(table, nn.Embedding | nn.EmbeddingBag):
        if table.max_norm is not None:
            return
        weight = table.weight
    elif isinstance(table, torch.Tensor):
        weight = table
    else:
        raise WrongTypeError(
            f"prefetch_rows got a {type(table).__name__} as table; give it the nn.Embedding or nn.EmbeddingBag whose "
            "lookup comes next, or its weight."
        )
    if not isinstance(ids, torch.Tensor) or ids.dtype not in ID_DTYPES:
        given = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else f"a {type(ids).__name__}"
        raise WrongTypeError(f"prefetch_rows got {given} as ids; give it a tensor of torch.int32 or torch.int64.")
    if has_torch_function_unary(weight):  # a worker's table
        handle_torch_function(prefetch_rows, (weight,), weight, ids)
