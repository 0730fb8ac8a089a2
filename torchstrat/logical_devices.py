"""Annotations that split a replica's tensors over its logical devices, where a replica has one such device.

Strategies whose replicas have several override these; here exactly the trivial annotations are accepted, so that an
annotated step runs unchanged, and everything else is an error instead of a silent no-op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchstrat.errors import InvalidArgumentError, WrongTypeError


def check_split(shape: Sequence[int], partition_dimensions: Sequence[int], num_logical_devices: int) -> None:
    """The three conditions of a split, in TensorFlow's order: length, divisibility, product."""
    dims = list(partition_dimensions)
    if len(dims) != len(shape):
        raise InvalidArgumentError(
            f"partition_dimensions={dims} has {len(dims)} entries for a tensor of {len(shape)} dimensions "
            f"{tuple(shape)}; give one entry per dimension, 1 for those not to be split."
        )
    for dim, (size, parts) in enumerate(zip(shape, dims, strict=True)):
        if parts < 1:
            raise InvalidArgumentError(f"partition_dimensions={dims}: entry {dim} is {parts}; the least is 1.")
        if size % parts:
            raise InvalidArgumentError(
                f"partition_dimensions={dims}: dimension {dim} has size {size}, which does not divide into {parts} "
                f"equal parts; use a divisor of {size}."
            )
    if math.prod(dims) != num_logical_devices:
        raise InvalidArgumentError(
            f"partition_dimensions={dims} makes {math.prod(dims)} parts, and a replica has {num_logical_devices} "
            f"logical device{'s' if num_logical_devices > 1 else ''}; the product of the entries must be that number."
        )


class LogicalDeviceMethods:
    """The three annotations for replicas of one logical device. Usable in and out of `run`; values are unchanged."""

    _num_logical_devices = 1

    def split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Split ``tensor`` over the replica's logical devices, ``partition_dimensions[d]`` parts along dimension d.

        With one logical device every entry must be 1. Returns the tensor. Raises `ValueError` if the number of entries
        is not the tensor's rank, a dimension does not divide, or the product is not the number of logical devices.
        """
        check_split(_shape_of(tensor), partition_dimensions, self._num_logical_devices)
        return tensor

    def replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Keep ``tensor`` whole on every logical device. Returns it."""
        return tensor

    def assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Place ``tensor`` on one logical device, numbered from 0. Returns it; `ValueError` for an id out of range."""
        if not 0 <= logical_device_id < self._num_logical_devices:
            raise InvalidArgumentError(
                f"logical_device_id={logical_device_id}: replicas of {type(self).__name__} have "
                f"{self._num_logical_devices} logical device, so the only id is 0."
            )
        return tensor


def _shape_of(tensor: Any) -> tuple[int, ...]:
    if isinstance(tensor, torch.Tensor) or hasattr(tensor, "shape"):
        return tuple(tensor.shape)
    raise WrongTypeError(f"logical device annotations need a tensor; got {type(tensor).__name__}.")
