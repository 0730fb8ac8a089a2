"""Rows of a table stepped by the two optimizers that tables are trained with most, without making an optimizer.

The general way (`row_optimizer`) makes a parameter of the rows, and an optimizer around it. Here is only what remains
for `torch.optim.SGD` without momentum and for `torch.optim.Adagrad`: the same operators in the same order, so that the
results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from torchstrat.parameter_server.messages import ShardKey
from torchstrat.parameter_server.server.held import HeldShards

Options: TypeAlias = Mapping[str, Any]
FastStep: TypeAlias = Callable[[HeldShards, ShardKey, int, torch.Tensor, torch.Tensor, Options], bool]
"""(shards, table, optimizer's number, ids ``(n,)`` sorted and unique, gradient ``(n, …)``, hyperparameters) → whether
it was done; if not, nothing has changed."""


def fast_step_of(cls: type[torch.optim.Optimizer]) -> FastStep | None:
    """For this very class; one derived from it may do anything."""
    return _FAST.get(cls)


def _sgd(
    shards: HeldShards, key: ShardKey, optimizer: int, ids: torch.Tensor, gradient: torch.Tensor, options: Options
) -> bool:
    if options.get("momentum", 0) != 0 or not _is_plain(options, gradient):
        return False
    table = shards.changing(key, ids)
    table.index_copy_(0, ids, table.index_select(0, ids).add_(gradient, alpha=-options["lr"]))
    return True


def _adagrad(
    shards: HeldShards, key: ShardKey, optimizer: int, ids: torch.Tensor, gradient: torch.Tensor, options: Options
) -> bool:
    known = shards.state(key, optimizer)
    if known is None or not _is_plain(options, gradient):
        return False  # the first step makes the state
    table = shards.changing(key, ids)
    state = shards.changing_state(key, optimizer, ids, ("sum",))
    assert state is not None
    state["step"] += 1
    rate = options["lr"] / (1 + (float(state["step"]) - 1) * options["lr_decay"])
    sums = state["sum"].index_select(0, ids).addcmul_(gradient, gradient, value=1)
    state["sum"].index_copy_(0, ids, sums)
    rows = table.index_select(0, ids).addcdiv_(gradient, sums.sqrt_().add_(options["eps"]), value=-rate)
    table.index_copy_(0, ids, rows)
    return True


def _is_plain(options: Options, gradient: torch.Tensor) -> bool:
    usual = not options.get("weight_decay", 0) and not options.get("maximize", False)
    return usual and isinstance(options["lr"], float) and not gradient.is_complex()


_FAST: dict[type[torch.optim.Optimizer], FastStep] = {torch.optim.SGD: _sgd, torch.optim.Adagrad: _adagrad}
