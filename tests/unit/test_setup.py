"""What setup.py says of the package, with and without addresses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import torchstrat as ts
from tests.support.programs import ROOT
from torchstrat import cli

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
