"""`SidecarEvaluator` with one replica per process: rank 0 looks and writes, all evaluate."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts
from tests.support.checkpoints import data_file
from torchstrat.errors import TorchstratError
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess

INPUTS = torch.arange(21.0).reshape(7, 3)
LOADER = DataLoader(TensorDataset(INPUTS, INPUTS[:, :1]), batch_size=3)  # 3, 3 and 1 rows for two replicas


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().squeeze(1)


def evaluate(top: str, strange: str) -> tuple[list[tuple[int, float]], list[str]]:
    """What this rank returned, and what it warned of or raised. One checkpoint is damaged, and another is deleted in
    front of rank 0."""
    strategy = ts.MirroredStrategy()
    restore, evaluations, error = ts.Checkpoint.restore, [], []

    def restored(self: ts.Checkpoint, path: Any) -> None:
        if Path(path).name == strange and strategy.is_chief:
            shutil.rmtree(path)
        restore(self, path)

    evaluator = ts.SidecarEvaluator(
        lambda: nn.Linear(3, 1),
        LOADER,
        f"{top}/checkpoints",
        metrics={"error": squared},
        strategy=strategy,
        log_dir=f"{top}/evaluation",
        tensorboard=False,
        poll_seconds=0.01,
    )
    with mock.patch.object(ts.Checkpoint, "restore", restored), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            evaluations = evaluator.start()
        except TorchstratError as raised:
            error.append(f"{type(raised).__name__}: {raised}")
    strategy.close()
    return [(one.step, one.metrics["error"]) for one in evaluations], [str(one.message) for one in caught] + error


def save(top: Path, step: int) -> None:
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, step)
    nn.init.zeros_(model.bias)
    ts.Checkpoint(model=model).save(top / "checkpoints" / f"step-{step:08d}")


def error_of(step: int) -> Any:
    return pytest.approx(float((INPUTS.sum(1) * step - INPUTS[:, 0]).square().mean()), rel=1e-6)


def test_all_evaluate_and_rank_0_writes(two_processes: Workers, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    file = data_file(tmp_path / "checkpoints" / "step-00000002")
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    (tmp_path / "checkpoints" / "finished.json").write_text('{"step": 4}')
    (first, warned), (second, quiet) = two_processes.run(evaluate, str(tmp_path), "step-00000003")
    assert first == second == [(1, error_of(1)), (4, error_of(4))]
    lines = [json.loads(line) for line in (tmp_path / "evaluation" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["metrics"]["error"]) for line in lines] == first
    assert [("step-00000002" in text, "damaged" in text) for text in warned] == [(True, True)]
    assert quiet == []
    assert [evaluations for evaluations, _ in two_processes.run(evaluate, str(tmp_path), "none")] == [[], []]


def test_a_failure_of_rank_0_is_one_of_all(two_processes: Workers, tmp_path: Path) -> None:
    """Another program's file is where results should be."""
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "metrics.jsonl").write_text("{}\n")
    (_, [first]), (_, [second]) = two_processes.run(evaluate, str(tmp_path), "none")
    assert first.startswith("InvalidArgumentError")
    assert "line 1, is not a SidecarEvaluator's" in first
    assert "failed on rank 0: InvalidArgumentError" in second
