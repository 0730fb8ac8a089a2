"""Annotations that split a replica's tensors over its logical devices: what they check, on every strategy.

Where replicas have one logical device, exactly the trivial annotations are accepted, so that an annotated step runs
unchanged, and everything else is an error instead of a silent no-op. Where they have several, an `Annotator` follows.
"""

from __future__ import annotations

import math
import numbers
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.sharding.grid import DeviceGrid, Sharding
from torchstrat.sharding.layout import ShardedEntry

if TYPE_CHECKING:
    from torchstrat.sharding.dtensor.devices import Traffic


def check_split(
    shape: Sequence[int | None] | None, partition_dimensions: Sequence[int], num_logical_devices: int
) -> tuple[int, ...]:
    """The conditions of a split, in TensorFlow's order: length, divisibility, product, and at last the type.

    Args:
        shape: of the tensor in one replica. None for a size that is not fixed, which divides for all that is known;
            None for all of it if not even the number of dimensions is fixed, and then nothing can be split.
        partition_dimensions: into how many equal parts each dimension is cut: integers of Python, NumPy or PyTorch.
        num_logical_devices: of one replica; what the entries have to multiply to.

    Returns ``partition_dimensions`` as Python integers.

    Raises:
        InvalidArgumentError: one of the first three conditions does not hold, or an entry is below 1.
        WrongTypeError: ``partition_dimensions`` is no sequence of integers, or empty: nothing of a scalar can be split.
    """
    dims = _entries(partition_dimensions)
    if shape is None:
        raise InvalidArgumentError(
            f"partition_dimensions={dims}: the tensor's number of dimensions is not known, and it needs one entry for "
            "each; split a tensor whose shape is known."
        )
    if len(dims) != len(shape):
        raise InvalidArgumentError(
            f"partition_dimensions={dims} for a tensor of shape {tuple(shape)}: the numbers of entries and dimensions "
            f"differ, {len(dims)} and {len(shape)}; give one entry per dimension, 1 for those not to be split."
        )
    for dim, size in enumerate(shape):
        _check_parts(dims, dim, size)
    if math.prod(dims) != num_logical_devices:
        raise InvalidArgumentError(
            f"partition_dimensions={dims} makes {math.prod(dims)} parts, and a replica has {num_logical_devices} "
            f"logical device{'s' if num_logical_devices > 1 else ''}; the product of the entries must be that number."
        )
    if not dims:
        raise WrongTypeError(
            "partition_dimensions=[]: a tensor without dimensions cannot be split; every logical device has all of it "
            "anyway, and replicate_to_logical_devices says so."
        )
    return tuple(_integer(dims, dim) for dim in range(len(dims)))


def check_logical_device_id(logical_device_id: int, num_logical_devices: int) -> int:
    """The number of one of a replica's logical devices, as a Python integer.

    Raises `InvalidArgumentError` if there is no such logical device, `WrongTypeError` if it is not an integer.
    """
    try:
        index = operator.index(logical_device_id)
    except TypeError:
        raise WrongTypeError(
            f"logical_device_id must be an integer; got {type(logical_device_id).__name__} {logical_device_id!r:.80}."
        ) from None
    if not 0 <= index < num_logical_devices:
        ids = "the only id is 0" if num_logical_devices == 1 else f"ids are 0 to {num_logical_devices - 1}"
        raise InvalidArgumentError(
            f"logical_device_id={index}: a replica has {num_logical_devices} logical "
            f"device{'s' if num_logical_devices > 1 else ''}, so {ids}."
        )
    return index


def shape_of(tensor: Any) -> tuple[int | None, ...] | None:
    """The shape of a tensor, an array or a spec, for `check_split`. `WrongTypeError` for anything else."""
    if isinstance(tensor, torch.Tensor) or hasattr(tensor, "shape"):
        return None if tensor.shape is None else tuple(tensor.shape)
    raise WrongTypeError(f"logical device annotations need a tensor; got {type(tensor).__name__}.")


class Assignments:
    """For backends that keep no tensor to one of the logical devices. ``why``: the reason, for the warning."""

    def __init__(self, why: str) -> None:
        self._why = why
        self._has_warned = False

    def assign(self, tensor: torch.Tensor, logical_device: int) -> torch.Tensor:
        """The tensor as it is; say once that nothing was moved."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"assign_to_logical_device: {self._why}; its values are right, nothing was moved. Use "
                "split_to_logical_devices to spread work and memory.",
                stacklevel=3,
            )
        return tensor


class Annotator(Protocol):
    """What takes annotations where replicas have several logical devices."""

    @property
    def traffic(self) -> Traffic | None:
        """None where nobody counts."""

    @property
    def assign(self) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """See `Assignments.assign`."""

    def cut(self, tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor: ...

    def entry_of(self, tensor: torch.Tensor) -> ShardedEntry | None:
        """How a tensor is cut; None for one about which nothing was said."""

    def grid(self) -> tuple[DeviceGrid, list[str]]:
        """The replicas' devices, and the names of the devices by their numbers."""


class LogicalDeviceMethods:
    """The three annotations. Values are unchanged, in and out of `run`; with one logical device nothing is done."""

    _num_logical_devices = 1
    _annotator: Annotator | None = None
    """None where replicas have one logical device."""

    def split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Split ``tensor`` over the replica's logical devices, ``partition_dimensions[d]`` parts along dimension d.

        Parts are equal, and numbered row-major: part i is on logical device i. With one logical device every entry
        must be 1. In a step, ``tensor`` is the replica's own, and its gradient is cut likewise. A variable is cut for
        good, and its optimizer state with it; call it on variables in the scope, or before the first run. Returns the
        tensor, whose values, shape and dtype are unchanged.

        Raises `ValueError` if the number of entries is not the tensor's rank, a dimension does not divide, or the
        product is not the number of logical devices; `TypeError` if the entries are not integers, and for a tensor
        without dimensions.
        """
        dims = check_split(shape_of(tensor), partition_dimensions, self._num_logical_devices)
        return tensor if self._annotator is None else self._annotator.cut(_as_tensor(tensor), Sharding.split(dims))

    def replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Keep ``tensor`` whole on every logical device. Returns it."""
        if self._annotator is None:
            return tensor
        value = _as_tensor(tensor)
        return self._annotator.cut(value, Sharding.replicated(value.ndim, self._num_logical_devices))

    def assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Say that ``tensor`` belongs on one logical device, numbered from 0. Returns it, unchanged.

        All logical devices of a replica run the same program, so that none can keep a tensor to itself: the number is
        checked and remembered, nothing is moved, and a warning says so once.

        Raises `ValueError` for an id out of range, `TypeError` for one that is no integer.
        """
        device = check_logical_device_id(logical_device_id, self._num_logical_devices)
        return tensor if self._annotator is None else self._annotator.assign(_as_tensor(tensor), device)


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(value)
    raise WrongTypeError(f"logical device annotations need a tensor; got {type(value).__name__} {value!r:.80}.")


def check_mesh_shape(mesh_shape: Sequence[int] | None, logical_devices: int) -> tuple[int, ...]:
    """How sharding rules see ``logical_devices``: the sizes of ``d0``, ``d1``, …; None: as one axis."""
    shape = (logical_devices,) if mesh_shape is None else tuple(mesh_shape)
    if math.prod(shape) != logical_devices:
        raise InvalidArgumentError(
            f"logical_mesh_shape={list(shape)} has {math.prod(shape)} places, and a replica has {logical_devices} "
            "logical devices; the product of the entries must be that number."
        )
    return shape


def _entries(partition_dimensions: Any) -> list[Any]:
    """The entries; integers of whatever library as Python's, the rest as they are: their turn comes last."""
    try:
        if isinstance(partition_dimensions, str | bytes):
            raise TypeError
        return [_plain(entry) for entry in partition_dimensions]
    except TypeError:
        raise WrongTypeError(
            "partition_dimensions must be a sequence of integers, one for each dimension of the tensor; got "
            f"{type(partition_dimensions).__name__} {partition_dimensions!r:.80}."
        ) from None


def _plain(entry: Any) -> Any:
    try:
        return operator.index(entry)
    except TypeError:
        return entry


def _check_parts(dims: list[Any], dim: int, size: int | None) -> None:
    parts = dims[dim]
    if not isinstance(parts, numbers.Real):
        _integer(dims, dim)
    if parts < 1:
        raise InvalidArgumentError(f"partition_dimensions={dims}: entry {dim} is {parts}; the least is 1.")
    if size is not None and parts != 1 and size % parts:
        raise InvalidArgumentError(
            f"partition_dimensions={dims}: dimension {dim} has size {size}, which does not divide into {parts} "
            f"equal parts; use a divisor of {size}."
        )


def _integer(dims: list[Any], dim: int) -> int:
    entry = dims[dim]
    if isinstance(entry, int):
        return entry
    raise WrongTypeError(
        f"partition_dimensions={dims}: entry {dim} is {type(entry).__name__} {entry!r:.80}; numbers of parts are "
        "integers."
    )
