"""What happens to the coordinator's scheduler (events), and what it wants done (actions): plain frozen data.

A function is a number, counted by the caller from the scheduler's first one without a gap. A worker is its index in the
cluster and the incarnation of the process that it is at the moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

# ---- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """The user scheduled a function."""

    function: int


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


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The user removes a worker: what runs there may finish, nothing new goes there, restarts of it stay out."""

    worker: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A function returned."""

    worker: int
    incarnation: str
    function: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A function raised ``error``."""

    worker: int
    incarnation: str
    function: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class HandedBack:
    """A process that is asked to leave returns a function, which is to run elsewhere; None: it leaves and had none.

    The incarnation gets no more functions. Those it still has may finish, come back too, or be lost with it.
    """

    worker: int
    incarnation: str
    function: int | None


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
    | Finished
    | Failed
    | HandedBack
    | ServersLost
    | ServersRestored
    | ErrorTaken
    | DispatchHeld
    | DispatchReleased
)

# ---- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send a function to a worker. ``rested``: it had nothing to do since its last function, if it had one at all, so
    that the values it holds may be old."""

    function: int
    worker: int
    incarnation: str
    rested: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """The function's result is its outcome."""

    function: int


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
class Quiet:
    """Nothing is in flight and nothing will be: an error is pending, or functions wait for lost servers."""


@dataclass(frozen=True, slots=True)
class AllDone:
    """Every function has its outcome, and no error is pending."""


Action: TypeAlias = Dispatch | Complete | Fail | Cancel | Release | Forget | Quiet | AllDone
