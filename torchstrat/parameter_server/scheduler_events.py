"""What happens to the coordinator's scheduler (events), and what it wants done (actions): plain frozen data.

A function is a number, counted by the caller from the scheduler's first one without a gap. A worker is its index in the
cluster and the incarnation of the process that it is at the moment.

And what the scheduler knows of workers, each process and the batches that it has, and of functions that were lost.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from dataclasses import dataclass
from typing import TypeAlias

from torchstrat.core.errors import CancelledByServerLossError, CancelledError, ParameterServerUnavailable

MAX_ATTEMPTS = 5
"""How often a function is run whose worker is lost each time, if nothing else is said."""

# ---- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """The user scheduled a function. ``max_attempts``: how often it may be lost with its worker; None: any number."""

    function: int
    max_attempts: int | None = MAX_ATTEMPTS


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A process is ready to run functions. An incarnation that joined before is ignored: it was used up or given up.

    ``readmit`` brings back a worker that the user had removed; without it such a worker stays out.
    """

    worker: int
    incarnation: str
    readmit: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A process died or was given up; what it may still send must be refused elsewhere (by its incarnation)."""

    worker: int
    incarnation: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The user removes a worker: what runs there may finish, nothing new goes there, restarts of it stay out."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """A process is asked to end, and says so: it gets no more functions. Those it has may finish, come back, or be lost
    with it."""

    worker: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Functions returned. ``seconds``: how long they ran, together."""

    worker: int
    incarnation: str
    functions: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A function raised ``error``."""

    worker: int
    incarnation: str
    function: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class HandedBack:
    """A process returns functions that it has not begun, and never will by what it was sent so far: they were recalled,
    one before them raised, or the process leaves."""

    worker: int
    incarnation: str
    functions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MomentPassed:
    """Some milliseconds have passed since `AwaitMoment`."""


@dataclass(frozen=True, slots=True)
class ServersLost:
    """A parameter server is gone, and what it held."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class ServersRestored:
    """All servers are there, with the values that the user wants."""


@dataclass(frozen=True, slots=True)
class ErrorTaken:
    """The pending error was raised at the user."""


@dataclass(frozen=True, slots=True)
class DispatchHeld:
    """Somebody wants all servers at one moment: let what was begun come to its end, and begin nothing."""


@dataclass(frozen=True, slots=True)
class DispatchReleased:
    """The moment is over."""


Event: TypeAlias = (
    Submitted
    | WorkerJoined
    | WorkerLost
    | WorkerDraining
    | WorkerLeaves
    | Finished
    | Failed
    | HandedBack
    | MomentPassed
    | ServersLost
    | ServersRestored
    | ErrorTaken
    | DispatchHeld
    | DispatchReleased
)

# ---- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send a worker a batch of functions, to be run in this order behind what it has. ``rested``: it had nothing to do
    since its last function, if it had one at all, so that the values it holds may be old. ``is_repeated``: the one
    function was lost with a worker before, which may have begun it."""

    functions: tuple[int, ...]
    worker: int
    incarnation: str
    rested: bool
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask a worker to hand back those of these functions that it has not begun."""

    functions: tuple[int, ...]
    worker: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Complete:
    """The functions' results are their outcomes."""

    functions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """The function's outcome is the error that it raised."""

    function: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Cancel:
    """The function's outcome is that it did not run to its end, ``because`` of another error."""

    function: int
    because: BaseException

    def error(self) -> BaseException:
        if isinstance(self.because, ParameterServerUnavailable):
            error: BaseException = CancelledByServerLossError(
                f"function {self.function} was cancelled: {self.because}", self.because.task
            )
        else:
            error = CancelledError(
                f"function {self.function} was cancelled before it ran, because of an earlier error: {self.because}"
            )
        error.__cause__ = self.because
        return error


@dataclass(frozen=True, slots=True)
class Release:
    """A worker that was removed has nothing in flight any more (or died): it may be told to leave."""

    worker: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Every function below this number has its outcome: nobody needs to remember what it did to the servers."""

    below: int


@dataclass(frozen=True, slots=True)
class AwaitMoment:
    """Tell `MomentPassed` in some milliseconds; comes again only after that."""


Action: TypeAlias = Dispatch | Recall | Complete | Fail | Cancel | Release | Forget | AwaitMoment


class LostFunctions:
    """Of functions that have no outcome yet: how each was lost, every time, and how often that may be."""

    def __init__(self) -> None:
        self._losses: dict[int, list[str]] = {}
        self._limits: dict[int, int | None] = {}  # other than `MAX_ATTEMPTS`

    def limit(self, function: int, max_attempts: int | None) -> None:
        if max_attempts != MAX_ATTEMPTS:
            self._limits[function] = max_attempts

    def add(self, function: int, how: str) -> None:
        self._losses.setdefault(function, []).append(how)

    def times(self, function: int) -> int:
        """How often it was lost; then it may have been begun."""
        return len(self._losses.get(function, ()))

    def losses(self, function: int) -> tuple[str, ...]:
        return tuple(self._losses.get(function, ()))

    def is_used_up(self, function: int) -> bool:
        """Whether it must not be run again."""
        limit = self._limits.get(function, MAX_ATTEMPTS)
        return limit is not None and self.times(function) >= limit

    def forget(self, functions: Iterable[int]) -> None:
        """They have their outcomes."""
        if self._losses or self._limits:
            for function in functions:
                self._losses.pop(function, None)
                self._limits.pop(function, None)

    def functions(self) -> KeysView[int]:
        return self._losses.keys()


_BATCH_SECONDS = 0.005
"""How long a worker should take for a batch: much longer than a message takes, much shorter than anybody minds."""
_REMEMBERED = 16
"""About how many functions the mean duration is taken over: few, since the first one of a worker imports and unpickles
for seconds, and batches of one should soon be over."""


class Batch:
    """Functions that were sent together and have no outcome yet, in their order."""

    __slots__ = ("functions", "process")

    def __init__(self, process: Process, functions: Iterable[int]) -> None:
        self.process = process
        self.functions = dict.fromkeys(functions)


class Process:
    """One incarnation of a worker, from joining to loss or release."""

    __slots__ = (
        *("alone", "asked", "batches", "draining", "incarnation", "leaving", "level", "reported", "stalled"),
        "worker",
    )

    def __init__(self, worker: int, incarnation: str) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.batches: list[Batch] = []  # in the order in which it runs them
        self.level: int | None = None  # its place in `Scheduler._free`
        self.draining = False  # the user removes it
        self.leaving = False  # it said itself that it leaves
        self.alone = False  # it runs a function that was lost before
        self.reported = False  # an outcome since the last moment, or it had nothing to do before
        self.stalled = False
        self.asked = False  # to hand back a part, and has neither done so nor reported an outcome since

    @property
    def count(self) -> int:
        return sum(len(batch.functions) for batch in self.batches)

    @property
    def functions(self) -> list[int]:
        return [function for batch in self.batches for function in batch.functions]


class Durations:
    """How long functions take: of the last ones, since older ones count less and less."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._functions = 0.0

    def learn(self, seconds: float, functions: int) -> None:
        """So many took so long together."""
        self.seconds += seconds
        self._functions += functions
        if self._functions >= 2 * _REMEMBERED:
            kept = _REMEMBERED / self._functions
            self.seconds *= kept
            self._functions *= kept

    def size_of_batch(self, most: int) -> int:
        """How many take about `_BATCH_SECONDS`: one, while that is not known."""
        if not self._functions:
            return 1
        if self.seconds * most > _BATCH_SECONDS * self._functions:
            most = int(_BATCH_SECONDS * self._functions / self.seconds)
        return max(1, most)


def takes_functions(process: Process) -> bool:
    return not (process.draining or process.leaving or process.stalled)
