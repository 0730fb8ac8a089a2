"""pytest's fixtures for distributed programs: ``cluster``, ``torchrun`` and ``fault_plan``.

A project that wants them says so in its ``conftest.py``, or ``-p torchstrat.testing.pytest_plugin``. Fixtures of the
project's own of the same names stay its own::

    pytest_plugins = ["torchstrat.testing.pytest_plugin"]  # conftest.py

    @pytest.mark.cluster(ps=1, workers=2)
    def test_training(cluster):
        strategy = cluster.strategy()
        ...

    def test_a_sum_over_ranks(torchrun):
        assert torchrun(sum_of_ranks, 2) == [1, 1]

It is no entry point: pytest would import it in every project of an environment, and PyTorch with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torchstrat.launch import Cluster
    from torchstrat.testing.fault_plan import FaultPlan

_MARKER = "cluster"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(ps=2, workers=2, ...): what the fixture cluster starts; arguments of torchstrat.launch.Cluster",
    )


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A `torchstrat.launch.Cluster` of real processes, as long as the test runs; ``cluster.strategy()`` trains on it.

    ``@pytest.mark.cluster(ps=1, workers=2)`` says how large it is and all else that a `Cluster` takes; without it there
    are two servers and two workers. In a test that also asks for ``fault_plan`` they follow that plan.
    """
    from torchstrat.launch import Cluster

    marker = request.node.get_closest_marker(_MARKER)
    options: dict[str, Any] = {} if marker is None else dict(marker.kwargs)
    if marker is not None and marker.args:
        raise pytest.UsageError(
            f"@pytest.mark.{_MARKER} was given {marker.args}, whose meaning is not plain; name them, as in "
            f"@pytest.mark.{_MARKER}(ps=2, workers=2)."
        )
    if "fault_plan" in request.fixturenames:
        plan: FaultPlan = request.getfixturevalue("fault_plan")
        options["env"] = {**plan.environment, **options.get("env", {})}
    with Cluster(**options) as made:
        yield made


@pytest.fixture
def torchrun(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``torchrun(function, num_processes, args=())`` calls it in that many real processes, which look as if torchrun
    had started them, and returns the results by rank. It is `torchstrat.testing.spawn`, with its further arguments.

    The function may be one of the test's own. A process that raises, hangs or dies is a `WorkersError` that shows it.
    """
    from torchstrat.testing import spawn
    from torchstrat.testing._child import by_value

    if request.config.getoption("importmode") != "importlib":
        return spawn
    # Other processes do not find modules that pytest has imported so.
    module = request.module

    def run(function: Callable[..., object], *arguments: Any, **options: Any) -> list[Any]:
        return spawn(by_value(function, module), *arguments, **options)

    return run


@pytest.fixture
def fault_plan(tmp_path: Path) -> FaultPlan:
    """A `torchstrat.testing.fault_plan.FaultPlan` without faults, which ``cluster`` of the same test follows.

    ::

        def test_a_worker_that_dies(fault_plan, cluster):
            fault_plan.add("worker", 0, Fault(phases.INSIDE))
            ...
            assert len(fault_plan.fired("worker", 0)) == 1
    """
    from torchstrat.testing.fault_plan import FaultPlan

    return FaultPlan(tmp_path / "fault_plan")
