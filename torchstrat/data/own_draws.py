"""Random draws of a data set and its collate function, where several processes or pipelines read different rows.

Processes are seeded alike, so that what they draw in common (weights, the order of rows) is common. Rows that are read
by different ones need different draws all the same. So each batch is read under seeds of its own, decided by those of
the pass, the number of the batch and the stream: a replica's or a pipeline's. The process's own streams are put back
after it, and so stay equal on all ranks whatever a data set draws. Nothing of this has to be saved but the seeds of the
pass.

Python's and NumPy's random streams are read and put back for every batch, which through their own functions takes 30
and 200 µs. The words of a Mersenne twister are read where they are instead: where that has been found to agree with
what the functions say, else by these functions.

`CommonDraws`: what one rank draws for all moves the random streams of the others, too, where they stood alike. Else
what a program draws after it (an image size for each batch, how rows of a batch are mixed) would differ from rank to
rank, and from one device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset, TensorDataset, default_collate

from torchstrat.core.randomness import RandomGenerator, RandomStreams, generators_in, state_of
from torchstrat.core.reachable import Start, walk_behind
from torchstrat.data.pipeline import Pipeline

PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]
NUMPYS: np.random.RandomState = np.random.rand.__self__  # type: ignore[attr-defined]
"""The objects behind the functions of the modules `random` and ``numpy.random``."""

_WORDS = 624
_SIZE = 4 * _WORDS + 4  # and the position among them
_BEYOND_HEAD = type(NUMPYS).__basicsize__ - object.__basicsize__  # without the count of references


class PythonStream:
    """The stream of the functions of `random`."""

    def __init__(self) -> None:
        address = id(PYTHONS) + object.__basicsize__
        _, found, _ = PYTHONS.getstate()
        there = np.frombuffer(ctypes.string_at(address, _SIZE), np.uint32).tolist()
        self._address = address if there == [found[-1], *found[:-1]] else 0

    def state(self) -> Any:
        if not self._address:
            return PYTHONS.getstate()
        return ctypes.string_at(self._address, _SIZE), PYTHONS.gauss_next

    def put(self, state: Any) -> None:
        if self._address:
            ctypes.memmove(self._address, state[0], _SIZE)
            PYTHONS.gauss_next = state[1]
        else:
            PYTHONS.setstate(state)


class NumpyStream:
    """The stream of the functions of ``numpy.random``.

    What its words do not tell is whether the second of a pair of normal numbers is waiting. The object behind the
    functions has that: it is asked for where the words or the object's bytes have changed.
    """

    def __init__(self) -> None:
        self._bits: np.random.BitGenerator | None = None
        self._address = 0
        self._seen = (b"", b"")

    def state(self) -> object:
        if not self._found():
            return NUMPYS.get_state(legacy=False)
        here = ctypes.string_at(self._address, _SIZE)
        seen = here, ctypes.string_at(id(NUMPYS) + object.__basicsize__, _BEYOND_HEAD)
        if seen == self._seen:
            return here
        state = NUMPYS.get_state(legacy=False)
        if state["has_gauss"]:
            return state
        self._seen = seen
        return here

    def put(self, state: Any) -> None:
        if isinstance(state, bytes):
            NUMPYS.seed(0)  # forgets what is left of a pair
            ctypes.memmove(self._address, state, _SIZE)
        else:
            NUMPYS.set_state(state)

    def seed(self, seed: int) -> None:
        """Begin a stream, after `state` has been asked for."""
        if self._address:
            NUMPYS.seed(seed)
        else:
            NUMPYS.set_state({**type(mtrand.get_bit_generator())(seed).state, "has_gauss": 0, "gauss": 0.0})

    def _found(self) -> bool:
        """Whether the words are at hand; looked for again when NumPy has been given another bit generator."""
        bits = mtrand.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._seen = bits, (b"", b"")
            self._address = self._look(bits)
        return self._address != 0

    def _look(self, bits: np.random.BitGenerator) -> int:
        if type(bits) is not np.random.MT19937:
            return 0
        address = int(bits.ctypes.state_address)
        state = NUMPYS.get_state(legacy=False)["state"]
        there = np.frombuffer(ctypes.string_at(address, _SIZE), np.uint32).tolist()
        return address if there == [*state["key"].tolist(), state["pos"]] else 0


class ProcessStreams:
    """PyTorch's, Python's and NumPy's. What it remembers of them is for one thread."""

    def __init__(self) -> None:
        self._python, self.numpy = PythonStream(), NumpyStream()

    def stand(self) -> tuple[torch.Tensor, Any, object]:
        return state_of(), self._python.state(), self.numpy.state()

    def put(self, stand: tuple[torch.Tensor, Any, object]) -> None:
        torch.default_generator.set_state(stand[0])
        self._python.put(stand[1])
        self.numpy.put(stand[2])


logger = logging.getLogger("torchstrat.data")
T = TypeVar("T")
Seeds = tuple[int, int]
"""For the process's streams, and for generators that belong to the data set."""
_Stand = tuple[tuple[torch.Tensor, Any, object], dict[str, object]]
"""Where the process's streams and those of the data set are."""

COMMON = -1
"""The stream of what every process reads alike."""


class OwnDraws:
    """Puts the streams of one batch in place of the process's.

    Args:
        seeds: of the pass.
        owned: generators that belong to the data set or the collate function.
    """

    def __init__(self, seeds: Seeds, owned: Sequence[RandomGenerator]) -> None:
        self._seeds, self._owned, self._streams = seeds, owned, RandomStreams((), owned)
        self._outside: _Stand | None = None
        self._inside: _Stand | None = None
        self._process = ProcessStreams()

    def enter(self, number: int, stream: int) -> None:
        """Before batch ``number`` of the pass is read for ``stream``. `leave` comes after it also where this raises."""
        if self._outside is None:
            self._outside = self._stand()
        words = stream_seeds(self._seeds[0], number, stream)
        torch.default_generator.manual_seed(words[0])
        random.seed(words[1])
        self._process.numpy.seed(words[2])
        for position, generator in enumerate(self._owned):
            _seed(generator, stream_seeds(self._seeds[1], number, stream, position)[0])

    def go_on(self, number: int, stream: int) -> None:
        """`enter`, or back to where `pause` left."""
        if self._inside is None:
            self.enter(number, stream)
            return
        self._outside = self._stand()
        self._put(self._inside)

    def pause(self) -> None:
        """`leave`, and remember these streams for `go_on`, where they have been put in place."""
        try:
            if self._outside is not None:
                self._inside = self._stand()
        finally:
            self.leave()

    def leave(self) -> None:
        """After it, however reading it ended. Idempotent."""
        outside, self._outside = self._outside, None
        if outside is not None:
            self._put(outside)

    def _stand(self) -> _Stand:
        return self._process.stand(), self._streams.own_states()

    def _put(self, stand: _Stand) -> None:
        self._process.put(stand[0])
        self._streams.put(stand[1])


class Leaving(Iterator[T]):
    """``items``, each of which may have been made after an `OwnDraws.enter`. No generator: an error does not end it."""

    def __init__(self, items: Iterator[T], draws: OwnDraws) -> None:
        self._items, self._draws = items, draws

    def __next__(self) -> T:
        try:
            return next(self._items)
        finally:
            self._draws.leave()


class Continuing(Iterator[T]):
    """``items`` that are read in sequence, from one end to the other in streams of their own.

    Args:
        items: opened already.
        draws: for these alone.
        number: of the pass, where its seeds do not tell passes apart.
        stream: of whoever reads them.
    """

    def __init__(self, items: Iterator[T], draws: OwnDraws, number: int, stream: int) -> None:
        self._items, self._draws, self._number, self._stream = items, draws, number, stream

    def __next__(self) -> T:
        try:
            self._draws.go_on(self._number, self._stream)
            return next(self._items)
        finally:
            self._draws.pause()


class Watched(Iterator[T]):
    """``items`` of a data set that shards itself, perhaps by what every process draws alike: it goes on to draw from
    the process's streams, and if it does, `tell_of_common_draws` says so."""

    def __init__(self, items: Iterator[T], name: str) -> None:
        self._items, self._name, self._count = items, name, 0

    def __next__(self) -> T:
        self._count += 1
        if self._count != 2:  # with the first one a generator draws what its beginning needs
            return next(self._items)
        before = process_stands()
        item = next(self._items)
        if process_stands() != before:
            tell_of_common_draws(self._name)
        return item


@functools.cache
def tell_of_common_draws(name: str) -> None:
    """Once for each kind of data set."""
    logger.warning(
        "%s draws from the process's random streams while it is read. It may shard itself by what all processes draw "
        "alike, so these streams are left to it: where they are seeded equally, all processes draw the same. Let it "
        "augment from a generator of its own, seeded with the number of the pipeline "
        "(torch.Generator().manual_seed(seed + context.input_pipeline_id); in each of a DataLoader's workers, where "
        "it is made in __iter__, + context.num_input_pipelines * get_worker_info().id), or use a map-style data set.",
        name,
    )


def seeds_of_pass(generator: torch.Generator | None, owned: Sequence[RandomGenerator]) -> Seeds:
    """Decided by where the process's streams and those of the data set stand, which stay there.

    ``generator``: what a loader draws from once for every pass, so that every pass has other seeds.
    """
    shared = (next_of(generator), next_of(None), random.getstate(), np.random.get_state(legacy=False))
    streams = RandomStreams((), owned)
    states = streams.own_states()
    seeds = number_of(*shared), number_of(*map(_next_of, owned))
    streams.put(states)
    return seeds


def draws_without_loader(dataset: object, beginning: Mapping[str, Any] | None) -> tuple[OwnDraws, Seeds]:
    """For one pass over ``dataset``, with its seeds: those of its ``beginning``, where it is gone on with. Nothing is
    drawn for it, so the seeds of several passes may be equal."""
    owned = generators_of_data(dataset, default_collate)
    saved = None if beginning is None else beginning.get("draws")
    seeds = seeds_of_pass(None, owned) if saved is None else (saved[0], saved[1])
    return OwnDraws(seeds, owned), seeds


def leave_for_next_pass(owned: Sequence[RandomGenerator]) -> None:
    """Move the data set's generators, which the pass leaves where they are: the next one has other seeds."""
    for generator in owned:
        _next_of(generator)


@contextlib.contextmanager
def apart(owned: Sequence[RandomGenerator], rank: int) -> Iterator[None]:
    """Around the start of loader processes that take copies of the data set's generators: those of the first rank as
    they stand, so as in plain PyTorch, and of every other rank others."""
    if not rank:
        yield
        return
    streams = RandomStreams((), owned)
    states = streams.own_states()
    seed_apart(owned, rank)
    try:
        yield
    finally:
        streams.put(states)


def seed_apart(owned: Sequence[RandomGenerator], rank: int) -> None:
    """Put generators that stand where those of other ranks do where no other rank's stand."""
    for position, generator in enumerate(owned):
        _seed(generator, stream_seed(_next_of(generator), rank, position))


def stream_seed(seed: int, *path: int) -> int:
    """A seed made of another and of numbers; those of other numbers are unrelated."""
    return stream_seeds(seed, *path)[0]


def generators_of_data(dataset: object, collate: Callable[..., object] | None) -> list[RandomGenerator]:
    """Generators of torch, NumPy and Python that reading a row or collating a batch can reach."""
    parts = parts_of(dataset)
    methods = [one for part in parts for kind in type(part).__mro__ for one in vars(kind).values() if callable(one)]
    functions = dataset.functions if isinstance(dataset, Pipeline) else []
    return generators_reached(collate, [*parts, *functions, *methods])


def generators_reached(fn: Callable[..., object] | None, arguments: Iterable[object]) -> list[RandomGenerator]:
    """The same that a function and its arguments can reach; not those of the process."""
    front = Start(fn, arguments).walk()
    return _of_objects([*front.generators, *walk_behind(front).generators])


def generators_of_stream(*owners: object) -> list[RandomGenerator]:
    """Those that iterating these objects can reach, also through PyTorch's own loaders, samplers and data sets.

    Those in attributes of the owners come first, in whose order positions of version 1 have them.
    """
    found = {id(one): one for one in generators_in(*owners)}
    pending, opened = list(owners), set[int]()
    while pending:
        front = Start(None, pending).walk()
        reached = [*front.generators, *walk_behind(front).generators]
        found |= {id(one): one for one in _of_objects(reached) if id(one) not in found}
        of_torch = [one for one in front.seen.values() if isinstance(one, DataLoader | Dataset | Sampler)]
        pending = [part for one in of_torch if id(one) not in opened for part in vars(one).values()]
        opened.update(map(id, of_torch))
    return list(found.values())


def _of_objects(generators: Iterable[RandomGenerator]) -> list[RandomGenerator]:
    """Without those of the process."""
    process = (torch.default_generator, PYTHONS, NUMPYS, *torch.cuda.default_generators)
    return [one for one in generators if not any(one is other for other in process)]


def draws_nothing(loader: DataLoader[object]) -> bool:
    """Whether reading a batch is known to run no code but torch's, Python's and ours, which draws nothing."""
    return loader.collate_fn is default_collate and all(
        type(part) in _KNOWN or (isinstance(part, Pipeline) and not part.functions) for part in parts_of(loader.dataset)
    )


_KNOWN = (TensorDataset, list, tuple, range)


def treats_rows_alone(loader: DataLoader[object]) -> bool:
    """Whether a row of a batch is known not to depend on the batch's other rows.

    A data set that is asked for several rows at once (``__getitems__``, as of Hugging Face's) may pad them to the
    longest, in a transform that it was given; without one it does not.
    """
    parts = parts_of(loader.dataset)
    if loader.batch_sampler is None:
        return all(type(part) in _KNOWN for part in parts)
    return loader.collate_fn is default_collate and all(map(_reads_rows_alone, parts))


def _reads_rows_alone(dataset: object) -> bool:
    if not hasattr(dataset, "__getitems__"):
        return True
    form = getattr(dataset, "format", None)
    return isinstance(form, dict) and form.get("type", "custom") != "custom"


def parts_of(dataset: object) -> list[object]:
    """What torch's own data sets are made of: `Subset`, which ``random_split`` makes, and `ConcatDataset`."""
    if type(dataset) is Subset:
        return parts_of(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [part for one in dataset.datasets for part in parts_of(one)]
    return [dataset]


def next_of(generator: torch.Generator | None) -> int:
    """What it would draw for the workers of a loader; it stays where it is."""
    # Its next number, and not its state: that has bits which no draw sees, and which runs of a strategy change.
    clone = torch.Generator()
    clone.set_state(state_of(generator))
    return _next_of(clone)


def _next_of(generator: RandomGenerator) -> int:
    if isinstance(generator, torch.Generator):
        drawn = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
        return int(drawn.item())
    if isinstance(generator, random.Random):
        return generator.getrandbits(63)
    return int.from_bytes(generator.bytes(7), "little")


def process_stands() -> int:
    return number_of(state_of(), random.getstate(), np.random.get_state(legacy=False))


def number_of(*parts: object) -> int:
    """Equal for equal ones, in every process."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(str(_plain(part)).encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def _plain(part: object) -> object:
    if isinstance(part, dict):
        return {name: _plain(value) for name, value in part.items()}
    return part.tolist() if isinstance(part, np.ndarray | torch.Tensor) else part


def stream_seeds(*numbers: int) -> tuple[int, int, int]:
    """Seeds of PyTorch's, Python's and NumPy's streams; those of other numbers are unrelated."""
    text = "/".join(map(str, numbers)).encode()
    digest = hashlib.blake2b(text, digest_size=20).digest()
    return (
        int.from_bytes(digest[:8], "little") >> 1,
        int.from_bytes(digest[8:16], "little"),
        int.from_bytes(digest[16:], "little"),
    )


def _seed(generator: RandomGenerator, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(np.random.RandomState(seed % 2**32).get_state(legacy=False))
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


class Move(NamedTuple):
    """Of one stream."""

    stream: int | str
    """Which of the process's, or the name of another's state in `RandomStreams`."""
    before: int
    """A number for where it stood."""
    after: object
    """Where it stands."""


class CommonDraws:
    """Notes on the drawing rank what has moved, and moves it on another: the process's streams, and ``generators``."""

    def __init__(self, generators: Sequence[RandomGenerator]) -> None:
        self._process, self._own = ProcessStreams(), RandomStreams((), generators)

    @contextmanager
    def noted(self) -> Iterator[list[Move]]:
        """What is drawn within this is in the list that it yields, afterwards."""
        before, moves = self._stand(), list[Move]()
        yield moves
        after = self._stand()
        moves += [Move(one, mark_of(old), after[one]) for one, old in before.items() if not _same(old, after[one])]

    def follow(self, moves: Sequence[Move]) -> None:
        """On a rank that has not drawn. A stream that is its own, as of a rank that is seeded by itself, stays."""
        if not moves:
            return
        stand = self._stand()
        for move in moves:
            if move.stream in stand and mark_of(stand[move.stream]) == move.before:
                stand[move.stream] = move.after
        self._process.put((stand[0], stand[1], stand[2]))
        self._own.put({name: state for name, state in stand.items() if isinstance(name, str)})

    def _stand(self) -> dict[int | str, Any]:
        stand: dict[int | str, object] = dict(enumerate(self._process.stand()))
        stand.update(self._own.own_states())
        return stand


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    # NumPy's, where the second of a pair of numbers is waiting, has arrays in it.
    return number_of(one) == number_of(other) if isinstance(one, dict) and isinstance(other, dict) else one == other


def mark_of(state: object) -> int:
    """A number for where a stream stands: equal for equal draws, in every process."""
    if not isinstance(state, torch.Tensor):
        return number_of(state)
    generator = torch.Generator()  # a state of PyTorch's has bits that no draw sees
    generator.set_state(state)
    return next_of(generator)
