"""What ``./scripts/soak`` and ``./scripts/test --repeat`` do when a test fails now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import PYTHON, ROOT, run

TESTS = """
from pathlib import Path
import pytest

def test_that_fails_in_the_second_round():
    with Path("rounds").open("a+") as file:
        file.write("x")
        file.seek(0)
        assert len(file.read()) != 2

@pytest.mark.soak
def test_that_takes_minutes():
    Path("soaked").touch()
"""


@pytest.mark.parametrize(
    ("arguments", "rounds", "soaked", "says"),
    [
        (
            ["--repeat", "3", "-m", "not soak"],  # as ./scripts/test calls it: a failure ends the rounds
            2,
            False,
            ["round 1/3: 1 passed in", "ended by a failure in round 2 of 3: 1 passed, 1 failed", "assert 2 != 2"],
        ),
        (["--repeat=3", "--count"], 3, True, ["3 rounds: 5 passed, 1 failed"]),
    ],
)
def test_rounds(tmp_path: Path, arguments: list[str], rounds: int, soaked: bool, says: list[str]) -> None:
    (tmp_path / "test_toy.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\naddopts = -m 'not soak' -p no:cacheprovider\n")
    quick = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # seconds of imports
    done = run(*PYTHON, ROOT / "scripts" / "soak.py", *arguments, "test_toy.py", cwd=tmp_path, seconds=50, **quick)
    assert done.returncode == 1
    assert len((tmp_path / "rounds").read_text()) == rounds
    assert (tmp_path / "soaked").exists() == soaked
    for text in [*says, f"1/{rounds}  test_toy::test_that_fails_in_the_second_round"]:
        assert text in done.stdout + done.stderr
