"""``torchstrat estimate`` and ``torchstrat explain``, on a program in a folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
Run = Callable[[str], int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "my_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_program", raising=False)

    def call(words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["torchstrat", *words.split()])
        return cli.main()

    yield call
    sys.modules.pop("my_program", None)


EXPLAIN = "explain my_program:build --rules my_program:RULES --logical-devices"


def test_what_they_print(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "--optimizer sgd momentum=0.9 --replicas 3 --ps 2 --workers 4 --max-shards 2"
    assert run(f"estimate my_program:build --batch my_program:batch {settings}") == 0
    out = capsys.readouterr().out
    assert out.startswith("parameters 184 B, buffers 0 B, gradients 184 B, state of SGD 184 B\n")
    assert "4 × worker" in out
    assert "?" not in out
    assert run(f"{EXPLAIN} 2") == 0
    out = capsys.readouterr().out
    assert out.startswith("1 replica × 2 logical devices")
    assert "0.weight  float32  (4, 8)  (d0, –)" in out


REFUSED = {
    "estimate my_program": "'my_program' must be MODULE:NAME",
    "estimate my_program:nothing": "'my_program:nothing' cannot be loaded from",
    "estimate my_program:build --optimizer sgd momentum": "'momentum' must be ARGUMENT=VALUE",
    "estimate my_program:build --optimizer adma": "there is no optimizer 'adma'",
    "estimate my_program:build --ps 2": "ps=2 and workers=None",
    f"{EXPLAIN} 3": "3",
    f"{EXPLAIN} 2 --replicas 0": "0 replicas",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_they_cannot_use(run: Run, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 2
    assert REFUSED[words] in capsys.readouterr().err.splitlines()[-1]
