"""Gradients of tables that are read by rows: sparse, where one device has dense ones, and used as these.

What PyTorch computes with a sparse tensor comes to the same. Norms and clipping, which it does not, are computed on the
rows; for anything else the gradient becomes the dense one that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchstrat._torch_private import DisableTorchFunction, foreach_norm

ROWS = "_torchstrat_rows"
"""Attribute of a gradient that has become dense: which rows it had. The others take no part in a step by rows."""

NOT_FOR_SPARSE = (NotImplementedError, RuntimeError, TypeError)
"""What PyTorch raises where an operator is not there for sparse tensors."""

_IS_SPARSE: Any = torch.Tensor.is_sparse
_LAYOUT: Any = torch.Tensor.layout
_DATA: Any = torch.Tensor.data
SHOWS_GRADIENT = frozenset({_IS_SPARSE.__get__, _LAYOUT.__get__, _DATA.__get__, torch.Tensor.detach})
"""What would show of a gradient that it has another form, or give another tensor with its values."""


class RowGradients:
    """``tables()``: the parameters that are read by rows. For one function at a time, from `begin` on."""

    def __init__(self, tables: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tables = tables
        self.became: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id: gradients that the function may hold, and what is in their places since. Mostly empty; asked about at
        every operator."""
        self._sparse: set[int] = set()
        """Ids of tables that are looked up for sparse gradients, as one device has them then, too."""

    def begin(self) -> None:
        self.became.clear()

    def note(self, table: torch.Tensor, sparse: bool) -> None:
        """A table is looked up, for gradients of this form."""
        (self._sparse.add if sparse else self._sparse.discard)(id(table))

    def shown(self, func: Any, gradient: torch.Tensor) -> Any:
        """What one of `SHOWS_GRADIENT` says of a gradient by rows."""
        gradient = self.current(gradient)
        if func not in (_IS_SPARSE.__get__, _LAYOUT.__get__):
            # Itself: what is done in place to another one with its values would be lost when either becomes dense.
            return gradient if not gradient.requires_grad else func(gradient)
        alike = [table for table in self._tables() if table.shape == gradient.shape]
        own = [table for table in alike if table.grad is gradient] or alike  # or it was computed from one
        is_sparse = any(id(table) in self._sparse for table in own)
        if func == _LAYOUT.__get__:
            return torch.sparse_coo if is_sparse else torch.strided
        return is_sparse

    def current(self, value: Any) -> Any:
        """``value`` with those in their places; of lists and tuples the elements."""
        if isinstance(value, list | tuple) and any(id(one) in self.became for one in value):
            return type(value)(self.current(one) for one in value)
        return self.became[id(value)][1] if id(value) in self.became else value

    def make_dense(self, values: Iterable[Any]) -> bool:
        """From now on those among ``values`` are dense; whether there were any."""
        with DisableTorchFunction():
            found = [one for one in _flat(values) if self.is_one(one)]
            for one in found:
                rows = one.coalesce().indices()[0]
                self._replace(one, one.to_dense())
                setattr(self.became[id(one)][1], ROWS, rows)
        return bool(found)

    def is_one(self, value: Any) -> bool:
        """Also what was computed from one, which is of the same form."""
        return (
            isinstance(value, torch.Tensor)
            and value.layout == torch.sparse_coo
            and value.sparse_dim() == 1
            and any(value.shape == table.shape for table in self._tables())
        )

    def coalesced(self, gradient: torch.Tensor) -> torch.Tensor:
        if not gradient.is_coalesced():
            self._replace(gradient, gradient.coalesce())
            gradient = self.current(gradient)
        return gradient

    def _replace(self, gradient: torch.Tensor, other: torch.Tensor) -> None:
        self.became[id(gradient)] = gradient, other  # kept, so that no other tensor gets its id
        for table in self._tables():
            if table.grad is gradient:
                table.grad = other

    def vector_norm(self, x: Any, ord: Any = 2, dim: Any = None, *rest: Any, **kwargs: Any) -> Any:  # noqa: A002
        with DisableTorchFunction():
            x = self.current(x)
            by_rows = not rest and set(kwargs) <= {"dtype"} and dim is None and isinstance(ord, int | float) and ord > 0
            if by_rows and self.is_one(x):
                values = x.coalesce().values()
                x = values if values.numel() else values.new_zeros(1)
            elif self.is_one(x):
                x = x.to_dense()
            return torch.linalg.vector_norm(x, ord, dim, *rest, **kwargs)

    def foreach_norm(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = self.current(list(tensors))
        if any(map(self.is_one, tensors)):
            return [self.vector_norm(one, *args, **kwargs) for one in tensors]
        with DisableTorchFunction():
            return foreach_norm(tensors, *args, **kwargs)

    def clamp_(self, x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002
        with DisableTorchFunction():
            x = self.current(x)
            is_zero_kept = all(isinstance(end, int | float | None) for end in (min, max)) and (
                (min is None or min <= 0) and (max is None or max >= 0)
            )
            if not self.is_one(x):
                return x.clamp_(min, max)
            if is_zero_kept:
                x = self.coalesced(x)
                x._values().clamp_(min, max)
                return x
        self.make_dense([x])
        with DisableTorchFunction():
            return self.current(x).clamp_(min, max)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
