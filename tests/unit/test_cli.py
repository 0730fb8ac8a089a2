"""The command ``torchstrat`` itself: what it says of its commands, of itself, and of what is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchstrat as ts
from torchstrat import cli

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["torchstrat", *words])
    return cli.main()


@pytest.mark.parametrize(("words", "status"), [((), 2), (("lunch",), 2), (("--help",), 0)])
def test_every_command_is_named_where_none_was_given(
    words: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == status
    said = capsys.readouterr()
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in (said.err if status else said.out)
        assert f"torchstrat {name} {command.arguments}\n" in (said.err if status else said.out)
    assert all(word in said.err for word in words if status)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_every_command_ends_with_calls_to_copy(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, name, "--help")
    assert end.value.code == 0
    examples = capsys.readouterr().out.partition("\nexamples:\n")[2].splitlines()
    assert examples
    assert all(example.startswith("  ") and f"torchstrat {name} " in example for example in examples)


def test_the_version_says_what_a_report_of_a_defect_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--version") == 0
    said = capsys.readouterr().out
    assert re.fullmatch(rf"torchstrat {re.escape(ts.__version__)} \(torch \S+, Python 3\.\d+\.\S+\)\n", said)


def test_the_package_is_the_command_of_its_python() -> None:
    command = [sys.executable, "-m", "torchstrat", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55, check=True).stdout
    assert said.startswith(f"torchstrat {ts.__version__} ")


def needs_hydra(words: list[str]) -> int:
    import hydra  # noqa: F401

    return 0


def needs_what_no_extra_has(words: list[str]) -> int:
    import there_is_no_such_module  # type: ignore[import-not-found]  # noqa: F401

    return 0


@pytest.fixture
def without_hydra(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setitem(sys.modules, "hydra", None)  # type: ignore[arg-type]  # what Python looks for, and does not find
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])  # pytest imports tests by their files alone
    return monkeypatch


def test_a_command_without_its_extra_names_it(
    without_hydra: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = cli.Command("[KEY=VALUE …]", "trains", f"{__name__}:needs_hydra")
    without_hydra.setitem(cli.COMMANDS, "train", row)
    assert run(without_hydra, "train") == 1
    said = capsys.readouterr().err
    assert said == "torchstrat train needs hydra, which is not installed: pip install 'torchstrat[experiments]'\n"


def test_a_module_of_the_users_own_is_not_taken_for_an_extra(without_hydra: pytest.MonkeyPatch) -> None:
    row = cli.Command("[KEY=VALUE …]", "trains", f"{__name__}:needs_what_no_extra_has")
    without_hydra.setitem(cli.COMMANDS, "train", row)
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        run(without_hydra, "train")
