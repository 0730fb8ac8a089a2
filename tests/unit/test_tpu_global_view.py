"""`RunOptions(global_view=True)`: a step that sees the replicas' batches as one, as plain PyTorch would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import fake_tpu, here, own, rows_of
from torchstrat.errors import ContextError, UnsupportedError

GLOBAL = ts.RunOptions(global_view=True)


class LastOutput(nn.Module):
    """The last output of an LSTM over three numbers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.lstm(x.unsqueeze(-1))[0][:, -1])
        return result


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def training(make: Callable[[], nn.Module], batches: list[Any], run: Callable[[Any, Any], Any]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model = make().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [run(step, batch) for batch in batches]
    return [*losses, *(one.detach() for one in model.state_dict().values())]


@pytest.mark.parametrize("make", [LastOutput, normalised])
@pytest.mark.parametrize("counts", [[(2, 2), (2, 2)], [(4, 4), (3, 1), (2, 0)]])
def test_numbers_of_plain_training(make: Callable[[], nn.Module], counts: list[tuple[int, int]]) -> None:
    batches = [rows_of(one, seed=seed) for seed, one in enumerate(counts)]
    plain = training(make, [torch.cat(one.values) for one in batches], lambda step, x: step(x))
    with fake_tpu(2) as strategy:

        def made() -> nn.Module:
            with strategy.scope():
                return make().double()

        found = training(made, batches, lambda step, x: strategy.run(step, args=(x,), options=GLOBAL))
    for mine, wanted in zip(found, plain, strict=True):
        assert type(mine) in (torch.Tensor, nn.Parameter)
        torch.testing.assert_close(mine, wanted)


def test_inputs_are_joined() -> None:
    def step(x: torch.Tensor, shared: torch.Tensor, more: Any, *, flag: bool) -> Any:
        return x, shared, more["numbers"], flag

    with fake_tpu(2) as strategy:
        shared = torch.ones(3)
        rows = rows_of((2, 1))
        x, same, numbers, flag = strategy.run(
            step, args=(rows, shared, {"numbers": own([1], [2])}), kwargs={"flag": True}, options=GLOBAL
        )
        assert torch.equal(x, torch.cat(rows.values))
        assert same is shared
        assert numbers.tolist() == [1, 2]
        assert flag is True


def test_a_batch_that_an_earlier_run_made() -> None:
    with fake_tpu(2) as strategy:
        made = strategy.run(lambda x: x * 2, args=(own([1.0, 2.0], [3.0, 4.0]),))
        assert strategy.run(lambda x: x + 1, args=(made,), options=GLOBAL).tolist() == [3, 5, 7, 9]


def test_numbers_that_differ_are_no_batch() -> None:
    with fake_tpu(2) as strategy, pytest.raises(UnsupportedError, match="single numbers that differ between replicas"):
        strategy.run(lambda x: x, args=(own(1.0, 2.0),), options=GLOBAL)


@pytest.mark.parametrize(
    "call",
    [
        lambda: here().all_reduce("sum", torch.ones(1)),
        lambda: here().all_gather(torch.ones(1), axis=0),
        lambda: here().merge_call(lambda strategy: None),
    ],
)
def test_there_are_no_collectives(call: Callable[[], Any]) -> None:
    with fake_tpu(2) as strategy:
        with pytest.raises(ContextError, match="with global_view=True a step sees all replicas' rows already"):
            strategy.run(call, options=GLOBAL)
        assert strategy.run(lambda: 1) == 1


def test_annotations_in_the_global_view() -> None:
    with fake_tpu(2, 2) as strategy:
        x = rows_of((2, 2), columns=4)
        result = strategy.run(lambda x: strategy.split_to_logical_devices(x, [1, 2]) * 2, args=(x,), options=GLOBAL)
        assert torch.equal(result, 2 * torch.cat(x.values))


def test_replicas_without_rows_add_none() -> None:
    calls: list[int] = []
    with fake_tpu(2) as strategy:
        strategy.run(lambda x: calls.append(len(x)), args=(rows_of((2, 0)),), options=GLOBAL)
        strategy.run(lambda x: calls.append(len(x)), args=(rows_of((0, 0)),), options=GLOBAL)
    assert calls == [2]


def test_options_are_told_apart() -> None:
    assert ts.RunOptions() != GLOBAL
    assert hash(ts.RunOptions()) != hash(GLOBAL)
    assert "global_view=True" in repr(GLOBAL)
    assert "global_view" not in repr(ts.RunOptions())


def test_other_strategies_take_no_notice_of_it() -> None:
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    result = strategy.run(lambda x: x.sum(), args=(own([1.0], [2.0]),), options=GLOBAL)
    assert [float(one) for one in result.values] == [1, 2]
    strategy.close()
