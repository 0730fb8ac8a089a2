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
    │   └── StructureMismatchError            they returned different structures
    ├── CommunicationError (RuntimeError)     another process could not be reached
    │   └── CommunicationTimeoutError         it did not arrive in time; the message names who was waited for
    ├── OutOfRangeError (RuntimeError)        `get_next` past the end of the data
    └── UnsupportedError (NotImplementedError) a combination that has no meaning here

Errors that a user's own arguments can cause are also the builtin class that Python programmers expect
(`ValueError`, `TypeError`, `RuntimeError`, `NotImplementedError`), so existing ``except`` clauses keep working.
"""

from __future__ import annotations


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


class UnsupportedError(TorchstratError, NotImplementedError):
    """A combination of arguments that means nothing on this strategy."""
