"""The command ``torchstrat`` itself: what it says of its commands, of itself, and of what is not installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

import torchstrat as ts
from tests.support.programs import PYTHON, succeed
from torchstrat import cli


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """The status, and what is said on both streams."""

    def run(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["torchstrat", *words])
        monkeypatch.setenv("COLUMNS", "80")
        try:
            status: Any = cli.main()
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.mark.parametrize(("words", "status"), [((), 2), (("lunch",), 2), (("--help",), 0)])
def test_every_command_is_named_where_none_was_given(run: Any, words: tuple[str, ...], status: int) -> None:
    ended, out, err = run(*words)
    assert ended == status
    said = err if status else out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in said
        assert f"torchstrat {name} {command.arguments}\n" in said
    assert all(word in err for word in words if status)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_every_command_ends_with_calls_to_copy(run: Any, name: str) -> None:
    status, out, _ = run(name, "--help")
    examples = out.partition("\nexamples:\n")[2].splitlines()
    assert status == 0
    assert examples
    assert all(example.startswith("  ") and f"torchstrat {name} " in example for example in examples)


def test_the_version_says_what_a_report_of_a_defect_needs(
    run: Any,
) -> None:
    status, out, _ = run("--version")
    assert status == 0
    assert re.fullmatch(rf"torchstrat {re.escape(ts.__version__)} \(torch \S+, Python 3\.\d+\.\S+\)\n", out)
    assert succeed(*PYTHON, "-m", "torchstrat", "--version").stdout == out


def needs_hydra(words: list[str]) -> int:
    import hydra  # noqa: F401

    return 0


def needs_what_no_extra_has(words: list[str]) -> int:
    import there_is_no_such_module  # type: ignore[import-not-found]  # noqa: F401

    return 0


@pytest.mark.parametrize("entry", ["needs_hydra", "needs_what_no_extra_has"])
def test_a_command_without_its_extra_names_it(run: Any, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a module of the user's own is not taken for one."""
    monkeypatch.setitem(sys.modules, "hydra", None)  # type: ignore[arg-type]  # what Python looks for, and does not find
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])  # pytest imports tests by their files alone
    row = cli.Command("[KEY=VALUE …]", "trains", f"{__name__}:{entry}")
    monkeypatch.setitem(cli.COMMANDS, "train", row)
    if entry == "needs_hydra":
        needs = "torchstrat train needs hydra, which is not installed: pip install 'torchstrat[experiments]'\n"
        assert run("train") == (1, "", needs)
    else:
        with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
            run("train")
