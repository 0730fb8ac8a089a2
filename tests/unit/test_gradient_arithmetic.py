"""How replicas' gradients are added up where their numbers, or their memory, leave little room."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

import torchstrat as ts

CPUS = ["cpu:0", "cpu:1"]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
def test_a_mean_in_half_precision_exists_where_the_sum_does_not(sizes):
    """In a step with single precision beside it, and with weights of the replicas."""
    with closing(ts.MirroredStrategy(CPUS)) as strategy:
        with strategy.scope():
            half, single = (torch.zeros(2, dtype=dtype) for dtype in (torch.float16, torch.float32))
            model = torch.nn.ParameterDict({"sixteen": half, "thirty_two": single})

        def step():
            context = ts.get_replica_context()
            context.set_weight(sizes[context.replica_id_in_sync_group])
            ((model["sixteen"] * 40_000.0).sum() + (model["thirty_two"] * 3.0).sum()).backward()

        strategy.run(step)
    assert torch.equal(model["sixteen"].grad, torch.full((2,), 40_000.0, dtype=torch.float16))
    assert torch.equal(model["thirty_two"].grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("call", ["all_gather", "all_reduce"])
def test_a_replica_of_weight_0_sends_no_nan_back(call):
    with closing(ts.MirroredStrategy(CPUS)) as strategy:
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


@pytest.mark.parametrize("what", ["scaled", "zeroed", "assigned"])
def test_sums_that_are_new_since_a_step_that_a_replica_sat_out(what):
    """What the others have alike it has too; to parts of theirs it has nothing to add."""
    with closing(ts.MirroredStrategy([*CPUS, "cpu:2"], gradient_reduce_op="sum")) as strategy:
        with strategy.scope():
            weight = torch.nn.Parameter(torch.ones(2))
            optimizer = torch.optim.SGD([weight], lr=1.0)

        def step(x):
            (weight * x).sum().backward()
            optimizer.step()
            if what == "assigned":
                weight.grad = x.sum(0)
            else:
                weight.grad.mul_(0.5 if what == "scaled" else 0.0)

        batches = [torch.ones(3, 2), torch.tensor([[1.0, 1.0], [3.0, 3.0]])]
        for batch in strategy.distribute_dataset(batches):
            strategy.run(step, args=(batch,))
        found = strategy.experimental_local_results(strategy.run(lambda: weight.grad.clone()))
        wanted = {"scaled": [2.75, 2.75, 2.75], "zeroed": [0.0, 0.0, 0.0], "assigned": [1.0, 3.0, 0.0]}[what]
        assert [gradient.tolist() for gradient in found] == [[value, value] for value in wanted]
