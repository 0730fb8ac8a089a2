"""What a dataset's elements look like: shapes and dtypes, with None where a size is not fixed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.randomness import state_of
from torchstrat.data import rows
from torchstrat.data.marks import Along, Examples, Same

DType = Any  # torch.dtype, or numpy.dtype(object) for strings


@dataclass(frozen=True)
class TensorSpec:
    """Shape (None: size not fixed) and dtype (`torch.dtype`; ``numpy.dtype(object)`` for strings) of one leaf."""

    shape: tuple[int | None, ...]
    dtype: DType
    rows_dim: int | None = field(default=0, repr=False, compare=False)
    """Where its rows are; None for what every replica gets whole."""

    @property
    def rank(self) -> int:
        return len(self.shape)

    def with_rows(self, count: int | None) -> TensorSpec:
        """Of a leaf with other rows; itself where it has none."""
        dim = self.rows_dim
        if dim is None or dim >= self.rank:
            return self
        return replace(self, shape=(*self.shape[:dim], count, *self.shape[dim + 1 :]))

    def of_row(self) -> TensorSpec:
        """Of one row of the leaf; itself where it has none."""
        dim = self.rows_dim
        return self if dim is None else TensorSpec(self.shape[:dim] + self.shape[dim + 1 :], self.dtype)


@dataclass(frozen=True)
class PerReplicaSpec:
    """The specs of one leaf, one per replica of this process. ``shape`` and ``dtype`` are what they share."""

    values: tuple[TensorSpec, ...]

    @property
    def shape(self) -> tuple[int | None, ...]:
        return self.values[0].shape

    @property
    def dtype(self) -> DType:
        return self.values[0].dtype


def spec_of(element: nest.Nest, *, rows_fixed: bool, trailing_fixed: bool = True) -> nest.Nest:
    """The spec of an element like ``element``.

    Args:
        element: a batch or an unbatched element.
        rows_fixed: whether every element has as many rows as this one.
        trailing_fixed: whether every element has the other sizes of this one.
    """

    def leaf_spec(leaf: rows.Leaf) -> TensorSpec:
        if isinstance(leaf, Same):
            found = leaf_spec(leaf.value)
            return replace(found, shape=found.shape if trailing_fixed else (None,) * found.rank, rows_dim=None)
        if isinstance(leaf, Along):
            sizes = leaf.value.shape if trailing_fixed else (None,) * leaf.value.ndim
            found = TensorSpec(tuple(sizes), leaf.value.dtype, leaf.dim)
            return found.with_rows(leaf.value.shape[leaf.dim] if rows_fixed else None)
        if isinstance(leaf, Examples):
            return TensorSpec((len(leaf.value) if rows_fixed else None,), np.dtype(object))
        if rows.is_row_list(leaf):
            return TensorSpec((len(leaf) if rows_fixed else None,), _python_dtype(leaf[0]))
        if not rows.is_array(leaf):
            return TensorSpec((), _python_dtype(leaf))
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            return TensorSpec((None,) * leaf.ndim, leaf.dtype)
        trailing = tuple(leaf.shape[1:]) if trailing_fixed else (None,) * (leaf.ndim - 1)
        leading = (leaf.shape[0] if rows_fixed else None,) if leaf.ndim else ()
        return TensorSpec(leading + trailing, leaf.dtype)

    return _map_leaves(leaf_spec, element)


def batched(spec: nest.Nest, rows: int | None) -> nest.Nest:
    """The spec of a batch of ``rows`` (None: not fixed) elements of ``spec``."""
    return nest.map_structure(lambda leaf: TensorSpec((rows, *leaf.shape), leaf.dtype), spec)


def widest(first: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """The spec that holds for all of these.

    Raises `InvalidArgumentError` where they have different numbers of dimensions.
    """
    shapes = [leaf.shape for leaf in (first, *others)]
    ranks = sorted(set(map(len, shapes)))
    if len(ranks) > 1:
        raise InvalidArgumentError(
            f"element_spec is not known: tensors of the batches have {ranks} dimensions, and no shape holds for all."
        )
    sizes = zip(*shapes, strict=True)
    return replace(first, shape=tuple(one[0] if len(set(one)) == 1 else None for one in sizes))


def per_replica(spec: nest.Nest, rows_of: Callable[[int | None], int | None], count: int) -> nest.Nest:
    """``spec`` of a global batch as the specs of ``count`` replicas; ``rows_of`` maps its rows to a replica's."""

    def spread(leaf: TensorSpec) -> PerReplicaSpec:
        dim = leaf.rows_dim
        own = leaf if dim is None or dim >= leaf.rank else leaf.with_rows(rows_of(leaf.shape[dim]))
        return PerReplicaSpec((own,) * count)

    return nest.map_structure(spread, spec)


def _map_leaves(fn: Callable[[rows.Leaf], TensorSpec], value: nest.Nest) -> nest.Nest:
    if nest.is_nested(value) and not rows.is_row_list(value):
        return nest.rebuild(value, [_map_leaves(fn, child) for _, child in nest.children(value)])
    return fn(value)


def _python_dtype(value: object) -> DType:
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(value).dtype
    return np.dtype(object)


@contextmanager
def undisturbed_randomness() -> Iterator[None]:
    """Run user code that may draw random numbers without moving the streams that training uses."""
    python, numpy, state = random.getstate(), np.random.get_state(legacy=False), state_of()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(state)
