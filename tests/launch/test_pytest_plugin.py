"""The fixtures that other projects get: a project of its own is tested by a pytest of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.support.programs import gone, run
from torchstrat.testing import pytest_plugin

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
    from torchstrat.parameter_server import phases
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
    (tmp_path / "checks").mkdir()
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["torchstrat.testing.pytest_plugin"]\n')
    (tmp_path / "checks" / "test_project.py").write_text(PROJECT)
    return tmp_path


def run_pytest(project: Path, *words: str) -> str:
    # Not the folder itself on the path, as by `python -m pytest`: most people type `pytest`.
    pytest_alone = "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main())"
    command = [sys.executable, "-c", pytest_alone, "-p", "no:cacheprovider", "-q", "-rA", "--strict-markers", *words]
    done = run(*command, cwd=project, PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    return done.stdout + done.stderr


# Otherwise ``torchrun`` is `spawn`, of which tests/multiprocess/test_spawn.py is.
@pytest.mark.parametrize("mode", ["importlib", pytest.param("prepend", marks=pytest.mark.soak)])
def test_the_fixtures_in_a_project(project: Path, mode: str) -> None:
    """With importlib other processes do not find the modules."""
    said = run_pytest(project, f"--import-mode={mode}")
    assert "5 passed, 1 error" in said, said
    assert "ERROR checks/test_project.py::test_numbers_without_names" in said, said
    assert "@pytest.mark.cluster(ps=2, workers=2)" in said
    pids = (project / "pids").read_text().split()
    assert len(pids) == 2
    assert all(gone(int(pid)) for pid in pids)


def test_the_marker_is_listed() -> None:
    config = mock.Mock(spec=pytest.Config)
    pytest_plugin.pytest_configure(config)
    ((_, line),) = (call.args for call in config.addinivalue_line.call_args_list)
    assert line.startswith("cluster(ps=2, workers=2, ...): ")
