"""Sharding rules by parameter name, for models whose code should not be edited.

::

    ShardingRules({"*.linear1.weight": ("d0", None), "*.linear2.weight": (None, "d0")}, axis_sizes=(4,))

**The first rule that matches a name decides it**, so exceptions stand before the general rule. What no rule matches is
whole on every logical device. Everything that can be wrong is an error before any tensor is touched; that a rule
decided nothing can only be seen when all names have been asked for: `unused`, `require_all_used`.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.sharding.grid import REPLICA_AXIS, Sharding, logical_axis

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

    def _parsed(self, pattern: Any, entries: Any) -> tuple[str, tuple[tuple[str, ...], ...] | None]:
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

    def _parsed_dimension(self, pattern: str, dim: int, entry: Any) -> tuple[str, ...]:
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
        return f"  {rule.pattern!r} matches no parameter's name{nearest}."


def _checked_sizes(axis_sizes: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in axis_sizes)
    except TypeError:
        raise WrongTypeError(f"axis_sizes must be a sequence of integers; got {axis_sizes!r:.80}.") from None
    if not sizes or min(sizes) < 1:
        raise InvalidArgumentError(f"axis_sizes needs at least one axis, each of size 1 or more; got {sizes}.")
    return sizes


def _shown(spec: Sequence[Any]) -> str:
    """Entries as a user writes them."""
    plain = [axes[0] if len(axes) == 1 else (tuple(axes) or None) for axes in (_as_axes(entry) for entry in spec)]
    return f"({', '.join(map(repr, plain))}{',' if len(plain) == 1 else ''})"


def _as_axes(entry: Any) -> Sequence[str]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _listed(items: Sequence[str]) -> str:
    shown = ", ".join(items[:NAMES_SHOWN])
    return shown if len(items) <= NAMES_SHOWN else f"{shown} and {len(items) - NAMES_SHOWN} more"
