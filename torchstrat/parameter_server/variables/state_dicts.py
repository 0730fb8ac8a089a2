"""``state_dict()`` on the coordinator: what it returns is what the servers hold at that moment."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from torchstrat.parameter_server.serialization.path_errors import StaysHere
from torchstrat.variables import WeakOrdered

if TYPE_CHECKING:
    from torchstrat.strategies.parameter_server import ParameterServerStrategy

_hooked = WeakOrdered()


def hook_module(strategy: ParameterServerStrategy, module: nn.Module) -> None:
    """Pull before ``module.state_dict()``. Once per module."""
    if _hooked.add(module):
        module.register_state_dict_pre_hook(_PullModule(strategy))


def hook_optimizer(strategy: ParameterServerStrategy, optimizer: Optimizer) -> None:
    """Pull the state before ``optimizer.state_dict()``, push it after ``optimizer.load_state_dict()``."""
    if _hooked.add(optimizer):
        # Wrappers around another optimizer often leave `Optimizer.__init__` out, and with it the places for hooks.
        vars(optimizer).setdefault("defaults", {})
        Optimizer.__setstate__(optimizer, {})
        optimizer.register_state_dict_pre_hook(_PullOptimizer(strategy))
        optimizer.register_load_state_dict_post_hook(_PushOptimizer(strategy))


class _Hook(StaysHere):
    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = weakref.ref(strategy)

    def _open_strategy(self) -> ParameterServerStrategy | None:
        """None after the strategy was closed or dropped: then the module is an ordinary one, with its last values."""
        strategy = self._strategy()
        return strategy if strategy is not None and strategy._connected is not None else None


class _PullModule(_Hook):
    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        strategy = self._open_strategy()
        if strategy is not None and prefix == "":  # the outermost call pulls for all modules below it
            strategy._pull([module])


class _PullOptimizer(_Hook):
    def __call__(self, optimizer: Optimizer) -> None:
        strategy = self._open_strategy()
        if strategy is not None and strategy._job.catalog.token_of(optimizer) is not None:  # else it was released
            job = strategy._job

            def pull() -> None:
                job.commit()
                job.pull_optimizer(optimizer)

            strategy._asking_servers(pull)


class _PushOptimizer(_Hook):
    def __call__(self, optimizer: Optimizer) -> None:
        strategy = self._open_strategy()
        if strategy is not None and strategy._job.catalog.token_of(optimizer) is not None:
            job = strategy._job

            def push() -> None:
                job.commit()
                job.push_optimizer(optimizer)

            strategy._telling_servers(push)
