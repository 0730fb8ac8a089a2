"""Places in a TPU's mesh: four integers ``[x, y, z, core]``, chips on a grid and cores on a chip.

Older documents have three entries for shapes, ``[x, y, core]``; they mean ``[x, y, 1, core]``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError

Integers = npt.NDArray[np.int64]
MeshShape = tuple[int, int, int, int]

MESH_RANK = 4
MAX_MESH_POINTS = 2**24
"""Of a mesh. Far above the largest TPU; a damaged description is refused before memory is taken for it."""


def integers(name: str, value: Any) -> Integers:
    """``value``, nested sequences of integers or an array or tensor of them, as a new array.

    Raises:
        WrongTypeError: it holds anything else.
        InvalidArgumentError: its rows have different lengths.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(f"{name} must be rectangular; got {value!r:.200}.") from error
    if array.dtype.kind not in "iu" and not (array.size == 0 and array.dtype.kind == "f"):  # [] is an array of floats
        raise WrongTypeError(f"{name} must hold integers; got {type(value).__name__} {value!r:.200}.")
    return array.astype(np.int64)


def mesh_axes(name: str, value: Any) -> MeshShape:
    """``value`` as sizes along x, y, z and core, of which each is at least 1.

    Raises:
        WrongTypeError: it does not hold integers.
        InvalidArgumentError: it has not three or four entries, or one below 1.
    """
    entries = integers(name, value)
    if entries.ndim != 1 or len(entries) not in (MESH_RANK - 1, MESH_RANK) or (entries < 1).any():
        raise InvalidArgumentError(
            f"{name} must be four positive integers [x, y, z, core], or three [x, y, core]; got {entries.tolist()}."
        )
    *chips, cores = entries.tolist()
    x, y, z = chips if len(chips) == MESH_RANK - 1 else (*chips, 1)
    return x, y, z, cores


def checked_mesh_shape(value: Any) -> MeshShape:
    """`mesh_axes` of a mesh, whose number of points is bounded by `MAX_MESH_POINTS`."""
    shape = mesh_axes("mesh_shape", value)
    if math.prod(shape) > MAX_MESH_POINTS:
        raise InvalidArgumentError(
            f"mesh_shape {list(shape)} has {math.prod(shape)} points; at most {MAX_MESH_POINTS} can be described."
        )
    return shape


def frozen(array: Integers) -> Integers:
    """``array``, from now on read-only."""
    array.flags.writeable = False
    return array
