"""How replicas' gradients are added up where their numbers, or their memory, leave little room."""

from __future__ import annotations

import pytest
import torch

import torchstrat as ts
from tests.unit.in_process_strategies import opened
from torchstrat import gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("factors", [(0.5, 0.5), (0.25, 0.75)])
def test_a_mean_in_half_precision_exists_where_the_sum_does_not(dtype, factors):
    columns = [[torch.full((3,), 40_000.0, dtype=dtype)] for _ in factors]
    gradients.combine_in_place(columns, factors)
    assert all(torch.equal(column[0], torch.full((3,), 40_000.0, dtype=dtype)) for column in columns)


def test_half_precision_beside_others_in_a_step():
    with opened("mirrored x2") as strategy:
        with strategy.scope():
            half, single = (torch.zeros(2, dtype=dtype) for dtype in (torch.float16, torch.float32))
            model = torch.nn.ParameterDict({"sixteen": half, "thirty_two": single})

        def step():
            ((model["sixteen"] * 40_000.0).sum() + (model["thirty_two"] * 3.0).sum()).backward()

        strategy.run(step)
    assert torch.equal(model["sixteen"].grad, torch.full((2,), 40_000.0, dtype=torch.float16))
    assert torch.equal(model["thirty_two"].grad, torch.full((2,), 3.0))


FLAT = torch.zeros(10)


@pytest.mark.parametrize(
    ("tensors", "shared"),
    [
        ([FLAT[:4], FLAT[4:]], False),
        ([FLAT[:5], FLAT[4:]], True),
        ([FLAT, FLAT], True),
        ([FLAT, FLAT[2:3]], True),
        ([FLAT[8:], FLAT[:2], FLAT[2:8]], False),
    ],
)
def test_shared_memory(tensors, shared):
    assert gradients.share_memory(tensors) is shared


@pytest.mark.parametrize("call", ["all_gather", "all_reduce"])
def test_a_replica_of_weight_0_sends_no_nan_back(call):
    with opened("mirrored x2") as strategy:
        with strategy.scope():
            model = torch.nn.ParameterDict({"scale": torch.ones(2)})

        def step():
            context = ts.get_replica_context()
            is_first = context.replica_id_in_sync_group == 0
            context.set_weight(1.0 if is_first else 0.0)
            own = model["scale"] * 2.0
            shared = context.all_gather(own, 0) if call == "all_gather" else context.all_reduce("sum", own)
            (shared * (3.0 if is_first else float("nan"))).sum().backward()

        strategy.run(step)
    assert torch.equal(model["scale"].grad, torch.full((2,), 6.0))
