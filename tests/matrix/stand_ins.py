"""Tensors that are cut over logical devices, in everything that can be done with a tensor.

Rows are all of `tensor_operations`. What is cut is the first argument, a parameter or all arguments; columns are ways
to cut it and places to call from. A cell is right where each of its samples equals plain PyTorch on the whole tensors,
or is refused by an operator that is known; one that is not known has to refuse all. A row without arguments has to
raise for a bare tensor.
"""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

import torchstrat as ts
from tests.matrix import places
from tests.matrix.stand_in_calls import Caller, Seen, complaint
from tests.matrix.table import RIGHT, Cell, Expected, PlantedFault, Table, refused
from tests.matrix.tensor_operations import (
    PLACES,
    Operation,
    Sample,
    operations,
    refused_samples_of,
    samples_of,
)
from torchstrat.core import tensor_classes
from torchstrat.core._torch_private import DisableTorchDispatch, DisableTorchFunctionSubclass
from torchstrat.errors import ContextError, TorchstratError, UnsupportedError
from torchstrat.sharding.dtensor import cut_tensors, no_values
from torchstrat.sharding.dtensor.cut_tensors import local_of, recut, whole
from torchstrat.sharding.dtensor.devices import LogicalAxes
from torchstrat.sharding.dtensor.no_values import METADATA
from torchstrat.sharding.dtensor.operators import elementwise, reductions, rules

SAMPLES_OF_KNOWN, SAMPLES = 4, 1

# -- the strategy -----------------------------------------------------------------------------------------------------

_open: list[Any] = []
"""In a process: the strategy that the cells share."""


def _strategy() -> Any:
    if not _open:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _open.append(ts.MirroredStrategy(logical_devices_per_replica=2, timeout=timedelta(seconds=100)))
    return _open[0]


def _close() -> None:
    while _open:
        _open.pop().close()


# -- columns ----------------------------------------------------------------------------------------------------------

Around = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Column:
    """``last``: the last dimension is cut, and not the first. ``around``: where the call is made from."""

    name: str
    last: bool = False
    everywhere: bool = False
    twice: bool = False
    is_parameter: bool = False
    is_outside: bool = False
    around: Around = lambda call: call()
    plainly_refused: bool = False
    """Its samples are those that plain PyTorch raises for."""
    only_known: bool = False
    any_error: bool = False
    """PyTorch's own errors are fine, too: here it is asked, and no class of tensors."""

    def fits(self, sample: Sample) -> bool:
        first = sample.args[0]
        tensors = [first] if isinstance(first, torch.Tensor) else list(first)
        if self.is_parameter:
            return all(self._can_cut(one) and one.dtype == torch.float64 for one in tensors)
        return any(map(self._can_cut, tensors))

    def _can_cut(self, tensor: torch.Tensor) -> bool:
        if tensor.layout != torch.strided or not tensor.ndim:
            return False
        size = tensor.shape[self._dim(tensor)]
        return size > 0 and size % 2 == 0

    def _dim(self, tensor: torch.Tensor) -> int:
        return tensor.ndim - 1 if self.last else 0

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a leaf; a tensor that does not divide stays whole."""
        copy = tensor.clone()
        return recut(copy, _strategy()._engine.devices, (self._dim(tensor),)) if self._can_cut(tensor) else copy

    def partition(self, tensor: torch.Tensor) -> list[int]:
        return [2 if dim == self._dim(tensor) else 1 for dim in range(tensor.ndim)]


def _in_a_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def work() -> None:
        try:
            results.append((call(), None))
        except Exception as error:
            results.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((result, error),) = results
    if error is not None:
        raise error
    return result


def _in_a_hook(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    leaf = torch.ones(1, requires_grad=True)
    product = leaf * 2

    def hook(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            results.append(call())

    product.register_hook(hook)
    product.sum().backward()
    return results[0]


class _CallsGoingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, call: Any, results: list[Any]) -> torch.Tensor:
        ctx.call, ctx.results = call, results
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.results.append(ctx.call())
        return gradient, None, None


def _in_backward(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    apply: Any = _CallsGoingBackward.apply
    apply(torch.ones(1, requires_grad=True), call, results).sum().backward()
    return results[0]


def _in_a_checkpointed_block(call: Callable[[], Any]) -> Any:
    return checkpoint.checkpoint(call, use_reentrant=False)


def _below_functions(call: Callable[[], Any]) -> Any:
    """As PyTorch calls what it is made of: no class of tensors and no mode is asked."""
    with DisableTorchFunctionSubclass():
        return call()


COLUMNS: tuple[Column, ...] = (
    Column("cut along the first dimension"),
    Column("cut along the last dimension", last=True),
    Column("all arguments are cut", everywhere=True),
    Column("second derivatives", twice=True, only_known=True),
    Column("arguments that plain PyTorch refuses", plainly_refused=True, only_known=True),
    Column("a parameter", is_parameter=True),
    Column(
        "arguments that plain PyTorch refuses, beside a last dimension", True, plainly_refused=True, only_known=True
    ),
    Column("a parameter, in another thread", is_parameter=True, around=_in_a_thread, last=True),
    Column("a parameter, in a tensor's hook", is_parameter=True, around=_in_a_hook),
    Column("a parameter, in a backward", is_parameter=True, around=_in_backward, last=True),
    Column("a parameter, in a checkpointed block", is_parameter=True, around=_in_a_checkpointed_block),
    Column("cut, below functions", around=_below_functions, any_error=True),
    Column("a parameter outside of runs", is_parameter=True, is_outside=True),
)


# -- cells ------------------------------------------------------------------------------------------------------------


def is_known(operation: Operation, column: Column) -> bool:
    """Whether there is an answer, and not only a refusal."""
    if operation.key in _ABOUT_ALL or column.any_error:
        return True
    if operation.key in _OF_KNOWN:
        return not column.is_outside
    member = getattr(PLACES[operation.place], operation.name, None)
    if operation.is_attribute:
        member = getattr(member, "__get__", None)
    known: Sequence[Any] = [rules._rules, METADATA]
    if column.is_outside:
        known = [no_values._NEEDS_NO_VALUES, no_values._DEVICES, no_values._MAY_CHANGE_NOTHING]
    try:
        return any(member in one for one in known)
    except TypeError:
        return False


_OF_KNOWN = frozenset(
    f"torch.Tensor.__{name}__" for name in ("add", "sub", "mul", "div", "mod", "radd", "rmul", "rmod")
) | {"torch.nn.init.ones_", "torch.nn.init.zeros_", "torch.nn.init.constant_"}
"""What PyTorch makes of others, and tells of by the others' names."""

_ABOUT_ALL = frozenset(
    (
        *(f"torch.Tensor.__{name}__" for name in ("array_priority", "dlpack_c_exchange_api", "hash", "repr")),
        *(f"torch.Tensor.{name}" for name in ("grad", "_grad", "_grad_fn", "ndimension")),
        *(f"torch.{name}" for name in ("as_tensor", "asarray", "is_tensor", "sym_not")),
    )
)
"""What tells of the object and not of its values, or hands it on."""


def check(operation: Operation, column: Column) -> None:
    """Raises AssertionError where a sample is wrong, and the refusal where all are refused."""
    known = is_known(operation, column)
    find = refused_samples_of if column.plainly_refused else samples_of
    samples = find(operation, SAMPLES_OF_KNOWN if known else SAMPLES, column.fits)
    has_arguments = bool(samples)
    if not has_arguments and not known:
        samples = (Sample((torch.rand(4, 4, dtype=torch.float64),), {}),)
    refusals: list[Exception] = []
    for sample, (seen, wanted) in zip(samples, _compared(operation, column, samples), strict=True):
        wrong = "" if column.any_error and seen.error is not None else complaint(operation, seen, wanted)
        assert not wrong, f"{operation.key} of {_shown(sample)}: {wrong}"
        if not known:
            assert seen.error is not None, f"{operation.key} of {_shown(sample)} answers, and is not what is known"
            refusals.append(seen.error)
    for error in refusals:
        raise (
            error if isinstance(error, TorchstratError) else UnsupportedError(f"raised as plain PyTorch does: {error}")
        )


def _compared(operation: Operation, column: Column, samples: Sequence[Sample]) -> list[tuple[Seen, Seen]]:
    """What was seen of each, and what is wanted."""
    if not column.is_parameter:
        plain = Caller(everywhere=column.everywhere, twice=column.twice, around=column.around)
        ours = Caller(column.cut, whole, everywhere=column.everywhere, twice=column.twice, around=column.around)
        found = _in_step(lambda: [ours.call(operation, sample) for sample in samples])
        return list(zip(found, [plain.call(operation, sample) for sample in samples], strict=True))

    def around(call: Callable[[], Any]) -> Any:
        with torch.no_grad() if operation.is_in_place else nullcontext():
            return column.around(call)

    holder = _parameters(column, samples)
    made = list(holder.parameters())
    plain = Caller(lambda leaf: leaf, around=around, is_leaf=True)
    ours = Caller(
        lambda leaf: made.pop(0),
        lambda tensor: whole(rules.with_stand_ins(tensor)),
        _gradient_of_parameter,
        around,
        is_leaf=True,
    )
    if column.is_outside:
        seen = [_outside(ours, operation, sample, list(made)) for sample in samples]
    else:
        seen = _in_step(lambda: [ours.call(operation, sample) for sample in samples])
    wanted = [plain.call(operation, sample) for sample in samples]
    if column.is_outside:  # nothing is differentiated there
        seen, wanted = [_without_gradients(one) for one in seen], [_without_gradients(one) for one in wanted]
    return list(zip(seen, wanted, strict=True))


def _without_gradients(seen: Seen) -> Seen:
    return seen._replace(values={name: one for name, one in seen.values.items() if not name.startswith("gradient")})


def _parameters(column: Column, samples: Sequence[Sample]) -> nn.Module:
    """A module that has one for the first argument of each, or for each in the list that it is; cut."""
    strategy = _strategy()
    with strategy.scope():
        holder = nn.Module()
        for sample in samples:
            first = sample.args[0]
            for one in [first] if isinstance(first, torch.Tensor) else first:
                made = nn.Parameter(one.detach().clone())
                strategy.split_to_logical_devices(made, column.partition(one))
                holder.register_parameter(str(len(holder._parameters)), made)
    return holder


def _gradient_of_parameter(leaf: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    return None if gradient is None else whole(gradient)


def _in_step(calls: Callable[[], list[Seen]]) -> list[Seen]:
    found: list[Seen] = []
    _strategy().run(lambda: found.extend(calls()))
    return found


def _outside(ours: Caller, operation: Operation, sample: Sample, parameters: list[torch.Tensor]) -> Seen:
    """What is returned without values counts as refused: that says so where it is used."""
    variables = _strategy()._engine.variables
    returned: list[Any] = []

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        if no_values.NOTE in vars(tensor):
            return variables.whole(tensor) if any(tensor is one for one in parameters) else _no_values(returned)
        return tensor

    found = Caller(ours.stand_in, kept, lambda leaf, given: None, ours.around).call(operation, sample)
    if isinstance(found.error, NotImplementedError | TypeError) and "meta" in str(found.error):
        return Seen({}, ContextError("has no values"))  # PyTorch's own word for it, of what nobody can override
    return Seen({}, ContextError("has no values")) if returned else found


def _no_values(returned: list[Any]) -> torch.Tensor:
    returned.append(True)
    return torch.zeros(())


def _shown(sample: Sample) -> str:
    def one(value: Any) -> str:
        return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.60}"

    return ", ".join([*map(one, sample.args), *(f"{name}={one(value)}" for name, value in sample.kwargs.items())])


_REFUSED = refused(
    TorchstratError,
    "over logical devices|raised|has no values|cut",
    "not among the operators that are proven; replicate_to_logical_devices makes the tensor whole",
)


def _make_cells() -> Iterable[Cell]:
    for operation in operations():
        for column in COLUMNS:
            known = is_known(operation, column)
            if known or not column.only_known:
                expected: Expected = RIGHT if known else _REFUSED
                check_one = partial(check, operation, column)
                yield Cell(operation.key, column.name, places.LOGICAL_DEVICES, check_one, expected)


# -- planted faults ---------------------------------------------------------------------------------------------------


def _softmax_of_a_piece(call: Any, tensor: torch.Tensor, dim: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    return call.leave(torch.softmax(call.open(tensor), dim), call.cut(tensor))  # type: ignore[no-any-return]


def _noise_of_a_piece(call: Any, shape: Any, cut: Any, like: torch.Tensor, p: float) -> torch.Tensor:
    return functional.dropout(torch.ones_like(like), p)


class _AskedNothing:
    def __init__(self, *_: Any) -> None: ...

    def check(self, result: Any) -> str:
        return ""


def _fault(name: str, cells: Sequence[tuple[str, str]], plant: Callable[[], Any]) -> PlantedFault:
    return PlantedFault(name, plant, [f"{row} | {column} | {places.LOGICAL_DEVICES}" for row, column in cells])


@contextmanager
def _taking_every_write() -> Iterator[None]:
    try:
        with mock.patch.object(no_values, "_asked", lambda function, args, kwargs: function(*args, **kwargs)):
            yield
    finally:
        _close()  # its variables are no longer what it thinks


_FIRST, _LAST, _ALL, _TWICE, _REFUSES, _PARAMETER, _OUTSIDE = (
    COLUMNS[index].name for index in (0, 1, 2, 3, 4, 5, len(COLUMNS) - 1)
)


def _unreported(function: Any, args: Sequence[Any], kwargs: Any) -> Any:
    with DisableTorchFunctionSubclass(), DisableTorchDispatch():
        return function(*args, **(kwargs or {}))


_MADE_OF_IT = ("torch.tensor", "torch.DoubleTensor", "torch.sparse_coo_tensor", "of_another.new_tensor")
FAULTS = (
    _fault(
        "parts of gradients are not added up",
        [("torch.matmul", _ALL), ("torch.nn.functional.linear", _ALL), ("torch.mul", _ALL)],
        lambda: mock.patch.object(cut_tensors, "spread", lambda tensor, devices, axes: tensor),
    ),
    _fault(
        "parts of a sum are not added up",
        [("torch.sum", _FIRST)],
        lambda: mock.patch.object(cut_tensors, "added_up", lambda tensor, devices, axes: tensor),
    ),
    _fault(
        "every process takes the first piece",
        [("torch.abs", _FIRST)],
        lambda: mock.patch.object(LogicalAxes, "index_along", return_value=0),
    ),
    _fault(
        "a mean divides by what its piece has",
        [("torch.mean", _FIRST)],
        lambda: mock.patch.object(reductions, "size_over", lambda tensor, dims: local_of(tensor).shape[0]),
    ),
    _fault(
        "plain PyTorch is not asked about shapes",
        [("torch.nn.functional.layer_norm", COLUMNS[6].name), ("torch.nn.functional.conv3d", _REFUSES)],
        lambda: mock.patch.object(rules, "AsPlain", _AskedNothing),
    ),
    _fault(
        "a rule computes with its piece alone",
        [("torch.softmax", _FIRST), ("torch.softmax", _LAST), ("torch.Tensor.softmax", _LAST)],
        lambda: mock.patch.dict(
            rules._rules, dict.fromkeys((torch.softmax, torch.Tensor.softmax), _softmax_of_a_piece)
        ),
    ),
    _fault(
        "each process draws for its piece",
        [("torch.nn.functional.dropout", _FIRST)],
        lambda: mock.patch.object(elementwise, "own_noise", _noise_of_a_piece),
    ),
    _fault(
        "a norm is the sum of powers",
        [("torch.linalg.vector_norm", _FIRST)],
        lambda: mock.patch.object(reductions, "root", lambda powers, degree: powers),
    ),
    _fault(
        "moves have no second derivatives",
        [("torch.mul", _TWICE), ("torch.exp", _TWICE)],
        lambda: mock.patch.object(cut_tensors, "_moved", lambda move, *args: move.forward(cut_tensors._Kept(), *args)),
    ),
    _fault(
        "outside of runs a variable takes whatever is written to it",
        [("torch.Tensor.mul_", _OUTSIDE), ("torch.nn.init.trunc_normal_", _OUTSIDE)],
        _taking_every_write,
    ),
    _fault(
        "operators that are called for no function are not reported",
        [(row, _PARAMETER) for row in _MADE_OF_IT] + [("torch.tensor", _OUTSIDE)],
        lambda: mock.patch.object(tensor_classes, "call_operator", _unreported),
    ),
    _fault(
        "a variable is no leaf",
        [("torch.Tensor.is_leaf", _PARAMETER)],
        lambda: mock.patch.dict(rules._OF_LEAVES, clear=True),
    ),
)


class _Enumerated(Table):
    """Of the rows that nobody has listed and that refuse, one in eight is in the sample."""

    @cached_property
    def sample(self) -> frozenset[str]:
        chosen = super().sample
        return frozenset(
            name for name in chosen if self.cells[name].expected != _REFUSED or not zlib.crc32(name.encode()) % 8
        )


TABLE = _Enumerated(
    "stand_ins",
    "Is a tensor that is cut over logical devices what it stands for, whatever is done with it?",
    _make_cells,
    faults=FAULTS,
    bundle=150,
    leave=_close,
)
