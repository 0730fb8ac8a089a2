"""Which tests reach what is not public: an inside that they hold in place, so that rebuilding it breaks them.

    python -m scripts.measuring.reach [FILE…]     every file with what it reaches, or these alone; then the counts
    python -m scripts.measuring.reach --check     fails if there are more than `MOST`

A file reaches an internal where it, or a module of tests/ that it imports, imports a module of the package which the
reference in docs/api does not name (`torchstrat.testing` counts as public), or reads a private attribute of anything
but ``self``, ``cls`` and modules of other packages. Private names that PyTorch's own tensors, modules and optimizers
have are PyTorch's.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import torch

from scripts.measuring.affected import imported

ROOT = Path(__file__).resolve().parents[2]
MOST = 60
"""Such files: fewer from time to time, never more."""

_OWN = frozenset({"self", "cls"})


@functools.cache
def public_modules() -> frozenset[str]:
    """Those whose names the reference documents, and errors and testing, which it documents as a whole."""
    found = {"torchstrat", "torchstrat.errors", "torchstrat.testing"}
    for page in sorted((ROOT / "docs/api").glob("*.rst")):
        for name in re.findall(r"auto\w+:: (torchstrat[\w.]*)", page.read_text()):
            found.add(name.rpartition(".")[0] or name)
    return frozenset(found)


@functools.cache
def _names_of_torch() -> frozenset[str]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    known = (parameter, torch.nn.Linear(1, 1), torch.optim.SGD([parameter], lr=0.1), torch.Generator())
    return frozenset(name for one in known for name in dir(one))


@functools.cache
def _nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Its imports, and where it reads attributes."""
    wanted = (ast.Import, ast.ImportFrom, ast.Attribute)
    return tuple(node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, wanted))


def _foreign_modules(file: Path) -> frozenset[str]:
    """The names under which it has modules of other packages."""
    return frozenset(
        one.asname or one.name.partition(".")[0]
        for node in _nodes_of(file)
        if isinstance(node, ast.Import)
        for one in node.names
        if one.name.partition(".")[0] not in ("torchstrat", "tests")
    )


def _root_of(node: ast.Attribute) -> str:
    """The name that the expression before the dot begins with; empty for what ``self`` and ``cls`` have."""
    inner: ast.expr = node.value
    if isinstance(inner, ast.Name):
        return inner.id
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) and inner.id not in _OWN else ""


@functools.cache
def _imported(file: Path) -> frozenset[str]:
    """The modules that it imports, and those of which it imports a part."""
    names = {full for node in _nodes_of(file) for full, _ in imported(node)}
    return frozenset({name for name in names if _file_of(name)} | {name.rpartition(".")[0] for name in names})


def _file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _is_internal(module: str) -> bool:
    is_ours = module.partition(".")[0] == "torchstrat"
    return is_ours and module not in public_modules() and not module.startswith("torchstrat.testing.")


@functools.cache
def reached_by(file: Path) -> frozenset[str]:
    """What this file itself reaches: names of modules, and of attributes with a dot before them."""
    modules = {module for module in _imported(file) if _is_internal(module)}
    foreign = _foreign_modules(file)
    attributes = {
        f".{node.attr}"
        for node in _nodes_of(file)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and node.attr not in _names_of_torch()
        and _root_of(node) not in (_OWN | foreign)
    }
    return frozenset(modules | attributes)


def reached_with_imports(file: Path) -> dict[Path, frozenset[str]]:
    """The file and the modules of tests/ that it imports, as far as they go → what each reaches, if anything."""
    seen = [file]
    for one in seen:  # which grows
        for module in _imported(one):
            other = _file_of(module) if module.partition(".")[0] == "tests" else None
            if other is not None and other not in seen:
                seen.append(other)
    return {one: reached for one in seen if (reached := reached_by(one))}


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def main(arguments: list[str]) -> int:
    is_check = arguments == ["--check"]
    files = files_of_tests() if is_check or not arguments else [Path(one).resolve() for one in arguments]
    count = 0
    for file in files:
        reached = reached_with_imports(file)
        count += bool(reached)
        for one, names in reached.items() if not is_check else ():
            by = "" if one == file else f" (by {one.relative_to(ROOT)})"
            print(f"{file.relative_to(ROOT)}{by}: {', '.join(sorted(names))}")
    print(f"{count} of {len(files)} files of tests reach what is not public")
    if is_check and count > MOST:
        print(f"There were {MOST}: test by public names, describe() and torchstrat.testing.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
