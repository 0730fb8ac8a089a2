"""Batches as rows: counting, cutting, joining and emptying whatever a data pipeline may hand out.

A batch is a nest whose leaves have rows along dim 0, or are marked (`torchstrat.data.marks`):

* `torch.Tensor` of rank 1 or more: dense, jagged (``torch.nested``, layout ``jagged``) or sparse COO;
* `numpy.ndarray` of objects: strings, which have no tensor type. Other arrays are made tensors by `to_tensors`;
* a list or tuple without containers or tensors in it, one entry per row: what ``default_collate`` makes of strings.

``None`` is no leaf; it is handed to every replica. Dataclasses are opened too; see `torchstrat.data.marks`.

The rows of a global batch are divided over replicas by one of two rules, as in TensorFlow by the sharding policy (see
`AutoShardPolicy`). Neither loses a row here.

* *Equal chunks*: each batch by itself; every replica gets ``ceil(rows / n)`` rows until none are left.
* *Fixed sizes*: sizes follow from the declared batch size alone and are applied in turn to the stream of rows, across
  the borders of batches; what is left at the end fills the first replicas first.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from torchstrat.core import nest
from torchstrat.core._torch_private import ragged_dim
from torchstrat.core.errors import InvalidArgumentError, StructureMismatchError, TorchstratError, WrongTypeError
from torchstrat.core.tensor_bytes import bytes_of
from torchstrat.data.marks import (
    Along,
    Examples,
    Marked,
    Same,
    children,
    children_beside,
    is_container,
    is_opaque,
    rebuild,
    with_children,
)


def equal_chunks(rows: int, num_replicas: int) -> tuple[int, ...]:
    """Rows of each replica under the equal-chunk rule: 5 rows over 4 replicas are ``(2, 2, 1, 0)``."""
    chunk = -(-rows // num_replicas)
    return tuple(max(0, min(chunk, rows - replica * chunk)) for replica in range(num_replicas))


def fixed_sizes(global_batch: int, num_replicas: int) -> tuple[int, ...]:
    """Rows of each replica under the fixed-size rule: 5 rows over 4 replicas are ``(2, 1, 1, 1)``."""
    each, left_over = divmod(global_batch, num_replicas)
    return tuple(each + (replica < left_over) for replica in range(num_replicas))


def batch_sizes_for_worker(
    global_batch: int, num_workers: int, num_replicas_per_worker: int, worker_index: int
) -> tuple[int, ...]:
    """The sizes that one worker cuts from its own stream of rows under the fixed-size rule, in turn and cyclically.

    Each worker reads all rows of each of its batches, so one batch lasts ``num_workers`` steps. Workers start at
    different places of the same cycle: the sizes of all workers in one step add up to ``global_batch``.

    Args:
        global_batch: rows of a full global batch.
        num_workers: processes.
        num_replicas_per_worker: replicas in each process.
        worker_index: this process, from 0.

    Returns:
        ``num_workers * num_replicas_per_worker`` sizes; the first ``num_replicas_per_worker`` are for the first step.

    Raises:
        InvalidArgumentError: a negative batch, no workers or replicas, or a worker that does not exist.
        WrongTypeError: an argument that is not an int.
    """
    arguments = {
        "global_batch": (global_batch, 0),
        "num_workers": (num_workers, 1),
        "num_replicas_per_worker": (num_replicas_per_worker, 1),
        "worker_index": (worker_index, 0),
    }
    for name, (value, least) in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise WrongTypeError(f"{name} must be an int; got {value!r}.")
        if value < least:
            raise InvalidArgumentError(f"{name}={value} must be at least {least}.")
    if worker_index >= num_workers:
        raise InvalidArgumentError(f"worker_index={worker_index} must be below num_workers={num_workers}.")
    cycle = fixed_sizes(global_batch, num_workers * num_replicas_per_worker)
    start = worker_index * num_replicas_per_worker
    return cycle[start:] + cycle[:start]


Leaf = Any


def to_tensors(batch: nest.Nest) -> nest.Nest:
    """``batch`` with numeric NumPy arrays and scalars as tensors, and NumPy strings as object arrays."""
    return map_leaves(_to_tensor, batch)


def map_leaves(fn: Callable[[Leaf], object], value: nest.Nest) -> nest.Nest:
    """`nest.map_structure` for batches: columns are leaves, and containers in which nothing changed stay the same.

    What has no rows (a packed sequence, an object of a foreign class) is given to ``fn`` whole; marks stay.
    """
    if not nest.is_nested(value):
        return value.map(lambda held: map_leaves(fn, held)) if isinstance(value, Marked) else fn(value)
    if is_row_list(value) or is_opaque(value):
        return fn(value)
    held = children(value)
    return with_children(value, held, [map_leaves(fn, child) for child in held])


def _to_tensor(leaf: Leaf) -> Leaf:
    if isinstance(leaf, np.generic) and leaf.dtype.kind not in "OSU":
        leaf = np.array(leaf)
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind in "OSU":
            return leaf.astype(object, copy=False)
        try:
            return torch.from_numpy(leaf if leaf.flags.writeable and leaf.flags.c_contiguous else leaf.copy())
        except (TypeError, ValueError) as error:  # the second of another byte order
            raise WrongTypeError(
                f"a batch holds an array of {leaf.dtype}, which no tensor can hold; convert it, such as by "
                "array.astype('int64'), or hand its rows out as objects: array.astype(object)."
            ) from error
    return leaf


def strings_to_arrays(batch: nest.Nest) -> nest.Nest:
    """`to_tensors`, with columns of strings as object arrays too."""

    def convert(leaf: Leaf) -> Leaf:
        if is_row_list(leaf) and all(isinstance(row, str | bytes) for row in leaf):
            return np.array(leaf, dtype=object)
        return _to_tensor(leaf)

    return map_leaves(convert, batch)


def in_own_memory(leaf: nest.Nest) -> nest.Nest:
    """What is on the host, copied: for batches that wait while their source goes on, which may fill the same memory."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone() if leaf.device.type == "cpu" else leaf
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=in_own_memory(leaf.data))
    if not is_container(leaf):
        return leaf
    held = children(leaf)
    try:
        return with_children(leaf, held, [in_own_memory(child) for child in held])
    except WrongTypeError:  # its class makes something else of them: it is refused, or stays whole, where it is used
        return leaf


class RowsOnTheirWay:
    """Stands for one replica's tensor while a placement brings it to its device together with the others'."""

    __slots__ = ()


def is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray | RowsOnTheirWay)


def is_row_list(value: object) -> bool:
    """Whether a list or tuple is a column of Python values, one per row, and not a container of columns."""
    return (
        isinstance(value, list | tuple)
        and not hasattr(value, "_fields")
        and len(value) > 0
        and not any(is_array(item) or is_container(item) or isinstance(item, Marked) or item is None for item in value)
    )


def map_rows(fn: Callable[[Leaf], object], batch: nest.Nest) -> nest.Nest:
    """Apply ``fn`` to every leaf that has rows, and keep the structure, each None and what is marked as the same.

    Raises:
        InvalidArgumentError: a tensor of rank 0, or a packed sequence, whose rows are not along dim 0.
        WrongTypeError: a leaf that is no tensor, array or column of values, or a container that takes no other rows.
    """
    if batch is None or isinstance(batch, Same):
        return batch
    if _has_rows(batch):
        return fn(batch)
    return rebuild(batch, [map_rows(fn, child) for child in children(batch)])


def row_leaves(batch: nest.Nest) -> list[Leaf]:
    """The leaves that have rows, in order; the errors of `map_rows`, but for containers."""
    if batch is None or isinstance(batch, Same):
        return []
    if _has_rows(batch):
        return [batch]
    return [leaf for child in children(batch) for leaf in row_leaves(child)]


def _has_rows(batch: nest.Nest) -> bool:
    """Whether this is a leaf that can be cut; else it is a container."""
    kind = type(batch)
    if kind is torch.Tensor and batch.ndim:  # what is usual shall not wait for all the other questions
        return True
    if kind is dict or ((kind is tuple or kind is list) and batch and type(batch[0]) is torch.Tensor):
        return False
    if is_array(batch):
        if batch.ndim == 0:
            raise InvalidArgumentError(
                f"a batch holds a scalar ({batch!r}): every tensor needs a batch dimension to be split over replicas. "
                "Batch the dataset first, for example DataLoader(dataset, batch_size=<global batch>), or mark what "
                "every replica gets: ts.data.same(value)."
            )
        return True
    if isinstance(batch, Marked) or is_row_list(batch):
        return True
    if is_opaque(batch):
        raise InvalidArgumentError(
            "a batch holds a PackedSequence, whose rows are interleaved and cannot be split over replicas. "
            "Hand out padded tensors and lengths, and call pack_padded_sequence in the training step."
        )
    if is_container(batch):
        return False
    raise WrongTypeError(
        f"a batch holds {batch!r:.200} of type {type(batch).__name__}, which cannot be split over replicas: batches "
        "are tensors, arrays, or lists, tuples and dicts of them. A dataset of single examples needs a DataLoader; "
        "what every replica gets is marked, ts.data.same(value), and so is a list of examples, ts.data.examples(list)."
    )


def length(leaf: Leaf) -> int:
    """Rows of one leaf."""
    if isinstance(leaf, Along):
        return int(leaf.value.shape[leaf.dim])
    if isinstance(leaf, Examples):
        return len(leaf.value)
    return leaf.size(0) if isinstance(leaf, torch.Tensor) else len(leaf)


def count_rows(batch: nest.Nest) -> int:
    """Rows of a batch: dim 0 of its first tensor; of its first leaf, if it has no tensor."""
    found = row_leaves(batch)
    if not found:
        raise WrongTypeError("a batch holds no tensor and no array, so there are no rows to give to replicas.")
    return length(next((leaf for leaf in found if isinstance(leaf, torch.Tensor | Along)), found[0]))


def common_rows(batch: nest.Nest) -> int | None:
    """The number of rows that all leaves of a batch share, or None when they differ."""
    lengths = {length(leaf) for leaf in row_leaves(batch)}
    return lengths.pop() if len(lengths) == 1 else None


def cut(leaf: Leaf, start: int, stop: int) -> Leaf:
    """Rows ``start`` to ``stop`` of one leaf; dense tensors and arrays share memory with it."""
    if isinstance(leaf, Along):
        return leaf.holding(_cut_along(leaf.value, leaf.dim, start, stop))
    if isinstance(leaf, Examples):
        return leaf.holding(_cut_list(leaf.value, start, stop))
    if isinstance(leaf, list | tuple):
        return _cut_list(leaf, start, stop)
    if not isinstance(leaf, torch.Tensor):
        return leaf[start:stop]
    if leaf.is_nested:
        return _cut_nested(leaf, start, stop)
    return _cut_along(leaf, 0, start, stop)


def row(leaf: Leaf, index: int) -> object:
    """One row of a leaf, without the dimension of rows and without its mark."""
    if isinstance(leaf, Along):
        tensor = isinstance(leaf.value, torch.Tensor)
        return leaf.value.select(leaf.dim, index) if tensor else leaf.value[(slice(None),) * leaf.dim + (index,)]
    return (leaf.value if isinstance(leaf, Examples) else leaf)[index]


def _cut_list(values: Leaf, start: int, stop: int) -> Leaf:
    """A list or tuple of its class with some of its entries."""
    return nest.rebuild(values, list(values)[start:stop])


def _cut_along(leaf: Leaf, dim: int, start: int, stop: int) -> Leaf:
    if isinstance(leaf, np.ndarray):
        return leaf[(slice(None),) * dim + (slice(start, stop),)]
    if leaf.layout is torch.strided:
        return leaf.narrow(dim, start, stop - start)
    index = torch.arange(start, stop, device=leaf.device)
    if leaf.layout is torch.sparse_coo:
        return leaf.index_select(dim, index)
    try:
        return _compressed(leaf.to_sparse_coo().index_select(dim, index), leaf)
    except RuntimeError as error:
        raise WrongTypeError(
            f"a batch holds a tensor of layout {leaf.layout} and shape {tuple(leaf.shape)}, which cannot be cut to "
            f"rows {start} to {stop}: {error}. Hand out sparse COO tensors."
        ) from error


def _compressed(leaf: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A COO tensor with compressed rows, columns or blocks, which torch neither cuts nor joins itself."""
    blocks = tuple(like.values().shape[1:3]) if like.layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return leaf.to_sparse(layout=like.layout, blocksize=blocks)


def _cut_nested(leaf: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    nested: Leaf = leaf  # NestedTensor's methods are not in Tensor's stubs
    if leaf.layout is torch.strided:
        return torch.nested.nested_tensor(list(leaf.unbind())[start:stop], dtype=leaf.dtype, device=leaf.device)
    offsets, lengths = nested.offsets(), nested.lengths()
    longest = int((offsets.diff() if lengths is None else lengths).max()) if leaf.size(0) else 0
    # The bounds of the whole batch keep the ragged dimension defined when there are no rows.
    bounds: dict[str, Any] = {"min_seqlen": 0, "max_seqlen": longest, "jagged_dim": ragged_dim(nested)}
    if lengths is not None:  # it has holes: rows are where their offsets say
        return torch.nested.nested_tensor_from_jagged(
            nested.values(), offsets[start : stop + 1], lengths[start:stop], **bounds
        )
    first, last = int(offsets[start]), int(offsets[stop])
    values = nested.values().narrow(ragged_dim(nested) - 1, first, last - first)
    return torch.nested.nested_tensor_from_jagged(values, offsets[start : stop + 1] - first, **bounds)


def join(leaves: list[Leaf]) -> Leaf:
    """The rows of leaves of one kind, one after the other."""
    first = leaves[0]
    if len(leaves) == 1:
        return first
    if isinstance(first, Marked):
        held = [leaf.value for leaf in leaves]
        return first.holding(_join_along(held, first.dim) if isinstance(first, Along) else join(held))
    if isinstance(first, list | tuple):
        return nest.rebuild(first, [row for leaf in leaves for row in leaf])
    if isinstance(first, torch.Tensor) and first.is_nested:
        return _join_nested([row for leaf in leaves for row in leaf.unbind()], first)
    return _join_along(leaves, 0)


def _join_nested(found: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    if like.layout is torch.strided:
        return torch.nested.nested_tensor(found, dtype=like.dtype, device=like.device)
    dim = ragged_dim(like) - 1
    ends = torch.tensor([0, *itertools.accumulate(row.size(dim) for row in found)], device=like.device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(found, dim), ends, jagged_dim=dim + 1)


def _join_along(leaves: list[Leaf], dim: int) -> Leaf:
    first = leaves[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(leaves, dim)
    if first.layout in (torch.strided, torch.sparse_coo):
        return torch.cat(leaves, dim)
    return _compressed(torch.cat([leaf.to_sparse_coo() for leaf in leaves], dim), first)


def cut_batch(batch: nest.Nest, start: int, stop: int) -> nest.Nest:
    """Rows ``start`` to ``stop`` of every leaf."""
    return map_rows(lambda leaf: cut(leaf, start, stop), batch)


def join_batches(batches: list[nest.Nest]) -> nest.Nest:
    """Batches of equal structure as one, rows in order.

    Raises:
        StructureMismatchError: they hold other things.
    """
    first = batches[0]
    if len(set(map(_mark_of, batches))) > 1:
        raise StructureMismatchError(
            f"rows of two batches belong to one, and their columns are marked in different ways: {first!r:.100} and "
            f"{next(one for one in batches if _mark_of(one) != _mark_of(first))!r:.100}. Mark all batches alike."
        )
    if len(batches) == 1 or first is None or isinstance(first, Same):
        return first
    if _has_rows(first):
        return join(batches)
    columns = zip(children(first), *(children_beside(first, other) for other in batches[1:]), strict=True)
    return rebuild(first, [join_batches(list(column)) for column in columns])


def _mark_of(batch: nest.Nest) -> object:
    """What joined columns have in common: a mark and its dimension, nothing at all, or neither."""
    if isinstance(batch, Marked):
        return type(batch), batch.dim if isinstance(batch, Along) else None
    return batch is None


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
    if isinstance(value, Same):
        return value
    if isinstance(value, Along | Examples):
        return cut(value, 0, 0)
    if is_row_list(value):
        return _cut_list(value, 0, 0)
    if is_container(value) and not is_opaque(value):
        try:
            return rebuild(value, [empty_like(child) for child in children(value)])
        except WrongTypeError:
            return value
    if is_array(value):
        return cut(value, 0, 0) if value.ndim else value.reshape(1)[:0]
    return value


def checksum(batch: nest.Nest) -> int:
    """A number that tells batches of different content apart: equal data give equal numbers in every process."""
    crc = 0
    for leaf in all_leaves(batch):
        for part in _bytes_of(leaf):
            crc = zlib.crc32(part, crc)
    return crc


def checksum_by_keys(batch: nest.Nest) -> int:
    """The same, and equal also where a process has filled its dicts in another order, from a set of names, say."""
    return checksum(nest.flatten_by_keys(batch))


def all_leaves(batch: nest.Nest) -> Iterator[Leaf]:
    """Also those without rows, and those of marked values and dataclasses."""
    if isinstance(batch, Marked):
        yield from all_leaves(batch.value)
    elif is_container(batch):
        for child in children(batch):
            yield from all_leaves(child)
    else:
        yield batch


def _bytes_of(leaf: Leaf) -> Iterator[bytes]:
    if not isinstance(leaf, torch.Tensor):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            yield f"{leaf.dtype}{leaf.shape}".encode()
            yield leaf.tobytes()
            return
        whole = leaf.tolist() if isinstance(leaf, np.ndarray) else leaf
        if isinstance(whole, set | frozenset):  # whose order is another one in each process
            whole = sorted(map(repr, whole))
        yield re.sub(r" at 0x[0-9a-f]+", "", repr(whole)).encode()  # which tells where it is in memory
        return
    leaf = leaf.detach().cpu()
    if leaf.is_nested:
        found = leaf.unbind()
        sizes = torch.tensor([size for row in found for size in row.shape], dtype=torch.double)
        # Saved positions have checksums of doubles. What they do not tell apart comes behind.
        wide = torch.complex128 if leaf.is_complex() else torch.double
        parts = [row.flatten().to(wide) for row in found]
        if leaf.dtype == torch.int64:
            exact = [row.flatten() for row in found]
            if any(not torch.equal(one.long(), other) for one, other in zip(parts, exact, strict=True)):
                parts += [bytes_of(row.contiguous()).to(wide) for row in exact]
        leaf = torch.cat([*parts, sizes])
    leaf = leaf.to_dense().contiguous()
    yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
    yield bytes_of(leaf).numpy().tobytes()


def is_batch(item: nest.Nest) -> bool:
    """Whether an item can be a batch: strings may be in a list, numbers there are an example's as likely."""
    try:
        leaves = row_leaves(item)
    except TorchstratError:
        return False
    texts = (isinstance(row, str | bytes) for leaf in leaves if is_row_list(leaf) for row in leaf)
    tells = any(is_array(leaf) or isinstance(leaf, Marked) for leaf in leaves)
    return tells and all(texts) and common_rows(item) is not None


def holds_arrays(batch: nest.Nest) -> bool:
    """Whether anything in a batch can be cut into rows."""
    if is_container(batch) and not is_row_list(batch):
        return any(holds_arrays(child) for child in children(batch))
    return (
        isinstance(batch, Marked)
        or is_array(batch)
        or hasattr(batch, "dtype")
        or (is_row_list(batch) and isinstance(batch[0], str))
    )


def only_arrays(value: object) -> bool:
    """Whether a nest has arrays, and nothing else."""
    leaves = nest.flatten(value)
    return bool(leaves) and all(is_array(leaf) for leaf in leaves)
