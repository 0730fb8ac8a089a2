"""What the coordinator sends a worker, and what comes back.

``worker.run``: a `Batch`, answered by a `Report` when it is over. ``worker.recall``: a `Recalled`, answered at once by
functions. ``coordinator.outcomes``: a `Report`, from the worker, while a batch runs.

Per-worker values are built on the worker from what the coordinator sent, when a function first needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchstrat.core.errors import ClosureInputError, InvalidArgumentError, OutOfRangeError, WrongTypeError
from torchstrat.data.marks import unmarked
from torchstrat.parameter_server import phases
from torchstrat.parameter_server.interface import Peer
from torchstrat.parameter_server.messages import Token
from torchstrat.parameter_server.serialization.captured_objects import Increment
from torchstrat.parameter_server.serialization.pack_cache import Packed

ZEROS, USED = "zeros", "used"

Gradients = tuple[tuple[int, str | None], ...]
"""Which gradients there are, by the parameter's number: `ZEROS`, which are there to be added to and to be stepped with,
`USED` by a step, or none. A step passes over a parameter without one, and decays and moves by its momentum one with
zeros: what one device would have at that point does not depend on which worker runs a function."""


@dataclass(frozen=True)
class ResourceSpec:
    """How to build per-worker value ``number``: by calling the packed ``builder``, or iterating over ``source``."""

    number: int
    what: str
    builder: Packed | None = None
    source: int | None = None


class MisusedBuilderError(ClosureInputError, InvalidArgumentError):
    """A builder asked torchstrat for something that cannot be, such as a new variable."""


class WorkerIterator:
    """One worker's iterator over its own copy of a per-worker dataset."""

    def __init__(self, dataset: object) -> None:
        self._batches = _iterate(dataset)

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        return unmarked(next(self._batches))

    def get_next(self) -> object:
        """The next batch; raises `OutOfRangeError` after the last."""
        try:
            return unmarked(next(self._batches))
        except StopIteration:
            raise OutOfRangeError("the per-worker dataset has no more batches on this worker.") from None


class Resources:
    """What this worker has built so far."""

    def __init__(self, call: Callable[[Packed], object]) -> None:
        self._call = call
        self._specs: dict[int, ResourceSpec] = {}
        self._built: dict[int, object] = {}

    def learn(self, spec: ResourceSpec) -> None:
        self._specs[spec.number] = spec

    def forget(self, number: int) -> None:
        self._specs.pop(number, None)
        self._built.pop(number, None)

    def get(self, number: int) -> object:
        """Raises `ClosureInputError`, from the original error, when it cannot be built; the next need tries again."""
        if number not in self._built:
            spec = self._specs[number]
            phases.reached(phases.BUILDING)
            try:
                self._built[number] = self._build(spec)
            except ClosureInputError:
                raise
            except Exception as error:
                kind = MisusedBuilderError if isinstance(error, InvalidArgumentError) else ClosureInputError
                raise kind(f"{spec.what} could not be built on its worker: {error!r}") from error
        return self._built[number]

    def _build(self, spec: ResourceSpec) -> object:
        if spec.source is None:
            assert spec.builder is not None
            return self._call(spec.builder)
        return WorkerIterator(self.get(spec.source))


def _iterate(dataset: object) -> Iterator[object]:
    """A new pass over a dataset of batches."""
    if isinstance(dataset, list | tuple | dict | str | bytes):
        raise WrongTypeError(
            f"the dataset function returned a {type(dataset).__name__}; return a DataLoader, a Dataset of batches, or "
            "what strategy.distribute_datasets_from_function gives. Plain data may be wrapped in a DataLoader with "
            "batch_size=None."
        )
    if hasattr(dataset, "__iter__"):
        return iter(dataset)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return (dataset[index] for index in range(len(dataset)))
    raise WrongTypeError(
        f"the dataset function returned a {type(dataset).__name__}, which cannot be iterated; return a DataLoader or a "
        "Dataset of batches."
    )


Options = Mapping[int, tuple[Mapping[str, Any], ...]]
"""Optimizer's number → its parameter groups: hyperparameters, and under ``params`` the numbers of the variables. Of a
group that is another optimizer's as well, under `SAME_AS`: number and place where it comes first."""

SAME_AS = "torchstrat: same as"

Modes = Mapping[Token, Any]
"""Token of a module → whether it is in training mode; token of a parameter → whether it requires a gradient;
`DEFAULT_DTYPE` → that of the program; `SURROUNDINGS` → `PlainSettings` of the thread that has scheduled;
`AGGREGATIONS` → variable → `VariableAggregation` of buffers; `SHARED` → variable → whose memory it shows, too;
`NUM_WORKERS` → how many the cluster's description has."""

DEFAULT_DTYPE = ("torch", "default_dtype")
SURROUNDINGS = ("torch", "surroundings")
AGGREGATIONS = ("buffers", "aggregations")
SHARED = ("buffers", "shared")
NUM_WORKERS = ("cluster", "num_workers")


Arguments = bytes | tuple[bytes, tuple[torch.Tensor, ...], int, frozenset[Token]]
"""(args, kwargs), pickled: the blob, its tensors, how many of these are buffers, and the captured objects it refers to;
the blob alone where there is no more. Plain tuples, since a batch has many."""


class Batch(NamedTuple):  # a dataclass takes ten times as long to pickle
    """Functions to run one after the other. What the worker has been sent before is left out, and known to it by name.

    Args:
        number: of the batches that this worker gets, from 0 without a gap: they are run in this order, whatever order
            they arrive in.
        stops: how often the worker has stopped, by what the coordinator knows. A batch that was sent before the news of
            a stop arrived is handed back: nothing that had not begun runs after a function that raised.
        rested: the worker's copies of variables may be out of date when the first one begins.
        functions: (function, which of the codes, arguments, seed of its random state). Arguments None: it could not be
            sent, and is left out.
        codes: (digest, pickle) of the functions' codes; the pickle is None where the worker has it.
        settings: (place in ``functions``, options, modes): from there on these are in force, as they were when the
            function was scheduled; None: as before.
        increments: captured objects that are new to the worker.
        resources: per-worker values that are new to the worker.
        servers: who the servers are; None: as in the last batch.
        is_shared: the job has other workers.
        left_elsewhere: numbers of parameters of which others hold gradients that no step has used.
        accumulates: functions of the job have left gradients to servers.
        gradients: what has become of gradients on other workers.
        gone: tokens of what the coordinator's program has dropped. What the worker has of these goes when it has taken
            in everything else of the batch, and kept codes that name them before; no function will name them again.
        is_repeated: the one function of the batch may have run before, on a worker that was lost.
    """

    number: int
    stops: int
    rested: bool
    functions: tuple[tuple[int, int, Arguments | None, int], ...]
    codes: tuple[tuple[bytes, Packed | None], ...] = ()
    settings: tuple[tuple[int, Options | None, Modes | None], ...] = ()
    increments: tuple[Increment, ...] = ()
    resources: tuple[ResourceSpec, ...] = ()
    servers: Mapping[int, Peer] | None = None
    is_shared: bool = False
    left_elsewhere: tuple[int, ...] = ()
    accumulates: bool = False
    gradients: Gradients = ()
    gone: tuple[Token, ...] = ()
    is_repeated: bool = False


PLAIN_RESULTS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Results of exactly these types travel as they are, others pickled."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised ``error``, or its result could not be sent.

    ``packed``: what was raised, where it cannot be pickled as it is; ``error`` then says what it said.
    """

    error: BaseException
    packed: Packed | None = None


@dataclass(frozen=True, slots=True)
class ServerGone:
    """A server did not answer this worker, so the function has no outcome.

    Args:
        message: what the function's error says, ``reason``: the part of it that tells what happened.
        is_cut_off: the server could not be called at all, rather than taking too long.
    """

    peer: Peer | None
    index: int
    message: str
    reason: str
    is_cut_off: bool


class Report(NamedTuple):
    """What became of functions; of each it is told once. A batch's own answer is the last report of it, others come
    before while it runs (``coordinator.outcomes``).

    Args:
        finished: functions that returned, and ``results`` what: plain, or pickled. ``seconds``: that they ran.
        ended: functions that did not return, and why.
        handed_back: functions that the worker has not begun and will not run: to be run elsewhere.
        stops: how often the worker has stopped because a function did not return. It then hands back the rest of the
            batch, and batches that were sent before the coordinator knew.
        leaving: the worker takes nothing more.
        left: numbers of parameters of which the worker holds gradients that no step has used.
        wrote_parameters: functions have written to parameters by hand there.
        accumulates: functions of the job have left gradients to servers, as far as is known there.
        gradients: what functions have changed of gradients that are no sums for later ones.
    """

    finished: tuple[int, ...] = ()
    results: tuple[object, ...] = ()
    seconds: float = 0.0
    ended: tuple[tuple[int, Raised | ServerGone], ...] = ()
    handed_back: tuple[int, ...] = ()
    stops: int = 0
    leaving: bool = False
    left: tuple[int, ...] = ()
    wrote_parameters: bool = False
    accumulates: bool = False
    gradients: Gradients = ()


Recalled = tuple[tuple[int, tuple[int, ...]], ...]
"""(number of a batch, functions of it) that a worker is asked to hand back; it answers with those that it will not
run."""
