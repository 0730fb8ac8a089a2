"""Print what ``./scripts/test --fast`` gives to pytest, an argument a line; on stderr, what it leaves out."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.measuring.affected import Choice, Tree, changed_files, choose
from scripts.measuring.core_cells import CELLS

ROOT = Path(__file__).resolve().parents[2]

LIMIT = 6
"""Test files: on two slow cores they take as long as tests/conformance beside them, with the cells of the contract."""

ELSEWHERE = "tests/tpu/"
"""Needs an environment of its own."""

ALWAYS = "tests/conformance/"
"""All of it runs beside these."""


def main() -> int:
    changed = changed_files(ROOT)
    choice = choose(Tree(ROOT), changed, LIMIT, without=(ELSEWHERE, ALWAYS))
    print("\n".join(arguments(choice)))
    print("\n".join(words(changed, choice)), file=sys.stderr)
    return 0


def arguments(choice: Choice) -> list[str]:
    core = [file for file in CELLS if file not in choice.files]  # one that is chosen runs whole
    return [*core, *(f"--cells-of={file}" for file in core), *choice.files]


def words(changed: list[str], choice: Choice) -> list[str]:
    lines = [f"{len(changed)} changed files; nearest to them: {' '.join(choice.files) or 'no test file'}"]
    if choice.left_out:
        lines.append(f"left out, further away or over {LIMIT}: {len(choice.left_out)} more test files")
    if choice.without_tests:
        lines.append(f"no test file is near to {_some(choice.without_tests)}")
    if elsewhere := [file for file in changed if file.startswith(ELSEWHERE)]:
        lines.append(f"left to ./scripts/test tests/tpu: {_some(elsewhere)}")
    return lines


def _some(files: list[str]) -> str:
    shown = ", ".join(files[:3])
    return f"{shown} and {len(files) - 3} more" if len(files) > 3 else shown


if __name__ == "__main__":
    sys.exit(main())
