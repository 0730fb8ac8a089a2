"""Edits that go around version counters, as a sample of every parameter's bytes shows them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from torchstrat.replicas.edits import ParameterEdits
from torchstrat.replicas.roster import Roster


def summary(tensor: torch.Tensor) -> tuple[float, ...]:
    return ParameterEdits().summary(Roster.of({"it": tensor}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (64, 64), (1000, 333)], ids=str)
@pytest.mark.parametrize("parameter_class", [torch.nn.Parameter, type("Own", (torch.nn.Parameter,), {})])
def test_noise_is_noticed(shape: tuple[int, ...], dtype: torch.dtype, parameter_class: type) -> None:
    generator = torch.Generator().manual_seed(1)
    parameter = parameter_class(torch.rand(shape, generator=generator).to(dtype) + 1)
    before = summary(parameter)
    assert summary(parameter) == before
    parameter.data.mul_(1 + 4 * torch.finfo(dtype).eps)
    assert parameter._version == 0
    assert summary(parameter) != before


def test_control_what_is_far_from_the_sample_is_not() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 20))
    before = summary(parameter)
    parameter.data[3] = 1.0
    assert summary(parameter) == before


@pytest.mark.parametrize("what", ["empty", "meta", "transposed", "sparse", "fake", "given back"])
def test_what_has_no_plain_memory_is_left_alone(what: str) -> None:
    tensor = torch.rand(4, 6)
    if what == "empty":
        tensor = torch.empty(0)
    elif what == "meta":
        tensor = tensor.to("meta")
    elif what == "transposed":
        tensor = tensor.t()
    elif what == "sparse":
        tensor = tensor.to_sparse()
    elif what == "fake":
        with FakeTensorMode() as mode:
            tensor = mode.from_tensor(tensor)
    else:
        tensor.untyped_storage().resize_(0)  # as FSDP does
    assert summary(tensor) == summary(torch.empty(0))
