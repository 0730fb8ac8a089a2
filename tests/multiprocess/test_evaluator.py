"""`SidecarEvaluator` with one replica per process: rank 0 looks and writes, all evaluate."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts
from torchstrat.checkpoint.finished import mark_finished
from torchstrat.errors import TorchstratError
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess

INPUTS = torch.arange(21.0).reshape(7, 3)


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().squeeze(1)


def evaluate(top: str, strange: str) -> tuple[list[tuple[int, float]], list[str]]:
    """What this rank returned and warned of. One checkpoint is damaged, and another is deleted in front of rank 0."""
    strategy = ts.MirroredStrategy()
    restore = ts.Checkpoint.restore

    def restored(self: ts.Checkpoint, path: Any) -> None:
        if Path(path).name == strange and strategy.is_chief:
            shutil.rmtree(path)
        restore(self, path)

    ts.Checkpoint.restore = restored  # type: ignore[method-assign]
    loader = DataLoader(TensorDataset(INPUTS, INPUTS[:, :1]), batch_size=3)  # 3, 3 and 1 rows for two replicas
    evaluator = ts.SidecarEvaluator(
        lambda: nn.Linear(3, 1),
        loader,
        f"{top}/checkpoints",
        metrics={"error": squared},
        strategy=strategy,
        log_dir=f"{top}/evaluation",
        tensorboard=False,
        poll_seconds=0.01,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluations = evaluator.start()
    strategy.close()
    return [(one.step, one.metrics["error"]) for one in evaluations], [str(warning.message) for warning in caught]


def save(top: Path, step: int) -> None:
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, step)
    nn.init.zeros_(model.bias)
    ts.Checkpoint(model=model).save(top / "checkpoints" / f"step-{step:08d}")


def error_of(step: int) -> float:
    return float((INPUTS.sum(1) * step - INPUTS[:, 0]).square().mean())


def test_all_evaluate_and_rank_0_writes(two_processes: Workers, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (file,) = (tmp_path / "checkpoints" / "step-00000002").glob("*.distcp")
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    mark_finished(tmp_path / "checkpoints", 4)
    (first, warned), (second, quiet) = two_processes.run(evaluate, str(tmp_path), "step-00000003")
    assert first == second
    assert [step for step, _ in first] == [1, 4]
    assert [error for _, error in first] == pytest.approx([error_of(1), error_of(4)], rel=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "evaluation" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["metrics"]["error"]) for line in lines] == first
    assert [("step-00000002" in text, "damaged" in text) for text in warned] == [(True, True)]
    assert quiet == []
    again = two_processes.run(evaluate, str(tmp_path), "none")
    assert [evaluations for evaluations, _ in again] == [[], []]


def fail(top: str) -> str:
    """Of rank 0 alone: another program's file is where results should be."""
    strategy = ts.MirroredStrategy()
    evaluator = ts.SidecarEvaluator(
        lambda: nn.Linear(3, 1), [INPUTS], top, metrics={"error": squared}, strategy=strategy, log_dir=top
    )
    try:
        evaluator.start()
    except TorchstratError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.close()
    return "nothing"


def test_a_failure_of_rank_0_is_one_of_all(two_processes: Workers, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    first, second = two_processes.run(fail, str(tmp_path))
    assert first.startswith("InvalidArgumentError")
    assert "line 1, is not a SidecarEvaluator's" in first
    assert "failed on rank 0: InvalidArgumentError" in second
