"""The forms in which ids per row are given to sparse embedding lookups, and the one form the lookups compute with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torchstrat.core._torch_private import sparse_indices, sparse_values
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError

ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class SparseIds:
    """Ids by row. Entry ``i`` says that row ``rows[i]`` has ``ids[i]``; rows are not sorted.

    ``rows``: ``(n,)`` int64, in ``[0, number of rows)``. ``ids``: ``(n,)`` int32 or int64, any values.
    ``batch_shape``: sizes of the dimensions that the rows are counted through, the last one fastest.
    ``positions``: ``(n, d)`` where the entries were given with their places in a ``d``-dimensional table, else None.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    batch_shape: tuple[int, ...]
    positions: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return math.prod(self.batch_shape)

    def kept(self, where: torch.Tensor) -> SparseIds:
        """Only the entries where ``where``, ``(n,)`` bool, is True."""
        positions = None if self.positions is None else self.positions[where]
        return replace(self, rows=self.rows[where], ids=self.ids[where], positions=positions)


def parse_sparse_ids(given: object, call: str) -> SparseIds:
    """Read ids in any of these forms:

    - ``(indices, ids, dense_shape)``: ``indices`` ``(n, d)``, one position per id; the last dimension counts the ids
      of a row, the others are the rows;
    - a sparse COO tensor whose values are the ids; it is not coalesced, which would add ids up;
    - ``(ids, offsets)``: ``ids`` ``(n,)``, ``offsets`` ``(number of rows,)`` says where each row begins;
    - a jagged nested tensor of ids, one component per row.

    Raises:
        WrongTypeError: none of these, or ids that are not int32 or int64.
        InvalidArgumentError: parts of other shapes, positions outside of the dense shape, offsets that do not ascend.
    """
    if isinstance(given, torch.Tensor) and given.is_nested:
        starts: torch.Tensor = given.offsets()[:-1]  # type: ignore[attr-defined]  # of jagged tensors only
        return _from_offsets(given.values(), starts, call)
    if isinstance(given, torch.Tensor) and given.layout is torch.sparse_coo:
        return _from_positions(sparse_indices(given).T, sparse_values(given), tuple(given.shape), call)
    if isinstance(given, tuple | list) and len(given) == 3:
        indices, ids, shape = given
        sizes = tuple(int(size) for size in (shape.tolist() if isinstance(shape, torch.Tensor) else shape))
        return _from_positions(_tensor(indices, torch.int64), _tensor(ids, torch.int64), sizes, call)
    if isinstance(given, tuple | list) and len(given) == 2:
        ids, offsets = given
        return _from_offsets(_tensor(ids, torch.int64), _tensor(offsets, torch.int64), call)
    shown = f"a tensor of layout {given.layout}" if isinstance(given, torch.Tensor) else type(given).__name__
    raise WrongTypeError(
        f"{call} needs ids as (indices, ids, dense_shape), as a sparse COO tensor or as (ids, offsets); got {shown}. "
        "For a dense tensor of ids use embedding_lookup."
    )


def _tensor(value: object, dtype_if_empty: torch.dtype) -> torch.Tensor:
    """A tensor as it is, numbers as a tensor; no numbers have no dtype of their own."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(value, dtype=dtype_if_empty if isinstance(value, Sequence) and not len(value) else None)


def _from_positions(indices: torch.Tensor, ids: torch.Tensor, sizes: tuple[int, ...], call: str) -> SparseIds:
    _check_id_dtype(ids, call)
    if ids.dim() != 1 or len(sizes) < 2:
        raise InvalidArgumentError(
            f"{call} needs ids of shape (n,) in a dense shape of at least two dimensions, rows and ids of a row; got "
            f"shape {tuple(ids.shape)} and dense shape {sizes}."
        )
    indices = indices.to(torch.int64).reshape(-1, len(sizes)) if not indices.numel() else indices.to(torch.int64)
    if indices.shape != (len(ids), len(sizes)):
        raise InvalidArgumentError(
            f"{call} got indices of shape {tuple(indices.shape)} for {len(ids)} ids in dense shape {sizes}; they must "
            f"have shape {(len(ids), len(sizes))}, one position per id."
        )
    outside = ((indices < 0) | (indices >= torch.tensor(sizes, device=indices.device))).any(dim=1).nonzero()
    if len(outside):
        place = int(outside[0])
        raise InvalidArgumentError(
            f"{call}: indices[{place}] is {indices[place].tolist()}, which is not within the dense shape {sizes}."
        )
    rows = torch.zeros_like(ids, dtype=torch.int64)
    for dim, size in enumerate(sizes[:-1]):
        rows = rows * size + indices[:, dim].to(rows.device)
    return SparseIds(rows, ids, sizes[:-1], indices)


def _from_offsets(ids: torch.Tensor, offsets: torch.Tensor, call: str) -> SparseIds:
    _check_id_dtype(ids, call)
    ends = torch.cat([offsets, torch.tensor([len(ids)], dtype=offsets.dtype, device=offsets.device)])
    lengths = ends.diff()
    if ids.dim() != 1 or offsets.dim() != 1 or bool((lengths < 0).any()) or (len(offsets) and int(offsets[0]) != 0):
        raise InvalidArgumentError(
            f"{call} got ids of shape {tuple(ids.shape)} and offsets {offsets.tolist()}; ids must have shape (n,), and "
            "offsets say where each row begins: the first is 0, they ascend, and none is beyond the ids."
        )
    if len(ids) and not len(offsets):
        raise InvalidArgumentError(f"{call} got {len(ids)} ids and no offsets; the first row begins at offset 0.")
    rows = torch.repeat_interleave(torch.arange(len(offsets), device=ids.device), lengths.to(ids.device))
    return SparseIds(rows, ids, (len(offsets),))


def _check_id_dtype(ids: torch.Tensor, call: str) -> None:
    if ids.dtype not in ID_DTYPES:
        raise WrongTypeError(f"{call} needs ids of int32 or int64; got {ids.dtype}. Convert them with .long().")


def parse_weights(given: object, entries: SparseIds, call: str) -> torch.Tensor:
    """The weight of each id, ``(n,)``: a dense tensor of n values, or the forms of ids that carry positions, with the
    same positions in the same order.

    Raises:
        WrongTypeError: the weights are no numbers.
        InvalidArgumentError: another number of weights than of ids, or other positions.
    """
    positions = None
    if isinstance(given, tuple | list) and len(given) == 3 and not all(isinstance(x, int | float) for x in given):
        positions, values = _tensor(given[0], torch.int64), _tensor(given[1], torch.float32)
    elif isinstance(given, torch.Tensor) and given.layout is torch.sparse_coo:
        positions, values = sparse_indices(given).T, sparse_values(given)
    elif isinstance(given, torch.Tensor) and given.is_nested:
        values = given.values()
    else:
        try:
            values = _tensor(given, torch.float32)
        except (TypeError, ValueError, RuntimeError):
            raise WrongTypeError(
                f"{call} needs one weight per id: a tensor, (indices, weights, dense_shape) or a sparse COO tensor; "
                f"got {type(given).__name__}."
            ) from None
    if values.shape != entries.ids.shape:
        raise InvalidArgumentError(
            f"{call} got weights of shape {tuple(values.shape)} for ids of shape {tuple(entries.ids.shape)}; every id "
            "needs one weight."
        )
    known = entries.positions
    if (
        positions is not None
        and known is not None
        and positions.numel()
        and not torch.equal(positions.to(known), known)
    ):
        raise InvalidArgumentError(
            f"{call} got weights at other positions than the ids; the weights' indices must equal the ids', in the "
            "same order."
        )
    return values
