"""The mutants of a line: cosmic-ray's operators, without its runner. Nothing else here knows of cosmic-ray.

An operator of cosmic-ray is an object that says where it can act on a node of parso's tree, and acts. Those that need
arguments (two that put a variable of the operator's user in) are left out, and so is what changes no program: what does
not compile, and what is in annotations.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import Visitor, ast_nodes, get_ast
from cosmic_ray.operators.provider import OperatorProvider

from scripts.measuring.places import spans_without_effect

_PROVIDER = OperatorProvider()
_OPERATORS = {name: _PROVIDER[name]() for name in sorted(_PROVIDER) if not _PROVIDER[name].arguments()}


@dataclass(frozen=True)
class Mutation:
    """The ``occurrence``-th place on a line where an operator acts."""

    operator: str
    occurrence: int
    column: int


def mutations(source: str, line: int) -> list[Mutation]:
    """All of this line that make another program."""
    without_effect = spans_without_effect(source)
    found = []
    nodes = _nodes(_parsed(source), line)
    for name in _OPERATORS:
        for occurrence, (column, _, _) in enumerate(_positions(nodes, name, line)):
            if not any(start <= (line, column) < end for start, end in without_effect):
                found.append(Mutation(name, occurrence, column))
    return found


def mutate(source: str, line: int, mutation: Mutation) -> str | None:
    """The file with this mutation; None if it is no other program."""
    tree = get_ast(source)
    found = list(_positions(_nodes(tree, line), mutation.operator, line))
    if mutation.occurrence >= len(found):
        return None
    _, target, index = found[mutation.occurrence]
    mutated: str = _Mutating(_OPERATORS[mutation.operator], target, index).walk(tree).get_code()
    try:
        return None if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)) else mutated
    except SyntaxError:
        return None


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> Any:
    """To be looked at alone. parso takes a second for a long file."""
    return get_ast(source)


def _nodes(tree: Any, line: int) -> list[Any]:
    return [node for node in ast_nodes(tree) if node.start_pos[0] <= line <= node.end_pos[0]]


def _positions(nodes: list[Any], name: str, line: int) -> Iterator[tuple[int, Any, int]]:
    """Column, node and the operator's own index there."""
    for node in nodes:
        try:
            positions = list(_OPERATORS[name].mutation_positions(node))
        except (AttributeError, IndexError):  # `except:` and `except module.Error:` are more than it knows
            continue
        for index, ((start_line, column), _) in enumerate(positions):
            if start_line == line:
                yield column, node, index


class _Mutating(Visitor):  # type: ignore[misc]  # cosmic-ray has no annotations
    def __init__(self, operator: Any, target: Any, index: int) -> None:
        self._operator, self._target, self._index = operator, target, index

    def visit(self, node: Any) -> Any:
        return self._operator.mutate(node, self._index) if node is self._target else node
