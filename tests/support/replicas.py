"""Training cases of the contract in processes of a launch, and strategies with several replicas in this process."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.testing import contract
from torchstrat.testing.training import one_device


def cpus(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


STRATEGIES: Mapping[str, tuple[int, Callable[..., Any]]] = {
    **{f"mirrored x{count}": (count, partial(ts.MirroredStrategy, cpus(count))) for count in (1, 2, 3, 4)},
    "central x2": (2, partial(ts.CentralStorageStrategy, cpus(2), "cpu:2")),
    "central x3": (3, partial(ts.CentralStorageStrategy, cpus(3))),
    **{f"apart x{row.replicas}": (row.replicas, row.make) for row in contract.APART.values()},
}
"""Name → (replicas, how to make one). "apart" keeps the variables on a device of their own."""


@contextmanager
def opened(name: str, **options: Any) -> Iterator[Any]:
    """The strategy of that name, closed at the end."""
    strategy = STRATEGIES[name][1](**options)
    try:
        yield strategy
    finally:
        strategy.close()


def replica() -> int:
    """The number of the replica whose step calls this."""
    context = ts.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


class Held(nn.Module):
    """``change(module)`` is a step's work on its buffer, which begins as ``first``."""

    kept: torch.Tensor

    def __init__(self, first: torch.Tensor | None, change: Callable[[Held], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1))
        self.register_buffer("kept", first)
        self.change = change

    def forward(self) -> None:
        self.change(self)


def _begin_or_add(module: Held, value: torch.Tensor) -> None:
    module.kept = value if module.kept is None or module.kept.shape != value.shape else module.kept + 1


BUFFERS: Mapping[str, tuple[str, torch.Tensor | None, Callable[[Held], object], object]] = {
    "sum of what was none": ("sum", None, lambda m: _begin_or_add(m, torch.ones(()) + replica()), 5),
    "sum of what was none, equal": ("sum", None, lambda m: _begin_or_add(m, torch.ones(())), 4),
    "sum of another shape": ("sum", torch.ones(1), lambda m: _begin_or_add(m, torch.ones(2) + replica()), [5, 5]),
    "sum of what is infinite": ("sum", torch.tensor(float("inf")), lambda m: m.kept.add_(1), float("inf")),
    "sum of many": ("sum", torch.tensor(2**24 + 1), lambda m: m.kept.add_(1), 2**24 + 5),
    "sparse": ("mean", torch.eye(2).to_sparse(), lambda m: m.kept @ m.weight, [[1, 0], [0, 1]]),
    "sparse, other ones": (
        *("", torch.eye(2).to_sparse()),
        *(lambda m: setattr(m, "kept", m.kept * (2 + replica())), [[4, 0], [0, 4]]),
    ),
    "expanded": ("mean", torch.ones(1, 2).expand(2, 2), lambda m: m.kept @ m.weight, [[1, 1], [1, 1]]),
}
"""Name → (its aggregation if any is set, its first value, what a step does to it, what it is after two runs of two
replicas)."""


def buffer_after_two_runs(strategy: ts.Strategy, name: str) -> object:
    aggregation, first, change, _ = BUFFERS[name]
    with strategy.scope():
        module = Held(copy.deepcopy(first), change)
    if aggregation:
        strategy.extended.set_aggregation(module, "kept", aggregation)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if aggregation else "ignore")
        for _ in range(2):
            strategy.run(module)
    return module.kept.to_dense().tolist()


def own_buffers_after_a_failure(strategy: ts.Strategy) -> list[float]:
    """What replicas of this process have kept to themselves, after a run of three that raised."""
    with strategy.scope():
        module = Held(torch.zeros(()), lambda m: m.kept.add_(1 + replica()))
    strategy.extended.set_aggregation(module, "kept", "none")

    def step(*, fails: bool) -> torch.Tensor:
        module()
        ts.get_replica_context().all_reduce("sum", torch.zeros(()))  # type: ignore[union-attr]
        if fails:
            raise ValueError("for once")
        return module.kept.clone()

    strategy.run(step, kwargs={"fails": False})
    with pytest.raises(ValueError, match="for once"):
        strategy.run(step, kwargs={"fails": True})
    return [float(one) for one in strategy.local_results(strategy.run(step, kwargs={"fails": False}))]


def buffer_of_an_evaluated_module_after_a_failure(strategy: ts.Strategy) -> float:
    """After a run that has added 1 to it, and one that has and raised."""
    with strategy.scope():
        module = Held(torch.zeros(()), lambda m: m.kept.add_(1)).eval()
    strategy.run(module)

    def failing() -> None:
        module()
        ts.get_replica_context().all_reduce("sum", torch.zeros(()))  # type: ignore[union-attr]
        raise ValueError("for once")

    with pytest.raises(ValueError, match="for once"):
        strategy.run(failing)
    return float(module.kept)


EVERY_LINE = {
    *("sgd_momentum", "adam_foreach", "third_party_optimizer", "sharpness_aware", "group_added_in_step"),
    *("state_dict_round_trip", "everything_made_in_first_run", "sparse_adam", "lookahead_without_hooks", "lbfgs"),
    "lookahead_with_plain_hooks",
    *("closure_of_sgd", "gradient_noise_drawn_in_step", "update_by_hand", "parameter_decay_between_through_data"),
    *("weights_exchanged_as_a_vector", "accumulation_idle", "accumulated_sums_idle_clipped", "weight_tying"),
    *("weight_norm", "batch_norm", "batch_norm_cumulative", "sync_batch_norm", "sync_batch_norm_uneven"),
    *("channels_last", "lazy_in_run_drawn", "mixed_dtypes", "bare_parameters", "buffers_of_every_kind"),
    *("members_set_anew", "members_set_anew_beside_made", "pruned_further"),
    *("tensor_hooks", "func_grad", "frozen_then_unfrozen", "double_backward_across_all_reduce"),
    *("nested_reentrant_checkpoints", "backward_of_some_inputs", "sums_of_branches", "compiled"),
    *("unused_on_all_but_one_replica", "averaged_model_outside", "deepcopy_in_step", "parametrized_half_way"),
    *("lazy_layer_behind_the_hooks", "buffer_behind_the_hooks", "token_weighted", "average_loss"),
    *("all_gather_in_step", "lookahead", "parameter_made_in_forward"),
}
"""Cases that go through every line and branch of the library that all of them go through, in processes of any launch,
with ranks on the host or on devices."""

COMPILER = (
    pytest.mark.deadline(300),
    pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler"),
)
"""Marks of a case that needs one."""


def reference(case: contract.Case, replicas: int) -> contract.Snapshot | None:
    """As `contract.reference`, computed once in a process: of one device for any number of replicas."""
    return _reference(case.name, replicas if case.expected else None)


@cache
def _reference(name: str, replicas: int | None) -> contract.Snapshot | None:
    case = contract.CASES[name]
    return one_device(case, 1) if replicas is None else contract.reference(case, replicas)


def run_case(name: str, row_name: str) -> contract.Snapshot:
    """In a process of the row's launch. A warning is an error."""
    case = contract.CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r".torch\.jit\.")  # deprecated in newer PyTorch
        if case.needs_compiler:
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's modules that inductor imports late
        return contract.run_row(case, contract.TORCHRUN[row_name])


def check_processes(name: str, snapshots: list[contract.Snapshot]) -> None:
    """One replica per process: they agree, and have the numbers of one device."""
    case = contract.CASES[name]
    contract.check_agreement(case, snapshots)
    expected = reference(case, len(snapshots))
    for snapshot in snapshots:
        contract.check(case, snapshot, expected)
