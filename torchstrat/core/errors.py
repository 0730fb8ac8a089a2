"""Every error torchstrat raises on purpose, in one tree.

::

    TorchstratError
    ├── InvalidArgumentError (ValueError)     a value that cannot mean what the call needs
    │   ├── DeviceError                       a device string that is empty, repeated, unparsable or absent
    │   ├── ClusterConfigError                a cluster description that is malformed
    │   └── VariableKindError                 an aggregation or synchronization that is no member of its enum
    ├── WrongTypeError (TypeError)            a value of the wrong kind
    │   └── VariableKindError                 (both: such a value is of the wrong type, and no name of a member)
    ├── ContextError (RuntimeError)           a call in the wrong place: replica, cross-replica, another strategy
    │   └── StrategyMixingError               two strategies meet in one call
    ├── ReplicaError (RuntimeError)           replicas that no longer agree
    │   ├── ReplicaDivergenceError            they made different calls
    │   ├── ReplicaDriftError                 they have different values of what has to be equal
    │   └── StructureMismatchError            they returned different structures
    ├── CommunicationError (RuntimeError)     another process could not be reached
    │   ├── CommunicationTimeoutError         it did not arrive in time; the message names who was waited for
    │   │   └── PeerTimeoutError              a message to one process of a cluster was not answered in time
    │   ├── PeerUnavailableError              one process of a cluster is gone; ``.peer`` says which
    │   ├── ParameterServerUnavailable        a parameter server is gone, and the variables it held; ``.task``
    │   ├── FencedError                       this process was given up by its cluster; what it sends is refused
    │   ├── AuthenticationError               a peer does not know the cluster's secret
    │   └── VersionMismatchError              the processes of a cluster run different versions
    ├── FunctionError (RuntimeError)          a scheduled function
    │   ├── CancelledError                    was cancelled before it ran, because another one failed
    │   │   └── CancelledByServerLossError    (also a ParameterServerUnavailable)
    │   ├── FunctionSetAsideError             was lost with its worker as often as it may be run
    │   ├── RepeatedFunctionError             ran again after its worker was lost, and made other changes than before
    │   └── ClosureInputError                 could not run: its dataset or resource could not be built on the worker
    ├── NotSendableError (TypeError)          a function, an argument or a result that cannot travel between processes
    ├── OutOfRangeError (RuntimeError)        `get_next` past the end of the data
    ├── LedgerError (RuntimeError)            rows of an epoch that were lost, finished twice, or not finished
    └── UnsupportedError (NotImplementedError) a combination that has no meaning here

Errors that a user's own arguments can cause are also the builtin class that Python programmers expect
(`ValueError`, `TypeError`, `RuntimeError`, `NotImplementedError`), so existing ``except`` clauses keep working.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class TorchstratError(Exception):
    """Base class: ``except ts.errors.TorchstratError`` catches everything torchstrat raises on purpose."""


class InvalidArgumentError(TorchstratError, ValueError):
    """An argument has the right type and an unusable value."""


class DeviceError(InvalidArgumentError):
    """A device string is empty, repeated, unparsable, or names a device this machine lacks."""


class ClusterConfigError(InvalidArgumentError):
    """A cluster description (``TF_CONFIG``, torchrun's variables, a `ClusterSpec`) is malformed."""


class WrongTypeError(TorchstratError, TypeError):
    """An argument is of a type the call cannot use."""


class VariableKindError(InvalidArgumentError, WrongTypeError):
    """A `Variable`'s aggregation or synchronization is not a member of its enum.

    TensorFlow raises `ValueError` or `TypeError` here, depending on the strategy and on whether there is a name.
    """


class ContextError(TorchstratError, RuntimeError):
    """A call was made in replica context that needs cross-replica context, or the other way round."""


class StrategyMixingError(ContextError):
    """A strategy, a value or a dataset of one strategy was used in the scope of another."""


class ReplicaError(TorchstratError, RuntimeError):
    """The replicas of one `run` no longer agree."""


class ReplicaDivergenceError(ReplicaError):
    """One replica made a call that another did not make: a step, a collective, a `merge_call`."""


class ReplicaDriftError(ReplicaError):
    """Replicas have other values of what has to be equal; the message names the first, and who has what."""


class StructureMismatchError(ReplicaError, AssertionError):
    """Replicas returned results of different structure.

    Also an `AssertionError`, the class TensorFlow raises here.
    """


class CommunicationError(TorchstratError, RuntimeError):
    """Another process of the job could not be reached."""


class CommunicationTimeoutError(CommunicationError):
    """Another process did not take part in time; the message names it and the call."""


class OutOfRangeError(TorchstratError, RuntimeError):
    """`get_next` was called after the last element."""


class LedgerError(TorchstratError, RuntimeError):
    """Not every row of an epoch was finished exactly once."""


class UnsupportedError(TorchstratError, NotImplementedError):
    """A combination of arguments that means nothing on this strategy."""


class PeerTimeoutError(CommunicationTimeoutError):
    """A message to one process of a cluster was not answered in time."""


class PeerUnavailableError(CommunicationError):
    """One process of a cluster is gone, or cannot be reached. ``peer``: which one."""

    def __init__(self, message: str, peer: object = None) -> None:
        super().__init__(message)
        self.peer = peer

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.peer)


class ParameterServerUnavailable(CommunicationError):  # noqa: N818  # the name that users look for
    """A parameter server is gone, and with it the variables it held. ``task``: which one.

    Start it again (a launcher does) and bring the variables back with ``ts.Checkpoint(…).restore(path)``, or let
    ``ParameterServerStrategy(on_server_loss="restore")`` do that.
    """

    def __init__(self, message: str, task: Any = None) -> None:
        super().__init__(message)
        self.task = task

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.task)


class FencedError(CommunicationError):
    """The cluster has given this process up, or has finished the function it works for; what it sends is refused."""


class AuthenticationError(CommunicationError):
    """A peer does not know the cluster's secret, or a message was changed or sent twice."""


class VersionMismatchError(CommunicationError):
    """Processes of one cluster run different versions of torchstrat or torch."""


class FunctionError(TorchstratError, RuntimeError):
    """A scheduled function did not run."""


class CancelledError(FunctionError):
    """A scheduled function was cancelled before it ran, because an earlier one failed or a server was lost."""


class CancelledByServerLossError(CancelledError, ParameterServerUnavailable):
    """A scheduled function was cancelled because a parameter server was lost. ``task``: which one."""


class FunctionSetAsideError(FunctionError):
    """A function was run as often as `ClusterCoordinator.schedule` allows (``max_attempts``), and each time its worker
    was lost: it has ended the process, or has not ended in time.

    Attributes:
        function: its number.
        losses: what became of the worker, each time.
        name: of the function.
    """

    def __init__(self, function: int, losses: Iterable[str], name: str = "a function") -> None:
        super().__init__(function, tuple(losses))
        self.function, self.losses, self.name = function, tuple(losses), name

    def __str__(self) -> str:
        times = {loss: self.losses.count(loss) for loss in self.losses}
        how = "; ".join(loss if count == 1 else f"{loss} ({count} times)" for loss, count in times.items())
        return (
            f"function {self.function} ({self.name}) is set aside: it was run {len(self.losses)} times, and each time "
            f"its worker was lost: {how}. Look at what it does there (memory, native code, the worker's output); where "
            "workers are lost for other reasons, allow more with schedule(…, max_attempts=…). What waited behind it "
            "went on; what was queued after its second loss is cancelled."
        )


class RepeatedFunctionError(FunctionError):
    """A function runs again, because its worker was lost, and is about to change other variables, or rows, than the
    earlier run of it, of which servers have applied a part."""


class ClosureInputError(FunctionError):
    """A per-worker dataset or resource that a scheduled function needs could not be built on its worker."""


class NotSendableError(WrongTypeError):
    """A function, an argument or a result cannot travel between processes; the message names the part that cannot."""


for _found in list(globals().values()):
    if isinstance(_found, type) and _found.__module__ == __name__:
        _found.__module__ = "torchstrat.errors"  # where programs find them: what tracebacks show, and pickles name
del _found
