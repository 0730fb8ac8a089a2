"""Two things that a test is called with and that hardly meet in the code: every second pair always, all in soak."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_second(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Each of the first with every second one of the others, and the other way round; the pairs between, as soak."""
    others = list(second)
    return [
        pytest.param(one, other, marks=[pytest.mark.soak] if (row + column) % 2 else [])
        for row, one in enumerate(first)
        for column, other in enumerate(others)
    ]
