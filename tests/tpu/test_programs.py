"""What everyday programs met with torch_xla itself: copies, complex values, mixed precision, inference mode, edits."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import torchstrat as ts
from tests.migration import losses, program, run
from torchstrat import PerReplica
from torchstrat.errors import ContextError, UnsupportedError

pytestmark = [pytest.mark.tpu, pytest.mark.filterwarnings("default")]

VALUES = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)


def strategy_of(replicas: int, logical_devices: int = 1, **options: Any) -> ts.TPUStrategy:
    topology = ts.tpu.initialize_tpu_system()
    shape = [1, 1, 1, logical_devices]
    assignment = ts.tpu.DeviceAssignment.build(topology, computation_shape=shape, num_replicas=replicas)
    return ts.TPUStrategy(device_assignment=assignment, **options)


@pytest.mark.filterwarnings("error")
def test_the_program_of_the_guide_for_migration(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = run(program("tpu"))["strategy"]
    assert (strategy.num_replicas_in_sync, strategy.num_logical_devices) == (4, 2)
    found = losses(capsys.readouterr().out)
    assert len(found) == 15
    assert found[-1] < found[0] * 0.95


def test_copies_of_cut_variables() -> None:
    """The average's parameters have names that no rule matches: they are whole."""
    strategy = strategy_of(2, 2, sharding_rules={"0.weight": ("d0", None)})
    rows = torch.randn(4, 4)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with strategy.scope():
        average, other = AveragedModel(model), copy.deepcopy(model)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(batch), batch).backward()
        optimizer.step()

    before = model[0].weight.detach().cpu()
    strategy.run(step, args=(PerReplica(rows.chunk(2)),))
    average.update_parameters(model)
    assert torch.equal(other[0].weight.cpu(), before)
    assert not torch.equal(model[0].weight.cpu(), before)
    torch.testing.assert_close(average.module[0].weight.cpu(), model[0].weight.cpu())


def test_complex_values_reach_the_host() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        kept = nn.ParameterList([nn.Parameter(VALUES.clone())])
    on_devices = kept.state_dict()["0"]
    file = io.BytesIO()
    torch.save(kept.state_dict(), file)
    file.seek(0)
    for seen in (
        on_devices.cpu(),
        torch.empty_like(VALUES).copy_(on_devices),
        torch.tensor(on_devices.tolist(), dtype=torch.complex128),
        torch.load(file, map_location="cpu")["0"],
    ):
        assert torch.equal(seen, VALUES)
    assert on_devices[1].item() == VALUES[1].item()
    returned = strategy.run(lambda: kept[0] * 2)
    assert torch.equal(strategy.local_results(returned)[1].detach(), VALUES * 2)


LAYERS: dict[str, Callable[[torch.Tensor, nn.Module, nn.Module], torch.Tensor]] = {
    "linear": lambda x, linear, conv: linear(x),
    "convolution": lambda x, linear, conv: conv(x[:, None]),
    "einsum": lambda x, linear, conv: torch.einsum("bi,ci->bc", x, x),
    "matmul": lambda x, linear, conv: x @ x.t(),
    "attention": lambda x, linear, conv: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "addmm": lambda x, linear, conv: torch.addmm(x, x, linear.weight),
    "mv": lambda x, linear, conv: torch.mv(x, x[0]),
    "losses": lambda x, linear, conv: F.cross_entropy(linear(x), torch.zeros(len(x), dtype=torch.long)),
    "softmax": lambda x, linear, conv: torch.softmax(linear(x), -1),
}


def test_autocast_is_that_of_a_step_that_is_not_mapped() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        linear, conv = nn.Linear(8, 8), nn.Conv1d(1, 4, 3)
    x = PerReplica((torch.randn(2, 8), torch.randn(2, 8)))

    def dtypes(**options: Any) -> dict[str, torch.dtype]:
        seen: dict[str, torch.dtype] = {}

        def step(rows: torch.Tensor) -> torch.Tensor:
            with torch.autocast(rows.device.type, torch.bfloat16):
                seen.update({name: layer(rows, linear, conv).dtype for name, layer in LAYERS.items()})
            return rows.sum()

        strategy.run(step, args=(x,), options=ts.RunOptions(**options))
        return seen

    found = dtypes()
    assert found == dtypes(global_view=True)
    assert set(found.values()) == {torch.bfloat16, torch.float32}


def test_autocast_of_the_host_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    with pytest.raises(ContextError, match=r"torch\.autocast\(x\.device\.type"):
        strategy_of(2).run(step, args=(PerReplica((torch.ones(2, 2), torch.ones(2, 2))),))


def test_inference_mode_and_kept_tensors() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = nn.Linear(4, 2).double().eval()
    x = PerReplica((torch.ones(2, 4).double(), torch.zeros(2, 4).double()))
    kept: list[torch.Tensor] = []

    def evaluate(rows: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            kept.append(model(rows))
            return kept[0]

    seen = strategy.local_results(strategy.run(evaluate, args=(x,)))
    weight, bias = model.weight.detach().cpu(), model.bias.detach().cpu()
    torch.testing.assert_close(seen[0], F.linear(x.values[0], weight, bias))
    with pytest.raises(UnsupportedError, match="Return it from the step"):
        kept[0].sum()


class Counting(nn.Module):
    """Its buffers begin at 1; a replica's rows are 0, 1 and 2, 3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("total", torch.tensor(1.0))
        self.register_buffer("rows", torch.tensor(1))


EDITS = {
    "total": lambda model, x: model.total.add_(x.sum()),
    "rows": lambda model, x: model.rows.add_(x.sum().long()),
    "weight": torch.no_grad()(lambda model, x: model.weight.add_(x.sum())),
}


@pytest.mark.parametrize(
    ("aggregation", "becomes", "warns"),
    [
        (
            None,
            [4.0, 2, 2.0],
            ["'total' .* is their mean", "'rows' .* is the first replica's", r"changed Counting\.weight"],
        ),
        ("sum", [7.0, 7, 2.0], [r"changed Counting\.weight"]),
        ("only_first_replica", [2.0, 2, 2.0], [r"changed Counting\.weight"]),
        ("none", None, []),
    ],
)
def test_what_replicas_change_differently(aggregation: str | None, becomes: list[Any], warns: list[str]) -> None:
    """On every strategy; here an operand that differs between replicas is what tells."""
    strategy = strategy_of(2)
    with strategy.scope():
        model = Counting()
    for name in ("total", "rows") if aggregation is not None else ():
        strategy.extended.set_aggregation(model, name, aggregation)
    rows = PerReplica([torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])])

    def step(x: torch.Tensor) -> None:
        for edit in EDITS.values():
            edit(model, x)

    if becomes is None:
        with pytest.raises(UnsupportedError, match=r"'total', 'none'.*one for all of them"):
            strategy.run(step, args=(rows,))
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        strategy.run(step, args=(rows,))
    assert [getattr(model, name).item() for name in EDITS] == becomes
    texts = [str(one.message) for one in said if "replica" in str(one.message)]
    assert len(texts) == len(warns), texts
    assert all(any(re.search(pattern, text) for text in texts) for pattern in warns), texts


@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_come_to_the_devices_while_programs_run(replicas: int) -> None:
    """Of one replica they were zeros now and then, one of some thousand: `XlaRuntime.replicate`."""
    strategy = strategy_of(replicas, 2)
    batches = [(torch.full((4, 2), float(index)), torch.tensor([index] * 4), torch.rand(4, 1, 2, 1, 1, 2) + index)
               for index in range(300)]  # fmt: skip

    def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.stack([one.sum(dtype=torch.float64) for one in batch])

    found = [
        strategy.reduce("sum", strategy.run(step, args=(batch,)))
        for batch in strategy.distribute_dataset(list(batches))
    ]
    torch.testing.assert_close([one.cpu() for one in found], [step(batch) for batch in batches])
