"""Every mistake of the table `tests.mistakes`, made: the class that is raised, and what its message says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mistakes.table import Area, Mistake, all_areas, look

MOST_FRAMES = 5
"""Of torchstrat, in a traceback."""


@pytest.mark.parametrize(
    ("area", "mistake"),
    [pytest.param(area, one, id=f"{area.title}: {one.name}") for area in all_areas() for one in area.mistakes()],
)
def test_what_the_user_sees(area: type[Area], mistake: Mistake, tmp_path: Path) -> None:
    seen = look(area, mistake, tmp_path)
    if mistake.error is None:
        assert seen.error is None
    elif seen.error is None:
        pytest.fail(f"nothing was raised, and {mistake.error.__name__} is expected")
    elif not isinstance(seen.error, mistake.error):
        raise seen.error
    for pattern in mistake.parts:
        assert re.search(pattern, seen.message), f"{pattern!r} is not in: {seen.message}"
    assert seen.frames <= MOST_FRAMES
    if mistake.because:
        assert seen.message == ""
