"""How a user says where a replica's tensors are cut over its logical devices: by annotations, or rules by name.

What annotations check is the same on every strategy. Where replicas have one logical device, exactly the trivial
annotations are accepted, so that an annotated step runs unchanged, and everything else is an error instead of a silent
no-op. Where they have several, an `Annotator` follows.

Sharding rules go by parameter name, for models whose code should not be edited::

    ShardingRules({"*.linear1.weight": ("d0", None), "*.linear2.weight": (None, "d0")}, axis_sizes=(4,))

**The first rule that matches a name decides it**, so exceptions stand before the general rule. What no rule matches is
whole on every logical device. Everything that can be wrong is an error before any tensor is touched; that a rule
decided nothing can only be seen when all names have been asked for: `unused`, `require_all_used`.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.sharding.grid import REPLICA_AXIS, DeviceGrid, ShardedEntry, Sharding, logical_axis

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


def shape_of(tensor: object) -> tuple[int | None, ...] | None:
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

    def split_to_logical_devices(self, tensor: object, partition_dimensions: Sequence[int]) -> Any:
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

    def replicate_to_logical_devices(self, tensor: object) -> Any:
        """Keep ``tensor`` whole on every logical device. Returns it."""
        if self._annotator is None:
            return tensor
        value = _as_tensor(tensor)
        return self._annotator.cut(value, Sharding.replicated(value.ndim, self._num_logical_devices))

    def assign_to_logical_device(self, tensor: object, logical_device_id: int) -> Any:
        """Say that ``tensor`` belongs on one logical device, numbered from 0. Returns it, unchanged.

        All logical devices of a replica run the same program, so that none can keep a tensor to itself: the number is
        checked and remembered, nothing is moved, and a warning says so once.

        Raises `ValueError` for an id out of range, `TypeError` for one that is no integer.
        """
        device = check_logical_device_id(logical_device_id, self._num_logical_devices)
        return tensor if self._annotator is None else self._annotator.assign(_as_tensor(tensor), device)


def annotator_of(strategy: object) -> Annotator | None:
    """What takes a strategy's annotations; None where its replicas have one logical device."""
    return strategy._annotator if isinstance(strategy, LogicalDeviceMethods) else None  # noqa: SLF001


def _as_tensor(value: object) -> torch.Tensor:
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


def _integer(dims: list[object], dim: int) -> int:
    entry = dims[dim]
    if isinstance(entry, int):
        return entry
    raise WrongTypeError(
        f"partition_dimensions={dims}: entry {dim} is {type(entry).__name__} {entry!r:.80}; numbers of parts are "
        "integers."
    )


DimensionRule: TypeAlias = str | Sequence[str] | None
"""One dimension: whole, cut along one axis, or along several, the slowest first."""

NAMES_SHOWN = 3


@dataclass
class _Rule:
    pattern: str
    spec: tuple[tuple[str, ...], ...] | None
    """None: whole, whatever the rank."""
    decided: int = 0
    taken: dict[str, str] = field(default_factory=dict)
    """Names that it matches and that an earlier rule decided → that rule's pattern."""


class ShardingRules:
    """How each parameter of a model is cut over the logical devices of a replica.

    Args:
        rules: Pattern → one entry for each dimension of the parameter: None (not cut), an axis such as ``"d0"``, or a
            tuple of axes, the slowest first; None instead of entries: whole, whatever the number of dimensions.
            Patterns match all of a dotted name, as `torch.nn.Module.named_parameters` gives it, case-sensitively: ``*``
            is any text, dots included, ``?`` one character, ``[0-3]`` one of several.
        axis_sizes: How many logical devices ``d0``, ``d1``, … have; ``(L,)`` for the one axis of L logical devices.

    Raises:
        WrongTypeError: A rule is not of this form.
        InvalidArgumentError: A rule names an axis that does not exist, or names one twice; a size is below 1.
    """

    def __init__(self, rules: Mapping[str, Sequence[DimensionRule] | None], axis_sizes: Sequence[int]) -> None:
        if not isinstance(rules, Mapping):
            raise WrongTypeError(
                f"sharding rules are a mapping from patterns of names to entries; got {type(rules).__name__} "
                f"{rules!r:.80}. Write {{'*.linear1.weight': ('d0', None)}}."
            )
        self._sizes = _checked_sizes(axis_sizes)
        self._axes = {logical_axis(index): size for index, size in enumerate(self._sizes)}
        self._rules = [_Rule(*self._parsed(pattern, entries)) for pattern, entries in rules.items()]
        self._names: dict[str, None] = {}
        """Asked for so far, in order."""

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """The sizes of ``d0``, ``d1``, …"""
        return self._sizes

    def sharding_for(self, name: str, shape: Sequence[int]) -> Sharding:
        """How the parameter ``name`` of ``shape`` is cut; whole if no rule matches.

        Raises `InvalidArgumentError` if the rule has another number of entries than the shape has dimensions, or a
        dimension does not divide.
        """
        self._names[name] = None
        matching = [rule for rule in self._rules if fnmatchcase(name, rule.pattern)]
        for rule in matching[1:]:
            rule.taken[name] = matching[0].pattern
        if not matching:
            return self._whole(len(shape))
        matching[0].decided += 1
        return self._applied(matching[0], name, tuple(shape))

    def unused(self) -> list[str]:
        """The patterns that decided none of the names asked for so far."""
        return [rule.pattern for rule in self._rules if not rule.decided]

    def require_all_used(self) -> None:
        """Raise `InvalidArgumentError` if `unused` is not empty, saying of each pattern why. To call at the end."""
        complaints = [self._why_unused(rule) for rule in self._rules if not rule.decided]
        if complaints:
            raise InvalidArgumentError("\n".join(["sharding rules that decide no parameter:", *complaints]))

    def __len__(self) -> int:
        return len(self._rules)

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self._axes.items())
        return f"<ShardingRules {[rule.pattern for rule in self._rules]} over {axes}>"

    # -- parsing ----------------------------------------------------------------------------------------------------

    def _parsed(self, pattern: object, entries: object) -> tuple[str, tuple[tuple[str, ...], ...] | None]:
        if not isinstance(pattern, str):
            raise WrongTypeError(f"the pattern of a sharding rule is text; got {type(pattern).__name__} {pattern!r}.")
        if entries is None:
            return pattern, None
        if isinstance(entries, str) or not isinstance(entries, Sequence):
            raise WrongTypeError(
                f"sharding rule {pattern!r}: expected one entry per dimension, such as (None, 'd0'); got "
                f"{type(entries).__name__} {entries!r:.80}."
            )
        spec = tuple(self._parsed_dimension(pattern, dim, entry) for dim, entry in enumerate(entries))
        used = [axis for axes in spec for axis in axes]
        repeated = sorted({axis for axis in used if used.count(axis) > 1})
        if repeated:
            raise InvalidArgumentError(
                f"sharding rule {pattern!r}: {_shown(entries)} uses {', '.join(repeated)} more than once; an axis can "
                "cut one dimension only."
            )
        return pattern, spec

    def _parsed_dimension(self, pattern: str, dim: int, entry: object) -> tuple[str, ...]:
        if entry is None:
            return ()
        axes = (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
            raise WrongTypeError(
                f"sharding rule {pattern!r}: entry {dim} is {type(entry).__name__} {entry!r:.80}; it must be None, the "
                "name of an axis, or a tuple of names."
            )
        for axis in axes:
            self._check_axis(pattern, dim, axis)
        return tuple(axes)

    def _check_axis(self, pattern: str, dim: int, axis: str) -> None:
        if axis == REPLICA_AXIS:
            raise InvalidArgumentError(
                f"sharding rule {pattern!r}: entry {dim} is {REPLICA_AXIS!r}; every replica has the whole parameter, "
                f"and rules cut it over the replica's own logical devices: {self._axes_shown()}."
            )
        if axis not in self._axes:
            raise InvalidArgumentError(
                f"sharding rule {pattern!r}: entry {dim} names the axis {axis!r}; there is {self._axes_shown()}."
            )

    def _axes_shown(self) -> str:
        return ", ".join(f"{axis!r} (size {size})" for axis, size in self._axes.items())

    # -- applying ---------------------------------------------------------------------------------------------------

    def _whole(self, rank: int) -> Sharding:
        return Sharding(self._sizes, ((),) * rank)

    def _applied(self, rule: _Rule, name: str, shape: tuple[int, ...]) -> Sharding:
        if rule.spec is None:
            return self._whole(len(shape))
        if len(rule.spec) != len(shape):
            raise InvalidArgumentError(
                f"sharding rule {rule.pattern!r} is {_shown(rule.spec)}, and {name} has the shape {shape}: the "
                f"numbers of entries and dimensions differ, {len(rule.spec)} and {len(shape)}; give one entry per "
                f"dimension, or write a rule of its own for {name} before this one."
            )
        sharding = Sharding(self._sizes, tuple(tuple(a for a in axes if self._axes[a] > 1) for axes in rule.spec))
        for dim, (size, parts) in enumerate(zip(shape, sharding.parts(1), strict=True)):
            if size % parts:
                raise InvalidArgumentError(
                    f"sharding rule {rule.pattern!r} cuts dimension {dim} of {name} {shape} into {parts} equal parts "
                    f"along {', '.join(sharding.spec[dim])}; {size} does not divide by {parts}."
                )
        return sharding

    # -- what decided nothing ---------------------------------------------------------------------------------------

    def _why_unused(self, rule: _Rule) -> str:
        if rule.taken:
            earlier = sorted(set(rule.taken.values()))
            return (
                f"  {rule.pattern!r} comes too late: {_listed(sorted(rule.taken))} is decided by the earlier rule "
                f"{_listed([repr(pattern) for pattern in earlier])}; move {rule.pattern!r} before it."
            )
        similar = difflib.get_close_matches(rule.pattern, [*self._names], NAMES_SHOWN, cutoff=0.0)
        nearest = f"; the most similar are {_listed(similar)}" if similar else "; no name has been asked for"
        shared = " A parameter that modules share goes by the first of its names alone." if similar else ""
        return f"  {rule.pattern!r} matches no parameter's name{nearest}.{shared}"


def _checked_sizes(axis_sizes: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in axis_sizes)
    except TypeError:
        raise WrongTypeError(f"axis_sizes must be a sequence of integers; got {axis_sizes!r:.80}.") from None
    if not sizes or min(sizes) < 1:
        raise InvalidArgumentError(f"axis_sizes needs at least one axis, each of size 1 or more; got {sizes}.")
    return sizes


def _shown(spec: Sequence[object]) -> str:
    """Entries as a user writes them."""
    plain = [axes[0] if len(axes) == 1 else (tuple(axes) or None) for axes in (_as_axes(entry) for entry in spec)]
    return f"({', '.join(map(repr, plain))}{',' if len(plain) == 1 else ''})"


def _as_axes(entry: Any) -> Sequence[str]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _listed(items: Sequence[str]) -> str:
    shown = ", ".join(items[:NAMES_SHOWN])
    return shown if len(items) <= NAMES_SHOWN else f"{shown} and {len(items) - NAMES_SHOWN} more"
