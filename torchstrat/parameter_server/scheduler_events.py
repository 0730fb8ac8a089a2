"""What happens to the coordinator's scheduler (events), and what it wants done (actions): plain frozen data.

A function is a number, counted by the caller from the scheduler's first one without a gap. A worker is its index in the
cluster and the incarnation of the process that it is at the moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torchstrat.errors import CancelledByServerLossError, CancelledError, ParameterServerUnavailable

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


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing is in flight and nothing will be: an error is pending, or functions wait for lost servers."""


@dataclass(frozen=True, slots=True)
class AllDone:
    """Every function has its outcome, and no error is pending."""


Action: TypeAlias = Dispatch | Recall | Complete | Fail | Cancel | Release | Forget | AwaitMoment | Quiet | AllDone
