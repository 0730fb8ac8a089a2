"""``torchstrat estimate`` and ``torchstrat explain``, on a program in a folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchstrat import cli

PROGRAM = """
import torch

RULES = {"0.weight": ("d0", None), "0.bias": ("d0",)}
batch = torch.ones(6, 8)

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "my_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_program", raising=False)

    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["torchstrat", *words])
        return cli.main()

    yield call
    sys.modules.pop("my_program", None)


def test_estimate_prints_the_table(run, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--optimizer",
        "sgd",
        "momentum=0.9",
        "--replicas",
        "3",
        "--ps",
        "2",
        "--workers",
        "4",
        "--max-shards",
        "2",
    )
    assert run("estimate", "my_program:build", "--batch", "my_program:batch", *words) == 0
    out = capsys.readouterr().out
    assert out.startswith("parameters 184 B, buffers 0 B, gradients 184 B, state of SGD 184 B\n")
    assert "4 × worker" in out
    assert "?" not in out


def test_estimate_says_what_it_cannot_use(run, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["my_program"], "'my_program' must be MODULE:NAME"),
        (["my_program:nothing"], "'my_program:nothing' cannot be loaded from"),
        (["my_program:build", "--optimizer", "sgd", "momentum"], "'momentum' must be ARGUMENT=VALUE"),
        (["my_program:build", "--optimizer", "adma"], "there is no optimizer 'adma'"),
        (["my_program:build", "--ps", "2"], "ps=2 and workers=None"),
    ):
        with pytest.raises(SystemExit) as ended:
            run("estimate", *words)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err


def test_explain_says_where_pieces_will_be(run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "my_program:build", "--rules", "my_program:RULES", "--logical-devices", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith("1 replica × 2 logical devices")
    assert "0.weight  float32  (4, 8)  (d0, –)" in out


def test_explain_says_what_does_not_fit(run, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["--logical-devices", "3"], "3"),
        (["--logical-devices", "2", "--replicas", "0"], "0 replicas"),
    ):
        with pytest.raises(SystemExit):
            run("explain", "my_program:build", "--rules", "my_program:RULES", *words)
        assert says in capsys.readouterr().err.splitlines()[-1]
