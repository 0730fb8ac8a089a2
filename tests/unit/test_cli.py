"""The command ``torchstrat`` itself: what it says of its commands, of itself, and of what is not installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchstrat as ts
from tests.support.programs import PYTHON, ROOT, succeed
from torchstrat.app import cli


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


# -- what is installed -------------------------------------------------------------------------------------------------


SETUP = ROOT / "setup.py"
ADDRESSES = {
    "SOURCE": "https://example.org/torchstrat",
    "SOURCE_FILES": "https://example.org/torchstrat/blob/main",
    "DOCS": "https://example.org/docs",
    "MAIL": "torchstrat@example.org",
}


def metadata(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> dict[str, Any]:
    """The arguments of ``setup``, where setup.py has these addresses."""
    given: dict[str, Any] = {}
    setuptools = pytest.importorskip("setuptools", reason="of the extra dev")
    monkeypatch.setattr(setuptools, "setup", given.update)
    program = SETUP.read_text(encoding="utf-8")
    for name in ADDRESSES:
        program, found = re.subn(rf'^{name} = ""', f"{name} = {addresses.get(name, '')!r}", program, flags=re.MULTILINE)
        assert found == 1, name
    exec(compile(program, SETUP, "exec"), {"__file__": str(SETUP), "__name__": "__main__"})
    return given


def test_without_addresses_none_is_claimed_and_the_base_install_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = metadata(monkeypatch)
    assert setup["version"] == ts.__version__
    assert [re.split("[>=]", one)[0] for one in setup["install_requires"]] == ["torch", "numpy", "cloudpickle"]
    for module, extra in cli.EXTRA_OF.items():
        brings = [one.replace("-", "_") for one in setup["extras_require"][extra]]
        names = {"hydra": "hydra_core", "sklearn": "scikit_learn"}
        assert any(one.startswith(names.get(module, module)) for one in brings), (module, brings)
    assert (bool(setup["project_urls"]), setup["url"], setup["author_email"]) == (False, None, None)
    assert setup["long_description"] == (ROOT / "README.md").read_text(encoding="utf-8")


def test_with_addresses_the_readme_leads_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[a](docs/a.md) [b](#part) [c](https://example.com/x) [d](mailto:x@example.com) <img src="p.png"> [e](/f)'
    setup = SETUP.read_text(encoding="utf-8")
    monkeypatch.setattr(Path, "read_text", lambda path, **how: setup if path == SETUP else text)
    given = metadata(monkeypatch, **ADDRESSES)
    files = ADDRESSES["SOURCE_FILES"]
    led = text.replace("docs/a.md", f"{files}/docs/a.md").replace("p.png", f"{files}/p.png")
    assert given["long_description"] == led
    assert given["project_urls"] == {"Source": ADDRESSES["SOURCE"], "Documentation": ADDRESSES["DOCS"]}
    assert given["author_email"] == ADDRESSES["MAIL"]
