"""What a step's own code has changed in optimizers' state: where replicas did so differently, the first one's counts.

Between processes nobody else would notice. To read the version of all that an optimizer keeps would cost every step
more than it is worth, so the step's code has a view of the state that notes what it looks at; most steps never look.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchstrat.collectives.agreement import fingerprint
from torchstrat.collectives.communicator import Communicator
from torchstrat.optimizers import stepped_by, wrapped_by
from torchstrat.replicas.optimizer_state import LeaderView, SharedState, is_plain, real_state
from torchstrat.replicas.state import is_memory, sample

Prints = dict[int, float]
"""Of parameters' entries, by the parameter's place."""


class _Noted(NamedTuple):
    """A value as the step's code has found it."""

    value: Any
    version: int
    address: int
    sample: bytes

    def is_still(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return value is self.value or (is_plain(value) and is_plain(self.value) and value == self.value)
        return value is self.value and _note(value)[1:] == self[1:]


def _note(value: Any) -> _Noted:
    if not isinstance(value, torch.Tensor):
        return _Noted(value, 0, 0, b"")
    is_at_an_address = is_memory(type(value)) and value.layout == torch.strided and not value.is_meta
    address = value.data_ptr() if is_at_an_address else 0
    return _Noted(value, 0 if value.is_inference() else value._version, address, sample(value))


def _note_entry(entry: Any) -> dict[Any, _Noted]:
    return {name: _note(value) for name, value in _values(entry).items()}


def _values(entry: Any) -> dict[Any, Any]:
    """Of one parameter; most optimizers keep a dictionary."""
    return entry if isinstance(entry, dict) else {} if entry is None else {"": entry}


def _is_still(noted: Any, entry: Any) -> bool:
    before, now = noted if isinstance(noted, dict) else {}, _values(entry)
    return before.keys() == now.keys() and all(before[name].is_still(value) for name, value in now.items())


class _Watched(NamedTuple):
    optimizer: Optimizer
    shared: SharedState
    view: LeaderView

    @property
    def is_replaced(self) -> bool:
        """Whether there is another state by now, from ``load_state_dict``, say."""
        state = vars(self.optimizer).get("state")
        return state is not self.view and state is not self.shared.real


class StateEdits:
    """Of the optimizers of one run on this rank. It holds them until `forget`, and what they keep while they live."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._views: weakref.WeakKeyDictionary[Optimizer, LeaderView] = weakref.WeakKeyDictionary()

    def begin(self, helpers: Iterable[Any]) -> None:
        """A run begins; what the program did in between it did on all ranks."""
        self._watched = {}
        for helper in helpers:
            if isinstance(helper, Optimizer):
                self._watch(helper)

    def _watch(self, optimizer: Optimizer) -> None:
        own = vars(optimizer)
        state = own.get("state")
        if isinstance(state, dict):
            real, view = real_state(state), self._views.get(optimizer)
            if view is None or view.shared.real is not real:
                self._views[optimizer] = view = LeaderView(SharedState(real, _note_entry))
            view.shared.before.clear()
            own["state"] = view
            self._watched[id(optimizer)] = _Watched(optimizer, view.shared, view)

    def pause(self, optimizer: Optimizer) -> None:
        """It is about to step, on the state itself."""
        for one in (optimizer, *wrapped_by(optimizer)):
            own, found = vars(one), self._watched.get(id(one))
            if found is not None and own.get("state") is found.view:
                own["state"] = found.shared.real

    def resume(self, optimizer: Optimizer) -> None:
        """It has stepped, and the state is what all ranks have."""
        for one in (optimizer, *wrapped_by(optimizer)):
            own, found = vars(one), self._watched.get(id(one))
            if found is None or own.get("state") is not found.shared.real:
                self._watch(one)
            else:
                found.shared.before.clear()
                own["state"] = found.view

    def end(self) -> None:
        """The step's code has come to its end."""
        for optimizer, shared, view in self._watched.values():
            own = vars(optimizer)
            if own.get("state") is view:
                own["state"] = shared.real

    def forget(self) -> None:
        """All ranks have what it has changed."""
        self._watched = {}

    def digest(self, optimizer: Optimizer) -> float:
        """A number that is equal on ranks that have made the same edits: 0 where there are none."""
        found = self._watched.get(id(optimizer))
        if found is None or not (found.shared.before or found.is_replaced):
            return 0.0
        changed = self._changed(optimizer)
        return float(zlib.crc32(repr(changed).encode())) if changed else 0.0

    def _changed(self, optimizer: Optimizer) -> Prints:
        found = self._watched.get(id(optimizer))
        if found is None:
            return {}
        state, before = real_state(vars(optimizer).get("state")), found.shared.before
        changed = {}
        for place, tensor in enumerate(stepped_by(optimizer)):
            if found.is_replaced or (tensor in before and not _is_still(before[tensor], state.get(tensor))):
                changed[place] = _print(state.get(tensor))
        return changed

    def differing(self, communicator: Communicator, optimizer: Optimizer, call: str) -> list[int]:
        """The places of parameters whose state ranks have changed, each in another way. All ranks call it, when
        digests differ."""
        everyone = communicator.all_gather_object(self._changed(optimizer), call)
        places = sorted({place for one in everyone for place in one})
        return [place for place in places if any(one.get(place) != everyone[0].get(place) for one in everyone)]

    def level(self, communicator: Communicator, optimizer: Optimizer, places: list[int], call: str) -> None:
        """There the first rank's state becomes everyone's. All ranks call it."""
        tensors, state = stepped_by(optimizer), real_state(vars(optimizer).get("state"))
        told: dict[int, Any] = {place: _copied(state.get(tensors[place])) for place in places}
        told = communicator.broadcast_object(told, 0, call)
        for place, entry in told.items() if communicator.rank else ():
            tensor = tensors[place]
            if entry is None:
                state.pop(tensor, None)
            elif not isinstance(entry, dict) or not isinstance(state.get(tensor), dict):
                state[tensor] = entry
            else:
                _put(state[tensor], entry, tensor.device)


def _print(entry: Any) -> float:
    values = _values(entry)
    plain = repr([(name, value) for name, value in values.items() if is_plain(value)])
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    return float(zlib.crc32(plain.encode())) + sum(fingerprint(tensors))


def _copied(entry: Any) -> Any:
    """Without the memory around what are views."""
    if isinstance(entry, dict):
        return {name: _copied(value) for name, value in entry.items()}
    return entry.detach().clone() if isinstance(entry, torch.Tensor) else entry


def _put(here: dict[Any, Any], told: dict[Any, Any], device: torch.device) -> None:
    for name in [name for name in here if name not in told]:
        del here[name]
    for name, value in told.items():
        own = here.get(name)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
            if own.shape == value.shape and own.dtype == value.dtype:
                with torch.no_grad():
                    own.copy_(value)
                continue
            value = value.to(own.device)
        elif isinstance(value, torch.Tensor) and value.device.type != "cpu":
            value = value.to(device)
        here[name] = value
