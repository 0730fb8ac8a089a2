"""Steps of optimizers outside of a run: of gradients that runs have left uncombined, and under central storage with one
replica per process, where the owner steps or all do their parts, and what the owner steps alone it alone has state of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from torch.optim import Optimizer

from torchstrat.core._torch_private import after_step, before_step


class Step(Protocol):
    """An `OptimizerStep`, or what stands for one."""

    def is_part_of_another(self) -> bool: ...
    def before_last(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any: ...
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None: ...


class StepsOutside:
    """Watches optimizers until `stop`. ``begin`` and ``end`` surround a step: the variables are known only in between.
    ``begin`` returns whether there is anything to do.

    An optimizer that a later strategy watches is that one's.
    """

    _watchers: ClassVar[weakref.WeakKeyDictionary[Optimizer, weakref.ref[StepsOutside]]] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        step: Step,
        begin: Callable[[], bool],
        end: Callable[[], None],
        has_own_state: Callable[[Optimizer], bool],
        *,
        owns: bool,
    ) -> None:
        """``has_own_state``: whether an optimizer's state is the owner's alone."""
        self._step = step
        self._has_own_state = has_own_state
        self._begin, self._end = begin, end
        self._owns = owns
        self._watched = weakref.WeakSet[Optimizer]()
        self._handles: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
        self._paused = 0
        self._is_begun = False
        self._keeps_state = owns

    def watch(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            if optimizer not in self._watched:
                self._watched.add(optimizer)
                if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                    continue  # a wrapper that does without torch's constructor: what it wraps is watched
                earlier = self._watchers.get(optimizer)
                if earlier is not None and (other := earlier()) is not None:
                    other._let_go(optimizer)  # its hooks would keep a strategy that the program has dropped
                self._watchers[optimizer] = weakref.ref(self)
                self._handles[optimizer] = handles = [
                    optimizer.register_step_pre_hook(before_step(self._before)),
                    optimizer.register_step_post_hook(after_step(self._after)),
                ]
                if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
                    handles.append(optimizer.register_load_state_dict_post_hook(self._after_loading))

    def pause(self) -> None:
        """In a run its own hooks are at work."""
        self._paused += 1

    def resume(self) -> None:
        self._paused -= 1

    @contextmanager
    def keeping_state(self) -> Iterator[None]:
        """What is loaded in this block stays, whoever owns it: the owner has lent it."""
        self._keeps_state = True
        try:
            yield
        finally:
            self._keeps_state = self._owns

    def stop(self) -> None:
        """The strategy is closed: optimizers are ordinary ones again."""
        self._paused += 1
        self._keeps_state = True
        for optimizer in list(self._handles):
            self._let_go(optimizer)

    def _let_go(self, optimizer: Optimizer) -> None:
        for handle in self._handles.pop(optimizer, ()):
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._paused or self._step.is_part_of_another():
            return None
        self._is_begun = self._begin()
        return self._step.before_last(optimizer, args, kwargs) if self._is_begun else None

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_begun and not self._paused and not self._step.is_part_of_another():
            self._is_begun = False
            self._step.after(optimizer, args, kwargs)
            self._end()

    def _after_loading(self, optimizer: Optimizer) -> None:
        if not self._keeps_state and self._has_own_state(optimizer):
            optimizer.state.clear()
