"""Every training case with two replicas of two processes each: numbers of the replica axis, whatever is cut."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.dtensor.cut_tensor import CutTensor
from torchstrat.dtensor.parameters import CutVariables
from torchstrat.sharding.grid import Sharding
from torchstrat.testing import Workers, contract, training

pytestmark = pytest.mark.multiprocess

RAISE_WHERE_CUT = {
    # optimizers, and what is done to gradients
    *("adafactor", "third_party_optimizer", "sparse_adam", "lbfgs", "lbfgs_strong_wolfe", "closure_of_sgd"),
    *("clip_twice", "gradient_noise", "gradient_noise_drawn_in_step", "grad_scaler", "grad_scaler_overflow"),
    *("grad_scaler_clip_overflow", "tensor_hooks", "gradient_penalty", "assigned_gradients"),
    *("assigned_gradients_in_place", "func_grad"),
    # writing to parameters, copying and replacing them
    *("parameter_decay_first", "parameter_decay_last", "parameter_decay_through_data", "parameter_decay_between"),
    *("parameter_clamp", "moving_average_in_step", "moving_average_outside", "averaged_model_in_step"),
    *("averaged_model_outside", "deepcopy_in_step", "deepcopy_kept_between_steps", "assigned_state_dict"),
    *("pruned_half_way", "edited_between_steps", "evaluated_between_steps"),
    # operators
    *("lstm", "transformer_encoder", "weight_norm", "channels_last", "compiled"),
    # variables made in a run, which are cut after it only: the case reads them before
    *("built_in_run", "built_in_run_drawn"),
}
CASES = [case for case in contract.CASES.values() if not case.needs_compiler]
PARTS = [[case.name for case in CASES[start::4]] for start in range(4)]


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Workers]:
    with Workers(4, timeout_seconds=300) as workers:
        yield workers


_CUT: set[tuple[int, ...]] = set()
"""Shapes of what has been cut in this process."""


def planned(variables: CutVariables, tensor: torch.Tensor) -> Sharding:
    """Weights are cut along their inputs if these are even, as the first layer's are."""
    known = variables.find(tensor)
    if known is not None:
        return known.sharding
    if isinstance(tensor, nn.Parameter) and tensor.ndim > 1 and tensor.shape[1] % 2 == 0:
        _CUT.add(tuple(tensor.shape))
        return Sharding((2,), tuple(("d0",) if dim == 1 else () for dim in range(tensor.ndim)))
    return Sharding.replicated(tensor.ndim, 2)


def numbers(value: Any, plain: Any = training._numbers) -> dict[str, Any]:
    """Of a model with variables that are cut, all of these."""
    if not isinstance(value, nn.Module):
        return plain(value)  # type: ignore[no-any-return]
    found = {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if any(isinstance(one, CutTensor) for one in found.values()):  # read in a run
        return {name: one.full_tensor() if isinstance(one, CutTensor) else one for name, one in found.items()}
    return {name: one for name, one in value.state_dict(keep_vars=False).items() if name in found}


def run_cases(names: list[str]) -> list[contract.Snapshot]:
    row = contract.Row("2x2", 2, lambda **options: ts.MirroredStrategy(logical_devices_per_replica=2, **options))
    warnings.simplefilter("error")
    found = []
    for name in names:
        if name in RAISE_WHERE_CUT:
            found.append(contract.run_row(contract.CASES[name], row))
            continue
        with mock.patch.object(CutVariables, "planned", planned), mock.patch.object(training, "_numbers", numbers):
            found.append(contract.run_row(contract.CASES[name], row))
    assert (5, 6) in _CUT  # the first layer of most models
    return found


@pytest.mark.parametrize("part", [0, *[pytest.param(part, marks=pytest.mark.soak) for part in range(1, len(PARTS))]])
def test_numbers_of_one_device(part: int, four_processes: Workers) -> None:
    of_ranks = four_processes.run(run_cases, PARTS[part])
    for number, name in enumerate(PARTS[part]):
        case = contract.CASES[name]
        snapshots = [snapshots[number] for snapshots in of_ranks]
        contract.check_agreement(case, snapshots)
        expected = contract.reference(case, 2)
        for snapshot in snapshots:
            contract.check(case, snapshot, expected)
