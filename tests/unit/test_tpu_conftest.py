"""How the files of tests/tpu are run, without torch_xla: an empty module of its name is all that this part needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

OUTCOMES = """
import os
import pytest

PROCESS = os.getpid()

def test_passes(): assert os.environ["CPU_NUM_DEVICES"] == "8" and "xla_dump_to" not in os.environ["XLA_FLAGS"]
@pytest.mark.parametrize("number", [1, 2])
def test_numbers(number): assert number == 1, f"not {number}"
def test_skips(): pytest.skip("on purpose")
def test_error(missing_fixture): pass
def test_process():
    with open("processes", "a") as file: file.write(f"{os.getpid()} ")
"""
DUMPS = """
import os
from pathlib import Path
DUMP_HLO = True

def test_dumps(hlo_dumps):
    assert f"--xla_dump_to={hlo_dumps.folder}" in os.environ["XLA_FLAGS"]
    assert hlo_dumps.compiled == 0
def test_process():
    with open("processes", "a") as file: file.write(f"{os.getpid()} ")
"""
CRASHES = """
import os

def test_before(): pass
def test_crash():
    os.write(2, b"the last words")
    os._exit(7)
def test_after(): pass
def test_long_after(): pass
"""
HANGS = """
import time

def test_hang(): time.sleep(600)
"""


@pytest.fixture
def suite(tmp_path):
    """Runs the files in ``tmp_path`` by the conftest of tests/tpu."""
    conftest = (TESTS / "tpu" / "conftest.py").read_text()
    (tmp_path / "torch_xla.py").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(TESTS.parent)])}
    # In CI (by these two, says pytest) a whole failure is repeated in its line of the summary.
    outer = ("XLA_", "PYTEST_", "TORCHSTRAT_TPU_TEST", "CI", "BUILD_NUMBER")
    for name in [name for name in environment if name.startswith(outer)]:
        del environment[name]
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing those that are installed takes a second

    def run(files: dict[str, str], *arguments: str, change: tuple[str, str] = ("", "")) -> tuple[int, str]:
        assert change[0] in conftest
        (tmp_path / "conftest.py").write_text(conftest.replace(*change))
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *arguments]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=False
        )
        return ended.returncode, ended.stdout + ended.stderr

    return run


def test_every_test_is_reported_as_its_own(suite, tmp_path):
    status, output = suite({"test_outcomes.py": OUTCOMES, "test_dumps.py": DUMPS})
    assert status == 1
    assert "1 failed, 5 passed, 1 skipped, 1 error" in output, output
    assert "PASSED test_outcomes.py::test_passes" in output
    assert "PASSED test_outcomes.py::test_numbers[1]" in output
    assert "FAILED test_outcomes.py::test_numbers[2] - AssertionError: not 2" in output
    assert re.search(r"SKIPPED \[1\] test_outcomes.py:\d+: on purpose", output)
    assert "ERROR test_outcomes.py::test_error" in output
    processes = (tmp_path / "processes").read_text().split()
    assert len(set(processes)) == 2  # one for each file, and none of them this suite's


@pytest.mark.soak  # of the tests themselves; the other tests here show how they run
def test_a_chosen_test_runs_alone(suite):
    status, output = suite({"test_outcomes.py": OUTCOMES}, "test_outcomes.py::test_numbers[1]")
    assert (status, "1 passed" in output) == (0, True), output


def test_a_crash_is_told_with_the_output_of_the_process(suite):
    status, output = suite({"test_crashes.py": CRASHES, "test_dumps.py": DUMPS})
    assert status == 1
    assert "PASSED test_crashes.py::test_before" in output
    assert "The process of test_crashes.py ended with status 7 before this test did." in output
    assert output.count("the last words") == 1
    for name in ("test_crash", "test_after", "test_long_after"):
        assert f"FAILED test_crashes.py::{name}" in output
    assert "PASSED test_dumps.py::test_dumps" in output


@pytest.mark.soak  # of the tests themselves; the other tests here show how they run
def test_a_hang_is_ended(suite):
    status, output = suite(
        {"test_hangs.py": HANGS}, change=("FILE_DEADLINE_SECONDS = 900", "FILE_DEADLINE_SECONDS = 3")
    )
    assert status == 1, output
    assert "test_hangs.py was ended at its deadline of 3 s before this test did." in output


@pytest.mark.soak  # of the tests themselves; the other tests here show how they run
def test_stops_at_the_first_failure_when_told(suite):
    status, output = suite({"test_crashes.py": CRASHES, "test_dumps.py": DUMPS}, "-x")
    assert (status, "1 failed, 1 passed" in output) == (1, True), output


def test_without_torch_xla_files_are_skipped_unread(suite):
    unreadable = "import a_module_that_is_nowhere"
    status, output = suite(
        {"test_unreadable.py": unreadable, "test_outcomes.py": OUTCOMES},
        change=('importlib.util.find_spec("torch_xla") is not None', "False"),
    )
    assert status == 0
    assert "2 skipped" in output, output
    assert re.search(r"SKIPPED \[2\] conftest.py:\d+: needs torch_xla: .*pip install torch==2.9.0", output)
