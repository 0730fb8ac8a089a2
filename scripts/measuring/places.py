"""Where a line of the package is, so that it is found again after unrelated edits; and what of a file has no effect."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A line: the ``nth`` one of that text inside a function, class or file."""

    file: str
    inside: str
    """As ``Class.method``; empty: of the file itself."""
    text: str
    nth: int

    @property
    def key(self) -> str:
        return "\0".join([self.file, self.inside, self.text, str(self.nth)])


def places(file: str, source: str) -> dict[int, Place]:
    """Line number → place, of lines that are neither empty nor a comment."""
    inside = _inside(ast.parse(source))
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    found = {}
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            where = inside.get(number, "")
            found[number] = Place(file, where, text, seen[where, text])
            seen[where, text] += 1
    return found


def _inside(tree: ast.Module) -> dict[int, str]:
    inside: dict[int, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                inside.update(dict.fromkeys(range(first_line(child), (child.end_lineno or child.lineno) + 1), name))
            visit(child, name)

    visit(tree, "")
    return inside


def first_line(statement: ast.stmt) -> int:
    """Decorators are before what Python takes for the first line."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def lines_to_cover(source: str, line: int) -> set[int]:
    """Lines that are run where this one is: of its statement, or, where that is run when the module is imported, of
    the functions that it is for. What nearly every test imports says nothing about who looks at it."""
    tree = ast.parse(source)
    path = _statements_around(tree, line)
    innermost = path[-1] if path else tree
    functions = [one for one in path if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    if functions and line >= functions[0].body[0].lineno:
        return _own_lines(innermost)
    # A default or a decorator is for its function or class; a constant for all of what it stands in.
    scopes = [*functions, *(one for one in reversed(path) if isinstance(one, ast.ClassDef)), tree]
    return next((lines for scope in scopes if (lines := set(_lines_of_functions(scope)))), set())


def _statements_around(tree: ast.Module, line: int) -> list[ast.stmt]:
    """The outermost first."""
    path: list[ast.stmt] = []
    node: ast.AST | None = tree
    while node is not None:
        node = next(
            (one for one in _statements_in(node) if first_line(one) <= line <= (one.end_lineno or one.lineno)), None
        )
        if node is not None:
            path.append(node)
    return path


def _statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements_in(child)


def _own_lines(statement: ast.AST) -> set[int]:
    assert isinstance(statement, ast.stmt)
    inner = [first_line(one) for one in _statements_in(statement)]
    end = statement.end_lineno or statement.lineno
    if isinstance(statement, ast.Try) or not inner:  # `except X:` is a line of its own, after others
        return set(range(first_line(statement), end + 1))
    return set(range(first_line(statement), max(min(inner), first_line(statement) + 1)))


def _lines_of_functions(scope: ast.AST) -> Iterator[int]:
    for node in ast.walk(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)


def spans_without_effect(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Annotations, and what stands under ``if TYPE_CHECKING``: nothing evaluates them. From (line, column) to."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        of_node: list[ast.AST | None] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            of_node.append(node)
        for one in of_node:
            if isinstance(one, ast.expr | ast.stmt):
                end = (one.end_lineno or one.lineno, one.end_col_offset or 0)
                spans.append(((one.lineno, one.col_offset), end))
    return spans
