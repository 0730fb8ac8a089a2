"""Random numbers: one stream per replica, the same in one process as with one replica per process.

A replica's stream is seeded by the seed of the default generator (``torch.manual_seed``) and the replica's id, and goes
on from run to run. Calling ``torch.manual_seed`` again, with whatever seed, starts the streams anew; a seed that only
``torch.random.fork_rng`` has put aside finds its streams where they were. Outside of runs the default generator is the
user's: what is drawn there (shuffling, say) does not move the replicas' streams, nor the other way round.

Where a generator stands is read so that threads cannot lock each other up (`state_of`). What a sampler draws depends on
streams that this package does not own: PyTorch's default generator, Python's and NumPy's, and generators that the user
gave to a loader or keeps in a sampler. Repeating a draw means putting all of them where they stood when it was made:
`RandomStreams` has that as plain data.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import itertools
import os
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchstrat.core.reachable import GENERATOR_TYPES

_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
"""Whether making any object may begin a garbage collection; later Pythons collect between two instructions alone."""

READING = threading.RLock()
"""Held while a state is read, without garbage collection. Reentrant: what is collected may itself read one."""
# A fork in the meantime would find it held by nobody that there is.
os.register_at_fork(before=READING.acquire, after_in_parent=READING.release, after_in_child=READING.release)


def state_of(generator: torch.Generator | None = None) -> torch.Tensor:
    """`torch.Generator.get_state`, of the default generator if none is given: a copy, on the CPU.

    PyTorch makes the tensor while it has the generator's lock. If that begins a garbage collection, what is collected
    may let another thread run, and one that asks for the same lock waits for it with the interpreter's own lock in
    hand: neither ever goes on. So nothing is collected meanwhile.
    """
    generator = torch.default_generator if generator is None else generator
    if not _COLLECTS_ANYWHERE:
        return generator.get_state()
    with READING:
        is_collecting = gc.isenabled()
        try:
            gc.disable()
            return generator.get_state()
        finally:
            if is_collecting:
                gc.enable()


def stream_seed(seed: int, replica: int) -> int:
    """A 63-bit seed for one replica; streams of neighbouring seeds and replicas are unrelated."""
    digest = hashlib.blake2b(f"{seed}/{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


ROUND = "round"
"""Among what checkpoints have of a replica, beside its streams: see `torchstrat.replicas.update_policies`."""


class ReplicaStreams:
    """Swaps the state of the default generators (the CPU's and the replica's own GPU's) with the replicas' turns."""

    def __init__(self, devices: Sequence[torch.device], first_replica: int = 0) -> None:
        self._devices = devices
        self._has_cuda = any(device.type == "cuda" for device in devices)
        self._first_replica = first_replica
        self._seeds: OrderedDict[int, tuple[int, dict[int, list[torch.Tensor]]]] = OrderedDict()
        self._states: dict[int, list[torch.Tensor]] = {}
        self._latest: tuple[int, int] | None = None  # the seed and epoch that `_states` are of
        self._outside: list[torch.Tensor] = []
        self._current: int | None = None

    def _generators(self, replica: int | None) -> list[torch.Generator]:
        generators = [torch.default_generator]
        devices = self._devices if replica is None else [self._devices[replica - self._first_replica]]
        for device in devices:
            if device.type == "cuda":
                generators.append(torch.cuda.default_generators[device.index or 0])
        return generators

    def begin(self, replicas: Sequence[int]) -> None:
        """A run begins; the first of its replicas is active."""
        seed = torch.default_generator.initial_seed()
        outside = self._read(None)
        epoch = seedings.epoch_of(seed, outside[0])
        if self._latest != (seed, epoch):
            known_epoch, states = self._seeds.pop(seed, (epoch, {}))
            self._states, self._latest = states if known_epoch == epoch else {}, (seed, epoch)
            remember(self._seeds, seed, (epoch, self._states))
        for replica in replicas:
            if replica not in self._states:
                self._states[replica] = self._fresh(seed, replica)
        self._outside = outside
        self._put(replicas[0], self._states[replicas[0]])

    def _read(self, replica: int | None) -> list[torch.Tensor]:
        if not self._has_cuda:
            return [state_of()]
        return [state_of(generator) for generator in self._generators(replica)]

    def _put(self, replica: int | None, states: list[torch.Tensor]) -> None:
        if not self._has_cuda:
            torch.default_generator.set_state(states[0])
        else:
            for generator, state in zip(self._generators(replica), states, strict=True):
                generator.set_state(state)
        self._current = replica

    def _fresh(self, seed: int, replica: int) -> list[torch.Tensor]:
        own = stream_seed(seed, replica)
        return [torch.Generator(device=g.device).manual_seed(own).get_state() for g in self._generators(replica)]

    def activate(self, replica: int | None) -> None:
        """Let the default generators be those of ``replica``; None: those outside of any run."""
        if replica == self._current:
            return
        left = self._read(self._current)
        if self._current is None:
            self._outside = left
        else:
            self._states[self._current] = left
        self._put(replica, self._outside if replica is None else self._states[replica])

    @contextmanager
    def of_the_user(self) -> Iterator[None]:
        """In this block, in the midst of a run, what is drawn is drawn outside of it."""
        replica = self._current
        self.activate(None)
        try:
            yield
        finally:
            self.activate(replica)

    def end(self) -> None:
        if self._current is None:
            left = state_of()
        else:
            self.activate(None)
            left = self._outside[0]  # has just been put back
        seedings.leave(torch.default_generator, left)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the streams of this process's replicas are, between runs: ``{"replica_0": {"now": {"cpu": state}}}``.

        ``now``: under the seed in force; ``seed_7``: under another seed that was put aside.
        """
        found: dict[str, Any] = {}
        for label, seed in seedings.labels():
            epoch, states = self._seeds.get(seed, (None, {}))
            if epoch != seedings.epoch_of_known(seed):
                continue  # seeded since the last run
            for replica, of_kinds in states.items():
                found.setdefault(f"replica_{replica}", {})[label] = dict(zip(_KINDS, of_kinds, strict=False))
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Replicas that ``state`` does not have begin with the seed in force, as they would."""
        self._seeds.clear()
        self._latest = None
        for replica in range(self._first_replica, self._first_replica + len(self._devices)):
            for label, kept in state.get(f"replica_{replica}", {}).items():
                if label == ROUND:
                    continue
                seed = seedings.seed_of(label)
                fresh = dict(zip(_KINDS, self._fresh(seed, replica), strict=False))
                states = [kept.get(kind, other) for kind, other in fresh.items()]
                self._seeds.setdefault(seed, (seedings.epoch_of_known(seed), {}))[1][replica] = states


# -- has the user called manual_seed again? ------------------------------------------------------------------------
#
# Nothing tells, and the seed may be the same as before. So a run leaves a mark in the default generator's state that
# draws do not see and that seeding removes: a Mersenne twister's first word takes part in later numbers with its
# highest bit only, once its own number has been drawn. (`_mark_is_unseen` makes sure; without a mark fewer cases are
# told apart.) The mark also goes when 624 further words have been drawn, so a state without one is compared with those
# that only seeding can lead back to.

_KINDS = ("cpu", "cuda")  # of a replica's generators, in their order
_FIRST_WORD = 24  # offset in the bytes of `get_state()`: seed (8), left (4), seeded (4), next (8), then 624 words of 8
_MARK = bytes((0x53, 0xA7, 0x6C))
_KEPT_SEEDS = 16
_bytes_at = (ctypes.c_char * len(_MARK)).from_address

_Value = TypeVar("_Value")


def _is_marked(state: torch.Tensor) -> bool:
    # Read at its address, which takes a tenth of the time of a view: every run asks twice.
    found: bytes = _bytes_at(state.data_ptr() + _FIRST_WORD).raw
    return found == _MARK


def _marked(state: torch.Tensor) -> torch.Tensor:
    state = state.clone()
    state[_FIRST_WORD : _FIRST_WORD + len(_MARK)] = torch.tensor(list(_MARK), dtype=torch.uint8, device="cpu")
    return state


@functools.cache
def _mark_is_unseen() -> bool:
    plain, marked = torch.Generator(), torch.Generator()
    for draws in (0, 1, 623, 3):
        for generator in (plain, marked):
            torch.empty(draws, dtype=torch.int32, device="cpu").random_(generator=generator.manual_seed(2**40 + 1))
        marked.set_state(_marked(marked.get_state()))
        numbers = [torch.empty(2000, dtype=torch.int32, device="cpu").random_(generator=g) for g in (plain, marked)]
        if not torch.equal(*numbers):
            return False
    return True


class Seedings:
    """Counts calls of ``manual_seed``, as far as runs have met them. One for all strategies: so is the generator."""

    def __init__(self) -> None:
        self._epochs = itertools.count()
        self._known: OrderedDict[int, tuple[int, torch.Tensor]] = OrderedDict()  # seed → epoch, first state met in it
        self._left: torch.Tensor | None = None  # as the last run left the generator

    def epoch_of(self, seed: int, state: torch.Tensor) -> int:
        """Equal for equal seeds unless the generator was seeded in between; ``state`` is how a run finds it."""
        known = self._known.pop(seed, None)
        if known is None or self._is_seeded(seed, state, known[1]):
            known = next(self._epochs), state
        remember(self._known, seed, known)
        return known[0]

    def _is_seeded(self, seed: int, state: torch.Tensor, first: torch.Tensor) -> bool:
        if _is_marked(state):
            return False
        if torch.equal(state, first) or torch.equal(state, torch.Generator().manual_seed(seed).get_state()):
            return True
        # The mark stays while the other words do.
        others = slice(_FIRST_WORD + 8, _FIRST_WORD + 8 * 624)
        return self._left is not None and _mark_is_unseen() and torch.equal(state[others], self._left[others])

    def is_seeded_since(self, state: torch.Tensor) -> bool:
        """Whether the default generator, found in ``state``, has been seeded since the last `leave`."""
        if _is_marked(state):
            return False
        seed = torch.default_generator.initial_seed()
        return self._is_seeded(seed, state, torch.Generator().manual_seed(seed).get_state())

    def leave(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """A run is over; ``state`` is that of ``generator``."""
        if not _is_marked(state) and _mark_is_unseen():
            state = _marked(state)
            generator.set_state(state)
        self._left = state

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def labels(self) -> Iterator[tuple[str, int]]:
        """What checkpoints call the seeds, and the seeds: ``now`` is the one in force."""
        current = torch.initial_seed()
        self.epoch_of(current, state_of())
        for seed in list(self._known):
            yield ("now" if seed == current else f"seed_{seed}"), seed

    def seed_of(self, label: str) -> int:
        return torch.initial_seed() if label == "now" else int(label.removeprefix("seed_"))

    def epoch_of_known(self, seed: int) -> int:
        """Of a seed that runs have met, or, from a checkpoint, will have."""
        if seed == torch.initial_seed():
            return self.epoch_of(seed, state_of())
        if seed not in self._known:
            self._known[seed] = next(self._epochs), torch.Generator().manual_seed(seed).get_state()
        return self._known[seed][0]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """For each seed the first state of the default generator that a run has met."""
        return {label: self._known[seed][1] for label, seed in self.labels()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """After the default generator has been put back."""
        self._known = OrderedDict((self.seed_of(label), (next(self._epochs), first)) for label, first in state.items())
        self._left = None


def remember(seeds: OrderedDict[int, _Value], seed: int, value: _Value) -> None:
    """As the latest; of too many the oldest goes."""
    seeds[seed] = value
    if len(seeds) > _KEPT_SEEDS:
        seeds.popitem(last=False)


seedings = Seedings()


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
