"""Gradients on a worker: those that a function has left for later ones, and those of tables that are read by rows.

On one device, and with one worker, gradients may be accumulated over functions. Of several workers each has those of
the functions that it happened to run, and a step would use these and miss the others: such a step is refused.

What a function computes under ``strategy.no_sync()``, and neither steps with nor sets to nothing, leaves the worker
with its end: the servers add it up, and the next step of any function takes it. A function that sets a gradient to
nothing before it steps discards what others have left, as it would on one device.

Gradients of tables that are read by rows are sparse, where one device has dense ones, and used as these. What PyTorch
computes with a sparse tensor comes to the same. Norms, clipping and unscaling, which it does not, are computed on the
rows; for anything else the gradient becomes the dense one that it stands for: the same object, whoever holds it.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from torchstrat.core import _torch_private
from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    foreach_norm,
    foreach_zero_,
    sparse_count,
    sparse_values,
    version_of,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.optimizers import stepped_by
from torchstrat.core.tensor_classes import methods, properties, tensors_in
from torchstrat.parameter_server.dispatch import USED, ZEROS, Gradients
from torchstrat.parameter_server.server.shard_optimizer import sparse_rows
from torchstrat.parameter_server.variables.cached_parameter import DATA, GRAD
from torchstrat.parameter_server.worker.stand_ins import WatchedParameter

_ROWS = "_torchstrat_rows"
"""Attribute of a gradient that has become dense: which rows it had. The others take no part in a step by rows."""

_NOT_FOR_SPARSE = (NotImplementedError, RuntimeError, TypeError)
"""What PyTorch raises where an operator is not there for sparse tensors."""


class RowGradient(torch.Tensor):
    """A sparse COO tensor over a table, or what was computed from one and has the same form. Below Python it is an
    ordinary one: autograd adds to it, hands it on and drops it as it does those."""

    is_asked_first: ClassVar[bool] = True
    table: weakref.ref[object]

    @classmethod
    @_torch_private.uncompiled
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Any,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # Who has a word to say of other operands comes first; tables are read below Python.
        if any(kind not in _SAY_NOTHING and not getattr(kind, "is_asked_below_python", False) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        table = next(one.table for one in tensors_in((args, kwargs)) if type(one) is RowGradient)
        with DisableTorchFunctionSubclass():
            rule = _RULES.get(func)
            if rule is not None:
                return rule(*args, **kwargs)
            if _writes_to_list(func, args) or _differs_for_sparse(func, args, table):
                make_dense((args, kwargs))  # before any of the others is written to: it could not be done again
                return func(*args, **kwargs)
            try:
                result = func(*args, **kwargs)
            except _NOT_FOR_SPARSE:
                if not make_dense((args, kwargs)):
                    raise
                return func(*args, **kwargs)
        return _as_computed(result, table) if func in _MAKE_SPARSE else _as_on_one_device(result, table)


_SAY_NOTHING = (RowGradient, torch.Tensor, torch.nn.Parameter)
"""Of operands. Functions that are written in Python name ordinary tensors, too."""


def as_rows(gradient: object, table: object) -> Any:
    """``gradient`` as one of ``table``, if it is by rows. The table says in ``rows_asked_for_sparse`` whether one
    device would have a sparse one, too."""
    return _as_computed(gradient, weakref.ref(table))


def _as_computed(value: object, table: weakref.ref[Any]) -> object:
    if type(value) is torch.Tensor:
        if value.layout == torch.sparse_coo and value.sparse_dim() == 1:
            of = table()
            if of is not None and value.shape == of.spec.shape:
                marked: Any = value
                marked.__class__ = RowGradient
                marked.table = table
    elif isinstance(value, list | tuple):
        for one in value:
            _as_computed(one, table)
    return value


def _as_on_one_device(value: Any, table: weakref.ref[object]) -> object:
    """The same, and what has another form than the table's (a sum of each row) is dense, where its gradient is."""
    if isinstance(value, torch.Tensor):
        value = _as_computed(value, table)
        is_sparse = type(value) is torch.Tensor and value.layout == torch.sparse_coo and not _asks_for_sparse(table)
        return value.to_dense() if is_sparse else value
    if type(value) in (list, tuple):
        return type(value)(_as_on_one_device(one, table) for one in value)
    return _as_computed(value, table)


def make_dense(values: object) -> bool:
    """From now on the gradients by rows in ``values`` are dense; whether there were any."""
    found = [one for one in tensors_in(values) if type(one) is RowGradient]
    for one in found:
        if type(one) is RowGradient:  # it may be an operand twice
            rows = one.coalesce().indices()[0]
            _become(one, one.to_dense())
            one.__class__ = torch.Tensor  # type: ignore[assignment]
            setattr(one, _ROWS, rows)
    return bool(found)


def _become(gradient: RowGradient, other: torch.Tensor) -> None:
    """The object is another tensor from now on, also as the gradient of its table."""
    table = gradient.table()
    is_of_table = table is not None and GRAD.__get__(table) is gradient
    _torch_private.swap_tensor_impl(gradient, other)
    if is_of_table:
        GRAD.__set__(table, gradient)


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` of a table, to be sent: if it was one of rows and has become dense in the function, it is one of
    rows still: of those that it had, and of those that are not zero."""
    rows = getattr(gradient, _ROWS, None)
    return gradient.detach() if rows is None else by_rows(gradient.detach(), rows)


def by_rows(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A dense gradient as one of ``rows``, and of whatever else is not zero."""
    ids = torch.cat([rows, gradient.flatten(1).ne(0).any(1).nonzero().flatten()]).unique()
    return sparse_rows(ids, gradient[ids], len(gradient))


# -- rules ------------------------------------------------------------------------------------------------------------


def _looks_sparse(gradient: RowGradient) -> bool:
    return _asks_for_sparse(gradient.table)


def _asks_for_sparse(table: weakref.ref[Any]) -> bool:
    """Whether one device would have a sparse one. PyTorch's compiler is told the truth: it takes no sparse ones."""
    of = table()
    return _torch_private.is_compiler_at_work() or of is None or bool(of.rows_asked_for_sparse)


def _layout(gradient: RowGradient) -> torch.layout:
    return torch.sparse_coo if _looks_sparse(gradient) else torch.strided


def _itself(gradient: torch.Tensor) -> torch.Tensor:
    """What is done in place to another one with its values would be lost when either becomes dense."""
    return gradient if not gradient.requires_grad else gradient.detach()


def _values(gradient: RowGradient) -> torch.Tensor:
    """To be written to: each row once."""
    if not gradient.is_coalesced():
        _become(gradient, gradient.coalesce())
    return sparse_values(gradient)


def _vector_norm(x: object, ord: object = 2, dim: object = None, *rest: object, **kwargs: object) -> object:  # noqa: A002
    by_rows = not rest and set(kwargs) <= {"dtype"} and dim is None and isinstance(ord, int | float) and ord > 0
    if type(x) is RowGradient and by_rows:
        values = x.coalesce().values()
        x = values if values.numel() else values.new_zeros(1)
    elif type(x) is RowGradient:
        x = x.to_dense()
    return torch.linalg.vector_norm(x, ord, dim, *rest, **kwargs)


def _foreach_norm(tensors: Any, *args: object, **kwargs: object) -> object:
    return [_vector_norm(one, *args, **kwargs) for one in tensors]


def _clamp_(x: Any, min: Any = None, max: Any = None) -> object:  # noqa: A002
    is_zero_kept = all(isinstance(end, int | float | None) for end in (min, max)) and (
        (min is None or min <= 0) and (max is None or max >= 0)
    )
    if is_zero_kept and type(x) is RowGradient:
        _values(x).clamp_(min, max)
        return x
    make_dense([x, min, max])
    return x.clamp_(min, max)


def _unscale_(gradients: Iterable[object], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    _torch_private.unscale_(
        [_values(one) if type(one) is RowGradient else one for one in gradients], found_inf, inverse
    )


def _reduced(gradient: RowGradient, protocol: object) -> object:
    """What is sent elsewhere is what one device would have."""
    other = gradient.detach() if _looks_sparse(gradient) else gradient.to_dense()
    return other.requires_grad_(gradient.requires_grad).__reduce_ex__(protocol)


_IS_SPARSE: types.GetSetDescriptorType = inspect.getattr_static(torch.Tensor, "is_sparse")
_LAYOUT: types.GetSetDescriptorType = inspect.getattr_static(torch.Tensor, "layout")
_RULES: Mapping[object, Callable[..., object]] = {
    _IS_SPARSE.__get__: _looks_sparse,
    _LAYOUT.__get__: _layout,
    DATA.__get__: _itself,
    torch.Tensor.detach: _itself,
    torch.Tensor.clamp_: _clamp_,
    torch.Tensor.__reduce_ex__: _reduced,
    torch.linalg.vector_norm: _vector_norm,
    foreach_norm: _foreach_norm,
    _torch_private.unscale_: _unscale_,
}
_WRITES_ROWS_TOO = (_torch_private.foreach_mul_, _torch_private.foreach_div_, _torch_private.foreach_zero_)
_MAKE_SPARSE = frozenset(methods("to_sparse", "to_sparse_coo", "coalesce"))
_COPIES_OF_SPARSE = frozenset(
    {
        *methods("__getitem__", "__iter__", "select", "unbind", "unsqueeze", "squeeze"),
        *(torch.select, torch.unbind, torch.unsqueeze, torch.squeeze, torch.atleast_3d),
    }
)
"""What gives a view of a dense tensor, through which the program may write, and a copy of a sparse one."""
_POWERS = frozenset({*methods("pow", "pow_", "__pow__", "__ipow__"), torch.pow})


def _differs_for_sparse(func: object, args: tuple[object, ...], table: weakref.ref[object]) -> bool:
    """Whether PyTorch computes something else with a sparse tensor, and says nothing."""
    if func in _COPIES_OF_SPARSE:
        return not _asks_for_sparse(table)
    return func in _POWERS and not (len(args) > 1 and isinstance(args[1], int | float) and args[1] > 0)


def _writes_to_list(func: object, args: tuple[object, ...]) -> bool:
    """Whether it may stop half-way, with some of the operands written to."""
    name: str = getattr(func, "__name__", "")
    return (
        bool(args)
        and isinstance(args[0], list | tuple)
        and name.endswith("_")
        and not name.endswith("__")
        and func not in _WRITES_ROWS_TOO
    )


class LeftGradients:
    """Those of one worker. Where it is the only one, and ``no_sync`` was not used, they are counted alone.

    Args:
        parameters: gives, of some numbers or of all, those that are parameters here.
    """

    def __init__(self, parameters: Callable[[Iterable[int] | None], Iterable[tuple[int, WatchedParameter]]]) -> None:
        self._parameters = parameters
        self._unused: set[int] = set()
        self._is_shared = False
        self._elsewhere: frozenset[int] = frozenset()
        self._marked: list[tuple[int, WatchedParameter]] = []  # for what is left elsewhere
        self._to_mark: set[int] = set()  # when the next function begins: what this one returns is its own
        self.accumulates = False
        """Whether functions of the job are known to have left gradients to the servers."""
        self._blocks = 0  # of `no_sync`, in one another
        self._of_blocks: set[int] = set()  # parameters whose gradients these have changed
        self._stepped: set[Optimizer] = set()  # by this function, which has
        self._uncleared: set[int] = set()  # not set these gradients to nothing since
        self._zeroed: set[Optimizer | torch.nn.Module] = set()  # whose `zero_grad` it has called
        self.has_scaled = False  # whether this function has scaled a loss
        self._kinds: dict[int, str | None] = {}  # of `Gradients`, as others know them
        self._changes: dict[int, str | None] = {}  # that they do not know
        self._missing: dict[int, torch.Tensor] = {}  # zeros, for what others hold of gradients
        self._news: dict[int, str | None] = {}  # of others', for when a function begins that has the parameters

    @property
    def unused(self) -> tuple[int, ...]:
        """Numbers of the parameters whose gradients no step has used, as they were when the last function ended."""
        return tuple(self._unused)

    def held(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Those of these parameters that have a gradient here, used or not, that is not zero."""
        gradients = ((number, GRAD.__get__(parameter)) for number, parameter in self._parameters(numbers))
        return tuple(number for number, gradient in gradients if gradient is not None and not _is_zero(gradient))

    def share(self, is_shared: bool, elsewhere: Collection[int], *, accumulates: bool) -> None:
        """What the coordinator knows: whether there are other workers, whose unused gradients these hold, and whether
        functions have left any to the servers."""
        self._elsewhere = frozenset(elsewhere)
        self.accumulates |= accumulates
        if (is_shared or self.accumulates) and not self._is_shared:
            self._is_shared = True
            self.end(None)

    def begin(self) -> None:
        """A function begins. What it reaches is not known before it has looked at gradients."""
        self._of_blocks.clear()
        self._stepped.clear()
        self._uncleared.clear()
        self._zeroed.clear()
        self.has_scaled = False
        if self.accumulates:
            for _, parameter in self._parameters(None):
                parameter.is_cleared = False
        for number, parameter in self._marked:
            if number not in self._unused:
                self._unmark(number, parameter)
        for _, parameter in self._parameters(self._to_mark):
            if (gradient := GRAD.__get__(parameter)) is not None:
                _mark(parameter, gradient)
        self._to_mark.clear()
        if self._news:
            self._follow()
        self._marked = list(self._parameters(self._elsewhere)) if self._elsewhere else []
        for number, parameter in self._marked:
            self._mark_missing(number, parameter)

    def _mark_missing(self, number: int, parameter: WatchedParameter) -> None:
        """A part of its gradient is elsewhere: what is computed from the part that is here would be wrong."""
        parameter.has_left_gradient = True
        if hasattr(parameter, "rows_asked_for_sparse"):
            return
        gradient: torch.Tensor | None = GRAD.__get__(parameter)
        if gradient is None:
            gradient = self._missing[number] = _zeros_like(parameter)
            GRAD.__set__(parameter, gradient)
        _mark(parameter, gradient)

    def _unmark(self, number: int, parameter: WatchedParameter) -> None:
        """The part that was elsewhere has been used or has gone."""
        parameter.has_left_gradient = False
        missing = self._missing.pop(number, None)
        gradient: Any = GRAD.__get__(parameter)
        if type(gradient) is not LeftGradient or _is_used(gradient):
            return
        if gradient is missing:
            GRAD.__set__(parameter, None)
        else:
            gradient.__class__ = torch.Tensor  # type: ignore[assignment]

    def pushed(self, gradient: torch.Tensor) -> bool:
        """A step has used it. Gives whether an earlier one has, too."""
        is_used_again = hasattr(gradient, _USED_AT)
        setattr(gradient, _USED_AT, version_of(gradient))
        return is_used_again

    def end(self, reached: Iterable[int] | None) -> None:
        """The function has ended: what it leaves is no later one's to step with. None: of all variables."""
        for number, parameter in self._parameters(None if reached is None else self._unused.union(reached)):
            if not self.accumulates:  # this function's is no later one's, which may be the first to leave any
                parameter.is_cleared = False
            gradient: torch.Tensor | None = GRAD.__get__(parameter)
            if type(gradient) is LeftGradient and gradient is self._missing.get(number) and _is_zero(gradient):
                continue  # nothing was added to it
            is_used = gradient is not None and _is_used(gradient)
            kind = None if gradient is None else USED if is_used else ZEROS if _is_zero(gradient) else None
            if kind != self._kinds.get(number) and not hasattr(parameter, "rows_asked_for_sparse"):
                self._changes[number] = kind
                self._kinds[number] = kind
            if gradient is None or kind == ZEROS:  # zeros are there to be added to
                parameter.has_left_gradient = False
                self._unused.discard(number)
                self._to_mark.discard(number)
                continue
            if self._is_shared:
                self._to_mark.add(number)
            if is_used:
                self._unused.discard(number)
            else:
                self._unused.add(number)

    def take_changes(self) -> Gradients:
        """What has become of gradients since it was last asked."""
        changes, self._changes = self._changes, {}
        return tuple(changes.items())

    def learn(self, gradients: Gradients) -> None:
        """What others have changed, for the next function."""
        self._news.update(gradients)

    def _follow(self) -> None:
        """Have gradients where others do, and none where they have none."""
        for number, parameter in list(self._parameters(list(self._news))):
            kind = self._kinds[number] = self._news.pop(number)
            if number in self._unused:
                continue
            gradient = None if kind is None else _zeros_like(parameter)
            parameter.has_left_gradient = False
            GRAD.__set__(parameter, gradient)
            if gradient is not None and kind == USED:
                self.pushed(gradient)
                _mark(parameter, gradient)

    # -- under no_sync -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """The gradients that are computed in it are for whichever function steps next."""
        before = {} if self._blocks else dict(self._states())
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                changed = (number for number, now in self._states() if not _is_same(before.get(number), now))
                self._of_blocks.update(changed)

    def _states(self) -> Iterator[tuple[int, _State]]:
        with _torch_private.DisableTorchFunctionSubclass():
            for number, parameter in self._parameters(None):
                gradient: torch.Tensor | None = GRAD.__get__(parameter) if parameter.is_leaf else None
                if gradient is not None:
                    yield number, (gradient, version_of(gradient))

    def take(self, name_of: Callable[[torch.Tensor], str]) -> list[tuple[WatchedParameter, torch.Tensor]]:
        """What the function, which has ended, leaves to the servers: it is not here any more."""
        found: list[tuple[WatchedParameter, torch.Tensor]] = []
        for _, parameter in self._parameters(self._of_blocks):
            gradient = parameter.grad
            if gradient is None or _is_used(gradient) or _is_zero(gradient):
                continue
            if parameter.has_left_gradient:
                raise UnsupportedError(_refusal("backward() under no_sync", name_of(parameter)))
            if self.has_scaled:
                raise UnsupportedError(
                    f"a scheduled function has scaled its loss by a GradScaler and left the gradient of "
                    f"{name_of(parameter)} under no_sync for a later step, which would add it to gradients of another "
                    "scale, or of none. Leave unscaled gradients, or step in the same function."
                )
            found.append((parameter, gradient))
        for parameter, _ in found:
            GRAD.__set__(parameter, None)  # nobody has set it to nothing
        if found and not self.accumulates:
            self.share(True, self._elsewhere, accumulates=True)
        return found

    def note_zeroed(self, owner: Optimizer | torch.nn.Module) -> None:
        """`zero_grad`, which passes over parameters that have no gradient here: those count, too."""
        self._zeroed.add(owner)

    def _clear_zeroed(self) -> None:
        while self._zeroed:
            owner = self._zeroed.pop()
            for parameter in stepped_by(owner) if isinstance(owner, Optimizer) else owner.parameters():
                if isinstance(parameter, WatchedParameter):
                    parameter.is_cleared = True

    def take_cleared(self, optimizer: Optimizer | None, number_of: Callable[[torch.Tensor], int | None]) -> list[int]:
        """Of which parameters what others have left is to go, before ``optimizer`` steps, or at the function's end."""
        stepped = [*self._stepped]
        if optimizer is not None:  # also where none is known to leave gradients: this function may be the first
            self._stepped.add(optimizer)
        if not self.accumulates:
            return []
        self._clear_zeroed()
        cleared = {number for number, parameter in self._parameters(None) if parameter.is_cleared}
        for _, parameter in self._parameters(cleared):
            parameter.is_cleared = False
        self._uncleared -= cleared
        # What was left since the function's own step is for the next one.
        cleared.difference_update(number_of(parameter) for one in stepped for parameter in stepped_by(one))
        if optimizer is not None:
            self._uncleared.update(number for one in stepped_by(optimizer) if (number := number_of(one)) is not None)
        return sorted(cleared)

    def forget(self, numbers: Iterable[int]) -> None:
        """These parameters are gone, and their gradients with them."""
        numbers = set(numbers)
        self._stepped.clear()
        self._zeroed.clear()
        self._unused -= numbers
        self._to_mark -= numbers
        for known in (self._kinds, self._changes, self._missing, self._news):
            for number in numbers & known.keys():
                del known[number]
        self._marked = [(number, parameter) for number, parameter in self._marked if number not in numbers]

    def check(
        self,
        optimizer: Optimizer,
        name_of: Callable[[torch.Tensor], str],
        number_of: Callable[[torch.Tensor], int | None],
    ) -> None:
        """Raise `UnsupportedError` where a step would use gradients that an earlier function left, or miss them."""
        step = f"{type(optimizer).__name__}.step()"
        if self._uncleared:
            self._clear_zeroed()
        for parameter in stepped_by(optimizer):
            if getattr(parameter, "has_left_gradient", False):
                raise UnsupportedError(_refusal(step, name_of(parameter)))
            is_again = self._uncleared and number_of(parameter) in self._uncleared
            if is_again and not getattr(parameter, "is_cleared", False):
                raise UnsupportedError(
                    f"a second {step} in a scheduled function would use the gradient of {name_of(parameter)} once "
                    "more. In a job that leaves gradients to later functions by no_sync a part of it may have been "
                    "on the servers, which the first step has used up. Call zero_grad() and compute it again."
                )


_USED_AT = "_torchstrat_used_at"
"""Attribute of a gradient: its version when a step used it."""

_State = tuple[torch.Tensor, int]
"""A gradient and its version."""


def _is_same(then: _State | None, now: _State) -> bool:
    return then is not None and then[0] is now[0] and then[1] == now[1]


class LeftGradient(torch.Tensor):
    """A gradient of an earlier function. Setting it to zero makes it an ordinary one; nothing else can be done with it,
    for on another worker it would be another one."""

    is_asked_first: ClassVar[bool] = True
    _parameter: weakref.ref[WatchedParameter]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func not in _ASKS_NO_VALUES:
            left: list[Any] = [tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is LeftGradient]
            if func not in _SETS_TO_ZERO and not (func is torch.Tensor.fill_ and args[1] == 0):
                raise UnsupportedError(_refusal(getattr(func, "__name__", str(func)), "a parameter"))
            for tensor in left:
                parameter = tensor._parameter()  # noqa: SLF001
                if parameter is not None:
                    parameter.has_left_gradient = False
                tensor.__class__ = torch.Tensor
        with _torch_private.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _is_used(gradient: torch.Tensor) -> bool:
    """Whether a step has used it as it is."""
    return getattr(gradient, _USED_AT, None) == version_of(gradient)


def _mark(parameter: WatchedParameter, gradient: torch.Tensor) -> None:
    parameter.has_left_gradient = True
    if type(gradient) in (torch.Tensor, RowGradient):
        marked: Any = gradient
        marked.__class__ = LeftGradient
        marked._parameter = weakref.ref(parameter)  # noqa: SLF001


def _zeros_like(parameter: WatchedParameter) -> torch.Tensor:
    with _torch_private.DisableTorchFunctionSubclass():  # the function does not reach the parameter by this
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _is_zero(gradient: torch.Tensor) -> bool:
    with _torch_private.DisableTorchFunctionSubclass():
        return not (gradient.count_nonzero() if gradient.layout == torch.strided else sparse_count(gradient))


def _refusal(what: str, of: str) -> str:
    return (
        f"{what} in a scheduled function would use the gradient of {of} that an earlier function left on a worker. "
        "This job has several workers, or uses no_sync, and each worker has the gradients of the functions that it "
        "ran: the others' would be missing. Compute gradients for a later function within `with strategy.no_sync():`, "
        "or all gradients of a step in the function that makes the step; begin functions with optimizer.zero_grad()."
    )


_ASKS_NO_VALUES = frozenset(
    {
        *properties("requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim", "_version"),
        *properties("is_sparse", "is_cuda", "is_cpu", "is_meta", "nbytes", "itemsize"),
        *methods("size", "dim", "numel", "detach_", "requires_grad_", "__hash__", "is_floating_point", "is_complex"),
        *methods("stride", "storage_offset", "element_size", "is_contiguous", "get_device"),
    }
)
_SETS_TO_ZERO = frozenset({torch.Tensor.zero_, foreach_zero_, torch.zero_})
