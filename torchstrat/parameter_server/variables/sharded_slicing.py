"""Which rows an index of a `ShardedVariable` needs, and where they are: arithmetic on keys and ranges, no tensors read.

``variable[key]`` is what the whole tensor gives for ``key``. Only the rows that the key's first dimension names are
read: `parse_key` splits a key into those rows and the key that is left to apply to them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchstrat.errors import InvalidArgumentError, WrongTypeError

RowSpan = tuple[int, int]
"""The rows ``[start, stop)`` of the whole variable that one shard holds."""


class ShardIndexError(InvalidArgumentError, IndexError):
    """An index of a `ShardedVariable` is out of range, or has more dimensions than it."""


@dataclass(frozen=True)
class RowSelection:
    """``rows``: of the whole variable, those to read, in order; a range, or a mask's rows as ``(n,)`` int64.
    ``key``: what is left to apply to the tensor of these rows."""

    rows: range | torch.Tensor
    key: tuple[Any, ...]


def parse_key(key: Any, rows: int) -> RowSelection:
    """Split the index of a variable with that many rows.

    Keys are integers, slices with positive steps, boolean masks, ``...`` and None, or tuples of them.

    Raises:
        WrongTypeError: another kind of index; tensors and lists of row numbers among them.
        ShardIndexError: a row that does not exist, or an empty tuple.
        InvalidArgumentError: a step that is not positive; a single bool.
    """
    entries = key if isinstance(key, tuple) else (key,)
    if not entries:
        raise ShardIndexError("a ShardedVariable cannot be indexed with an empty tuple; v[...] is the whole value.")
    for entry in entries:
        _check_entry(entry)
    lead = next((place for place, entry in enumerate(entries) if entry is not None), len(entries))
    new_dims, head, tail = entries[:lead], entries[lead : lead + 1], entries[lead + 1 :]
    if not head or head[0] is Ellipsis:
        return RowSelection(range(rows), entries)
    if isinstance(head[0], slice):
        chosen = range(*head[0].indices(rows))
        return RowSelection(chosen, (*new_dims, slice(None), *tail))
    if _is_mask(head[0]):
        return _masked(torch.as_tensor(head[0]), rows, entries)
    row = _row_in_range(operator.index(head[0]), rows)
    return RowSelection(range(row, row + 1), (*new_dims, 0, *tail))


def _masked(mask: torch.Tensor, rows: int, entries: tuple[Any, ...]) -> RowSelection:
    if mask.shape[0] != rows:
        raise ShardIndexError(
            f"a mask of shape {tuple(mask.shape)} cannot select from {rows} rows; its first dimension must be {rows}."
        )
    if len(entries) == 1 and mask.dim() == 1:
        return RowSelection(mask.nonzero().flatten(), ())
    return RowSelection(range(rows), entries)


def _row_in_range(row: int, rows: int) -> int:
    if not -rows <= row < rows:
        raise ShardIndexError(f"row {row} is out of range: the variable has {rows} rows, {-rows} to {rows - 1}.")
    return row % rows


def _is_mask(entry: Any) -> bool:
    return (isinstance(entry, torch.Tensor) and entry.dtype == torch.bool) or (
        isinstance(entry, np.ndarray) and entry.dtype == np.bool_
    )


def _check_entry(entry: Any) -> None:
    if isinstance(entry, slice):
        _check_slice(entry)
    elif isinstance(entry, bool | np.bool_) or (_is_mask(entry) and entry.ndim == 0):
        raise InvalidArgumentError(
            f"a ShardedVariable cannot be indexed with a single bool, {entry!r}; a mask has one bool per row."
        )
    elif not (entry is None or entry is Ellipsis or isinstance(entry, int | np.integer) or _is_mask(entry)):
        raise WrongTypeError(
            f"a ShardedVariable is indexed with integers, slices, boolean masks, ... and None; got "
            f"{type(entry).__name__} {entry!r:.80}. For rows by number use embedding_lookup(v, ids), for other indices "
            "torch.as_tensor(v)[…]."
        )


def _check_slice(entry: slice) -> None:
    for name in ("start", "stop", "step"):
        bound = getattr(entry, name)
        if bound is not None and not isinstance(bound, int | np.integer):
            raise WrongTypeError(
                f"a slice of a ShardedVariable needs whole numbers; got {name}={type(bound).__name__} {bound!r:.80}. "
                "Write int(…) around it."
            )
    if entry.step is not None and entry.step <= 0:
        raise InvalidArgumentError(
            f"a slice of a ShardedVariable has step {entry.step}; as for tensors it must be positive. For the reverse "
            "order use torch.flip."
        )


def split_range(rows: range, spans: Sequence[RowSpan]) -> Iterator[tuple[int, range]]:
    """The shards that hold some of ``rows``, in order, each with its own rows by local number."""
    for shard, (start, stop) in enumerate(spans):
        # Which entries of the range lie in the span: its k-th is rows.start + k * rows.step.
        first = max(0, -(-(start - rows.start) // rows.step))
        last = min(len(rows), -(-(stop - rows.start) // rows.step))
        if first < last:
            mine = rows[first:last]
            yield shard, range(mine.start - start, mine.stop - start, mine.step)


def split_ids(ids: torch.Tensor, spans: Sequence[RowSpan]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For every shard: where in ``ids``, ``(n,)`` and in range, its rows stand, and their local numbers; both int64.

    Order and repetitions are kept.
    """
    stops = torch.tensor([stop for _, stop in spans], device=ids.device)
    shard_of = torch.searchsorted(stops, ids.long(), right=True)
    for shard, (start, _) in enumerate(spans):
        places = (shard_of == shard).nonzero().flatten()
        yield places, ids.index_select(0, places).long() - start


def check_ids(ids: torch.Tensor, rows: int, call: str) -> None:
    """Raise `ShardIndexError`, which names the first bad id and its place, unless all are in ``[0, rows)``."""
    bad = ((ids < 0) | (ids >= rows)).nonzero()
    if len(bad):
        place = tuple(bad[0].tolist())
        shown = f"ids[{', '.join(map(str, place))}]" if place else "the id"
        raise ShardIndexError(
            f"{call}: {shown} is {int(ids[place])}, which is not in [0, {rows}), the rows of the table "
            f"({len(bad)} of {ids.numel()} ids are out of range)."
        )
