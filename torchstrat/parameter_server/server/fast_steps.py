"""Steps of the two optimizers that tables are trained with most, without making an optimizer.

The general way (`shard_optimizer`, and `row_optimizer` for rows) makes parameters of what is stepped, and an optimizer
around them. Here is only what remains for `torch.optim.SGD` without momentum, and for rows stepped by
`torch.optim.Adagrad`: the same operators in the same order, so that the results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from torchstrat.parameter_server.messages import ShardKey
from torchstrat.parameter_server.server.held import HeldShards
from torchstrat.parameter_server.variables.edits import put_rows

Options: TypeAlias = Mapping[str, Any]
FastStep: TypeAlias = Callable[[HeldShards, ShardKey, int, torch.Tensor | None, torch.Tensor, Options], bool]
"""(shards, which of them, optimizer's number, ids ``(n,)`` sorted and unique, gradient ``(n, …)``, hyperparameters) →
whether it was done; if not, nothing has changed. Without ids it is a step of the whole shard."""


def fast_step_of(cls: type[torch.optim.Optimizer]) -> FastStep | None:
    """For this very class; one derived from it may do anything."""
    return _FAST.get(cls)


def _sgd(
    shards: HeldShards,
    key: ShardKey,
    optimizer: int,
    ids: torch.Tensor | None,
    gradient: torch.Tensor,
    options: Options,
) -> bool:
    if options.get("momentum", 0) != 0 or not _is_plain(options, gradient):
        return False
    values = shards.changing(key, ids)
    if ids is None:
        values.add_(gradient, alpha=-options["lr"])
    else:
        put_rows(values, ids, values.index_select(0, ids).add_(gradient, alpha=-options["lr"]))
    return True


def _adagrad(
    shards: HeldShards,
    key: ShardKey,
    optimizer: int,
    ids: torch.Tensor | None,
    gradient: torch.Tensor,
    options: Options,
) -> bool:
    known = shards.state(key, optimizer)
    if ids is None or known is None or not _is_plain(options, gradient):
        return False  # the first step makes the state, and large shards are stepped in blocks
    table = shards.changing(key, ids)
    state = shards.changing_state(key, optimizer, ids, ("sum",))
    assert state is not None
    state["step"] += 1
    rate = options["lr"] / (1 + (float(state["step"]) - 1) * options["lr_decay"])
    sums = state["sum"].index_select(0, ids).addcmul_(gradient, gradient, value=1)
    put_rows(state["sum"], ids, sums)
    rows = table.index_select(0, ids).addcdiv_(gradient, sums.sqrt_().add_(options["eps"]), value=-rate)
    put_rows(table, ids, rows)
    return True


def _is_plain(options: Options, gradient: torch.Tensor) -> bool:
    """Without what makes other operators of it; ``fused`` rounds differently."""
    usual = not any(options.get(name) for name in ("weight_decay", "maximize", "fused"))
    return usual and isinstance(options["lr"], float) and not gradient.is_complex()


_FAST: dict[type[torch.optim.Optimizer], FastStep] = {torch.optim.SGD: _sgd, torch.optim.Adagrad: _adagrad}
