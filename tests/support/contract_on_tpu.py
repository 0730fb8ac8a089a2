"""The training cases on the TPU strategy: the same steps and the same loop, looked at from outside of the step only.

A step is recorded before it runs, so nothing in it can look at values, and some cases do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchstrat.errors import ContextError, UnsupportedError
from torchstrat.strategies.strategy import Strategy
from torchstrat.testing.training import Case, Snapshot, named_losses, read, step_for

REFUSED: Mapping[str, type[Exception]] = {
    "lbfgs": ContextError,  # reads the loss
    "lbfgs_strong_wolfe": ContextError,
    "token_weighted": ContextError,  # float(tokens); a tensor is taken
    "unused_on_all_but_one_replica": ContextError,  # branches on the replica's number
    "unused_on_all_sometimes": ContextError,
    "lstm": UnsupportedError,  # global_view
    "torch_script": UnsupportedError,  # buffers
    "backward_hooks": UnsupportedError,  # functions that cannot be mapped
    "checkpoint_reentrant": UnsupportedError,
    "checkpoint_not_reentrant": UnsupportedError,
    "nested_reentrant_checkpoints": UnsupportedError,
    "sums_zeroed_in_place": UnsupportedError,  # picks rows by their values
    "sums_of_branches": ContextError,  # branches on the rows' values
}
"""Cases that are refused, and the error that says so."""

REFUSED_ON_DEVICES: Mapping[str, type[Exception]] = {}
"""Further ones where the variables are on devices: they read a variable or a gradient in the step."""

OTHER_NUMBERS: Mapping[str, str] = {"dropout": "replicas draw from another stream of random numbers"}


def run_case_on_tpu(case: Case, strategy: Strategy) -> Snapshot:
    """Train under a `TPUStrategy` and read everything the case watches, outside of `run`."""
    with case.conditions():
        with strategy.scope():
            training = case.build()
        losses: list[torch.Tensor] = []
        for index, batch in enumerate(strategy.distribute_dataset(case.batches())):
            training.before(index)
            result = strategy.run(step_for(training, index), args=(batch,))
            loss = strategy.reduce("mean", result, axis=0)
            training.after(index, loss)
            losses.append(loss)
        snapshot = {**named_losses(losses), **read(training.watch)}
        return snapshot | {f"{name} on replica 0": number for name, number in snapshot.items()}
