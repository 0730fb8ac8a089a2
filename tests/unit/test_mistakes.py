"""Every mistake of the table `tests.mistakes`, made: the class that is raised, and what its message says."""

import re
from collections import Counter

import pytest

from tests.mistakes.table import Mistake, all_areas, look
from torchstrat.tracebacks import MOST_FRAMES

AREAS = list(all_areas())
MISTAKES = [pytest.param(mistake, id=f"{area.title}: {mistake.name}") for area in AREAS for mistake in area]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_the_user_sees(mistake: Mistake, tmp_path):
    seen = look(mistake, tmp_path)
    if mistake.error is None:
        assert seen.error is None
    elif seen.error is None:
        pytest.fail(f"nothing was raised, and {mistake.error.__name__} is expected")
    elif not isinstance(seen.error, mistake.error):
        raise seen.error
    for part, pattern in mistake.parts.items():
        assert re.search(pattern, seen.message), f"{part}: {pattern!r} is not in: {seen.message}"
    assert seen.frames <= MOST_FRAMES
    if mistake.because:
        assert seen.message == ""


def test_every_name_is_there_once():
    names = Counter((area.title, mistake.name) for area in AREAS for mistake in area)
    assert [name for name, count in names.items() if count > 1] == []
