"""The fixtures that watch over all other tests: each kind of leak fails its test and no other."""

import os
import types

import pytest

from tests import patience
from tests.support.programs import PYTHON, ROOT, run

LEAKS = """
import multiprocessing, os, subprocess, sys, threading, time
from pathlib import Path
import pytest

def test_clean(): pass
def test_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True, name="forgotten").start()
def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def test_fork():
    multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(61,)).start()
def test_new_variable():
    os.environ["FORGOTTEN"] = "1"
def test_lost_variable():
    del os.environ["PATH"]
def test_folder(tmp_path):
    os.chdir(tmp_path)
@pytest.mark.deadline(0.2)
def test_slow():
    time.sleep(60)
@pytest.mark.deadline(30)
def test_thread_that_ends():
    threading.Thread(target=time.sleep, args=(0.3,)).start()
def test_environment_is_as_before():
    assert "FORGOTTEN" not in os.environ and "PATH" in os.environ
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    (folder / "conftest.py").write_text(conftest.replace("GRACE_SECONDS = 10.0", "GRACE_SECONDS = 1.0"))
    (folder / "test_leaks.py").write_text(LEAKS)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers = deadline(seconds): of one test\n")
    words = ["-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", folder]
    no_plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing those that are installed takes a second
    return run(*PYTHON, *words, cwd=folder, **no_plugins).stdout


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("test_thread", "thread <Thread(forgotten"),
        ("test_process", "time.sleep(60)"),
        ("test_fork", "multiprocessing.forkserver"),
        ("test_new_variable", "environment FORGOTTEN='1' (was None)"),
        ("test_lost_variable", "environment PATH=None"),
        ("test_folder", "working directory left at"),
    ],
)
def test_a_leak_is_reported(report, test, reason):
    assert f"ERROR test_leaks.py::{test} - Failed: the test left behind:" in report
    assert reason in report


def test_a_slow_test_is_ended_and_clean_tests_pass(report):
    assert "FAILED test_leaks.py::test_slow - Failed: over its deadline of 0.2 s" in report
    assert "2 errors" not in report
    for test in ("test_clean", "test_thread_that_ends", "test_environment_is_as_before"):
        assert f"PASSED test_leaks.py::{test}" in report
        assert f"ERROR test_leaks.py::{test}" not in report


@pytest.mark.parametrize(("idle", "seconds"), [(1.0, 10), (0.5, 10), (0.1, 40), (0.0, 40)])
def test_a_deadline_is_later_on_a_busy_machine(idle, seconds, monkeypatch):
    clock = types.SimpleNamespace(monotonic=lambda: clock.now, now=7.0)
    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(patience, "idle_seconds", lambda: idle * clock.now * os.cpu_count())
    waits = patience.Patience(10)
    clock.now += seconds - 1
    assert not waits.is_over
    clock.now += waits.left()
    assert clock.now <= 7 + seconds
    clock.now = 7 + seconds
    assert waits.is_over


def test_cores_that_nobody_uses_are_idle():
    before = patience.idle_seconds()
    assert before > 0
    assert patience.idle_seconds() >= before
