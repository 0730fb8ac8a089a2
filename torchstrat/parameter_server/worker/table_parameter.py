"""What a table that is read by rows is on a worker: a parameter without memory, which fails closed.

PyTorch asks its class, on any thread, in backward and in hooks: `torch.nn.functional.embedding` and ``embedding_bag``
and `torchstrat.prefetch_rows` by ``__torch_function__``; everything else that reaches PyTorch's dispatcher, from
Python, autograd or C++, by ``__torch_dispatch__``, for which the worker first brings the whole table. Whoever asks for
the pointer past these gets an exception.

A lookup in a `TableParameter` reads the unique rows that the batch names and computes on these; its gradient is a
sparse COO tensor over the table, as that of ``nn.Embedding(sparse=True)`` is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch.nn import functional as F

from torchstrat.core import _torch_private
from torchstrat.core._torch_private import DisableTorchFunctionSubclass, schema_of, sparse_indices
from torchstrat.core.errors import ContextError, UnsupportedError
from torchstrat.parameter_server.embedding import prefetch_rows
from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.variables.cached_parameter import DATA, GRAD
from torchstrat.parameter_server.variables.edits import renormalise
from torchstrat.parameter_server.variables.remote_access import VariableAccess
from torchstrat.parameter_server.worker.gradients import RowGradient, as_rows, by_rows
from torchstrat.parameter_server.worker.stand_ins import Bringer, WatchedParameter, refuse_in_a_fork
from torchstrat.parameter_server.worker.table_rows import Rows, TableRows


class _RowsOfTable(torch.autograd.Function):
    """Rows that were read from the servers, as a function of the table's parameter."""

    @staticmethod
    def forward(ctx: Any, table: TableParameter, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.shape = table.spec.shape
        ctx.save_for_backward(ids)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        sparse = torch.sparse_coo_tensor(ids[None], gradient, ctx.shape, is_coalesced=True, check_invariants=False)
        return sparse, None, None


class _Lookup(torch.autograd.Function):
    """The same with the lookup among the rows, on the CPU. PyTorch's own way back from a lookup clears, sorts and adds
    in three times the time."""

    @staticmethod
    def forward(
        ctx: Any,
        table: TableParameter,
        ids: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        padding: int | None,
    ) -> torch.Tensor:
        ctx.table_shape, ctx.rows_shape, ctx.padding = table.spec.shape, rows.shape, padding
        ctx.save_for_backward(ids, places)
        return F.embedding(places, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ids, places = ctx.saved_tensors
        sums = gradient.new_zeros(ctx.rows_shape)
        # Twice as fast as index_add_.
        sums.scatter_add_(0, places.reshape(-1, 1).expand(-1, sums.shape[1]), gradient.reshape(-1, sums.shape[1]))
        if ctx.padding is not None:
            sums[ctx.padding] = 0
        sparse = torch.sparse_coo_tensor(ids[None], sums, ctx.table_shape, is_coalesced=True, check_invariants=False)
        return sparse, None, None, None, None


class TableLookups:
    """Of one worker; on any thread."""

    def __init__(self, access: VariableAccess) -> None:
        self.rows = TableRows(access)
        self._access = access
        self._pid = os.getpid()

    def embedding(
        self,
        input: torch.Tensor,  # noqa: A002  # torch's name
        weight: TableParameter,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        weight.rows_asked_for_sparse = sparse
        if weight.device.type == "cpu" and not scale_grad_by_freq:
            return self._look_up(weight, input, padding_idx, max_norm, norm_type)
        ids, places, rows = self._rows(weight, input, max_norm, norm_type)
        padding = _place_of(padding_idx, ids, weight.spec.shape[0])
        return F.embedding(places, rows, padding, scale_grad_by_freq=scale_grad_by_freq)

    def embedding_bag(
        self,
        input: torch.Tensor,  # noqa: A002
        weight: TableParameter,
        offsets: torch.Tensor | None = None,
        max_norm: float | None = None,
        norm_type: float = 2,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> torch.Tensor:
        weight.rows_asked_for_sparse = sparse
        ids, places, rows = self._rows(weight, input, max_norm, norm_type)
        return F.embedding_bag(
            places, rows, offsets, None, norm_type, scale_grad_by_freq, mode, False, per_sample_weights,
            include_last_offset, _place_of(padding_idx, ids, weight.spec.shape[0]),
        )  # fmt: skip

    def prefetch(self, table: TableParameter, ids: torch.Tensor) -> None:
        if not table.is_current:
            self.rows.prefetch(table.spec, ids)

    def _rows(
        self, table: TableParameter, ids: torch.Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The unique ids on the CPU, where each of ``ids`` is among them, and the rows ``(unique, dim)``."""
        unique, places, rows = self._read(table, ids, max_norm, norm_type)
        rows = rows.to(table.device)
        if table.requires_grad and torch.is_grad_enabled():
            rows = _RowsOfTable.apply(table, unique.to(table.device), rows)  # type: ignore[no-untyped-call]
        return unique, places, rows

    def _look_up(
        self,
        table: TableParameter,
        ids: torch.Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
    ) -> torch.Tensor:
        """All of a lookup in a table on the CPU."""
        unique, places, rows = self._read(table, ids, max_norm, norm_type)
        padding = _place_of(padding_idx, unique, table.spec.shape[0])
        return _Lookup.apply(table, unique, rows, places, padding)  # type: ignore[no-any-return,no-untyped-call]

    def _read(self, table: TableParameter, ids: torch.Tensor, max_norm: float | None, norm_type: float) -> Rows:
        refuse_in_a_fork(self._pid)
        spec = table.spec
        table.reach()
        # A table that this function uses as a whole, too, has the values of that, and what was written to them.
        whole = table.memory if table.is_current else None
        # max_norm writes rows back: it must not take any from before the last push.
        found = self.rows.read(spec, ids, fresh=max_norm is not None, whole=whole)
        if max_norm is not None:
            self._renormalise(spec, found.ids, found.values, max_norm, norm_type)
            if whole is not None:
                table.put_rows(found.ids, found.values)
        return found

    def _renormalise(
        self, spec: VariableSpec, ids: torch.Tensor, rows: torch.Tensor, max_norm: float, norm_type: float
    ) -> None:
        """``max_norm`` changes the table itself, as torch's lookups do. Servers do the same to rows that are too long,
        to what these are then: another worker may have stepped them since."""
        long = renormalise(rows, max_norm, norm_type)
        if bool(long.any()):
            self._access.edit(spec, "renorm", torch.tensor([max_norm, norm_type], dtype=torch.float64), ids[long])


def _place_of(padding_idx: int | None, ids: torch.Tensor, rows: int) -> int | None:
    """Where the padding row is among the unique ids; None when the batch does not name it."""
    if padding_idx is None:
        return None
    wanted = padding_idx + rows if padding_idx < 0 else padding_idx
    place = int(torch.searchsorted(ids, wanted))
    return place if place < len(ids) and int(ids[place]) == wanted else None


class TablesHolder(Bringer, Protocol):
    """Who brings whole tables, on any thread."""

    def bring_table(self, table: TableParameter) -> None:
        """Afterwards ``table.memory`` has what the servers hold, or what the function has written.

        Raises:
            ParameterServerUnavailable: a server is gone.
        """


class TableParameter(WatchedParameter):
    """A table of the shape of ``spec``, whose rows come by ``lookups``."""

    is_asked_below_python: ClassVar[bool] = True
    is_read_by_rows: ClassVar[bool] = True
    spec: VariableSpec
    lookups: TableLookups
    rows_asked_for_sparse: bool
    """Whether the last lookup wanted sparse gradients, as one device has them then, too."""
    whole: torch.Tensor | None
    """Its memory, while the worker holds all of it."""
    is_current: bool
    """Whether this function has brought `whole`."""
    holder: weakref.ref[TablesHolder]

    @staticmethod
    def __new__(
        cls: type[TableParameter], spec: VariableSpec, device: torch.device, lookups: TableLookups, holder: TablesHolder
    ) -> TableParameter:
        table: TableParameter = _torch_private.wrapper_of(
            cls, spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.requires_grad, storage_size=0
        )
        _torch_private.raise_on_data_pointer(table)
        table.spec, table.lookups, table.holder = spec, lookups, weakref.ref(holder)
        table.rows_asked_for_sparse = table.is_current = False
        table.whole = None
        return table

    # -- who asks ---------------------------------------------------------------------------------------------------

    @classmethod
    @_torch_private.uncompiled
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if len(types) > 1 and any(getattr(kind, "is_asked_first", False) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        found = _LOOKUPS.get(func)
        if found is not None and _torch_private.is_inside_transform() is None:
            place, lookup = found
            if isinstance(args[place], TableParameter):
                return lookup(args[place].lookups, *args, **kwargs)
        if func in _POINTERS:
            raise UnsupportedError(
                f"{func.__name__}() in a scheduled function: the table {args[0].spec.name} has no memory there. "
                "Look rows up, or use table.detach()."
            )
        if func in _SHOWS_MEMORY and not _torch_private.is_compiler_at_work():
            return func(args[0].detach().requires_grad_(args[0].requires_grad), *args[1:], **kwargs)
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            return _gradients_by_rows(result, *args, **kwargs) if func is torch.autograd.grad else result

    @classmethod
    @_torch_private.uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        used: list[tuple[TableParameter, torch.Tensor]] = []  # with what takes the place of each
        written = _lists_written_to(func, args)
        args = _with_values(args, used)
        result = func(*args, **{name: _with_values(value, used) for name, value in (kwargs or {}).items()})
        if written:  # PyTorch leaves the count to what is called for each of the list, which comes out below it here
            torch.autograd.graph.increment_version(written)
        for table, values in used:
            if schema_of(func).is_mutable:
                table.take_form(values, func)
            if func is _DETACH:  # what is written through an array of it is not counted
                table.keep_before()
        return _with_tables(result, {id(values): table for table, values in used})

    def take_form(self, values: torch.Tensor, func: object) -> None:
        """``values`` stood in for this in something that may have written to it."""
        if values.shape != self.spec.shape or not values.is_contiguous():
            raise UnsupportedError(
                f"{func} in a scheduled function gave the table {self.spec.name} {self.spec.shape} another shape. "
                "Variables on parameter servers keep their shape."
            )
        if values.data_ptr() != self.memory.data_ptr():
            self.whole, self.has_other_memory = values, True

    # -- values -----------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> torch.Tensor:
        assert self.whole is not None
        return self.whole

    def bring(self) -> torch.Tensor:
        """All of its values, which are to be used."""
        if not self.is_current:
            holder = self.holder()
            if holder is None:
                raise ContextError(f"the coordinator that has sent the table {self.spec.name} to this worker has gone.")
            holder.bring_table(self)
        return self.memory

    def reach(self) -> None:
        """The function that runs looks rows up."""
        holder = self.holder()
        if holder is not None:
            holder.reach(self.spec.number)

    def put_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """What the servers have been told of, and this copy not yet."""
        with torch.no_grad():
            for one in (self.whole, self._before):
                if one is not None:
                    one.index_copy_(0, ids.to(one.device), rows.to(one.device))

    def replace(self, value: torch.Tensor) -> None:
        self.whole = value
        self.settle()

    def grow(self, spec: VariableSpec) -> None:
        """From now on it has the shape of ``spec``, for whoever holds it."""
        holder = self.holder()
        assert holder is not None  # who calls this
        with DisableTorchFunctionSubclass():
            DATA.__set__(self, TableParameter(spec, self.device, self.lookups, holder))
        self.spec, self.whole, self.is_current = spec, None, False
        self.settle()

    @property
    def data(self) -> torch.Tensor:
        with DisableTorchFunctionSubclass():
            found: torch.Tensor = DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:
            return
        if value.shape != self.spec.shape or value.dtype != self.spec.dtype:
            raise UnsupportedError(
                f"a scheduled function gave the table {self.spec.name} {self.spec.shape} values of {value.dtype} "
                f"{tuple(value.shape)}. Variables on parameter servers keep their shape and dtype."
            )
        self.bring()
        self.keep_before()
        self.whole = value.detach().contiguous()
        self.has_other_memory = True

    # -- gradients --------------------------------------------------------------------------------------------------

    @property
    def grad(self) -> torch.Tensor | None:
        with DisableTorchFunctionSubclass():
            gradient: torch.Tensor | None = GRAD.__get__(self)
        if gradient is None:
            self.has_left_gradient = False
        return as_rows(gradient, self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.reach()
        GRAD.__set__(self, value)
        self.note_cleared()

    @grad.deleter
    def grad(self) -> None:
        self.reach()
        GRAD.__delete__(self)
        self.note_cleared()

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> object:
        """The hook sees what `grad` would show, and what it returns is by rows again."""

        if not callable(hook):
            raise TypeError(f"a hook is called with the gradient; {hook!r} cannot be called.")

        def with_rows(gradient: torch.Tensor) -> torch.Tensor | None:
            if gradient.layout != torch.sparse_coo or gradient.requires_grad:
                return hook(gradient)
            rows = sparse_indices(gradient)[0]
            shown = as_rows(gradient.detach(), self)
            found = hook(shown)
            if found is None and type(shown) is RowGradient:
                return None
            with DisableTorchFunctionSubclass():
                found = shown if found is None else found
                return by_rows(found, rows) if found.layout == torch.strided else found

        return super().register_hook(with_rows)  # type: ignore[no-untyped-call]


def _lists_written_to(func: object, args: tuple[object, ...]) -> list[torch.Tensor]:
    """The tensors of lists that an operator writes to."""
    if not schema_of(func).is_mutable:
        return []
    given = zip(schema_of(func).arguments, args, strict=False)
    lists = [value for argument, value in given if argument.is_write and isinstance(value, list | tuple)]
    return [tensor for one in lists for tensor in one]


def _with_values(value: object, used: list[tuple[TableParameter, torch.Tensor]]) -> Any:
    if isinstance(value, TableParameter):
        values = value.bring().detach()  # of whose form the table's own memory does not depend
        used.append((value, values))
        return values
    return type(value)(_with_values(one, used) for one in value) if isinstance(value, list | tuple) else value


def _with_tables(value: object, used: Mapping[int, TableParameter]) -> object:
    """What was written to is what was given."""
    if isinstance(value, torch.Tensor):
        return used.get(id(value), value)
    return type(value)(_with_tables(one, used) for one in value) if isinstance(value, list | tuple) else value


def _gradients_by_rows(result: Any, _: object, inputs: Any, *__: object, **___: object) -> object:
    for one, gradient in zip([inputs] if isinstance(inputs, torch.Tensor) else inputs, result, strict=True):
        if isinstance(one, TableParameter):
            as_rows(gradient, one)
    return result


_DETACH = torch.ops.aten.detach.default
_LOOKUPS: Mapping[object, tuple[int, Callable[..., object]]] = {
    F.embedding: (1, TableLookups.embedding),
    F.embedding_bag: (1, TableLookups.embedding_bag),
    prefetch_rows: (0, TableLookups.prefetch),
}
"""Which argument is the table, and what is done instead."""

_POINTERS = frozenset(getattr(torch.Tensor, name, None) for name in ("data_ptr", "const_data_ptr"))
_SHOWS_MEMORY = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("numpy", "__array__", "tolist", "__dlpack__", "share_memory_", "is_shared"),
        *("storage", "_typed_storage", "untyped_storage"),
    )
)
"""What looks at memory past the dispatcher, and is shown that of the whole. Anything else that does raises."""
