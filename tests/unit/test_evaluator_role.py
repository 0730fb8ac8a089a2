"""``scripts/train.py`` in the evaluator's role, without processes: what it evaluates, and when it refuses to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.choices import chosen
from torchstrat.app import build, data, train
from torchstrat.app.config import experiment_from_mapping
from torchstrat.app.launch import Run
from torchstrat.app.loop import loss_of, planned_steps, score
from torchstrat.checkpoint.numbered import mark_finished
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.errors import CommunicationTimeoutError, InvalidArgumentError

EVALUATOR = json.dumps({"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "evaluator", "index": 0}})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of a few rows, by its settings; this process is its evaluator."""
    rows = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    rows[:, -1] = (rows[:, 0] > 0).float()
    (tmp_path / "rows.csv").write_text("\n".join(",".join(map(str, row)) for row in rows.tolist()))
    monkeypatch.setenv("TF_CONFIG", EVALUATOR)

    def with_settings(plan: ProcessPlan | None = None, **settings: Any) -> Run:
        mapping = {
            "strategy": chosen("strategy=parameter_server"),
            "model": chosen("model=mlp", hidden=[4]),
            "data": chosen("data=csv", path=str(tmp_path / "rows.csv"), global_batch=8),
            "checkpoint": {"every_steps": 2, "directory": str(tmp_path / "checkpoints")},
            "epochs": 3,
            "tensorboard": False,
            **settings,
        }
        config = experiment_from_mapping(mapping)
        return Run(config=config, resolved=mapping, folder=tmp_path / "run", plan=plan)

    return with_settings


def save(run: Run, *steps: int) -> dict[int, Any]:
    """The scores of what is saved, by step."""
    examples, scores = data.load(run.config.data), {}
    for step in steps:
        torch.manual_seed(step)
        model = build.model(run.config, examples)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        ts.Checkpoint(model=model, optimizer=optimizer).save(folder(run) / f"step-{step:08d}")
        found = score(model, [examples.test.tensors], loss_of(run.config, examples))
        scores[step] = pytest.approx({name: found[name] for name in ("loss", "accuracy")}, rel=1e-6)
    return scores


def folder(run: Run) -> Path:
    return Path(run.config.checkpoint.directory or "")


def test_the_same_command_evaluates(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    this = run()
    expected = save(this, 2, 4)
    last = planned_steps(this.config, data.load(this.config.data))
    mark_finished(folder(this), last)
    train.train(this)
    lines = [json.loads(line) for line in (folder(this) / "evaluation" / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["metrics"] for line in lines} == expected
    said = capsys.readouterr().err.splitlines()
    assert said[1].startswith("evaluation of step 4: loss ")
    assert not this.folder.exists(), "it leaves the folder of the training alone"


def test_the_end_mark_of_a_run_that_is_gone_on_with(run: Any) -> None:
    """It ended at an earlier step than this one will: there are checkpoints to come."""
    this = run(evaluator={"timeout_seconds": 0.01})
    save(this, 2)
    mark_finished(folder(this), 2)
    with pytest.raises(CommunicationTimeoutError, match="none came after that of step 2"):
        train.train(this)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint": {}}, "keeps no checkpoints to evaluate; set checkpoint.every_steps"),
        ({"plan": ProcessPlan(0, 2, 0, 2, "env://", False, "rank 0")}, "torchrun started 2 of them"),
    ],
)
def test_a_start_that_means_nothing(run: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        train.train(run(**settings))


BARE, WORKER = '{"task": {"type": "evaluator"}}', EVALUATOR.replace("evaluator", "worker")


@pytest.mark.parametrize(("text", "answer"), [(EVALUATOR, True), (BARE, True), (WORKER, False), (None, False)])
def test_who_is_the_evaluator(monkeypatch: pytest.MonkeyPatch, text: str | None, answer: bool) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    assert train.is_evaluator() == answer
