"""What the table of lifetimes has to notice: things that are kept by one place or another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.matrix import lifetime_servers
from tests.matrix.on_servers import marked
from tests.matrix.table import PlantedFault, cells_at
from torchstrat.core import gradients
from torchstrat.core.registration_order import WeakOrdered
from torchstrat.core.variables import VariableRegistry
from torchstrat.data import prefetch
from torchstrat.distributed.collectives import process_group
from torchstrat.distributed.collectives.shared_memory.common_memory import CommonMemory
from torchstrat.distributed.collectives.shared_memory.neighbours import Neighbours
from torchstrat.parameter_server.dispatch import Resources
from torchstrat.parameter_server.dispatcher import Dispatcher
from torchstrat.parameter_server.serialization.pack_cache import Recent
from torchstrat.parameter_server.worker.local_variables import Copies
from torchstrat.replicas.central.state import CentralState
from torchstrat.replicas.in_process import baton
from torchstrat.replicas.in_process.engine import InProcessReplicas
from torchstrat.replicas.optimizer_step import StepsOutside

Plant = Callable[[], AbstractContextManager[object]]


def _nothing(*_: Any, **__: Any) -> None: ...


def _off(owner: Any, name: str) -> Plant:
    return lambda: mock.patch.object(owner, name, _nothing)


def _keeping(owner: Any, name: str) -> Plant:
    """What the method gets, and returns, stays."""

    @contextmanager
    def plant() -> Iterator[None]:
        whole, kept = getattr(owner, name), []

        def keeps(self: Any, *args: Any, **options: Any) -> Any:
            found = whole(self, *args, **options)
            kept.append((args, found))
            return found

        with mock.patch.object(owner, name, keeps):
            yield
        kept.clear()

    return plant


@contextmanager
def _later(owner: Any, name: str) -> Iterator[None]:
    """What is called is called when the fault is over. Finalizers that were made meanwhile know the replacement, which
    may be called after that."""
    whole, calls, is_over = getattr(owner, name), [], False

    def postponed(*given: Any) -> None:
        if is_over:
            whole(*given)
        else:
            calls.append(given)

    try:
        with mock.patch.object(owner, name, postponed):
            yield
    finally:
        is_over = True
        for given in calls:
            whole(*given)


def _added_for_good(self: Recent, key: Any, value: Any = None) -> None:
    self._entries[key] = value


def _without_an_end(self: VariableRegistry, step: Any, start: Any) -> None:
    self._walked[step] = start


_MANY = "20,000 functions"
_RESULTS, _CODES = "a coordinator keeps the results of functions", "workers keep every function"
_ON_WORKERS, _BUILT = "workers keep what the program has dropped", "workers keep per-worker values"

FAULTS = [
    PlantedFault(
        "results of runs are kept",
        _keeping(InProcessReplicas, "run"),
        cells_at("results", "dropped", "one_device", "mirrored x2"),
    ),
    PlantedFault(
        "modules are held strongly",
        _keeping(WeakOrdered, "add"),
        cells_at("models", "dropped", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "steps are remembered for good",
        lambda: mock.patch.object(VariableRegistry, "_remember", _without_an_end),
        cells_at("functions", _MANY, "mirrored x2"),
    ),
    PlantedFault(
        "hooks of a dropped strategy stay on the tensors",
        _off(gradients, "_detach"),
        cells_at("strategies", "dropped", "mirrored x2"),
    ),
    PlantedFault(
        "threads of a dropped strategy go on",
        lambda: _later(baton, "_dismiss"),
        cells_at("strategies", "dropped", "mirrored x2"),
    ),
    PlantedFault(
        "a reader in the background goes on without its iterator",
        lambda: _later(prefetch._Background, "stop"),
        cells_at("iterators", "dropped", "one_device", "mirrored x2"),
    ),
    PlantedFault(
        "loader processes go on without their iterator",
        _off(_MultiProcessingDataLoaderIter, "_shutdown_workers"),
        cells_at("loader processes", "dropped", "torchrun mirrored"),
    ),
    PlantedFault(
        "groups that nobody has any more stay",
        _off(process_group, "_destroy_abandoned"),
        cells_at("strategies", "dropped", "torchrun multi_worker_mirrored"),
    ),
    PlantedFault(
        "groups of a dropped strategy stay",
        _off(process_group, "abandon"),
        cells_at("data sets", "dropped", "torchrun mirrored"),
    ),
    PlantedFault(
        "processes that share memory keep each other's descriptors",
        _off(Neighbours, "close"),
        cells_at("strategies", "500 trials", "torchrun mirrored"),
    ),
    PlantedFault(
        "common memory stays mapped",
        _keeping(CommonMemory, "places"),
        cells_at("models", "dropped", "torchrun central_storage"),
    ),
    PlantedFault(
        "common memory of state stays mapped",
        _keeping(CentralState, "_bind"),
        cells_at("optimizers", "dropped", "torchrun central_storage"),
    ),
    PlantedFault(
        "optimizers keep the hooks of earlier strategies",
        _off(StepsOutside, "let_go"),
        cells_at("strategies", "dropped", "torchrun central_storage"),
    ),
    PlantedFault(
        _RESULTS,
        lambda: marked(_RESULTS, _keeping(Dispatcher, "_handle_news")),
        cells_at("results", "dropped", lifetime_servers.PLACE),
    ),
    PlantedFault(
        _CODES,
        lambda: marked(_CODES, lambda: mock.patch.object(Recent, "add", _added_for_good)),
        cells_at("functions", "dropped", lifetime_servers.PLACE),
    ),
    PlantedFault(
        _ON_WORKERS,
        lambda: marked(_ON_WORKERS, _off(Copies, "release")),
        cells_at("models", "dropped", lifetime_servers.PLACE),
    ),
    PlantedFault(
        _BUILT,
        lambda: marked(_BUILT, _off(Resources, "forget")),
        cells_at("iterators", "dropped", lifetime_servers.PLACE),
    ),
]
