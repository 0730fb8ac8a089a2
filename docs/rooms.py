"""The folders of the package from the ground up, for the page on reading the source: what each holds, and imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rooms() -> str:
    """Markdown: a row for each folder, and for each file beside them that is a room of its own."""
    lines = ["| | | imports from |", "|---|---|---|"]
    for room in reversed(layers()):
        for path, is_folder in _within(ROOT / "torchstrat" / room):
            name = path.relative_to(ROOT / "torchstrat").as_posix()
            said = docstring(path / "__init__.py" if is_folder else path)
            imports = re.search(r"\nImports from ([^.]*)\.\s*\Z", said)
            depth = "&emsp;" * name.count("/")
            cells = [f"{depth}`{name}{'/' if is_folder else ''}`", _sentence(said), imports[1] if imports else ""]
            lines.append(f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def layers() -> list[str]:
    """import-linter's, from the top down."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^layers = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return [room for layer in re.findall(r'"([^"]+)"', found[1]) for room in layer.split(" : ")]


def docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text())) or ""


def _sentence(said: str) -> str:
    """The first one, with its links as code."""
    first = re.split(r"\.(?=\s)", said, maxsplit=1)[0].removesuffix(".")
    return re.sub(r"`+([^`]+)`+", r"`\1`", first) + "."


def _within(path: Path) -> Iterator[tuple[Path, bool]]:
    if not path.is_dir():
        yield path.with_suffix(".py"), False
        return
    yield path, True
    for inner in sorted(path.rglob("__init__.py")):
        if inner.parent != path:
            yield inner.parent, True
