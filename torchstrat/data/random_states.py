"""Where random streams stand, as plain data, and how to put them back there.

What a sampler draws depends on streams that this package does not own: PyTorch's default generator, Python's and
NumPy's, and generators that the user gave to a loader or keeps in a sampler. Repeating a draw means putting all of
them where they stood when it was made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchstrat.core.randomness import state_of
from torchstrat.core.reachable import GENERATOR_TYPES

RandomGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""One that belongs to an object of the user's: `GENERATOR_TYPES`."""

SHARED = ("torch", "python", "numpy")
"""The streams of a process that anybody may draw from."""


class RandomStreams:
    """Some of the process's random streams.

    Args:
        shared: which of `SHARED`.
        own: generators (of torch, NumPy or Python) that belong to the user's objects.
    """

    def __init__(self, shared: Sequence[str] = SHARED, own: Sequence[RandomGenerator] = ()) -> None:
        self._shared, self._own = tuple(shared), tuple(own)

    @property
    def own_kinds(self) -> str:
        """Which generators of their own the user's objects have, for comparing."""
        return ", ".join(f"{type(one).__module__}.{type(one).__qualname__}" for one in self._own) or "none"

    def states(self) -> dict[str, object]:
        """Tensors, numbers, strings and lists of them: about 5 kB for each of `SHARED`."""
        return {name: _SHARED_STATE[name]() for name in self._shared} | self.own_states()

    def own_states(self) -> dict[str, object]:
        """`states` without the shared streams."""
        return {f"own_{number}": _state_of(one) for number, one in enumerate(self._own)}

    def put(self, states: Mapping[str, object]) -> None:
        """Bring the streams to what `states` or `own_states` said; those that are not in it stay where they are."""
        for name in self._shared:
            if name in states:
                _PUT_SHARED[name](states[name])
        for number, one in enumerate(self._own):
            if f"own_{number}" in states:
                _put(one, states[f"own_{number}"])

    def put_shared(self, states: Mapping[str, object]) -> None:
        """`put` without the generators of the user's objects."""
        self.put({name: state for name, state in states.items() if name in SHARED})


def generators_in(*owners: object) -> list[RandomGenerator]:
    """The generators that are attributes of these objects, each once. A `DataLoader`'s are also its samplers'."""
    found: dict[int, RandomGenerator] = {}
    for owner in _with_samplers(owners):
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, GENERATOR_TYPES):
                found.setdefault(id(value), value)
    return list(found.values())


def _with_samplers(owners: Sequence[object]) -> Iterator[object]:
    seen: set[int] = set()
    waiting = list(owners)
    while waiting:
        owner = waiting.pop(0)
        if owner is None or id(owner) in seen:
            continue
        seen.add(id(owner))
        yield owner
        names = ("batch_sampler", "sampler") if isinstance(owner, DataLoader) else ("sampler",)
        waiting += [getattr(owner, name, None) for name in names]


def _numpy_plain(state: object) -> object:
    if isinstance(state, Mapping):
        return {key: _numpy_plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _state_of(stream: RandomGenerator) -> object:
    if isinstance(stream, torch.Generator):
        return state_of(stream)
    if isinstance(stream, np.random.Generator):
        return _numpy_plain(stream.bit_generator.state)
    if isinstance(stream, np.random.RandomState):
        return _numpy_plain(stream.get_state(legacy=False))
    return stream.getstate()


def _put(stream: RandomGenerator, state: Any) -> None:
    if isinstance(stream, torch.Generator):
        stream.set_state(state)
    elif isinstance(stream, np.random.Generator):
        stream.bit_generator.state = state
    elif isinstance(stream, np.random.RandomState):
        stream.set_state(_numpy_whole(state))
    else:
        stream.setstate(_python_whole(state))


def _numpy_whole(state: Mapping[str, Any]) -> dict[str, Any]:
    # RandomState wants an array where the bit generators take any sequence.
    key = np.asarray(state["state"]["key"], dtype=np.uint32)
    return {**state, "state": {**state["state"], "key": key}}


def _python_whole(state: Sequence[Any]) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words), gauss


_SHARED_STATE: dict[str, Callable[[], object]] = {
    "torch": state_of,
    "python": random.getstate,
    "numpy": lambda: _numpy_plain(np.random.get_state(legacy=False)),
}
_PUT_SHARED: dict[str, Callable[[Any], None]] = {
    "torch": torch.set_rng_state,
    "python": lambda state: random.setstate(_python_whole(state)),
    "numpy": lambda state: np.random.set_state(_numpy_whole(state)),
}
