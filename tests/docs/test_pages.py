"""What the pages of ``docs/`` tell a reader to run does what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Page, compile_all, is_alike, pages, read_page, run

PAGES = pages()
QUICK = ("quickstart.md", "tutorials/plain_script.md")
"""In every test run; the others are for ./scripts/soak docs."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_compiles(page: Page) -> None:
    compile_all(page)


@pytest.mark.deadline(600)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in QUICK else pytest.mark.soak, id=page.name) for page in PAGES],
)
def test_every_block_runs(page: Page, tmp_path: Path) -> None:
    run(page, tmp_path)


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
