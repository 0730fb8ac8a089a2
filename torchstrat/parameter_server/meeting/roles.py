"""Which service a task of each role runs. They are imported when the first task of the role starts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torchstrat.cluster_spec import CHIEF, EVALUATOR, PARAMETER_SERVER, WORKER
from torchstrat.errors import ClusterConfigError
from torchstrat.parameter_server.service import Service
from torchstrat.parameter_server.tasks import Task

_SERVICES: dict[str, tuple[str, str, Callable[[Task], tuple[Any, ...]]]] = {
    PARAMETER_SERVER: ("torchstrat.parameter_server.server.service", "VariableServer", lambda task: ()),
    WORKER: ("torchstrat.parameter_server.worker.service", "FunctionWorker", lambda task: (task.index,)),
}
"""Job → module, class, arguments of its constructor."""

_RUN_INSTEAD = {
    CHIEF: "the chief is the coordinator: it runs your program, which makes a ParameterServerStrategy and a "
    "ClusterCoordinator",
    EVALUATOR: "an evaluator runs a program of yours that waits for checkpoints and evaluates them",
}


def check_role(task: Task) -> None:
    """Raises `ClusterConfigError` unless tasks of that job are servers of the cluster; says what they run instead."""
    if task.job in _SERVICES:
        return
    served = " and ".join(repr(job) for job in _SERVICES)
    instead = _RUN_INSTEAD.get(task.job, f"{task.job!r} is no role of a cluster")
    raise ClusterConfigError(f"a Server runs the jobs {served}, and this process is {task}: {instead}.")


def make_service(task: Task) -> Service:
    """What ``task`` runs. Raises `ClusterConfigError` as `check_role` does."""
    check_role(task)
    module, name, arguments = _SERVICES[task.job]
    service: Service = getattr(importlib.import_module(module), name)(*arguments(task))
    return service
