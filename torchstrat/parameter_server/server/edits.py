"""Changes that no optimizer makes: a variable's ``assign*`` and ``scatter_*``, and modules' buffers.

`check_edit` raises for whatever `apply_edit` could not do, so that a push is applied whole or not at all.
"""

from __future__ import annotations

from typing import get_args

import torch

from torchstrat.errors import InvalidArgumentError
from torchstrat.parameter_server.messages import EditOp, ShardEdit, ShardKey
from torchstrat.parameter_server.server.held import HeldShards, check_rows
from torchstrat.parameter_server.variables import edits
from torchstrat.tensor_bytes import is_same

_OPS = get_args(EditOp)


def check_edit(edit: ShardEdit, shards: HeldShards) -> None:
    shard, name = shards.tensor(edit.key), shards.name(edit.key)
    if edit.op not in _OPS:
        raise InvalidArgumentError(f"{edit.op!r} is no edit of {name}; there are {', '.join(_OPS)}.")
    if (
        not isinstance(edit.value, torch.Tensor)
        or edit.value.layout != torch.strided
        or edit.value.device.type != "cpu"
    ):
        raise InvalidArgumentError(f"the value of an edit of {name} must be a dense tensor on the CPU.")
    if not torch.can_cast(edit.value.dtype, shard.dtype):
        raise InvalidArgumentError(f"{name} is {shard.dtype}; {edit.op} with {edit.value.dtype} would lose its value.")
    if edit.base is not None and (edit.base.shape != shard.shape or edit.rows is not None):
        raise InvalidArgumentError(f"{edit.op} of {name}: a base has to be of the whole shard, {tuple(shard.shape)}.")
    if shard.dtype == torch.bool and edit.op != "assign":
        raise InvalidArgumentError(f"{name} is {shard.dtype}, which can only be assigned; got {edit.op}.")
    if shard.is_complex() and edit.op in ("min", "max"):
        raise InvalidArgumentError(f"{name} is {shard.dtype}, which has no order; got {edit.op}.")
    if edit.rows is None:
        target = tuple(shard.shape)
    else:
        if shard.dim() == 0:
            raise InvalidArgumentError(f"{name} is a scalar and has no rows to {edit.op}.")
        check_rows(edit.rows, shard.shape[0], name, sorted_and_unique=False)
        target = (edit.rows.shape[0], *shard.shape[1:])
    try:
        fits = torch.broadcast_shapes(edit.value.shape, target) == target
    except RuntimeError:
        fits = False
    if not fits or (edit.rows is not None and tuple(edit.value.shape) != target):
        how = "broadcast to" if edit.rows is None else "have"
        raise InvalidArgumentError(
            f"{edit.op} of {name}: the value has shape {tuple(edit.value.shape)}, but must {how} {target}."
        )


def apply_edit(edit: ShardEdit, shards: HeldShards) -> bool:
    """Whether there was no conflict: with what another writer has changed meanwhile."""
    op, value = edit.op, edit.value.to(shards.tensor(edit.key).dtype)
    if shards.writer and op == "assign" and edit.rows is None and shards.is_parameter(edit.key):
        return _write_parameter(edit.key, value, shards)
    shard = shards.changing(edit.key, edit.rows)
    is_untouched = edit.base is None or is_same(edit.base, shard)
    if op == "move":
        op, value = ("assign", value) if is_untouched or edit.base is None else ("add", value - edit.base)
        is_untouched = True
    edits.apply_edit(shard, op, value, edit.rows)
    return is_untouched


def _write_parameter(key: ShardKey, value: torch.Tensor, shards: HeldShards) -> bool:
    """A function has written to a parameter by hand, or at least counted as if: see `apply_edit`."""
    is_fine = is_same(value, shards.tensor(key))
    if not is_fine:
        is_fine = shards.is_known(key)
        shards.changing(key).copy_(value)
    shards.give(key, shards.writer)  # it has what it has written
    return is_fine
