"""`ts.Checkpoint` with one replica per process: rank 0 writes, all read, and none goes on alone."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat import Checkpoint
from torchstrat.errors import InvalidArgumentError, TorchstratError
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2)).double()
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}


def strategy_of(kind: str) -> ts.Strategy:
    return ts.CentralStorageStrategy() if kind == "central" else ts.MirroredStrategy()


def train(strategy: ts.Strategy, objects: dict[str, Any], steps: int) -> list[torch.Tensor]:
    def step() -> None:
        objects["optimizer"].zero_grad()
        objects["model"](torch.arange(6)).square().mean().backward()
        objects["optimizer"].step()

    for _ in range(steps):
        strategy.run(step)
    return [parameter.detach().clone() for parameter in objects["model"].parameters()]


def save_and_go_on(kind: str, path: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    strategy = strategy_of(kind)
    with strategy.scope():
        objects = make(0)
        seen = ts.Variable(
            0.0, aggregation=ts.VariableAggregation.SUM, synchronization=ts.VariableSynchronization.ON_READ
        )
    saved = train(strategy, objects, 2)
    strategy.run(lambda: seen.assign_add(torch.tensor(1.0)))
    Checkpoint(**objects, seen=seen).save(path)
    assert os.path.isfile(os.path.join(path, ".metadata"))  # every rank sees it when save returns
    later = train(strategy, objects, 2)
    strategy.close()
    return saved, later


def restore_and_go_on(kind: str, path: str) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    strategy = strategy_of(kind)
    with strategy.scope():
        objects = make(1)
        seen = ts.Variable(
            0.0, aggregation=ts.VariableAggregation.SUM, synchronization=ts.VariableSynchronization.ON_READ
        )
    Checkpoint(**objects, seen=seen).restore(path)
    restored = [parameter.detach().clone() for parameter in objects["model"].parameters()]
    later = train(strategy, objects, 2)
    total = float(seen.read_value())
    strategy.close()
    return restored, later, total


@pytest.mark.parametrize(
    ("before", "after"), [("mirrored", "mirrored"), ("central", "central"), ("central", "mirrored")]
)
def test_from_strategy_to_strategy(before: str, after: str, two_processes: Workers, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    runs = two_processes.run(save_and_go_on, before, path)
    assert os.listdir(tmp_path) == ["saved"]
    for (saved, later), (restored, again, total) in zip(
        runs, two_processes.run(restore_and_go_on, after, path), strict=True
    ):
        assert all(map(torch.equal, saved, restored))
        assert all(map(torch.equal, later, again))
        assert not any(map(torch.equal, saved, later))
        assert total == 2.0


def test_one_process_restores_it(two_processes: Workers, tmp_path: Path) -> None:
    [(saved, later), _] = two_processes.run(save_and_go_on, "central", str(tmp_path / "saved"))
    objects = make(1)
    Checkpoint(**objects).restore(tmp_path / "saved")
    assert all(map(torch.equal, saved, objects["model"].parameters()))
    # Both replicas saw the same rows, so one of them alone makes the same steps.
    strategy = ts.OneDeviceStrategy("cpu:0")
    again = train(strategy, objects, 2)
    strategy.close()
    assert all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(later, again, strict=True))


def quantized(numbers: list[float], scale: float) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.quantize_per_tensor(torch.tensor(numbers), scale, 1, torch.qint8))
    return module


def keep_quantized(path: str) -> tuple[list[float], list[float], float]:
    warnings.simplefilter("ignore")  # torch deprecates them
    strategy = ts.MirroredStrategy()
    own = strategy.is_chief
    with strategy.scope():  # as in any creation, the first rank's are those of all
        saved = quantized([0.5, -0.5] if own else [9.0, 9.0], 0.1 if own else 0.7)
        fresh = quantized([0.0, 0.0], 0.3)
    strategy.run(lambda: saved(torch.ones(1, 2)))
    strategy.extended.check_replicas()
    Checkpoint(model=saved).save(path)
    Checkpoint(model=fresh).restore(path)
    strategy.close()
    return saved.table.dequantize().tolist(), fresh.table.dequantize().tolist(), fresh.table.q_scale()


def test_quantized_buffers(two_processes: Workers, tmp_path: Path) -> None:
    for saved, restored, scale in two_processes.run(keep_quantized, str(tmp_path / "saved")):
        assert saved == restored == pytest.approx([0.5, -0.5])
        assert scale == 0.1


def keep_expanded(path: str) -> list[list[float]]:
    """A buffer of which one row is in memory, and stands for all."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Linear(2, 2)
        model.register_buffer("row", torch.tensor([1.0, 2.0] if strategy.is_chief else [9.0, 9.0]).expand(3, 2))
    strategy.run(lambda: model(torch.ones(1, 2)) + model.row.sum())
    strategy.extended.check_replicas()
    Checkpoint(model=model).save(path)
    strategy.close()
    return model.row.tolist()


def test_expanded_buffers(two_processes: Workers, tmp_path: Path) -> None:
    assert two_processes.run(keep_expanded, str(tmp_path / "saved")) == [[[1.0, 2.0]] * 3] * 2


def fail_together(path: str) -> list[str]:
    """Rank 1 cannot see what rank 0 sees; both learn it."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        objects = make(0)
    Checkpoint(**objects).save(path)
    before = [parameter.detach().clone() for parameter in objects["model"].parameters()]
    train(strategy, objects, 1)
    moved = [parameter.detach().clone() for parameter in objects["model"].parameters()]
    messages = []
    try:
        Checkpoint(**objects).restore(path if strategy.is_chief else path + "-nowhere")
    except TorchstratError as error:
        messages.append(f"{type(error).__name__}: {error}")
    assert all(map(torch.equal, moved, objects["model"].parameters()))
    try:
        Checkpoint(**objects).save(os.path.join(path, ".metadata", "below"))
    except TorchstratError as error:
        messages.append(f"{type(error).__name__}: {error}")
    Checkpoint(**objects).restore(path)
    assert all(map(torch.equal, before, objects["model"].parameters()))
    strategy.close()
    return messages


def test_a_failure_on_one_rank_is_one_on_all(two_processes: Workers, tmp_path: Path) -> None:
    first, second = two_processes.run(fail_together, str(tmp_path / "saved"))
    assert first[0].startswith("TorchstratError: restoring")
    assert "failed on rank 1: InvalidArgumentError: there is no checkpoint at" in first[0]
    assert second[0].startswith(f"{InvalidArgumentError.__name__}: there is no checkpoint at")
    assert first[1].startswith(f"{InvalidArgumentError.__name__}: no checkpoint can be written")
    assert "failed on rank 0: InvalidArgumentError: no checkpoint can be written" in second[1]
