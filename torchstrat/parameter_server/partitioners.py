"""Into how many shards a variable is cut for the parameter servers; public as ``ts.partitioners``.

A partitioner is called as ``partitioner(shape, dtype, axis=0)`` and answers with one number per dimension: 1, except at
``axis``, where the number of shards stands. Variables are only ever cut along their first dimension; any callable of
that form serves as a ``variable_partitioner``. Nothing here holds or creates a variable.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]

BYTES_PER_STRING = 16
_STRING_KINDS = "OUS"
"""NumPy's kinds of dtype whose elements are strings: objects, fixed-width text, bytes."""


class PartitionFunction(Protocol):
    """What a ``variable_partitioner`` is: one of the classes below, or a function of the user."""

    def __call__(self, shape: Sequence[int], dtype: object) -> Sequence[int]: ...


class Partitioner:
    """Base class of the partitioners; calling it without overriding ``__call__`` raises `NotImplementedError`."""

    def __call__(self, shape: Sequence[int], dtype: object, axis: int = 0) -> list[int]:
        """One number per dimension of ``shape``: the number of shards at ``axis``, 1 elsewhere.

        Args:
            shape: of the whole variable.
            dtype: a torch or NumPy dtype; ``np.dtype(object)`` means strings.
            axis: the dimension to cut.
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not say how to partition; override __call__(shape, dtype, axis=0), or use "
            "FixedShardsPartitioner, MinSizePartitioner or MaxSizePartitioner."
        )


class _AlongAxis(Partitioner, ABC):
    """A partitioner that only has to say the number of shards of the one dimension."""

    @abstractmethod
    def _shards(self, sizes: tuple[int, ...], dtype: object, axis: int) -> int: ...

    def __call__(self, shape: Sequence[int], dtype: object, axis: int = 0) -> list[int]:
        sizes = tuple(operator.index(size) for size in shape)
        if not 0 <= axis < len(sizes):
            raise InvalidArgumentError(
                f"{type(self).__name__} got axis={axis} for shape {sizes}, which has {len(sizes)} dimensions; a "
                "variable without that dimension cannot be partitioned. Give an axis that it has, or leave it whole."
            )
        partitions = [1] * len(sizes)
        partitions[axis] = self._shards(sizes, dtype, axis)
        return partitions


class FixedShardsPartitioner(_AlongAxis):
    """``num_shards`` shards, or one per row where there are fewer rows.

    Args:
        num_shards: a whole number; its size is not checked here: the strategy that cuts a variable refuses what is not
            positive.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _whole("num_shards", num_shards)

    def _shards(self, sizes: tuple[int, ...], dtype: object, axis: int) -> int:
        return min(self._num_shards, sizes[axis])


class MinSizePartitioner(_AlongAxis):
    """As many shards as hold ``min_shard_bytes`` each, and at most ``max_shards``.

    The number is rounded up, so the shards can be a little smaller than that. The defaults never split.

    Args:
        min_shard_bytes: the size that a shard should not fall below.
        max_shards: the most shards.
        bytes_per_string: what an element counts where the dtype is a string's.

    Raises:
        InvalidArgumentError: an argument is not positive.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = BYTES_PER_STRING
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def _shards(self, sizes: tuple[int, ...], dtype: object, axis: int) -> int:
        total_bytes = math.prod(sizes) * _element_bytes(dtype, self._bytes_per_string)
        return max(1, min(sizes[axis], self._max_shards, -(-total_bytes // self._min_shard_bytes)))


class MaxSizePartitioner(_AlongAxis):
    """As few shards as keep each within ``max_shard_bytes``, but at least one row per shard.

    Args:
        max_shard_bytes: the size that a shard should not exceed. A single row that is larger is a shard of its own.
        max_shards: the most shards, which may then be larger. None and 0: no limit.
        bytes_per_string: what an element counts where the dtype is a string's.

    Raises:
        InvalidArgumentError: an argument is negative, or a size is 0; when called, a dimension of size 0.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = BYTES_PER_STRING
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def _shards(self, sizes: tuple[int, ...], dtype: object, axis: int) -> int:
        if 0 in sizes:
            raise InvalidArgumentError(
                f"MaxSizePartitioner got shape {sizes}: a variable without elements has no size to divide. Use "
                "FixedShardsPartitioner or MinSizePartitioner, or leave the variable out of the scope."
            )
        row_bytes = math.prod(sizes) // sizes[axis] * _element_bytes(dtype, self._bytes_per_string)
        rows_per_shard = max(1, self._max_shard_bytes // row_bytes)
        shards = -(-sizes[axis] // rows_per_shard)
        return shards if self._max_shards is None else min(shards, self._max_shards)


def _whole(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongTypeError(f"{name} must be a whole number; got {type(value).__name__} {value!r}.")
    return value


def _positive(name: str, value: int) -> int:
    if _whole(name, value) <= 0:
        raise InvalidArgumentError(f"{name}={value} must be at least 1.")
    return value


def _element_bytes(dtype: Any, bytes_per_string: int) -> int:
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    as_numpy = np.dtype(dtype)
    return bytes_per_string if as_numpy.kind in _STRING_KINDS else as_numpy.itemsize


# -- what a strategy asks ---------------------------------------------------------------------------------------------


def row_offsets(rows: int, shards: int) -> list[tuple[int, int]]:
    """The rows ``[start, stop)`` of each shard, in order: sizes differ by at most one, the first shards are the larger.

    ``row_offsets(13, 5)`` gives shards of 3, 3, 3, 2 and 2 rows. More shards than rows: one shard per row.

    Raises:
        InvalidArgumentError: fewer than one row or shard.
    """
    if rows < 1 or shards < 1:
        raise InvalidArgumentError(f"{rows} rows cannot be divided into {shards} shards; both must be at least 1.")
    shards = min(shards, rows)
    size, larger = divmod(rows, shards)
    starts = [shard * size + min(shard, larger) for shard in range(shards + 1)]
    return list(itertools.pairwise(starts))


def shards_of(partitioner: PartitionFunction, shape: Sequence[int], dtype: object) -> int:
    """How many shards ``partitioner`` wants for a variable, checked; 1 leaves it whole. A scalar is always whole.

    More shards than rows are one per row, as in `row_offsets`.

    Args:
        partitioner: one of the classes here, or a function ``(shape, dtype) -> partitions`` of the user.
        shape: of the whole variable; the partitioner gets it as a `torch.Size`.
        dtype: of the variable.

    The first number of an answer counts; those of further dimensions may be left out, as they can only be 1.

    Raises:
        InvalidArgumentError: the answer is not a list of whole numbers, the number of shards is not positive, another
            dimension than the first is cut, or there are no rows to cut; the message has the answer.
    """
    size = torch.Size(shape)
    if not size:
        return 1
    answer = partitioner(size, dtype)
    partitions = _whole_numbers(answer)
    called = f"the partitioner {_name(partitioner)} returned {answer!r} for shape {tuple(size)}"
    wanted = f"return one whole number per dimension, such as {[2] + [1] * (len(size) - 1)}"
    if not partitions:
        raise InvalidArgumentError(f"{called}; {wanted}.")
    if any(number != 1 for number in partitions[1:]):
        raise InvalidArgumentError(
            f"{called}: variables are cut along their first dimension only; {wanted}, with 1 after the first."
        )
    if partitions[0] == 0 and size[0] == 0:
        return 1  # one shard per row, of which there is none: it has to be somewhere, and may get no rows ever
    if partitions[0] < 1:
        raise InvalidArgumentError(f"{called}: there must be at least 1 shard, and a row for it; {wanted}.")
    if partitions[0] > 1 and size[0] == 0:
        raise InvalidArgumentError(f"{called}: a variable without rows cannot be cut; return 1 for it.")
    return min(partitions[0], size[0]) or 1


def _whole_numbers(answer: object) -> list[int] | None:
    """``answer`` as a list of numbers, or None where it is none."""
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence | np.ndarray):
        return None
    try:
        return [operator.index(number) for number in answer]
    except TypeError:
        return None


def _name(partitioner: object) -> str:
    return getattr(partitioner, "__qualname__", type(partitioner).__qualname__)
