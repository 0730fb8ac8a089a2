"""What stands for the `ClusterCoordinator` in a function that closes over it."""

from __future__ import annotations

from typing import Any, NoReturn

from torchstrat.errors import ContextError
from torchstrat.parameter_server.worker.run import current_worker_index


class CoordinatorHere:
    """On a worker, a coordinator knows which worker this is, and of how many. Scheduling is done where the program
    runs."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.workers = 0

    def num_workers(self) -> int:
        return self.workers

    def get_current_worker_index(self) -> int:
        return current_worker_index()

    experimental_get_current_worker_index = get_current_worker_index

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ContextError(
            f"a scheduled function used coordinator.{name}; on a worker there are only get_current_worker_index() "
            "and num_workers(). Functions do not schedule functions: return what the coordinator needs to go on."
        )
