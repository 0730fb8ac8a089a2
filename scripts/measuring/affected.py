"""Which tests to run first after a change: those whose imports are nearest to what changed.

Read from the files alone, nothing is run. pytest-testmon knows better, from what each test ran the last time, but it is
a dependency, and its database is only there after a whole run under coverage, and only on the machine of that run. What
a choice by imports misses, the whole suite runs before anything is merged.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

CHOSEN_FROM = ("tests/unit", "tests/conformance", "tests/docs")
"""Tests of one process; those of several run where they themselves have changed."""

CHANGED, IMPORTS, BY_NAME, ONE_BETWEEN = range(4)
"""How far a test file is from what changed: it is that; imports it; takes a name of it from a package's list, or
imports a module that imports it."""


@dataclass(frozen=True)
class Choice:
    """Test files, nearest first."""

    files: list[str]
    left_out: list[str]
    """Over the limit."""

    without_tests: list[str]
    """Files that changed and that no test file is near to."""


@dataclass(frozen=True)
class Imports:
    """What one file imports, by full names: of a module, or of something in it."""

    names: frozenset[str]
    exports: dict[str, str] = field(default_factory=dict)
    """Name in the file → the full name that it was imported as."""


class Tree:
    """The Python files of a checkout, and who imports whom."""

    def __init__(self, root: Path) -> None:
        folders = ("torchstrat", "scripts", *CHOSEN_FROM)  # reading all of tests/ would take seconds
        self.root = root
        self.files = {file.relative_to(root).as_posix(): file for one in folders for file in (root / one).rglob("*.py")}

    @cached_property
    def _imports(self) -> dict[str, Imports]:
        return {name: _read(file, module_of(name)) for name, file in self.files.items()}

    @cached_property
    def _packages(self) -> dict[str, Imports]:
        return {module_of(name): found for name, found in self._imports.items() if name.endswith("/__init__.py")}

    def distances(self, changed: str) -> dict[str, int]:
        """Test file → how far it is from the file that changed; nothing of those further than one module away."""
        module = module_of(changed)
        direct = {name for name, found in self._imports.items() if _has(found.names, module)}
        # A package's list imports everything beneath it: as a module in between it would be near to all tests.
        between = [module_of(name) for name in direct if not name.endswith("/__init__.py") and not is_test(name)]
        found = {changed: CHANGED} if is_test(changed) and (self.root / changed).exists() else {}
        for name in filter(is_test, self.files):
            names = self._imports[name].names
            if name in found:
                continue
            if name in direct:
                found[name] = IMPORTS
            elif _has({self._origin(one) for one in names}, module):
                found[name] = BY_NAME
            elif any(_has(names, one) for one in between):
                found[name] = ONE_BETWEEN
        return found

    def _origin(self, name: str) -> str:
        """Where ``name``, such as torchstrat.MirroredStrategy, comes from, through the lists of packages."""
        package, _, last = name.rpartition(".")
        seen = set()
        while package in self._packages and name not in seen:
            seen.add(name)
            name = self._packages[package].exports.get(last, name)
            package, _, last = name.rpartition(".")
        return name

    def breadth(self, name: str) -> int:
        """How many modules a file imports: what it tests is a smaller part of it, the more there are."""
        return len({self._origin(one) for one in self._imports[name].names}) if name in self._imports else 0


def choose(tree: Tree, changed: Iterable[str], limit: int, without: tuple[str, ...] = ()) -> Choice:
    """At most ``limit`` test files that are nearest to what changed; none from the folders ``without``."""
    distances: dict[str, tuple[int, bool]] = {}
    without_tests = []
    for file in sorted(set(changed)):
        near = tree.distances(file) if file.endswith(".py") else {}
        if not near:
            without_tests.append(file)
        subject = PurePosixPath(file).stem.lstrip("_")
        for test, far in near.items():
            is_of_other_name = subject not in PurePosixPath(test).stem
            distances[test] = min(distances.get(test, (far, True)), (far, is_of_other_name))
    wanted = [test for test in distances if not test.startswith(without)]
    ordered = sorted(wanted, key=lambda test: (*distances[test], tree.breadth(test), test))
    return Choice(ordered[:limit], ordered[limit:], without_tests)


def changed_files(root: Path) -> list[str]:
    """What differs from where the branch left ``main`` (of its upstream, if it has one), committed or not; on ``main``
    itself with nothing uncommitted, from the commit before the last one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    def differing(commit: str) -> list[str]:
        return git("diff", "--name-only", "--no-renames", "-z", commit, "--").split("\0")[:-1]

    main = "main@{upstream}" if git("rev-parse", "--verify", "--quiet", "main@{upstream}") else "main"
    base = git("merge-base", "HEAD", main).strip() or "HEAD"
    changed = differing(base) + git("ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1]
    return changed or differing("HEAD~1")


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_test(file: str) -> bool:
    path = PurePosixPath(file)
    return path.parts[0] == "tests" and path.name.startswith("test_")


def _has(names: Iterable[str], module: str) -> bool:
    """Whether the module itself, or something that is defined in it, is among the names."""
    return any(name == module or name.rpartition(".")[0] == module for name in names)


def _read(file: Path, module: str) -> Imports:
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:  # half written: its test says so better
        return Imports(frozenset())
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    exports: dict[str, str] = {}
    names: set[str] = set()
    attributes: set[tuple[str, str]] = set()  # ts.MirroredStrategy
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.add((node.value.id, node.attr))
        for full, local in imported(node, package):
            exports[local] = full
            names.add(full)
    names |= {f"{exports[local]}.{name}" for local, name in attributes if local in exports}
    return Imports(frozenset(names), exports)


def imported(node: ast.AST, package: str = "") -> Iterator[tuple[str, str]]:
    """Full name and name in the file, of one statement. ``package``: of the file, where it may import relatively."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, alias.asname or alias.name
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        origin = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield f"{origin}.{alias.name}", alias.asname or alias.name
