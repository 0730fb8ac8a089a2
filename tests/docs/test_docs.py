"""The pages, the pictures and the reference of ``docs/``: they do what they say, and every public name is there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import types
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Page, compile_all, is_alike, pages, read_page, run
from torchstrat import errors

PAGES = pages()
QUICK = ("quickstart.md",)
"""In every test run; the others start the same launchers on other programs, and are for ./scripts/soak docs."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_compiles(page: Page) -> None:
    compile_all(page)


@pytest.mark.deadline(600)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in QUICK else pytest.mark.soak, id=page.name) for page in PAGES],
)
def test_every_block_runs(page: Page, tmp_path: Path) -> None:
    run(page, tmp_path, in_forks=page.name in QUICK)


def test_the_quick_pages_are_there() -> None:
    assert {page.name for page in PAGES} >= set(QUICK)


def test_blocks_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(
        "# A page\n\n```{code-block} python\n:caption: a.py\nprint('a', 0.25)\n```\n\n"
        "```console\n$ python a.py\na 0.25\n```\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 1\n```\n\n"
        "```{code-block} python\n:caption: 'Not run here: needs a TPU'\nnothing.of(this)\n```\n",
        encoding="utf-8",
    )
    page = read_page(file)
    page.path = DOCS / "page.md"
    assert [name for _, name, _ in page.files] == ["a.py"]
    assert [len(page.consoles), len(page.blocks), len(page.not_run)] == [1, 2, 1]
    run(page, tmp_path)
    page.blocks[1] = (page.blocks[1][0], "assert x == 2\n")
    with pytest.raises(AssertionError, match=r"line 20, in <module>(?s:.*)assert x == 2"):
        run(page, tmp_path)
    page.consoles = [(8, "$ python a.py\na 0.50\n")]
    with pytest.raises(AssertionError, match="no line like"):
        run(page, tmp_path)


@pytest.mark.parametrize(
    ("expected", "printed", "alike"),
    [
        ("loss 0.52", "loss 0.53", True),
        ("loss 0.52", "loss 0.62", False),
        ("loss …", "loss nan", True),
        ("2 replicas", "3 replicas", False),
        ("a", "ab", False),
    ],
)
def test_lines_are_alike(expected: str, printed: str, alike: bool) -> None:
    assert is_alike(expected, printed) is alike


def test_the_pictures_are_what_their_program_draws() -> None:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "images" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    drawn = {draw.file_name(picture): str(picture()) for picture in draw.PICTURES}
    there = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "images").glob("*.svg")}
    assert there == drawn, "run python docs/images/draw.py"
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    assert not [name for name in drawn if f"images/{name}" not in text]


PARTS = "checkpoint cluster_resolver data evaluation experimental experimental.coordinator extended launch partitioners"
MODULES = ["torchstrat", *(f"torchstrat.{name}" for name in f"{PARTS} registry testing tpu tpu.experimental".split())]
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
_DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|exception|data):: (\S+)$", re.MULTILINE)


def documented() -> list[str]:
    sources = [*(DOCS / "api").glob("*.rst"), *(DOCS / "errors").glob("*.md")]
    return [name for source in sources for name in _DIRECTIVE.findall(source.read_text(encoding="utf-8"))]


def public_names(module: str) -> list[str]:
    there = importlib.import_module(module)
    own = [name for name, value in vars(there).items() if getattr(value, "__module__", None) == module]
    listed = getattr(there, "__all__", [name for name in own if not name.startswith("_")])
    return [name for name in listed if not isinstance(getattr(there, name), types.ModuleType)]


def found(name: str) -> object:
    module, _, member = name.rpartition(".")
    return getattr(importlib.import_module(module), member)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    names = documented()
    objects = {id(found(name)) for name in names if not isinstance(found(name), int)}  # small numbers are one object
    public = [f"{module}.{name}" for name in public_names(module)]
    missing = [name for name in public if name not in names and id(found(name)) not in objects]
    assert not missing, f"add them to a page of docs/api: {', '.join(missing)}"
    assert sorted(set(names)) == sorted(names), "twice"


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


PACKAGE = Path(__file__).resolve().parents[2] / "torchstrat"
FOLDERS = sorted(init.parent for init in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_every_folder_says_what_lives_there_and_names_files_that_do(folder: Path) -> None:
    readme = folder / "README.md"
    says = (folder / "__init__.py").read_text() + (readme.read_text() if readme.exists() else "")
    assert says.strip(), "neither a README nor a docstring"
    listed = re.findall(r"^    ([a-z_]+\.py)  ", says, re.MULTILINE)
    assert [name for name in listed if not (folder / name).exists()] == []
