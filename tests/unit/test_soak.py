"""What ``./scripts/soak`` and ``./scripts/test --repeat`` do when a test fails now and then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "scripts" / "soak.py"
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


@pytest.fixture
def soak(tmp_path):
    (tmp_path / "test_toy.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\naddopts = -m 'not soak' -p no:cacheprovider\n")
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # seconds of imports

    def run(*arguments):
        command = [sys.executable, str(SOAK), *arguments, "test_toy.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=False
        )
        return done.returncode, done.stdout + done.stderr, len((tmp_path / "rounds").read_text())

    return run


def test_a_failure_ends_the_rounds(soak, tmp_path):
    status, said, rounds = soak("--repeat", "3", "-m", "not soak")  # as ./scripts/test calls it
    assert (status, rounds) == (1, 2)
    assert "round 1/3: 1 passed in" in said
    assert "assert 2 != 2" in said
    assert "ended by a failure in round 2 of 3: 1 passed, 1 failed" in said
    assert "1/2  test_toy::test_that_fails_in_the_second_round" in said
    assert not (tmp_path / "soaked").exists()


def test_to_the_end_where_failures_are_counted(soak, tmp_path):
    status, said, rounds = soak("--repeat=3", "--count")
    assert (status, rounds) == (1, 3)
    assert "3 rounds: 5 passed, 1 failed" in said
    assert "1/3  test_toy::test_that_fails_in_the_second_round" in said
    assert (tmp_path / "soaked").exists()
