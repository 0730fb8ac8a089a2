"""How the components of a distributed value are combined. Pure: no process group, no device beyond the tensors' own.

The rules are those of ``tf.distribute`` except where PyTorch's users expect otherwise: dtypes follow PyTorch (an
integer mean is of the default floating dtype) and every check is made for one replica as for many.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from torchstrat.core._torch_private import sparse_indices, sparse_values
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.core.values import DistributedValues, PerReplica
from torchstrat.core.variable.tensor_like import TensorLike, open_tensor

Axis = int | tuple[int, ...] | None


class ReduceOp(enum.Enum):
    """How components are combined: their sum, or their mean."""

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """The reduction of the same name; only SUM and MEAN have one (else `ValueError`)."""
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise InvalidArgumentError(f"{aggregation} is not a reduction; VariableAggregation.SUM and .MEAN are.")

    @staticmethod
    def parse(value: ReduceOp | str) -> ReduceOp:
        """A `ReduceOp`, or its name in any case ("sum", "Mean"). Anything else is an error before anything runs."""
        if isinstance(value, ReduceOp):
            return value
        if not isinstance(value, str):
            raise WrongTypeError(
                f"reduce_op must be 'sum', 'mean' or a ReduceOp; got {type(value).__name__} {value!r:.80}. It is the "
                "first argument: reduce('mean', value)."
            )
        try:
            return ReduceOp(value.upper())
        except ValueError:
            raise InvalidArgumentError(f"unknown reduce_op {value!r}; use 'sum' or 'mean'.") from None


class VariableAggregation(enum.Enum):
    """How values that replicas assign to one `Variable` become one."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class VariableSynchronization(enum.Enum):
    """When the copies of a `Variable` are brought together. ``ON_READ``: each replica has its own until it is read."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


HALF = (torch.float16, torch.bfloat16)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """In single precision at least: in that PyTorch adds up half precision, and sums of squares do not overflow."""
    return tensor.float() if tensor.dtype in HALF else tensor


# -- arguments ------------------------------------------------------------------------------------------------------


def parse_axis(axis: object, op: ReduceOp) -> Axis:
    """None, an int (bools count), or a tuple of ints, as `reduce` takes them.

    A NumPy integer is accepted for SUM only, as recorded from TensorFlow. Lists, floats, strings, tensors are errors.
    """
    if axis is None or (isinstance(axis, tuple) and not axis):  # not ``== ()``: an array compares element by element
        return None
    if isinstance(axis, int):
        return int(axis)
    if isinstance(axis, np.integer) and op is ReduceOp.SUM:
        return int(axis)
    if isinstance(axis, tuple) and all(isinstance(one, int) for one in axis):
        return tuple(int(one) for one in axis)
    raise WrongTypeError(
        f"axis must be None, an int or a tuple of ints; got {type(axis).__name__} {axis!r}. "
        "None combines the replicas' tensors element by element; an int also reduces that dimension."
    )


def require_mean_without_axis(op: ReduceOp, axis: Axis) -> None:
    """What ``weighted=True`` is about."""
    if op is not ReduceOp.MEAN or axis is not None:
        raise InvalidArgumentError(
            f"reduce with weighted=True takes reduce_op='mean' and no axis; got {op.value.lower()!r} and axis={axis}. "
            "A sum needs no weights, and a mean over an axis counts every entry alike already: leave weighted out."
        )


def normalize_dims(axis: int | tuple[int, ...], rank: int, call: str) -> tuple[int, ...]:
    """Non-negative dimensions, each checked against ``rank``."""
    dims = (axis,) if isinstance(axis, int) else axis
    for dim in dims:
        if not -rank <= dim < rank:
            raise InvalidArgumentError(
                f"{call} got axis={axis} for tensors of {rank} dimensions; "
                + (f"use {-rank} to {rank - 1}." if rank else "scalars have no axis: use axis=None.")
            )
    normal = tuple(dim % rank for dim in dims)
    if len(set(normal)) != len(normal):
        raise InvalidArgumentError(f"{call} got axis={axis}, which names one dimension twice.")
    return normal


def is_python_number(value: object) -> TypeGuard[complex]:
    """Bools too, as in Python. NumPy's scalars are arrays, although ``np.float64`` is a subclass of ``float``."""
    return isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)


def as_tensor(value: object, call: str) -> torch.Tensor:
    """One component as a tensor. Python numbers and numeric arrays convert; anything else is an error."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, TensorLike):
        lent: torch.Tensor = open_tensor(value)
        return lent
    if is_python_number(value):
        return torch.tensor(int(value) if isinstance(value, bool) else value)  # Python adds bools up as 0 and 1
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object and value.dtype.kind not in "SUMmV":
        return torch.from_numpy(np.array(value))
    kind = f"array of dtype {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise WrongTypeError(f"{call} needs numeric tensors; got a component that is {kind}: {value!r:.80}.")


def _require_any(components: Sequence[object], call: str) -> None:
    if not components:
        raise InvalidArgumentError(
            f"{call} got a value without components: no replica took part in the run that it comes from, because none "
            "had rows. Skip batches without rows."
        )


def _check_alike(tensors: Sequence[torch.Tensor], call: str, *, shapes: bool) -> None:
    """All components of one dtype and layout and, if asked, of one shape."""
    _require_any(tensors, call)
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            raise InvalidArgumentError(
                f"{call} got {first.dtype} on replica 0 and {tensor.dtype} on replica {index}; "
                "convert to one dtype first."
            )
        if tensor.layout != first.layout:
            raise InvalidArgumentError(
                f"{call} got a {first.layout} tensor on replica 0 and a {tensor.layout} tensor on replica {index}."
            )
        if shapes and tensor.shape != first.shape:
            raise InvalidArgumentError(
                f"{call} got shape {tuple(first.shape)} on replica 0 and {tuple(tensor.shape)} on replica {index}; "
                "shapes must be equal (nothing is broadcast). To join batches of different length use gather, "
                "or give the axis to reduce."
            )
    if first.dtype == torch.bool:
        raise WrongTypeError(f"{call} cannot combine bool tensors; convert them to an integer or floating dtype first.")


# -- combining ------------------------------------------------------------------------------------------------------


def mean_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a mean, PyTorch's rule: floating and complex dtypes stay, integers become the default float."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which components are added up for a mean: in half precision the sum may not exist where the mean does."""
    return torch.float32 if dtype == torch.float16 else mean_dtype(dtype)


def combine(op: ReduceOp, components: Sequence[torch.Tensor], call: str = "reduce") -> torch.Tensor:
    """Element by element over replicas; components of equal shape and dtype, the result on the first one's device.

    Sparse COO tensors are concatenated (entries in replica order, duplicates kept); a mean divides their values.
    """
    _check_alike(components, call, shapes=True)
    first = components[0]
    if first.layout == torch.sparse_coo:
        return _combine_sparse(op, components)
    total = first.to(sum_dtype(first.dtype)) if op is ReduceOp.MEAN else first
    for other in components[1:]:
        total = total + other.to(total.device)
    if op is ReduceOp.MEAN:
        total = (total / len(components) if len(components) > 1 else total).to(mean_dtype(first.dtype))
    return total.clone() if total is first else total


def _combine_sparse(op: ReduceOp, components: Sequence[torch.Tensor]) -> torch.Tensor:
    first = components[0]
    values = torch.cat([sparse_values(one).to(first.device) for one in components])
    if op is ReduceOp.MEAN:
        values = values.to(mean_dtype(values.dtype)) / len(components)
    indices = torch.cat([sparse_indices(one).to(first.device) for one in components], dim=1)
    return torch.sparse_coo_tensor(indices, values, first.shape, is_coalesced=False, check_invariants=False)


def sum_and_count(tensor: torch.Tensor, axis: int | tuple[int, ...], op: ReduceOp) -> tuple[torch.Tensor, int]:
    """One replica's share of a `reduce` with an axis: its sum over those dimensions, and how many entries that were."""
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"reduce with axis={axis} needs dense tensors; got layout {tensor.layout}. Use axis=None."
        )
    if tensor.dtype == torch.bool:
        raise WrongTypeError("reduce cannot combine bool tensors; convert them to an integer or floating dtype first.")
    dims = normalize_dims(axis, tensor.dim(), "reduce")
    # torch.sum promotes small integers to int64; a SUM keeps its dtype as the element-wise one does.
    dtype = sum_dtype(tensor.dtype) if op is ReduceOp.MEAN else tensor.dtype
    return tensor.sum(dim=dims, dtype=dtype), math.prod(tensor.shape[dim] for dim in dims)


def reduce_components(op: ReduceOp, components: Sequence[object], axis: Axis) -> torch.Tensor:
    """`Strategy.reduce` on the components of all replicas. A mean over an axis divides by the total length, so partial
    batches weigh by their rows; with no rows at all it is nan."""
    tensors = [as_tensor(component, "reduce") for component in components]
    if axis is None:
        return combine(op, tensors)
    _check_alike(tensors, "reduce", shapes=False)
    shares = [sum_and_count(tensor, axis, op) for tensor in tensors]
    total = combine(ReduceOp.SUM, [share for share, _ in shares])
    count = sum(count for _, count in shares)
    return (total / count).to(mean_dtype(tensors[0].dtype)) if op is ReduceOp.MEAN else total


def weighted_mean_of(value: object, num_replicas: int) -> object:
    """`Strategy.reduce` by weights, with all components at hand. What is the same on all replicas is its own mean."""
    if isinstance(value, PerReplica):
        return weighted_mean(value.values, require_known(value.known_weights()))
    if isinstance(value, DistributedValues):
        return reduce_components(ReduceOp.MEAN, value.values, None)
    return reduce_plain(ReduceOp.MEAN, value, None, num_replicas)


def weighted_mean(components: Sequence[object], weights: Sequence[float]) -> torch.Tensor:
    """Components of weight 0 are left out: of no rows they may be nan. Where all are of weight 0 they count alike."""
    tensors = [as_tensor(component, "reduce") for component in components]
    _check_alike(tensors, "reduce", shapes=True)
    if len(set(weights)) <= 1:
        return combine(ReduceOp.MEAN, tensors)
    dtype = tensors[0].dtype
    parts = [tensor.to(sum_dtype(dtype)) * weight for tensor, weight in zip(tensors, weights, strict=True) if weight]
    return (combine(ReduceOp.SUM, parts).to(tensors[0].device) / sum(weights)).to(mean_dtype(dtype))


def require_known(weights: Sequence[float | None]) -> list[float]:
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(weights):
        raise InvalidArgumentError(
            "reduce with weighted=True got a value of which nothing says how much each replica counts. Pass what "
            "strategy.run returned for a batch of strategy.distribute_dataset, or call "
            "get_replica_context().set_weight(rows) in the step; or reduce rows by their axis."
        )
    return known


def parse_gather_axis(axis: Any) -> int:
    """An int, a one-element integer tensor, or a one-element tuple of an int."""
    if axis is None:
        raise InvalidArgumentError(
            "gather needs an axis: the dimension along which the components are joined. Got None; write "
            "gather(value, axis=0) for rows."
        )
    if isinstance(axis, tuple | list) and len(axis) == 1:
        axis = axis[0]
    try:
        return operator.index(axis)
    except TypeError:
        raise WrongTypeError(f"gather's axis must be an int; got {type(axis).__name__} {axis!r}.") from None


def gather_components(components: Sequence[Any], axis: int, call: str = "gather") -> Any:
    """The components joined along ``axis``, in replica order, on the first one's device. Arrays of strings stay so."""
    _require_any(components, call)
    if all(isinstance(one, np.ndarray) and one.dtype == object for one in components):
        shapes = [one.shape for one in components]
        dim = check_gather_shapes(shapes, axis, call)
        return np.concatenate(list(components), axis=dim)
    tensors = [as_tensor(one, call) for one in components]
    tensors = [one.to_dense() if one.layout == torch.sparse_coo else one for one in tensors]
    dim = check_gather_shapes([tuple(one.shape) for one in tensors], axis, call)
    for index, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise InvalidArgumentError(
                f"{call} got {tensors[0].dtype} on replica 0 and {tensor.dtype} on replica {index}; "
                "convert to one dtype first."
            )
    return torch.cat([one.to(tensors[0].device) for one in tensors], dim=dim)


def check_gather_shapes(shapes: Sequence[tuple[int, ...]], axis: int, call: str) -> int:
    """The non-negative dimension to join on, after checking that all other dimensions agree."""
    first = shapes[0]
    for index, shape in enumerate(shapes):
        if len(shape) != len(first):
            raise InvalidArgumentError(
                f"{call} got {len(first)} dimensions on replica 0 and {len(shape)} on replica {index}; "
                "ranks must be equal."
            )
    if not first:
        raise InvalidArgumentError(f"{call} got scalars, which have no axis to join on; reshape them to (1,) first.")
    (dim,) = normalize_dims(axis, len(first), call)
    for index, shape in enumerate(shapes):
        if shape[:dim] + shape[dim + 1 :] != first[:dim] + first[dim + 1 :]:
            raise InvalidArgumentError(
                f"{call} along axis {axis} got shape {first} on replica 0 and {shape} on replica {index}; "
                "all dimensions but that one must be equal. Give the axis along which they differ, or pad them first."
            )
    return dim


def reduce_plain(op: ReduceOp, value: Any, axis: Axis, num_replicas: int) -> object:
    """`Strategy.reduce` of a value that is not distributed.

    Without an axis it is taken as equal on all replicas: its mean is itself. So is the sum of one replica; of several
    it is an error (add up what replicas return instead), but for Python numbers: `Strategy.run` gives back one number
    for those that happen to be the same object on all replicas, and each counts. With an axis every replica
    contributes the whole value.
    """
    if axis is not None:
        return reduce_components(op, [value] * num_replicas, axis)
    if is_python_number(value) and op is ReduceOp.SUM and num_replicas > 1:
        return reduce_components(op, [value] * num_replicas, None)
    is_array = isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc"
    if is_array and not np.any(value):
        return value  # zeros stay zeros however often they are added
    if op is ReduceOp.MEAN:
        return value.to(mean_dtype(value.dtype)) if isinstance(value, torch.Tensor) else value
    if num_replicas == 1:
        if isinstance(value, TensorLike):
            return as_tensor(value, "reduce").clone()  # the sum stays when the variable changes
        return as_tensor(value, "reduce") if is_array else value
    raise InvalidArgumentError(
        f"reduce('sum') over {num_replicas} replicas got a {type(value).__name__} that is the same for all of them, "
        "not a value per replica. Pass what strategy.run returned, or multiply by num_replicas_in_sync yourself."
    )


def gather_plain(value: object, axis: int) -> object:
    """`Strategy.gather` of a value that is not distributed: the value itself, once the axis has been checked."""
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        raise UnsupportedError(f"gather needs dense tensors; got layout {value.layout}. Call .to_dense() first.")
    if isinstance(value, torch.Tensor | np.ndarray):
        check_gather_shapes([tuple(value.shape)], axis, "gather")
    return value
