"""Tensors of ``optimizer.state`` on the coordinator: whoever has one reads and writes what the servers have.

They ask as parameters do (`torchstrat.parameter_server.variables.cached_parameter`), and what shows their memory does.
What functions have made of them comes into the same tensors, as steps change them in a plain program: also into those
that ``optimizer.load_state_dict`` was given, which PyTorch does not copy.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from torchstrat.core._torch_private import DisableTorchFunctionSubclass
from torchstrat.core.optimizers import wrapped_among
from torchstrat.parameter_server.messages import StateOfShard
from torchstrat.parameter_server.variables.cached_parameter import (
    Alias,
    CachedTensor,
    TensorCall,
    alias_of,
    aliases_in,
    let_alone,
    let_ask,
)

_Result = TypeVar("_Result")


class _Keeper(Protocol):
    def is_current(self) -> bool: ...


class _StateOnServers(Protocol):
    """A `RemoteOptimizerState`, as the holder of its tensors knows it."""

    @property
    def keeper(self) -> _Keeper: ...
    def fill(self) -> None: ...
    def write(self, make: Callable[[], _Result]) -> _Result: ...


class CachedState:
    """A `Holder`: of all tensors in the state of one optimizer."""

    is_variable = True
    hands_on = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._entries: dict[int, weakref.ref[torch.Tensor]] = {}
        self._has_warned = False

    def _state(self) -> _StateOnServers | None:
        """None while it is not the servers': between a load and the call that sends it."""
        state: Any = getattr(self._optimizer(), "state", None)
        return state if getattr(state, "holder", None) is self else None

    def is_own(self, tensor: object) -> bool:
        alias = alias_of(tensor) if isinstance(tensor, torch.Tensor) else None
        return alias is not None and alias.holder is self

    def can_take(self, tensor: object, value: object) -> bool:
        """Whether ``value`` may be put into an entry's own memory."""
        return (
            isinstance(tensor, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and self.is_own(tensor)
            and tensor.shape == value.shape
            and tensor.dtype == value.dtype
        )

    def plain(self, value: object) -> object:
        """As what is sent: nothing that asks."""
        if self.is_own(value):
            assert isinstance(value, torch.Tensor)
            with DisableTorchFunctionSubclass():
                return value.detach()
        return value.detach().clone() if isinstance(value, CachedTensor) else value  # type: ignore[attr-defined]

    def adopt(self, state: Iterable[tuple[Any, Any]]) -> None:
        """The state has these now. What it had before, and something still holds, is an ordinary tensor again."""
        found = {}
        for entry, name, value in list(tensors_in(state)):
            if not self.is_own(value):
                if isinstance(value, CachedTensor):  # of a variable, or in another optimizer's state
                    self._warn_of_other(value)
                    value = entry[name] = self.plain(value)
                if not _can_stay(value):
                    continue
                let_ask(value, self)
            found[id(value)] = weakref.ref(value)
        for key in self._entries.keys() - found.keys():
            if (gone := self._entries[key]()) is not None:
                let_alone(gone)
        self._entries = found

    def _warn_of_other(self, tensor: torch.Tensor) -> None:
        alias = alias_of(tensor)
        other = alias.holder if alias is not None else None
        if self._has_warned or not isinstance(other, CachedState) or other._state() is None:  # noqa: SLF001
            return
        both = self._optimizer(), other._optimizer()  # noqa: SLF001
        if any(one is not None and wrapped_among([one]) & {id(two)} for one, two in (both, both[::-1])):
            return  # a wrapper that shows what it wraps has
        self._has_warned = True
        warnings.warn(
            f"{type(self._optimizer()).__name__} was given tensors that are in the state of another optimizer "
            "(load_state_dict(other.state_dict()), or state = other.state). On one device steps of either would change "
            "both; on parameter servers each has its own from here on. If that is what you mean, load a copy: "
            "copy.deepcopy(other.state_dict()).",
            stacklevel=2,
        )

    # -- Holder -----------------------------------------------------------------------------------------------------

    @property
    def shown(self) -> str:
        state = self._state()
        if state is None or state.keeper.is_current():
            return ""
        return "<optimizer state on parameter servers; reading it (.detach()) brings its value>"

    def require_value(self) -> None:
        pass

    def read(self, alias: Alias) -> None:
        if (state := self._state()) is not None:
            state.fill()

    def call(self, call: TensorCall) -> object:
        own = [alias for alias in call.aliases if alias.holder is self]
        writes = call.writes_to(own)
        call.aliases = [alias for alias in call.aliases if alias.holder is not self]
        state = self._state()
        if state is None:
            result = call.hand_on()
        elif writes:
            result = state.write(call.hand_on)
        else:
            state.fill()
            result = call.hand_on()
        with DisableTorchFunctionSubclass():
            for alias in own:
                tensor = alias.tensor()
                for one in () if tensor is None else aliases_in(result, tensor):
                    let_ask(one, self)
        return result


def of_parameters(state: Iterable[tuple[Any, Any]]) -> list[tuple[torch.Tensor, StateOfShard]]:
    """Of the items of a state those of parameters; a class of the program's own may keep other things there."""
    return [(key, entry) for key, entry in state if isinstance(key, torch.Tensor) and isinstance(entry, dict)]


def tensors_in(state: Iterable[tuple[Any, Any]]) -> Iterator[tuple[StateOfShard, str, torch.Tensor]]:
    """With the entry and the name of each."""
    for _, entry in of_parameters(state):
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                yield entry, name, value


def _can_stay(tensor: torch.Tensor) -> bool:
    """Whether it can ask, and other values can be put into it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and not tensor.requires_grad
    )
