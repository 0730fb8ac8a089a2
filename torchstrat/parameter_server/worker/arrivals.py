"""Parameters whose fresh values servers are still writing while the next function computes with the first layers.

A parameter that is on its way is pending (see `pending`): the first use waits. So layers wait one by one, at no cost
for those that are there.

What is let arrive late is what nobody can get at past its class: parameters of PyTorch's own modules, on the CPU,
whose memory no other tensor shows. Everything else is waited for before the function goes on; and when a transform of
`torch.func` or PyTorch's compiler takes hold of tensors itself, everything is waited for before that, and from the
compiler's first compilation on nothing is late any more.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from torch import nn

from torchstrat import _torch_private
from torchstrat.errors import CommunicationError
from torchstrat.parameter_server.messages import ShardKey
from torchstrat.parameter_server.variables.remote_access import ValuesToCome
from torchstrat.parameter_server.worker.pending import wait_for
from torchstrat.parameter_server.worker.watched_parameter import WatchedParameter

SWITCH = "TORCHSTRAT_OVERLAP_PULLS"
"""``off`` in the environment: a function goes on when all of its values are here."""

_LARGE_BYTES = 1 << 20
"""Smaller parameters are here before anybody could use the time."""

_CHOOSE_BY_CLASS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""They take another algorithm where a parameter has a class that asks: rounding would depend on who came first."""


class Arrivals:
    """The parameters of one worker that are on their way. Their class is the business of whoever adds them.

    Args:
        settled: called with the number of a variable when its value is here, or is not going to be
            (``settled(number, False)``): then its memory may still be written to, and must not be used.
        lock: held while anything here changes.
        bring_all: called before PyTorch's compiler traces anything in this process.
    """

    _all: ClassVar[weakref.WeakSet[Arrivals]] = weakref.WeakSet()
    _compiles = False

    def __init__(
        self,
        settled: Callable[[int, bool], None],
        lock: threading.RLock | None = None,
        bring_all: Callable[[], None] = lambda: None,
    ) -> None:
        self._settled = settled
        self._lock = threading.RLock() if lock is None else lock
        self._bring_all = bring_all
        self._coming: dict[int, tuple[ValuesToCome, Sequence[ShardKey]]] = {}
        self._is_on = os.environ.get(SWITCH, "").lower() != "off"
        _watch_what_passes_by()
        self._all.add(self)

    def may_be_late(self, parameter: WatchedParameter) -> bool:
        """Whether nobody reads the memory of this parameter but through itself; see the module."""
        memory = parameter.memory
        return (
            self._is_on
            and hears_of_compilations()
            and not Arrivals._compiles
            and memory.device.type == "cpu"
            and memory.is_contiguous()
            and _torch_private.tensors_in_storage(memory) == 2  # the parameter, and what was just made to look at it
        )

    def add(self, number: int, values: ValuesToCome, keys: Sequence[ShardKey]) -> None:
        """Variable ``number`` has its value when ``values`` has written ``keys``."""
        with self._lock:
            self._coming[number] = values, keys

    def __contains__(self, number: int) -> bool:
        return number in self._coming

    def wait(self, number: int) -> None:
        """Until it is here, on any thread. Raises `ParameterServerUnavailable`."""
        with self._lock, _torch_private.untouched_by_surroundings():
            found = self._coming.get(number)
            if found is None:
                return
            values, keys = found
            is_here = False
            try:
                values.fetch(keys)
                is_here = True
            finally:
                del self._coming[number]
                self._settled(number, is_here)

    def settle(self) -> None:
        """Wait for all. What cannot come is forgotten: whoever needs it will ask for it again."""
        for number in list(self._coming):
            try:
                self.wait(number)
            except CommunicationError:
                continue

    @classmethod
    def settle_all(cls) -> None:
        """Of every worker in this process."""
        for arrivals in list(cls._all):
            arrivals.settle()

    @classmethod
    def stop(cls) -> None:
        """From now on nothing is late."""
        cls._compiles = True
        cls.settle_all()
        for arrivals in list(cls._all):
            arrivals._bring_all()


def worth_waiting_for(modules: Iterable[nn.Module]) -> set[int]:
    """The ``id`` of each large parameter that belongs to PyTorch's own modules alone. All that these do with it is to
    call PyTorch's functions; modules of others may hand it to code of their own, which does not ask."""
    by_torch: set[int] = set()
    by_others: set[int] = set()
    for module in modules:
        if isinstance(module, _CHOOSE_BY_CLASS):
            by_others.update(map(id, module.parameters()))
        else:
            owned = by_torch if type(module).__module__.startswith("torch.nn.modules.") else by_others
            owned.update(id(one) for one in module._parameters.values() if _is_large(one))
    return by_torch - by_others


def _is_large(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.nbytes >= _LARGE_BYTES


_watching = threading.Lock()
_is_watching = False
_is_hearing = False


def _watch_what_passes_by() -> None:
    """What takes tensors without asking their class. Once per process, by whoever first has a worker in it."""
    global _is_watching
    with _watching:
        if not _is_watching:
            _is_watching = True
            _torch_private.before_transforms_take(wait_for)
            os.register_at_fork(before=Arrivals.settle_all)


def hears_of_compilations() -> bool:
    """Not before the compiler is imported, which workers do when they start (see `warm_up`)."""
    global _is_hearing
    if not _is_hearing and "torch._dynamo" in sys.modules:
        with _watching:
            if not _is_hearing:
                _torch_private.before_compilations(Arrivals.stop)
                _is_hearing = True
    return _is_hearing
