"""Batches as rows: counting, cutting, joining and emptying whatever a data pipeline may hand out.

A batch is a nest whose leaves have rows along dim 0:

* `torch.Tensor` of rank 1 or more: dense, jagged (``torch.nested``, layout ``jagged``) or sparse COO;
* `numpy.ndarray` of objects: strings, which have no tensor type. Other arrays are made tensors by `to_tensors`;
* a list or tuple without containers or tensors in it, one entry per row: what ``default_collate`` makes of strings.

``None`` is no leaf; it is handed to every replica.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from torchstrat import nest
from torchstrat.data.rebatch import equal_chunks
from torchstrat.errors import InvalidArgumentError, WrongTypeError

Leaf = Any


def to_tensors(batch: nest.Nest) -> nest.Nest:
    """``batch`` with numeric NumPy arrays and scalars as tensors, and NumPy strings as object arrays."""
    return map_leaves(_to_tensor, batch)


def map_leaves(fn: Callable[[Leaf], Any], value: nest.Nest) -> nest.Nest:
    """`nest.map_structure` for batches: columns are leaves, and containers in which nothing changed stay the same."""
    if not nest.is_nested(value) or is_row_list(value):
        return fn(value)
    children = [child for _, child in nest.children(value)]
    mapped = [map_leaves(fn, child) for child in children]
    same = all(new is old for new, old in zip(mapped, children, strict=True))
    return value if same else nest.rebuild(value, mapped)


def _to_tensor(leaf: Leaf) -> Leaf:
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind in "OSU":
            return leaf.astype(object, copy=False)
        return torch.from_numpy(leaf if leaf.flags.writeable and leaf.flags.c_contiguous else leaf.copy())
    if isinstance(leaf, np.generic) and leaf.dtype.kind not in "OSU":
        return torch.tensor(leaf.item(), dtype=torch.from_numpy(np.zeros((), leaf.dtype)).dtype)
    return leaf


def strings_to_arrays(batch: nest.Nest) -> nest.Nest:
    """`to_tensors`, with columns of strings as object arrays too."""

    def convert(leaf: Leaf) -> Leaf:
        if is_row_list(leaf) and all(isinstance(row, str | bytes) for row in leaf):
            return np.array(leaf, dtype=object)
        return _to_tensor(leaf)

    return map_leaves(convert, batch)


class RowsOnTheirWay:
    """Stands for one replica's tensor while a placement brings it to its device together with the others'."""

    __slots__ = ()


def is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray | RowsOnTheirWay)


def is_row_list(value: Any) -> bool:
    """Whether a list or tuple is a column of Python values, one per row, and not a container of columns."""
    return (
        isinstance(value, list | tuple)
        and not hasattr(value, "_fields")
        and len(value) > 0
        and not any(is_array(item) or nest.is_nested(item) or item is None for item in value)
    )


def map_rows(fn: Callable[[Leaf], Any], batch: nest.Nest) -> nest.Nest:
    """Apply ``fn`` to every leaf that has rows, and keep the structure and each None.

    Raises:
        InvalidArgumentError: a tensor of rank 0, or a packed sequence, whose rows are not along dim 0.
        WrongTypeError: a leaf that is no tensor, array or column of values.
    """
    if batch is None:
        return None
    if isinstance(batch, PackedSequence):
        raise InvalidArgumentError(
            "a batch holds a PackedSequence, whose rows are interleaved and cannot be split over replicas. "
            "Hand out padded tensors and lengths, and call pack_padded_sequence in the training step."
        )
    if is_array(batch):
        if batch.ndim == 0:
            raise InvalidArgumentError(
                f"a batch holds a scalar ({batch!r}): every tensor needs a batch dimension to be split over replicas. "
                "Batch the dataset first, for example DataLoader(dataset, batch_size=<global batch>)."
            )
        return fn(batch)
    if is_row_list(batch):
        return fn(batch)
    if nest.is_nested(batch):
        return nest.rebuild(batch, [map_rows(fn, child) for _, child in nest.children(batch)])
    raise WrongTypeError(
        f"a batch holds {batch!r} of type {type(batch).__name__}, which cannot be split over replicas: batches are "
        "tensors, arrays, or lists, tuples and dicts of them. A dataset of single examples needs a DataLoader."
    )


def row_leaves(batch: nest.Nest) -> list[Leaf]:
    """The leaves that have rows, in order; the errors of `map_rows`."""
    found: list[Leaf] = []
    map_rows(found.append, batch)
    return found


def length(leaf: Leaf) -> int:
    """Rows of one leaf."""
    return leaf.size(0) if isinstance(leaf, torch.Tensor) else len(leaf)


def count_rows(batch: nest.Nest) -> int:
    """Rows of a batch: dim 0 of its first tensor; of its first leaf, if it has no tensor."""
    found = row_leaves(batch)
    if not found:
        raise WrongTypeError("a batch holds no tensor and no array, so there are no rows to give to replicas.")
    return length(next((leaf for leaf in found if isinstance(leaf, torch.Tensor)), found[0]))


def common_rows(batch: nest.Nest) -> int | None:
    """The number of rows that all leaves of a batch share, or None when they differ."""
    lengths = {length(leaf) for leaf in row_leaves(batch)}
    return lengths.pop() if len(lengths) == 1 else None


def cut(leaf: Leaf, start: int, stop: int) -> Leaf:
    """Rows ``start`` to ``stop`` of one leaf; dense tensors and arrays share memory with it."""
    if not isinstance(leaf, torch.Tensor):
        return leaf[start:stop]
    if leaf.is_nested:
        return _cut_jagged(leaf, start, stop)
    if leaf.layout is not torch.strided:
        return leaf.index_select(0, torch.arange(start, stop, device=leaf.device))
    return leaf[start:stop]


def _cut_jagged(leaf: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    jagged: Any = leaf  # NestedTensor's methods are not in Tensor's stubs
    offsets = jagged.offsets()
    first, last = int(offsets[start]), int(offsets[stop])
    longest = int(offsets.diff().max()) if leaf.size(0) else 0
    # The bounds of the whole batch keep the ragged dimension defined when there are no rows.
    return torch.nested.nested_tensor_from_jagged(
        jagged.values()[first:last], offsets[start : stop + 1] - first, min_seqlen=0, max_seqlen=longest
    )


def join(leaves: list[Leaf]) -> Leaf:
    """The rows of leaves of one kind, one after the other."""
    if len(leaves) == 1:
        return leaves[0]
    first = leaves[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(leaves)
    if isinstance(first, list | tuple):
        return type(first)(row for leaf in leaves for row in leaf)
    if first.is_nested:
        return torch.nested.nested_tensor([row for leaf in leaves for row in leaf.unbind()], layout=torch.jagged)
    return torch.cat(leaves)


def cut_batch(batch: nest.Nest, start: int, stop: int) -> nest.Nest:
    """Rows ``start`` to ``stop`` of every leaf."""
    return map_rows(lambda leaf: cut(leaf, start, stop), batch)


def join_batches(batches: list[nest.Nest]) -> nest.Nest:
    """Batches of equal structure as one, rows in order."""
    joined = iter([join(list(column)) for column in zip(*(row_leaves(batch) for batch in batches), strict=True)])
    return map_rows(lambda _: next(joined), batches[0])


def split_equally(batch: nest.Nest, num_replicas: int) -> list[nest.Nest]:
    """One part per replica by the equal-chunk rule, each leaf by its own length. Parts may have zero rows."""

    def part(replica: int) -> nest.Nest:
        def cut_leaf(leaf: Leaf) -> Leaf:
            sizes = equal_chunks(length(leaf), num_replicas)
            return cut(leaf, sum(sizes[:replica]), sum(sizes[: replica + 1]))

        return map_rows(cut_leaf, batch)

    return [part(replica) for replica in range(num_replicas)]


def split_by_sizes(batch: nest.Nest, sizes: tuple[int, ...]) -> list[nest.Nest]:
    """Consecutive parts of the given numbers of rows."""
    stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [cut_batch(batch, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def empty_like(value: nest.Nest) -> nest.Nest:
    """A batch of zero rows with the dtypes and trailing shapes of ``value``; a scalar becomes shape ``(0,)``.

    What has no rows (a number, an object) stays as it is: this also makes a stand-in for batches of foreign classes.
    """
    if is_row_list(value):
        return type(value)()
    if nest.is_nested(value) and not isinstance(value, PackedSequence):
        return nest.rebuild(value, [empty_like(child) for _, child in nest.children(value)])
    if is_array(value):
        return cut(value, 0, 0) if value.ndim else value.reshape(1)[:0]
    return value


def checksum(batch: nest.Nest) -> int:
    """A number that tells batches of different content apart: equal data give equal numbers in every process."""
    crc = 0
    for leaf in nest.leaves(batch):
        for part in _bytes_of(leaf):
            crc = zlib.crc32(part, crc)
    return crc


def _bytes_of(leaf: Leaf) -> Iterator[bytes]:
    if not isinstance(leaf, torch.Tensor):
        yield repr(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf).encode()
        return
    leaf = leaf.detach().cpu()
    if leaf.is_nested:
        jagged: Any = leaf
        leaf = torch.cat([jagged.values().flatten().double(), jagged.offsets().double()])
    leaf = leaf.to_dense().contiguous()
    yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
    yield leaf.reshape(-1).view(torch.uint8).numpy().tobytes()
