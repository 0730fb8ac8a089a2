"""Hooks on an optimizer's step that come after all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from torchstrat._torch_private import before_step
from torchstrat.optimizer_blocks import is_worth_blocks, step_in_blocks
from torchstrat.stand_ins import make_stand_in

Hook = Callable[[Optimizer, Any, Any], Any]


class LastHooks:
    """Pre-hooks of one step each, registered while torch's global ones run: so they come last, after the user's own,
    which may change gradients and parameters."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}

    def put(self, optimizer: Optimizer, hook: Hook) -> None:
        """``hook``: made by `before_step`."""
        self.remove(optimizer)
        self._handles[id(optimizer)] = optimizer.register_step_pre_hook(hook)

    def remove(self, optimizer: Optimizer) -> None:
        handle = self._handles.pop(id(optimizer), None)
        if handle is not None:
            handle.remove()

    def clear(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def step_in_blocks(self, optimizer: Optimizer) -> None:
        """Have the step that has begun made in blocks, where that is quicker. What is then stepped is a stand-in, which
        has nothing to step; so hooks that follow find all of it done."""

        def last(stepped: Optimizer, args: Any, kwargs: Any) -> Any:
            if args[0] is not stepped or not step_in_blocks(stepped):  # a hook of the user's own steps another one
                return None
            return (make_stand_in(stepped), *args[1:]), kwargs

        if is_worth_blocks(optimizer):
            self.put(optimizer, before_step(last))
