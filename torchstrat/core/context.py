"""Where the calling thread is: in no scope, in a strategy's scope (*cross-replica*), or inside one replica of a run.

The state is a stack per thread. A thread that user code starts inside a scope begins with an empty stack, as in
TensorFlow. Engines push a frame on the threads that run replicas.
"""

from __future__ import annotations

import abc
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from torchstrat.core.engine import ReplicaEngine
from torchstrat.core.errors import ContextError, InvalidArgumentError, StrategyMixingError, WrongTypeError
from torchstrat.core.reduction import ReduceOp, parse_gather_axis
from torchstrat.core.values import require_callable, require_kwargs, require_list_or_tuple
from torchstrat.core.variable.storage import VariableHome, VariablePlacement


class StrategyLike(abc.ABC):
    """A strategy, as the rooms below know it; programs have a `ts.Strategy`, which says what its methods do."""

    extended: Any
    _engine: ReplicaEngine
    _home: VariableHome

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int: ...
    @property
    @abc.abstractmethod
    def is_chief(self) -> bool: ...
    @abc.abstractmethod
    def scope(self) -> AbstractContextManager[StrategyLike]: ...
    @abc.abstractmethod
    def run(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any: ...
    @abc.abstractmethod
    def reduce(self, reduce_op: ReduceOp | str, value: object, axis: object = None) -> Any: ...
    @abc.abstractmethod
    def local_results(self, value: object) -> tuple[Any, ...]: ...
    @abc.abstractmethod
    def distribute_dataset(self, dataset: object, options: Any = None) -> Any: ...


def engine_of(strategy: StrategyLike) -> ReplicaEngine:
    """The part of a strategy that runs its replicas: for this package, while programs have the strategy's methods."""
    return strategy._engine


def home_of(strategy: StrategyLike) -> VariableHome:
    """The part of a strategy that says where its variables live."""
    return strategy._home


def placement_of(strategy: StrategyLike) -> VariablePlacement:
    return home_of(strategy).placement


def wraps_values(strategy: StrategyLike) -> bool:
    """Whether what its replicas return is handed out as `PerReplica`."""
    return placement_of(strategy) is not VariablePlacement.ONE


def is_open(strategy: StrategyLike) -> bool:
    return not home_of(strategy).is_closed


class OfStrategy:
    """What belongs to one strategy."""

    _strategy: StrategyLike


def strategy_of(value: object) -> StrategyLike | None:
    return value._strategy if isinstance(value, OfStrategy) else None


class _Frame(NamedTuple):
    strategy: StrategyLike
    replica: ReplicaContext | None  # None: cross-replica context


class _Frames(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        self.installed: _Frame | None = None  # by experimental_set_strategy

    def top(self) -> _Frame | None:
        return self.stack[-1] if self.stack else self.installed


_frames = _Frames()

strategies: weakref.WeakSet[StrategyLike] = weakref.WeakSet()
"""All strategies of this process that are still there."""

_default_strategy: functools._lru_cache_wrapper[StrategyLike]


def set_default(make: Callable[[], StrategyLike]) -> None:
    """``make``: the strategy that is in force outside of any scope, made when somebody first asks for it."""
    global _default_strategy
    _default_strategy = functools.cache(make)


def is_default(strategy: StrategyLike) -> bool:
    """Makes none to compare with."""
    return _default_strategy.cache_info().currsize > 0 and strategy is _default_strategy()


@functools.cache
def _default_replica() -> ReplicaContext:
    return ReplicaContext(_default_strategy(), 0)


def get_strategy() -> StrategyLike:
    """The strategy of the innermost scope or run of this thread; the default one-device strategy outside of any."""
    frame = _frames.top()
    return frame.strategy if frame is not None else _default_strategy()


def has_strategy() -> bool:
    """Whether this thread is in a scope or a run of a strategy other than the default one."""
    return get_strategy() is not _default_strategy()


def get_replica_context() -> ReplicaContext | None:
    """The current replica's context; None in cross-replica context; outside any scope the default strategy's."""
    frame = _frames.top()
    return frame.replica if frame is not None else _default_replica()


def in_cross_replica_context() -> bool:
    """Whether this thread is in a scope and not inside a replica (`merge_call` functions are in cross context too)."""
    frame = _frames.top()
    return frame is not None and frame.replica is None


class _Entered:
    """A plain class, not a generator: every replica of every run enters one."""

    __slots__ = ("_frame",)

    def __init__(self, frame: _Frame) -> None:
        self._frame = frame

    def __enter__(self) -> None:
        _frames.stack.append(self._frame)

    def __exit__(self, *_: object) -> None:
        _frames.stack.pop()


def enter(strategy: StrategyLike, replica: ReplicaContext | None) -> AbstractContextManager[None]:
    """Push a frame on this thread for the duration of the block. What it returns may be entered again, anywhere."""
    return _Entered(_Frame(strategy, replica))


def enter_cross(strategy: StrategyLike) -> AbstractContextManager[None]:
    """Cross-replica context of ``strategy``. The default one is in force as it is, in its one replica."""
    return nullcontext() if strategy is _default_strategy() else enter(strategy, None)


def push_cross(strategy: StrategyLike) -> None:
    _frames.stack.append(_Frame(strategy, None))


def pop_cross(strategy: StrategyLike) -> None:
    """Leave the innermost cross frame, which must be ``strategy``'s: scopes close in the reverse order of opening."""
    frame = _frames.stack[-1] if _frames.stack else None
    if frame is None or frame.strategy is not strategy or frame.replica is not None:
        raise ContextError(f"{strategy!r}.scope() was left by a thread, or in an order, other than it was entered.")
    _frames.stack.pop()


def require_cross(strategy: StrategyLike, call: str) -> None:
    """``call`` belongs to cross-replica context, of this very strategy when the thread is in any."""
    frame = _frames.top()
    if frame is None:
        return
    if frame.replica is not None and strategy is not _default_strategy():
        raise ContextError(
            f"{call} was called inside {frame.replica._name()} of a run; it works outside of run, or in a merge_call. "
            "Inside a replica use get_replica_context().all_reduce or .all_gather."
        )
    require_not_mixed(strategy, call)


def require_not_mixed(strategy: StrategyLike, call: str) -> None:
    """``call`` on ``strategy`` is an error in the scope of another strategy. The default one's is as good as none."""
    frame = _frames.top()
    if frame is None or (frame.replica is None and frame.strategy is _default_strategy()):
        return
    if frame.strategy is not strategy:
        raise StrategyMixingError(
            f"{call} of {strategy!r} was used in the scope of {frame.strategy!r}. One program part works with one "
            "strategy at a time: leave the inner scope first, or use its strategy."
        )


def replica_of(strategy: StrategyLike, call: str) -> int | None:
    """The replica of ``strategy`` whose code makes ``call``; None in cross-replica context and outside of any scope.

    Raises `StrategyMixingError` in the scope or a run of another strategy.
    """
    frame = _frames.top()
    if frame is None:
        return None
    require_not_mixed(strategy, call)
    return None if frame.replica is None else frame.replica.replica_id_in_sync_group


def experimental_set_strategy(strategy: StrategyLike | None) -> None:
    """Make ``strategy`` current in this thread without a ``with`` block; None clears it. An error inside a scope."""
    if strategy is not None and not isinstance(strategy, StrategyLike):
        raise WrongTypeError(
            f"experimental_set_strategy needs a strategy or None; got {type(strategy).__name__} {strategy!r:.80}. Make "
            'one: ts.MirroredStrategy(), or by its name, ts.registry.create("mirrored").'
        )
    if _frames.stack:
        raise ContextError("experimental_set_strategy cannot be called inside a scope or a run; leave it first.")
    installed, _frames.installed = _frames.installed, None
    if installed is not None:
        engine_of(installed.strategy).scope_closed()
    if strategy is not None and strategy is not _default_strategy():
        engine_of(strategy).scope_opened()
        _frames.installed = _Frame(strategy, None)


class ReplicaContext:
    """What one replica knows of itself, and its way to talk to the others. See `get_replica_context`.

    Inside `Strategy.run` every replica gets one. Calls that involve the others (`all_reduce`, `all_gather`,
    `merge_call`) must be made by every replica of the run, in the same order.
    """

    def __init__(self, strategy: StrategyLike, replica_id_in_sync_group: int | None) -> None:
        if isinstance(replica_id_in_sync_group, bool) or not isinstance(
            replica_id_in_sync_group, int | torch.Tensor | None
        ):
            raise InvalidArgumentError(
                "replica_id_in_sync_group must be an int, an integer tensor or None; "
                f"got {type(replica_id_in_sync_group).__name__} {replica_id_in_sync_group!r}."
            )
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's number, from 0 to ``num_replicas_in_sync - 1``; unique over all processes. On TPUs, where a
        step runs for all replicas at once, a scalar tensor."""
        return self._replica_id  # type: ignore[return-value]

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of the strategy, over all processes."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """A 1-tuple: the device this replica computes on, such as ``"cpu:1"``."""
        return (self._engine.device_of_replica(self.replica_id_in_sync_group),)

    @property
    def _engine(self) -> ReplicaEngine:
        return engine_of(self._strategy)

    def _require_current(self, call: str) -> None:
        if get_replica_context() is not self:
            raise ContextError(
                f"{call} was called on the context of a replica that is not the running one. Call "
                "get_replica_context() anew inside each run; a context ends with its run."
            )

    def all_reduce(self, reduce_op: ReduceOp | str, value: object, options: object = None) -> Any:
        """Combine ``value`` over all replicas; every replica gets the result, on its own device.

        ``value`` is a tensor or a nest of tensors of equal shapes and dtypes on every replica, where dicts go by their
        keys; a Python number counts as a scalar tensor, a bool as 0 or 1. Differentiable: the gradient is the
        `all_reduce`, with the same operation, of the incoming gradients.
        """
        op = ReduceOp.parse(reduce_op)
        self._require_current("all_reduce")
        return self._engine.all_reduce(op, value)

    def all_gather(self, value: object, axis: int, options: object = None) -> Any:
        """Every replica's ``value`` (tensor or nest) joined along ``axis``, in replica order, on every replica.

        Sizes along ``axis`` may differ. The gradient sums the incoming gradients and hands each replica its own part.
        """
        axis = parse_gather_axis(axis)
        self._require_current("all_gather")
        return self._engine.all_gather(value, axis)

    def merge_call(
        self, merge_fn: Callable[..., object], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """Run ``merge_fn(strategy, *args, **kwargs)`` once for all replicas, in cross-replica context.

        Arguments arrive as `PerReplica` values (unwrapped where all replicas passed the same object); a `PerReplica`
        result is split again. Every replica has to make the same number of calls. With one replica per process the
        function runs in every process. What it draws comes from the generator of code outside of runs.
        """
        require_callable(merge_fn, "merge_call")
        require_list_or_tuple(args)
        require_kwargs(kwargs)
        self._require_current("merge_call")
        return self._engine.merge_call(merge_fn, tuple(args), dict(kwargs or {}))

    def set_weight(self, weight: float) -> None:
        """Say how much this replica's gradients count in this run's mean, instead of its number of rows.

        For losses that average over something else than rows: pass the number of tokens, or of unmasked elements.
        Call it before ``backward``, on every replica. Non-negative; 0 leaves this replica's gradients out.
        """
        self._require_current("set_weight")
        self._engine.set_weight(weight)

    def __enter__(self) -> ReplicaContext:
        _frames.stack.append(_Frame(self._strategy, self))
        return self

    def __exit__(self, *_: object) -> None:
        _frames.stack.pop()

    def __repr__(self) -> str:
        return f"<ReplicaContext {self._name()} of {self.num_replicas_in_sync}>"

    def _name(self) -> str:
        """For messages. Where a step runs for all replicas at once the number is a tensor that nobody may look at."""
        return f"replica {self._replica_id}" if isinstance(self._replica_id, int | None) else "every replica"


class _Fields(NamedTuple):
    experimental_enable_dynamic_batch_size: bool
    experimental_bucketizing_dynamic_shape: bool
    experimental_xla_options: object


class RunOptions(_Fields):
    """How a step is compiled where steps are compiled (TPUs); everywhere else it is accepted and changes nothing.

    An immutable named tuple. Every field also goes without ``experimental_``.

    Args:
        experimental_enable_dynamic_batch_size: allow the shapes of inputs to change from run to run, each compiled.
            Default True. False: another shape is an error.
        experimental_bucketizing_dynamic_shape: TensorFlow rounds shapes up to a few sizes, to compile less often. Here
            shapes are never changed, because rows that are not there would count in statistics. Default False.
        experimental_xla_options: None, the default. TPUs take the compiler's options from ``XLA_FLAGS`` alone.
        global_view: on TPUs, call the step once with the global batch, the replicas' batches joined, instead of once
            per replica. For models that cannot be mapped over replicas (LSTM). Statistics of the batch (BatchNorm) are
            then those of the global batch, random numbers are drawn for all of it, a loss is its loss, results are
            bare, and there are no collectives. A sum loss is the sum over all rows whatever `gradient_reduce_op` says.
    """

    global_view: bool = False  # beside the tuple, which is TensorFlow's

    def __new__(
        cls,
        experimental_enable_dynamic_batch_size: bool | None = None,
        experimental_bucketizing_dynamic_shape: bool | None = None,
        experimental_xla_options: object = None,
        *,
        enable_dynamic_batch_size: bool | None = None,
        bucketizing_dynamic_shape: bool | None = None,
        xla_options: object = None,
        global_view: bool = False,
    ) -> RunOptions:
        dynamic = _one_of(
            "enable_dynamic_batch_size", experimental_enable_dynamic_batch_size, enable_dynamic_batch_size
        )
        buckets = _one_of(
            "bucketizing_dynamic_shape", experimental_bucketizing_dynamic_shape, bucketizing_dynamic_shape
        )
        xla = _one_of("xla_options", experimental_xla_options, xla_options)
        options = super().__new__(cls, True if dynamic is None else bool(dynamic), bool(buckets), xla)
        options.global_view = bool(global_view)
        return options

    def _replace(self, **changed: Any) -> RunOptions:
        """As of named tuples; ``global_view`` stays what it is, or is changed as well."""
        global_view = changed.pop("global_view", self.global_view)
        made = super()._replace(**changed)
        made.global_view = global_view
        return made

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) and self.global_view == getattr(other, "global_view", False)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((*self, self.global_view))

    def __repr__(self) -> str:
        shown = super().__repr__()
        return f"{shown[:-1]}, global_view=True)" if self.global_view else shown

    enable_dynamic_batch_size = property(lambda self: self.experimental_enable_dynamic_batch_size)
    bucketizing_dynamic_shape = property(lambda self: self.experimental_bucketizing_dynamic_shape)
    xla_options = property(lambda self: self.experimental_xla_options)


def _one_of(name: str, long: object, short: object) -> object:
    if long is not None and short is not None:
        raise WrongTypeError(f"RunOptions was given both {name} and experimental_{name}; they are one field.")
    return short if long is None else long


def require_run_options(options: object) -> None:
    """`run(options=…)`: None or a `RunOptions`."""
    if options is not None and not isinstance(options, RunOptions):
        raise WrongTypeError(f"options must be a ts.RunOptions or None; got {type(options).__name__} {options!r:.80}.")
