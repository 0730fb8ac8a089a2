"""The files here run in two other pytest processes: SPMD is a setting of a whole process, made once and for good.

Nothing changes for who runs them: ``pytest tests/tpu``, ``pytest tests/tpu/test_x.py::test_y``, ``-k`` and ``-x`` do
what they always do, and every test is reported by its own name. Collecting imports the files in the process that was
started, so a file must not touch a device when it is imported. Without torch_xla all of it is one skip for each file.

Files with ``DUMP_HLO = True`` share one process, and get the compiler's dumps of it through the fixture `hlo_dumps`;
the others share the other one. A process for each file would take five seconds more for each.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tpu.hlo import COMPILES_QUICKLY, DUMP_FLAGS, DumpFolder

HERE = Path(__file__).parent
REPORTS = "TORCHSTRAT_TPU_TEST_REPORTS"
"""In the environment of a process of files: where it writes its reports, a JSON object on each line."""
DUMPS = "TORCHSTRAT_TPU_TEST_DUMPS"

FILE_DEADLINE_SECONDS = 900
NEEDS_TORCH_XLA = (
    "needs torch_xla: run ./scripts/test tests/tpu, or pip install torch==2.9.0 torch_xla==2.9.0 "
    "(Linux on x86-64, Python 3.10 … 3.13)"
)
HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None
IS_OWN_PROCESS = REPORTS in os.environ


@pytest.fixture
def hlo_dumps() -> DumpFolder:
    """The programs that this process has compiled so far."""
    if DUMPS not in os.environ:
        pytest.fail("this file has no dumps: it has to say DUMP_HLO = True at its top level", pytrace=False)
    return DumpFolder(Path(os.environ[DUMPS]))


# --- without torch_xla ------------------------------------------------------------------------------------------------


class _Skipped(pytest.File):
    def collect(self) -> Iterable[pytest.Item]:
        yield _SkippedItem.from_parent(self, name="all tests of this file")


class _SkippedItem(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(NEEDS_TORCH_XLA)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Without torch_xla a file is not even imported."""
    return None if HAS_TORCH_XLA else _Skipped.from_parent(parent, path=module_path)


# --- the process that was started -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """How a process ended. ``reports``: by test. ``unexplained``: its output, until it has been shown."""

    reports: dict[str, list[pytest.TestReport]]
    ending: str
    unexplained: list[str]


_OUTCOMES = pytest.StashKey[dict[bool, _Outcome]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """The first test runs the chosen tests of all files of its process; each takes its reports from there."""
    if IS_OWN_PROCESS or not HAS_TORCH_XLA or not item.path.is_relative_to(HERE):
        return None
    outcomes = item.config.stash.setdefault(_OUTCOMES, {})
    dumps = _dumps(item)
    if dumps not in outcomes:
        together = [one for one in item.session.items if one.path.is_relative_to(HERE) and _dumps(one) == dumps]
        outcomes[dumps] = _run(together, dumps)
    outcome = outcomes[dumps]
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = outcome.reports.get(item.nodeid, [])
    if not any(report.when == "teardown" for report in reports):  # each test that comes to its end has one
        reports = [*reports, _not_reported(item, outcome)]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _dumps(item: pytest.Item) -> bool:
    return getattr(item.module, "DUMP_HLO", False)


def _run(items: list[pytest.Item], dumps: bool) -> _Outcome:
    config = items[0].config
    interactive = config.option.capture == "no"
    modules = {item.module for item in items}
    deadline = sum(getattr(module, "DEADLINE_SECONDS", FILE_DEADLINE_SECONDS) for module in modules)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={config.rootpath}"]
    command += ["-p", "no:hydra_pytest"]  # its import takes half a second
    command += ["-m", ""]  # they have been chosen already
    command += [f"--maxfail={config.option.maxfail or 0}", f"--tb={config.option.tbstyle}"]
    # What C++ writes before it aborts would be lost with a capture of file descriptors inside of the process.
    command += ["-s"] if interactive else ["--capture=sys"]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "output"), "w+") as output:
        reports = Path(folder, "reports")
        reports.touch()
        process = subprocess.Popen(
            [*command, *(item.nodeid for item in items)],
            cwd=config.rootpath,
            env=_environment(reports, Path(folder, "dumps") if dumps else None),
            stdout=None if interactive else output,
            stderr=None if interactive else subprocess.STDOUT,
            start_new_session=True,  # so that what the tests started can be ended with it
        )
        try:
            ending = f"ended with status {process.wait(deadline)}"
        except subprocess.TimeoutExpired:
            ending = f"was ended at its deadline of {deadline} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return _Outcome(_read(reports, config), ending, [output.read()])


def _environment(reports: Path, dumps: Path | None) -> dict[str, str]:
    environment = {"PJRT_DEVICE": "CPU", **os.environ, "CPU_NUM_DEVICES": "8", "OMP_NUM_THREADS": "1"}
    environment.setdefault("XLA_NO_SPECIAL_SCALARS", "1")  # as torchstrat sets it; a test must leave nothing behind
    environment[REPORTS] = str(reports)
    environment["XLA_FLAGS"] = f"{COMPILES_QUICKLY} {os.environ.get('XLA_FLAGS', '')}".strip()
    if dumps is not None:
        dumps.mkdir()
        environment[DUMPS] = str(dumps)
        environment["XLA_FLAGS"] += f" {DUMP_FLAGS} --xla_dump_to={dumps}"
    return environment


def _read(path: Path, config: pytest.Config) -> dict[str, list[pytest.TestReport]]:
    found: dict[str, list[pytest.TestReport]] = {}
    for line in path.read_text().splitlines():
        try:
            data = json.loads(line)
        except ValueError:  # the process ended in the middle of a line
            continue
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        if isinstance(report.longrepr, list):  # a skip's place and reason; JSON has no tuples
            report.longrepr = tuple(report.longrepr)
        found.setdefault(report.nodeid, []).append(report)
    return found


def _not_reported(item: pytest.Item, outcome: _Outcome) -> pytest.TestReport:
    """A crash of the process, or its deadline, takes the tests that had not ended yet with it."""
    output = f" Its output:\n{outcome.unexplained.pop()}" if outcome.unexplained else " Its output is shown above."
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=f"The process of {item.path.name} {outcome.ending} before this test did.{output}",
        when="call",
    )


# --- in the process of the files --------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    if IS_OWN_PROCESS:
        import torch_xla  # noqa: F401  # here, since it sets environment variables, which a test must not

        config.pluginmanager.register(_ReportWriter(config, Path(os.environ[REPORTS])))


class _ReportWriter:
    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._path = config, path

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a") as file:
            file.write(json.dumps(data) + "\n")
