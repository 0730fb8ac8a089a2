"""The pages of ``docs/``: what a reader would save and type, found by sybil, and done.

* A Python block with a caption is a file of that name: ``:caption: train.py``.
* A ``console`` block is what the reader sees in the folder of these files: lines after ``$`` are run, in the order of
  the page, and what stands below them has to be printed. ``…`` is any text; numbers with a point may differ by
  a twentieth.
* The Python blocks without a caption are one program, which is run at the end, as a notebook's cells would be.
* A caption that begins with ``Not run`` says why: such a block is compiled.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.myst import CodeBlockParser

from tests.support import programs

DOCS = programs.ROOT / "docs"
PROGRAMS = {
    # what a reader types → the same in this environment, which need not be activated
    "python": programs.PYTHON,
    "torchrun": (*programs.PYTHON, "-m", "torch.distributed.run"),
    "torchstrat": programs.COMMAND,
    "pytest": (*programs.PYTHON, "-m", "pytest", "-p", "no:cacheprovider"),
}
_NUMBER = re.compile(r"\d+\.\d+")


@dataclass
class Page:
    """What a page has for a reader to save, type and run."""

    path: Path
    files: list[tuple[int, str, str]] = field(default_factory=list)
    """Line, name and text of each."""
    consoles: list[tuple[int, str]] = field(default_factory=list)
    blocks: list[tuple[int, str]] = field(default_factory=list)
    """Line and text of the Python blocks that are one program."""
    not_run: list[tuple[int, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.relative_to(DOCS).as_posix()

    @property
    def has_code(self) -> bool:
        return bool(self.files or self.consoles or self.blocks or self.not_run)


def pages() -> list[Page]:
    """Those with code in them."""
    read = [read_page(path) for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]
    return [page for page in read if page.has_code]


def read_page(path: Path) -> Page:
    page = Page(path)

    def python(example: Example) -> None:
        caption = example.region.lexemes.get("options", {}).get("caption", "").strip("'\"")
        if caption.startswith("Not run"):
            page.not_run.append((example.line, example.parsed))
        elif caption:
            page.files.append((example.line, caption, example.parsed))
        else:
            page.blocks.append((example.line, example.parsed))

    def console(example: Example) -> None:
        page.consoles.append((example.line, example.parsed))

    parsers = [CodeBlockParser("python", python), CodeBlockParser("console", console)]
    for example in Sybil(parsers).parse(path).examples():
        example.evaluate()
    return page


def compile_all(page: Page) -> None:
    """Raises `SyntaxError`, with the line of the page, for a block that is no Python."""
    for line, text in [*((line, text) for line, _, text in page.files), *page.blocks, *page.not_run]:
        compile(at_line(line, text), page.name, "exec")


def at_line(line: int, text: str) -> str:
    """Such that tracebacks have the page's lines: the text begins on the line below the fence."""
    return "\n" * line + text


def run(page: Page, folder: Path, in_forks: bool = False) -> None:
    """Do all that the page says, in an empty folder. Raises `AssertionError` with what was printed.

    ``in_forks``: what Python starts is a fork that has made its imports; torchrun's processes are not.
    """
    for line, name, text in page.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(at_line(line, text) if name.endswith(".py") else text, encoding="utf-8")
    for line, text in page.consoles:
        for command, expected in commands(text):
            printed = call(command, folder, f"{page.name}:{line}", in_forks)
            require(expected, printed, f"{page.name}:{line}: $ {command}")
    if page.blocks:
        program = folder / page.path.with_suffix(".py").name
        program.write_text(joined(page.blocks), encoding="utf-8")
        call(f"python {program.name}", folder, page.name, in_forks)


def joined(blocks: list[tuple[int, str]]) -> str:
    """One program of all blocks, each on the lines that it has on the page."""
    text = ""
    for line, block in blocks:
        text += "\n" * (line - text.count("\n")) + block.rstrip("\n") + "\n"
    return text


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """``$ command`` and the lines below it, one after the other."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *lines = part.replace("\\\n", " ").splitlines()
        yield command, [line for line in lines if line.strip()]


def call(command: str, folder: Path, where: str, in_forks: bool) -> str:
    """What a command printed, on both streams."""
    words = shlex.split(command, comments=True)
    assert words[0] in PROGRAMS, f"{where}: {words[0]} is none of {', '.join(PROGRAMS)}; use a `shell` block"
    if in_forks and words[0] == "python":
        (process,) = programs.scripts(folder, ([folder / words[1], *words[2:]], {}))
        said = process.stdout + process.stderr
    else:
        with programs.started(*PROGRAMS[words[0]], *words[1:], cwd=folder) as process:
            said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, f"{where}: {command} ended with {process.returncode}:\n{said}"
    return said


def require(expected: list[str], printed: str, where: str) -> None:
    """The lines in this order, whatever stands between them."""
    left = iter(printed.splitlines())
    for line in expected:
        assert line.strip() == "…" or any(is_alike(line, other) for other in left), (
            f"{where}: no line like\n    {line}\nin what was printed, or not after the line before it:\n{printed}"
        )


def is_alike(expected: str, printed: str) -> bool:
    """The same text; ``…`` stands for any, and a number with a point for those that are close to it."""
    parts = re.split(r"(\d+\.\d+|…)", expected.rstrip())
    patterns = (
        ".*" if part == "…" else r"(\d+\.\d+)" if _NUMBER.fullmatch(part) else re.escape(part) for part in parts
    )
    found = re.fullmatch("".join(patterns), printed.rstrip())
    wanted = [float(number) for number in _NUMBER.findall(expected)]
    return found is not None and all(
        abs(float(got) - want) <= max(0.05 * want, 0.01) for got, want in zip(found.groups(), wanted, strict=True)
    )
