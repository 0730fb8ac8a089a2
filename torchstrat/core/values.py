"""Values that have one component per replica, and the functions that make and open them outside of a run.

`PerReplica` holds different values, `Mirrored` equal ones. Both are inert: they are made by a strategy and opened by
`Strategy.run`, `Strategy.local_results`, `Strategy.reduce` and `Strategy.gather`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

import torch

from torchstrat.core import nest, notebook_html
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.variable.tensor_like import components_here


@dataclass(frozen=True)
class BatchInfo:
    """How one global batch was split: the rows each replica of the whole group got, in replica order.

    Attached to every leaf that an input pipeline hands out; it is what weighs the gradients of uneven batches and
    what tells which replicas have nothing to do in this step. Known to every process without communication.
    """

    rows: tuple[int, ...]
    run_empty: bool = False
    """`InputOptions(empty_replicas="run")`: call the step on replicas without rows, as TensorFlow does."""
    dim: int = 0
    """Along which this leaf has its rows."""


class Weights(Protocol):
    """How much each replica counted in a run; see `torchstrat.replicas.engine.StepWeights`."""

    batches: tuple[BatchInfo, ...]
    """That the run was given."""

    def known(self, replica: int) -> float | None:
        """None where nothing has said it."""


T_co = TypeVar("T_co", covariant=True)


class DistributedValues(Generic[T_co]):
    """A value with one component per replica of a strategy.

    ``values`` are the components of this process, in replica order; ``replica_ids`` are their ids in the whole group.
    In annotations ``DistributedValues[Tensor]`` says what the components are.
    """

    __slots__ = ("batch_info", "replica_ids", "values", "weights")
    _shown_as: str | None = None

    def __init__(
        self,
        values: tuple[T_co, ...] | list[T_co],
        *,
        replica_ids: tuple[int, ...] | None = None,
        batch_info: BatchInfo | None = None,
        weights: Weights | None = None,
    ) -> None:
        """``weights``: of the run that returned it."""
        try:
            self.values: tuple[T_co, ...] = tuple(values)
        except TypeError:
            raise WrongTypeError(
                f"{type(self).__name__} needs a list of values, one for each replica; got {type(values).__name__} "
                f"{values!r:.80}. Write {type(self).__name__}([value, value])."
            ) from None
        self.weights = weights
        self.replica_ids = tuple(range(len(self.values))) if replica_ids is None else tuple(replica_ids)
        self.batch_info = batch_info
        if len(self.replica_ids) != len(self.values):
            raise InvalidArgumentError(
                f"{type(self).__name__} was given {len(self.values)} values and {len(self.replica_ids)} replica ids; "
                "give one id per value."
            )

    def known_weights(self) -> list[float | None]:
        """Of the components: what they counted in the run that returned them, or the rows of a batch."""
        if self.batch_info is not None:
            return [float(self.batch_info.rows[replica]) for replica in self.replica_ids]
        return [None if self.weights is None else self.weights.known(replica) for replica in self.replica_ids]

    def component(self, replica_id: int) -> T_co:
        """The component of one replica of this process, by its id in the group."""
        try:
            return self.values[self.replica_ids.index(replica_id)]
        except ValueError:
            raise InvalidArgumentError(
                f"this {type(self).__name__} has components for replicas {list(self.replica_ids)}, not for replica "
                f"{replica_id}; a value made by one run cannot be given to replicas that took no part in it."
            ) from None

    def _show(self, convert: Any) -> str:
        rows = ",\n".join(f"  {index}: {convert(value)}" for index, value in enumerate(self.values))
        return f"{self._shown_as or type(self).__name__}:{{\n{rows}\n}}"

    def __repr__(self) -> str:
        return self._show(repr)

    def __str__(self) -> str:
        return self._show(str)

    def _repr_html_(self) -> str:
        info, components = self.batch_info, zip(self.replica_ids, self.values, strict=True)
        rows: list[tuple[object, ...]] = [
            (replica, *(() if info is None else (info.rows[replica],)), value) for replica, value in components
        ]
        header = ("replica", *(() if info is None else ("rows",)), "value")
        return notebook_html.table(self._shown_as or type(self).__name__, header, rows)


class PerReplica(DistributedValues[T_co]):
    """A different value on every replica. Supports no arithmetic: reduce it, gather it, or open it first."""

    __slots__ = ()

    def __array__(self, *_: object, **__: object) -> object:
        raise InvalidArgumentError(
            "a PerReplica value cannot be converted to one array: it has one value per replica. "
            "Use strategy.reduce, strategy.gather or strategy.local_results first."
        )

    if not TYPE_CHECKING:  # to a type checker, an object with a __getattr__ has every attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # what libraries ask of any object
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise AttributeError(f".{name} was asked of {_several(self)}", name=name, obj=self)

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        raise WrongTypeError(f"the format {spec!r} was given {_several(self)}")

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise InvalidArgumentError(
            f"{getattr(func, '__name__', func)} was given a PerReplica value, which has one value per replica. "
            "Call it inside strategy.run, or use strategy.reduce, strategy.gather or strategy.local_results first."
        )


def _several(value: PerReplica[object]) -> str:
    return (
        f"a PerReplica value, which has one value per replica ({len(value.replica_ids)} in this process). "
        'strategy.reduce("mean", value) or strategy.reduce("sum", value) makes one of them; '
        "strategy.local_results(value) is a tuple of those of this process."
    )


def _refuse(name: str, shown: str) -> None:
    def refused(self: PerReplica[object], *_: object) -> NoReturn:
        raise WrongTypeError(f"{shown} was given {_several(self)}")

    refused.__name__ = name
    setattr(PerReplica, name, refused)


for _name in ("float", "int", "bool", "complex", "round"):
    _refuse(f"__{_name}__", f"{_name}()")
for _name, _sign in {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "matmul": "@"}.items():
    _refuse(f"__{_name}__", _sign)
    _refuse(f"__r{_name}__", _sign)
# Without __iter__: isinstance(value, Iterable) stays False, and Python iterates by __getitem__, too.
_refuse("__getitem__", "iteration, or []")
_refuse("__len__", "len()")
for _name, _sign in {"neg": "-", "abs": "abs()", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _refuse(f"__{_name}__", _sign)


class Mirrored(DistributedValues[T_co]):
    """The same value on every replica. Attributes and operators are those of the first local component."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.values[0], name)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: object = None) -> Any:
        return func(*nest.map_structure(_first, list(args)), **nest.map_structure(_first, kwargs or {}))

    @property
    def _first(self) -> Any:
        return self.values[0]

    def __array__(self, *args: object, **kwargs: object) -> Any:
        return self._first.__array__(*args, **kwargs)

    def __float__(self) -> float:
        return float(self._first)

    def __int__(self) -> int:
        return int(self._first)

    def __bool__(self) -> bool:
        return bool(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, key: object) -> Any:
        return self._first[key]

    def __iter__(self) -> Any:
        return iter(self._first)


def _first(value: object) -> Any:
    return value.values[0] if isinstance(value, Mirrored) else value


def _delegate(name: str, *, reflected: bool = False) -> None:
    """By Python's operator, which asks both operands: of a number and another kind of number the one that knows."""
    compute: Callable[..., Any] = getattr(operator, f"__{name}__")

    def delegated(self: Mirrored[Any], *others: object) -> Any:
        own = (self.values[0], *map(_first, others))
        return compute(*(reversed(own) if reflected else own))

    delegated.__name__ = f"__r{name}__" if reflected else f"__{name}__"
    setattr(Mirrored, delegated.__name__, delegated)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _delegate(_name)
    _delegate(_name, reflected=True)
for _name in ("neg", "pos", "abs", "lt", "le", "gt", "ge"):
    _delegate(_name)


_OPENED = (PerReplica, Mirrored)


def first_here(value: DistributedValues[T_co]) -> T_co:
    """The first component in this process."""
    if not value.values:
        raise InvalidArgumentError(
            f"this {type(value).__name__} has no component in this process, which had no rows in the run that returned "
            "it. Combine it first, for which every process gets the result: strategy.reduce('mean', value, "
            "weighted=True), or strategy.gather(value, axis=0)."
        )
    return value.values[0]


def select_replica(replica_id: int, structure: nest.Nest) -> nest.Nest:
    """What one replica sees of a nest: its own component of every distributed value, all else unchanged."""
    if isinstance(structure, _OPENED):
        return structure.component(replica_id)
    if not nest.is_nested(structure):
        return structure
    return nest.rebuild(structure, [select_replica(replica_id, child) for child in nest.values_of(structure)])


def batches_among(leaves: Sequence[object]) -> list[BatchInfo]:
    """How the batches in the arguments of a run were split, each way once; empty when no input pipeline made one.

    Without a batch, those count that earlier runs were given whose results are among the arguments.
    """
    values = [leaf for leaf in leaves if isinstance(leaf, DistributedValues)]
    given = [value.batch_info for value in values if value.batch_info is not None]
    if not given:
        given = [one for value in values if value.weights is not None for one in value.weights.batches]
    found: list[BatchInfo] = []
    for batch in given:
        if not any(batch is one or batch.rows == one.rows for one in found):
            found.append(batch)
    return found


def require_list_or_tuple(
    args: object, error: type[InvalidArgumentError | WrongTypeError] = InvalidArgumentError
) -> None:
    """`run(fn, args=…)`: anything but a list or a tuple is an error, a lone tensor most of all. ``error``: TensorFlow
    raises a `ValueError` in `run`, and a `TypeError` in `schedule`."""
    if not isinstance(args, list | tuple):
        raise error(
            f"args must be a list or a tuple, one entry per positional argument; got {type(args).__name__}. "
            "For a single argument write args=(value,)."
        )


_AWAITS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_RUNS_LATER = inspect.CO_GENERATOR | _AWAITS


def require_callable(fn: object, caller: str, *, may_yield: bool = False) -> None:
    """Refuse what ``caller`` cannot call, or what computes nothing when it is called: generator functions and ``async
    def``. ``may_yield``: where a generator is as good a result as any other iterable."""
    if type(fn) is FunctionType and not fn.__code__.co_flags & _RUNS_LATER:
        return  # nearly always
    if not callable(fn):
        raise WrongTypeError(
            f"{caller} needs a function; got {type(fn).__name__}. Pass the function itself, with its arguments beside "
            "it, and not what it returned."
        )
    flags = _flags_behind(fn)
    if flags & (_AWAITS if may_yield else _RUNS_LATER):
        kind, change = (
            ("an async function", "Write `def` without async, or pass a function that awaits it by asyncio.run")
            if flags & _AWAITS
            else ("a generator function", "Take the yield out of it, and return the value")
        )
        name = getattr(fn, "__qualname__", None) or f"{fn!r:.80}"
        raise WrongTypeError(
            f"{caller} needs a function that computes when it is called; got {name}, which is {kind}: a call runs none "
            f"of its code. {change}."
        )


def _flags_behind(fn: object) -> int:
    """Of the code that calling ``fn`` runs, through `functools.partial`, bound methods and ``__call__``. 0: of none in
    Python, or a class, whose result is an object of it."""
    while not isinstance(fn, FunctionType):
        if isinstance(fn, partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        else:
            called = None if isinstance(fn, type) else getattr(type(fn), "__call__", None)  # noqa: B004
            if not isinstance(called, FunctionType | MethodType | partial):
                return 0
            fn = called
    return fn.__code__.co_flags


_FINISHED = frozenset({torch.Tensor, float, int, type(None)})  # what runs return most
_UNFINISHED = (GeneratorType, CoroutineType, AsyncGeneratorType)


def require_finished(result: nest.Nest) -> None:
    """That a run returned no generator or coroutine, whose code would run after it, on no replica."""
    components: Sequence[object] = (result,)
    if type(result) is PerReplica:
        components = result.values
        result = components[0] if components else None
    if type(result) in _FINISHED:
        return
    if nest.is_nested(result):
        for child in nest.values_of(result):
            require_finished(child)
    elif isinstance(result, _UNFINISHED):
        for one in components:
            if isinstance(one, CoroutineType):
                one.close()  # or Python complains of it, too, whenever it is collected
        kind = type(result).__name__.replace("_", " ")
        raise WrongTypeError(
            f"run called a step that returned the {kind} {result.__qualname__}, whose code has run on no replica and "
            "would run outside of the run. Return what it computes: for a generator a list of it, for a coroutine what "
            "asyncio.run returns."
        )


def require_kwargs(kwargs: object) -> None:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise WrongTypeError(
            f"kwargs must be a dict of keyword arguments; got {type(kwargs).__name__}. Write kwargs={{'name': value}}."
        )


def require_fitting_arguments(fn: Callable[..., object], args: Any, kwargs: Any) -> None:
    """For a `TypeError` that ``fn(*args, **kwargs)`` has raised: if ``fn`` does not take these, say so in the caller's
    words."""
    error = misfit(fn, *args, **(kwargs or {}))
    if error is None:
        return
    name = getattr(fn, "__name__", type(fn).__name__)
    taken = inspect.Signature([one.replace(annotation=one.empty) for one in inspect.signature(fn).parameters.values()])
    message = (
        f"run called {name}{taken} with {len(args)} positional arguments and the keywords "
        f"{sorted(kwargs or {})}: {error}. Each entry of args is one argument"
    )
    # A batch of a DataLoader is a list, which passes for a list of arguments.
    message += "; for a single one, such as a whole batch, write args=(batch,)." if len(args) > 1 else "."
    raise WrongTypeError(message) from None


def misfit(fn: Callable[..., object], /, *args: object, **kwargs: object) -> TypeError | None:
    """Why ``fn`` cannot be called with these; None if it can, or if nobody knows: a builtin may not say."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        return error
    except ValueError:
        pass
    return None


@dataclass(frozen=True)
class ValueContext:
    """What the function of `distribute_values_from_function` is told: which replica it makes a value for."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f" total replicas in sync: {self.num_replicas_in_sync})"
        )


def distribute_values(
    value_fn: Callable[[ValueContext], object], num_replicas: int, local_replicas: tuple[int, ...], wrap: bool
) -> Any:
    """One call per local replica, in order. ``wrap``: always `PerReplica` leaves; else the one replica's bare value."""
    require_callable(value_fn, "distribute_values_from_function", may_yield=True)
    values = [value_fn(ValueContext(replica, num_replicas)) for replica in local_replicas]
    if not wrap:
        return values[0]
    return nest.map_structure(lambda *leaves: PerReplica(leaves, replica_ids=local_replicas), values[0], *values[1:])


def local_results(value: object, local_replicas: tuple[int, ...]) -> tuple[object, ...]:
    """The local components of a value or, of a nest, one nest per local component."""
    if isinstance(value, DistributedValues):
        return value.values
    components = components_here(value)
    if components is not None:
        return components
    if not nest.is_nested(value):
        return (value,)
    count = len(local_replicas)

    def pick(index: int) -> object:
        def open_leaf(leaf: object) -> object:
            if isinstance(leaf, DistributedValues):
                return leaf.values[index]
            components = components_here(leaf)
            if components is None:
                return leaf
            return components[index] if len(components) > 1 else components[0]

        return nest.map_structure(open_leaf, value)

    lengths = {len(leaf.values) for leaf in nest.leaves(value) if isinstance(leaf, DistributedValues)}
    return tuple(pick(index) for index in range(min(lengths) if lengths else count))
