"""The reference in ``docs/`` has every public name, and every error class its page."""

from __future__ import annotations

import importlib
import inspect
import re
import types

import pytest

from tests.docs.pages import DOCS
from torchstrat import errors

MODULES = [
    "torchstrat",
    *(
        f"torchstrat.{name}"
        for name in (
            *("checkpoint", "cluster_resolver", "data", "evaluation", "experimental", "experimental.coordinator"),
            *("extended", "launch", "partitioners", "registry", "testing", "tpu", "tpu.experimental"),
        )
    ),
]
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
_DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|exception|data):: (\S+)$", re.MULTILINE)


def documented() -> list[str]:
    sources = [*(DOCS / "api").glob("*.rst"), *(DOCS / "errors").glob("*.md")]
    return [name for source in sources for name in _DIRECTIVE.findall(source.read_text(encoding="utf-8"))]


def public_names(module: str) -> list[str]:
    there = importlib.import_module(module)
    listed = getattr(there, "__all__", None)
    if listed is None:
        listed = [
            name
            for name, value in vars(there).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module
        ]
    return [name for name in listed if not isinstance(getattr(there, name), types.ModuleType)]


def found(name: str) -> object:
    module, _, member = name.rpartition(".")
    return getattr(importlib.import_module(module), member)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    names = documented()
    objects = {id(found(name)) for name in names if not isinstance(found(name), int)}  # small numbers are one object
    missing = [
        f"{module}.{name}"
        for name in public_names(module)
        if f"{module}.{name}" not in names and id(getattr(importlib.import_module(module), name)) not in objects
    ]
    assert not missing, f"add them to a page of docs/api: {', '.join(missing)}"


def test_nothing_is_in_the_reference_twice() -> None:
    names = documented()
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_a_page_with_a_remedy(name: str) -> None:
    page = DOCS / "errors" / f"{name}.md"
    assert page.exists(), f"write {page}: what {name} means, and what to do"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    assert f".. autoexception:: torchstrat.errors.{name}\n" in text
    for heading in ("What it means", "What to do"):
        _, _, below = text.partition(f"\n## {heading}\n")
        assert len(below.split("\n## ")[0].split()) >= 8, f"{page} says nothing under {heading!r}"


def test_no_page_is_of_an_error_that_is_gone() -> None:
    pages = {page.stem for page in (DOCS / "errors").glob("*.md")} - {"index"}
    assert pages == set(ERRORS)
    index = (DOCS / "errors" / "index.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name}.md)" in index for name in ERRORS)
    contents = re.search(r"```\{toctree\}\n(?::.*\n)*\n(.*?)```", index, re.DOTALL)
    assert contents is not None
    assert set(contents[1].split()) == set(ERRORS)
