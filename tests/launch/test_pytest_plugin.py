"""The fixtures that other projects get: a project of its own is tested by a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 240.0

PROJECT = """
import os

import pytest



def rank(*more):
    return (int(os.environ["RANK"]), *more)


def test_two_ranks(torchrun):
    offset = 5
    assert torchrun(rank, 2) == [(0,), (1,)]
    assert torchrun(rank, 1, ("more",)) == [(0, "more")]
    assert torchrun(lambda: offset + rank()[0], 2) == [5, 6]


def test_ranks_that_fail(torchrun):
    def fails():
        raise ValueError("on a rank")

    import torchstrat as ts

    with pytest.raises(ts.testing.WorkersError, match="on a rank"):
        torchrun(fails, 1, timeout_seconds=100)


@pytest.mark.cluster(ps=1, workers=1)
def test_a_worker_that_dies(cluster, fault_plan):
    import torchstrat as ts
    from torchstrat.parameter_server.worker import phases
    from torchstrat.testing.fault_plan import Fault

    fault_plan.add("worker", 0, Fault(phases.INSIDE))
    coordinator = ts.ClusterCoordinator(cluster.strategy())
    assert repr(cluster) == "Cluster(ps=1, workers=1, running)"
    assert coordinator.schedule(lambda: 5).get(timeout=100) == 5
    assert len(fault_plan.fired("worker", 0)) == 1
    with open("pids", "a") as pids:
        print(*(cluster.process(job, 0).pid for job in ("ps", "worker")), file=pids)


def test_the_usual_size(cluster):
    assert repr(cluster) == "Cluster(ps=2, workers=2, running)"


@pytest.mark.cluster(2, 2)
def test_numbers_without_names(cluster):
    pass


class TestOwn:
    @pytest.fixture
    def cluster(self):
        return "the project's own"

    def test_own(self, cluster):
        assert cluster == "the project's own"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "checks").mkdir(parents=True)
    (folder / "conftest.py").write_text('pytest_plugins = ["torchstrat.testing.pytest_plugin"]\n')
    (folder / "checks" / "test_project.py").write_text(PROJECT)
    return folder


def run_pytest(project: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        environment.pop(name, None)
    # Not the folder itself on the path, as by `python -m pytest`: most people type `pytest`.
    run = "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main())"
    command = [sys.executable, "-c", run, "-p", "no:cacheprovider", "-q", "-rA", "--strict-markers", *words]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_the_fixtures_in_a_project(project: Path, mode: str) -> None:
    said = run_pytest(project, f"--import-mode={mode}")
    assert "5 passed, 1 error" in said, said
    assert "ERROR checks/test_project.py::test_numbers_without_names" in said, said
    assert "@pytest.mark.cluster(ps=2, workers=2)" in said
    pids = (project / "pids").read_text().split()
    assert len(pids) == 2
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_the_marker_is_listed(project: Path) -> None:
    assert "cluster(ps=2, workers=2, ...)" in run_pytest(project, "--markers")
