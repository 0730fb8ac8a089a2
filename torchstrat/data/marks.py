"""What of a batch is opened, and what a program says about leaves that have no row per example along dim 0.

Opened are the containers of `torchstrat.core.nest`, and dataclasses. A program's own containers are rebuilt by their
own protocol, or refused by name; values that were computed when one was made are never those of other rows.

Marks are on the values, where a collate function (or whatever makes the batch) knows what they mean: they travel with
them through data-loading workers and pinned memory, and follow no structure that would have to be told twice. The step,
and a loop over a distributed dataset, get the values without them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from torchstrat.core import nest
from torchstrat.core._torch_private import pinned
from torchstrat.core.errors import InvalidArgumentError, StructureMismatchError, WrongTypeError

_MISSING: Final = object()


def is_container(value: object) -> bool:
    """Whether a batch may have its leaves in ``value``."""
    return nest.is_nested(value) or _is_dataclass(value)


def _is_dataclass(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "__dataclass_fields__")


def children(value: object) -> list[nest.Nest]:
    """What a container holds, in order; of a dataclass, what it is made of."""
    if nest.is_nested(value):
        return nest.values_of(value)
    return [getattr(value, name) for name in names(value)]


def children_beside(like: object, other: object) -> list[nest.Nest]:
    """What ``other``, another container of its kind, holds, in the order of ``like``: what collate functions make of
    rows with their keys in another order has them in another order.

    Raises:
        StructureMismatchError: it holds other things.
    """
    kinds = [(nest.is_nested(one), isinstance(one, Mapping)) for one in (like, other)]
    if kinds[0] != kinds[1] or not is_container(other) or len(children(like)) != len(children(other)):
        raise StructureMismatchError(
            f"batches of one structure were needed; got a {type(like).__name__} beside a {type(other).__name__}, or "
            f"with another number of entries: {like!r:.100} and {other!r:.100}. Hand out the same columns every time."
        )
    return nest.values_beside(like, other) if nest.is_nested(like) else children(other)


def rebuild(like: object, values: list[object]) -> nest.Nest:
    """A container of the kind of ``like`` that holds ``values``.

    Raises:
        WrongTypeError: its class does not take them.
    """
    return nest.rebuild(like, values) if nest.is_nested(like) else _rebuild_dataclass(like, values)


def with_children(value: nest.Nest, held: Sequence[object], made: list[object]) -> nest.Nest:
    """`rebuild`, or ``value`` itself where all that was ``made`` of what it ``held`` is the same."""
    return value if all(new is old for new, old in zip(made, held, strict=True)) else rebuild(value, made)


def is_opaque(value: object) -> bool:
    """Whether a container's parts belong together, so that they are neither cut nor emptied one by one."""
    return isinstance(value, PackedSequence)


def names(value: Any) -> list[str]:
    """Of the fields of a dataclass that it is made of."""
    return [field.name for field in dataclasses.fields(value) if field.init]


def _rebuild_dataclass(like: Any, values: list[object]) -> object:
    """By `dataclasses.replace`, so that what ``__post_init__`` computes is that of the new values."""
    given = dict(zip(names(like), values, strict=True))
    try:
        made = dataclasses.replace(like, **given)
        changed = [name for name, value in given.items() if getattr(made, name) is not value]
        if changed:
            raise TypeError(f"its __post_init__ makes something else of {', '.join(changed)}")
        _carry_over(like, made, given)
    except Exception as error:
        raise WrongTypeError(
            f"a batch that is a {type(like).__qualname__} cannot be split over replicas: dataclasses.replace does not "
            f"make one of other rows ({type(error).__name__}: {error}). Hand out a dict, or let the collate function "
            "compute what its __post_init__ does."
        ) from error
    return made


def _carry_over(like: Any, made: object, given: dict[str, object]) -> None:
    """Attributes that were set from outside come along; what follows from the fields has been computed anew."""
    others = {field.name for field in dataclasses.fields(like)} | set(getattr(like, "__dict__", ()))
    others -= set(given)
    if not others:
        return
    again = dataclasses.replace(like)
    for name in sorted(others):
        value, computed = getattr(like, name, _MISSING), getattr(again, name, _MISSING)
        if _is_equal(value, computed):
            continue
        if computed is not _MISSING:
            raise TypeError(f"its {name} has been changed since it was made")
        object.__setattr__(made, name, value)


def _is_equal(first: object, second: object) -> bool:
    if first is second:
        return True
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bool(torch.equal(first, second))
    return type(first) is type(second) and bool(first == second)


MarkedT = TypeVar("MarkedT", bound="Marked")


class Marked:
    """A leaf of a batch and what is said about its rows. Made by `same`, `examples` and `axis`."""

    def __init__(self, value: nest.Nest) -> None:
        self.value = value

    def holding(self: MarkedT, value: nest.Nest) -> MarkedT:
        """Another value, of which the same is said."""
        made = copy.copy(self)
        made.value = value
        return made

    def map(self, fn: Callable[[nest.Nest], nest.Nest]) -> Marked:
        """With ``fn`` of what it holds; itself where that changes nothing."""
        made = fn(self.value)
        return self if made is self.value else self.holding(made)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r:.100})"

    def pin_memory(self) -> Marked:
        """What a `DataLoader` with ``pin_memory=True`` calls."""
        return self.holding(pinned(self.value))


class Same(Marked):
    """Without rows: every replica gets all of it."""


class Examples(Marked):
    """A list with an example per row."""

    def map(self, fn: Callable[[nest.Nest], nest.Nest]) -> Marked:
        made = with_children(self.value, self.value, [fn(one) for one in self.value])
        return self if made is self.value else self.holding(made)


class Along(Marked):
    """A tensor or an array whose rows are along ``dim``."""

    def __init__(self, value: nest.Nest, dim: int) -> None:
        super().__init__(value)
        self.dim = dim


def same(value: nest.Nest) -> nest.Nest:
    """Mark what every replica gets whole: a mask over positions, class weights, a number, a configuration.

    For the batches of `Strategy.distribute_dataset`, whose leaves are otherwise split on dim 0::

        def collate(rows):
            x = pad_sequence(rows, batch_first=True)
            return {"x": x, "mask": ts.data.same(causal_mask(x.size(1))), "epoch": ts.data.same(3)}

    The step gets the plain value. In lists, tuples and dicts each leaf is marked.
    """
    return nest.map_structure(lambda leaf: Same(_unmarked(leaf, "same")), value)


def examples(value: Sequence[object]) -> Examples:
    """Mark a list as one that has an entry for each example: images of different sizes, targets of detection.

    For the batches of `Strategy.distribute_dataset`: each replica gets a list of its own rows' entries, which may be
    anything. Without the mark a list holds columns, each a tensor whose rows are along dim 0::

        def collate(rows):
            images, targets = zip(*rows)
            return ts.data.examples(images), ts.data.examples(targets)

    Raises:
        WrongTypeError: no list and no tuple.
    """
    if not isinstance(value, list | tuple):
        raise WrongTypeError(f"ts.data.examples needs a list with an entry for each row; got {type(value).__name__}.")
    for leaf in nest.leaves(value):
        _unmarked(leaf, "examples")
    return Examples(value)


def axis(value: nest.Nest, dim: int) -> nest.Nest:
    """Mark tensors whose rows are along ``dim``: 1 for time-first batches, as recurrent layers take them.

    For the batches of `Strategy.distribute_dataset`, whose leaves are otherwise split on dim 0::

        def collate(rows):
            return ts.data.axis(pad_sequence(rows), 1)      # (steps, rows)

    The step gets plain tensors, cut along ``dim``. In lists, tuples and dicts each tensor is marked.

    Args:
        value: a dense or sparse COO tensor, a NumPy array, or a nest of them.
        dim: which of its dimensions has a row per example; negative ones count from the end.

    Raises:
        WrongTypeError: something else in it.
        InvalidArgumentError: a tensor without this dimension.
    """

    def mark(leaf: object) -> Along:
        leaf = _unmarked(leaf, "axis")
        if not isinstance(leaf, torch.Tensor | np.ndarray):
            raise WrongTypeError(f"ts.data.axis needs tensors or arrays; got {leaf!r:.60}, a {type(leaf).__name__}.")
        if not can_mark(leaf):
            raise WrongTypeError("ts.data.axis needs dense or sparse COO tensors; the rows of others are along dim 0.")
        if not -leaf.ndim <= dim < leaf.ndim:
            raise InvalidArgumentError(f"ts.data.axis(…, {dim}) got a tensor of shape {tuple(leaf.shape)}.")
        return Along(leaf, dim % leaf.ndim)

    if isinstance(dim, bool) or not isinstance(dim, int):
        raise WrongTypeError(f"ts.data.axis(value, dim) needs an int as dim; got {dim!r:.60}.")
    return nest.map_structure(mark, value)


def can_mark(leaf: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    """Whether it can be cut along any of its dimensions."""
    if not isinstance(leaf, torch.Tensor):
        return True
    return not leaf.is_nested and leaf.layout in (torch.strided, torch.sparse_coo)


def unmarked(batch: nest.Nest) -> nest.Nest:
    """A batch without marks, as its step gets it: for a loop in plain PyTorch over the same loader."""
    if isinstance(batch, Marked):
        return batch.value
    if not is_container(batch):
        return batch
    held = children(batch)
    return with_children(batch, held, [unmarked(value) for value in held])


def with_same_of(whole: nest.Nest, part: nest.Nest) -> nest.Nest:
    """``part``, with what ``whole`` has marked as the same in its place."""
    if isinstance(whole, Same) and isinstance(part, Same):
        return whole
    if not is_container(whole) or type(whole) is not type(part):
        return part
    ours = children(part)
    try:
        theirs = children_beside(part, whole)
    except StructureMismatchError:
        return part
    return with_children(part, ours, [with_same_of(one, other) for one, other in zip(theirs, ours, strict=True)])


def _unmarked(leaf: object, mark: str) -> object:
    if isinstance(leaf, Marked):
        raise WrongTypeError(
            f"ts.data.{mark} got a value that is marked already, as {type(leaf).__name__}: mark it once."
        )
    return leaf
