"""The programs in MIGRATION.md, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import torchstrat

TEXT = (Path(torchstrat.__file__).parent / "MIGRATION.md").read_text(encoding="utf-8")
TITLES = {"central": "Central storage", "ps": "Parameter servers", "tpu": "TPU with two logical devices per replica"}


def program(which: str, framework: str = "torchstrat") -> str:
    """One of the six programs, as it stands there."""
    section = re.split(r"^### ", TEXT, flags=re.MULTILINE)
    [own] = [part for part in section if part.startswith(f"{TITLES[which]}\n")]
    [code] = re.findall(rf"^\*\*{framework}\*\*\n\n```python\n(.*?)```", own, re.MULTILINE | re.DOTALL)
    return str(code)


def replaced(code: str, line: str, other: str) -> str:
    """A program with one of its lines changed, which must be there once."""
    assert code.splitlines().count(line) == 1, f"the program has no single line {line!r}"
    return code.replace(line, other)


def run(code: str, **names: Any) -> dict[str, Any]:
    """Execute a program; the names that it defined."""
    torch.manual_seed(0)
    defined: dict[str, Any] = {"__name__": "program", **names}
    exec(compile(code, "MIGRATION.md", "exec"), defined)
    return defined


def losses(printed: str) -> list[float]:
    return [float(one) for one in re.findall(r"^loss ([\d.]+)$", printed, re.MULTILINE)]
