"""Datasets that read something: the rows of arrays, the lines of text files."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.data import rows, spec
from torchstrat.data.pipeline import UNKNOWN_CARDINALITY, PathLike, Pipeline, View


class ArrayDataset(Pipeline):
    """The rows of an array or tensor, or of a nest of them, along dim 0: one element per row, not batched.

    Args:
        arrays: arrays of equal length; elements have the structure of the nest.

    Raises:
        InvalidArgumentError: no array, a scalar, or arrays of different lengths.
    """

    def __init__(self, arrays: nest.Nest) -> None:
        self.arrays = rows.to_tensors(arrays)
        leaves = nest.flatten(self.arrays)
        if not leaves or not all(rows.is_array(leaf) for leaf in leaves):
            raise WrongTypeError(
                f"ArrayDataset takes an array, a tensor, or a nest of them; got {type(arrays).__name__}. "
                "For a sequence of batches give a list."
            )
        count = rows.common_rows(self.arrays)
        if count is None:
            raise InvalidArgumentError(
                f"arrays of one dataset need the same number of rows; got {[rows.length(leaf) for leaf in leaves]}. "
                "For a sequence of batches of different sizes give a list."
            )
        self._count = count

    def read(self, view: View) -> Iterator[nest.Nest]:
        return self.read_from(view, 0)

    def read_from(self, view: View, start: int) -> Iterator[nest.Nest]:
        for index in range(start, self._count):
            yield nest.map_structure(operator.itemgetter(index), self.arrays)

    @property
    def element_spec(self) -> nest.Nest:
        return nest.map_structure(lambda leaf: spec.TensorSpec(tuple(leaf.shape[1:]), leaf.dtype), self.arrays)

    @property
    def cardinality(self) -> int:
        return self._count

    def __len__(self) -> int:
        return self._count


class TextLineDataset(Pipeline):
    """The lines of text files, without their line ends, one file after the other: one ``str`` per element.

    Args:
        files: a path, or paths.
        encoding: of the files.
    """

    def __init__(self, files: PathLike | Sequence[PathLike], encoding: str = "utf-8") -> None:
        self.files = (files,) if isinstance(files, str | os.PathLike) else tuple(files)
        self._encoding = encoding

    def open(self, files: Sequence[PathLike]) -> Iterator[str]:
        for path in files:
            with Path(path).open(encoding=self._encoding) as lines:
                for line in lines:
                    yield line.rstrip("\n")

    def read(self, view: View) -> Iterator[nest.Nest]:
        return self.open(self.files if view.files is None else view.files)

    @property
    def element_spec(self) -> nest.Nest:
        return spec.TensorSpec((), np.dtype(object))

    @property
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY
