"""Strategies by name, as configurations spell them. A new strategy adds one row."""

from __future__ import annotations

import importlib
from typing import Any

from torchstrat.errors import InvalidArgumentError
from torchstrat.strategy import Strategy

_STRATEGIES = {
    "one_device": ("torchstrat.strategies.one_device", "OneDeviceStrategy"),
    "mirrored": ("torchstrat.strategies.mirrored", "MirroredStrategy"),
    "multi_worker_mirrored": ("torchstrat.strategies.multi_worker_mirrored", "MultiWorkerMirroredStrategy"),
    "central_storage": ("torchstrat.strategies.central_storage", "CentralStorageStrategy"),
    "tpu": ("torchstrat.strategies.tpu", "TPUStrategy"),
    "parameter_server": ("torchstrat.strategies.parameter_server", "ParameterServerStrategy"),
}


def names() -> list[str]:
    """Every registered name."""
    return list(_STRATEGIES)


def get(name: str) -> type[Strategy]:
    """The class registered as ``name``; its module is imported on first use. `ValueError` lists the names there are."""
    if name not in _STRATEGIES:
        raise InvalidArgumentError(f"unknown strategy {name!r}; there are {', '.join(names())}.")
    module, attribute = _STRATEGIES[name]
    found: type[Strategy] = getattr(importlib.import_module(module), attribute)
    return found


def create(name: str, **options: Any) -> Strategy:
    """Build the strategy registered as ``name`` with its constructor's keywords."""
    strategy_type: Any = get(name)
    strategy: Strategy = strategy_type(**options)
    return strategy
