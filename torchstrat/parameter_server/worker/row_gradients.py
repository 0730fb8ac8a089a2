"""Gradients of tables that are read by rows: sparse, where one device has dense ones, and used as these.

What PyTorch computes with a sparse tensor comes to the same. Norms, clipping and unscaling, which it does not, are
computed on the rows; for anything else the gradient becomes the dense one that it stands for: the same object, whoever
holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from torchstrat import _torch_private
from torchstrat._torch_private import DisableTorchFunctionSubclass, foreach_norm
from torchstrat.operands import tensors_in
from torchstrat.parameter_server.server.shard_optimizer import sparse_rows
from torchstrat.parameter_server.worker.watched_parameter import GRAD

_ROWS = "_torchstrat_rows"
"""Attribute of a gradient that has become dense: which rows it had. The others take no part in a step by rows."""

_NOT_FOR_SPARSE = (NotImplementedError, RuntimeError, TypeError)
"""What PyTorch raises where an operator is not there for sparse tensors."""


class RowGradient(torch.Tensor):
    """A sparse COO tensor over a table, or what was computed from one and has the same form. Below Python it is an
    ordinary one: autograd adds to it, hands it on and drops it as it does those."""

    is_asked_first: ClassVar[bool] = True
    _table: weakref.ref[Any]

    @classmethod
    @_torch_private.uncompiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Who has a word to say of other operands comes first; tables are read below Python.
        if any(kind is not cls and not getattr(kind, "is_asked_below_python", False) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        table = next(one._table for one in tensors_in((args, kwargs)) if type(one) is RowGradient)
        with DisableTorchFunctionSubclass():
            rule = _RULES.get(func)
            if rule is not None:
                return rule(*args, **kwargs)
            if _writes_to_list(func, args):
                make_dense((args, kwargs))  # before any of the others is written to: it could not be done again
                return func(*args, **kwargs)
            try:
                result = func(*args, **kwargs)
            except _NOT_FOR_SPARSE:
                if not make_dense((args, kwargs)):
                    raise
                return func(*args, **kwargs)
        return _as_computed(result, table)


def as_rows(gradient: Any, table: Any) -> Any:
    """``gradient`` as one of ``table``, if it is by rows. The table says in ``rows_asked_for_sparse`` whether one
    device would have a sparse one, too."""
    return _as_computed(gradient, weakref.ref(table))


def _as_computed(value: Any, table: weakref.ref[Any]) -> Any:
    if type(value) is torch.Tensor:
        if value.layout == torch.sparse_coo and value.sparse_dim() == 1:
            of = table()
            if of is not None and value.shape == of.spec.shape:
                marked: Any = value
                marked.__class__ = RowGradient
                marked._table = table
    elif isinstance(value, list | tuple):
        for one in value:
            _as_computed(one, table)
    return value


def make_dense(values: Any) -> bool:
    """From now on the gradients by rows in ``values`` are dense; whether there were any."""
    found = [one for one in tensors_in(values) if type(one) is RowGradient]
    for one in found:
        rows = one.coalesce().indices()[0]
        _become(one, one.to_dense())
        one.__class__ = torch.Tensor  # type: ignore[assignment]
        setattr(one, _ROWS, rows)
    return bool(found)


def _become(gradient: RowGradient, other: torch.Tensor) -> None:
    """The object is another tensor from now on, also as the gradient of its table."""
    table = gradient._table()
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
    """Whether one device would have a sparse one. PyTorch's compiler is told the truth: it takes no sparse ones."""
    table = gradient._table()
    return _torch_private.is_compiler_at_work() or table is None or table.rows_asked_for_sparse


def _layout(gradient: RowGradient) -> torch.layout:
    return torch.sparse_coo if _looks_sparse(gradient) else torch.strided


def _itself(gradient: torch.Tensor) -> torch.Tensor:
    """What is done in place to another one with its values would be lost when either becomes dense."""
    return gradient if not gradient.requires_grad else gradient.detach()


def _values(gradient: RowGradient) -> torch.Tensor:
    """To be written to: each row once."""
    if not gradient.is_coalesced():
        _become(gradient, gradient.coalesce())
    return gradient._values()


def _vector_norm(x: Any, ord: Any = 2, dim: Any = None, *rest: Any, **kwargs: Any) -> Any:  # noqa: A002
    by_rows = not rest and set(kwargs) <= {"dtype"} and dim is None and isinstance(ord, int | float) and ord > 0
    if type(x) is RowGradient and by_rows:
        values = x.coalesce().values()
        x = values if values.numel() else values.new_zeros(1)
    elif type(x) is RowGradient:
        x = x.to_dense()
    return torch.linalg.vector_norm(x, ord, dim, *rest, **kwargs)


def _foreach_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    return [_vector_norm(one, *args, **kwargs) for one in tensors]


def _clamp_(x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002
    is_zero_kept = all(isinstance(end, int | float | None) for end in (min, max)) and (
        (min is None or min <= 0) and (max is None or max >= 0)
    )
    if is_zero_kept and type(x) is RowGradient:
        _values(x).clamp_(min, max)
        return x
    make_dense([x, min, max])
    return x.clamp_(min, max)


def _unscale_(gradients: Iterable[Any], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    _torch_private.unscale_(
        [_values(one) if type(one) is RowGradient else one for one in gradients], found_inf, inverse
    )


def _reduced(gradient: RowGradient, protocol: Any) -> Any:
    """What is sent elsewhere is what one device would have."""
    other = gradient.detach() if _looks_sparse(gradient) else gradient.to_dense()
    return other.requires_grad_(gradient.requires_grad).__reduce_ex__(protocol)


_IS_SPARSE: Any = torch.Tensor.is_sparse
_LAYOUT: Any = torch.Tensor.layout
_DATA: Any = torch.Tensor.data
_RULES: Mapping[Any, Callable[..., Any]] = {
    _IS_SPARSE.__get__: _looks_sparse,
    _LAYOUT.__get__: _layout,
    _DATA.__get__: _itself,
    torch.Tensor.detach: _itself,
    torch.Tensor.clamp_: _clamp_,
    torch.Tensor.__reduce_ex__: _reduced,
    torch.linalg.vector_norm: _vector_norm,
    foreach_norm: _foreach_norm,
    _torch_private.unscale_: _unscale_,
}
_WRITES_ROWS_TOO = (_torch_private.foreach_mul_, _torch_private.foreach_div_, _torch_private.foreach_zero_)


def _writes_to_list(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it may stop half-way, with some of the operands written to."""
    name: str = getattr(func, "__name__", "")
    return (
        bool(args)
        and isinstance(args[0], list | tuple)
        and name.endswith("_")
        and not name.endswith("__")
        and func not in _WRITES_ROWS_TOO
    )
