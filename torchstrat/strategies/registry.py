"""Strategies by name, as configurations spell them. A new strategy adds one row, or calls `register`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.values import misfit
from torchstrat.strategies.strategy import Strategy

_STRATEGIES = {
    "one_device": ("torchstrat.strategies.one_device", "OneDeviceStrategy"),
    "mirrored": ("torchstrat.strategies.mirrored", "MirroredStrategy"),
    "multi_worker_mirrored": ("torchstrat.strategies.multi_worker_mirrored", "MultiWorkerMirroredStrategy"),
    "central_storage": ("torchstrat.strategies.central_storage", "CentralStorageStrategy"),
    "local_sgd": ("torchstrat.strategies.local_sgd", "LocalSGDStrategy"),
    "tpu": ("torchstrat.strategies.tpu", "TPUStrategy"),
    "parameter_server": ("torchstrat.strategies.parameter_server", "ParameterServerStrategy"),
}

_REGISTERED: dict[str, type[Strategy]] = {}
"""By programs, with `register`."""


def names() -> list[str]:
    """Every registered name."""
    return [*_STRATEGIES, *_REGISTERED]


def register(name: str, strategy_type: type[Strategy]) -> None:
    """Give a strategy of the program's own a name, by which `get` and `create` find it.

    Registered again, as when a notebook's cell runs again, the new class replaces the old one.

    Raises:
        WrongTypeError: ``strategy_type`` is no class derived from `Strategy`.
        InvalidArgumentError: the name is one of torchstrat's own.
    """
    if not (isinstance(strategy_type, type) and issubclass(strategy_type, Strategy)):
        raise WrongTypeError(
            f"register({name!r}, …) needs a class derived from ts.Strategy; got {strategy_type!r:.80}."
        )
    if name in _STRATEGIES:
        raise InvalidArgumentError(f"{name!r} is torchstrat's own {_STRATEGIES[name][1]}; choose another name.")
    _REGISTERED[name] = strategy_type


def get(name: str) -> type[Strategy]:
    """The class registered as ``name``; its module is imported on first use. `ValueError` lists the names there are."""
    if not isinstance(name, str):
        raise WrongTypeError(
            f"a strategy's name is a string; got {type(name).__name__} {name!r:.80}. There are {', '.join(names())}."
        )
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _STRATEGIES:
        raise InvalidArgumentError(f"unknown strategy {name!r}; there are {', '.join(names())}.")
    module, attribute = _STRATEGIES[name]
    found: type[Strategy] = getattr(importlib.import_module(module), attribute)
    return found


def create(name: str, **options: object) -> Strategy:
    """Build the strategy registered as ``name`` with its constructor's keywords."""
    strategy_type: Any = get(name)
    known = inspect.signature(strategy_type).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    unknown = [option for option in options if option not in known]
    if unknown and not takes_any:
        raise WrongTypeError(
            f"strategy {name!r} was given {', '.join(unknown)}, which {strategy_type.__name__} does not have; it takes "
            f"{', '.join(option for option in known if not option.startswith('_'))}."
        )
    if error := misfit(strategy_type, **options):
        raise WrongTypeError(
            f"strategy {name!r}: {error}. Pass it by its name to create; {strategy_type.__name__} takes "
            f"{', '.join(option for option in known if not option.startswith('_'))}."
        )
    strategy: Strategy = strategy_type(**options)
    return strategy
