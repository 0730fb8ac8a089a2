"""Nested structures of values: lists, tuples, named tuples and dicts, at any depth.

A *leaf* is everything that is not one of those containers. `torch.utils._pytree` is private and opens more types
(dataclasses, registered classes) than the semantics of this library name, hence these few functions.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchstrat.core.errors import StructureMismatchError, WrongTypeError

Nest = Any


# Of types. Every run asks for every argument, and an abstract class takes long to answer. OmegaConf's containers hold
# no tensors, and raise where they are opened at a value that is still missing: they are passed whole.
_is_container: Callable[[object], bool] = functools.lru_cache(1024)(
    lambda kind: issubclass(kind, (list, tuple, Mapping)) and kind.__module__.partition(".")[0] != "omegaconf"
)
_is_mapping: Callable[[object], bool] = functools.lru_cache(1024)(lambda kind: issubclass(kind, Mapping))


def is_nested(value: Nest) -> bool:
    """Whether ``value`` is a container that the functions below open."""
    return _is_container(type(value))


def children(value: Nest) -> list[tuple[Any, Nest]]:
    """``(key, child)`` pairs of one container, in order."""
    return list(value.items() if _is_mapping(type(value)) else enumerate(value))


def values_of(value: Nest) -> list[Nest]:
    """The children of one container without their keys."""
    return list(value.values() if _is_mapping(type(value)) else value)


def rebuild(like: Nest, values: list[Nest]) -> Nest:
    """A container of the kind of ``like`` (same keys, same attributes, same class) holding ``values``.

    Lists and tuples may become shorter or longer.

    Raises:
        WrongTypeError: its class cannot be copied, or its copy does not take other values.
    """
    kind = type(like)
    if kind is dict:
        return dict(zip(like, values, strict=True))
    if kind is list:
        return list(values)
    if kind is tuple:
        return tuple(values)
    if isinstance(like, tuple):
        return _rebuild_tuple(like, values)
    try:
        return _filled_copy(like, values) if hasattr(like, "__setitem__") else _made_of(like, values)
    except Exception as error:
        plain = "dict" if _is_mapping(kind) else "list"
        raise WrongTypeError(
            f"a {kind.__qualname__} cannot be handed to replicas: a copy of it does not take their values "
            f"({type(error).__name__}: {error}). Pass a plain {plain}, or let its class have __copy__ and __setitem__."
        ) from error


def _filled_copy(like: Any, values: list[Nest]) -> Nest:
    """By its own protocol, for its constructor may take anything: a copy, whose entries are replaced."""
    keys = list(like) if _is_mapping(type(like)) else None
    kept = values_of(like)
    computed = _differ(values_of(like), kept)  # anew by each look: nobody can say whether a copy shares them
    for copied in (copy.copy, _copy_of_its_own):
        made: object = copied(like)
        _fill(made, keys, values)
        if computed or not _differ(values_of(like), kept):
            return made
        _fill(like, keys, kept)  # the copy holds its entries in the same dict as the original
    raise TypeError("it shares its entries with its copies")


def _made_of(like: Mapping[Any, Nest], values: list[Nest]) -> Nest:
    """One that is read only, as a proxy of a dict is, by its constructor; itself where it has these values already."""
    if not _differ(values_of(like), values):
        return like
    made: Any = type(like)(dict(zip(like, values, strict=True)))  # type: ignore[call-arg]
    if list(made) != list(like) or _differ(values_of(made), values):
        raise TypeError("its constructor makes something else of a dict")
    return made


def _fill(container: Any, keys: list[object] | None, values: list[Nest]) -> None:
    """``keys``: of a mapping; None for a list, which may become shorter."""
    if keys is None:
        container[:] = values
        return
    for key, value in zip(keys, values, strict=True):
        container[key] = value


def _differ(first: list[Nest], second: list[Nest]) -> bool:
    return len(first) != len(second) or any(one is not other for one, other in zip(first, second, strict=True))


def _copy_of_its_own(like: object) -> object:
    """A copy that shares none of the containers which hold its entries."""
    made = copy.copy(like)
    for name, value in vars(made).items():
        if isinstance(value, dict | list):
            object.__setattr__(made, name, copy.copy(value))
    return made


def _rebuild_tuple(like: tuple[object, ...], values: list[Nest]) -> Nest:
    """As unpickling makes it: without its constructor, which may take anything, and with its attributes."""
    kind = type(like)
    try:
        made = tuple.__new__(kind, values)
    except TypeError:  # a class written in C, such as torch's results of several values, or torch.Size, of numbers only
        try:
            return kind(values)
        except TypeError:
            return tuple(values)
    if attributes := getattr(like, "__dict__", None):
        made.__dict__.update(attributes)
    return made


def map_structure(fn: Callable[..., object], first: Nest, *others: Nest) -> Nest:
    """Apply ``fn`` to the leaves of nests of equal structure, and return that structure; by key in dicts.

    Raises:
        StructureMismatchError: dicts have other keys.
    """
    if not is_nested(first):
        return fn(first, *others)
    if not others:
        return rebuild(first, [map_structure(fn, child) for child in values_of(first)])
    columns = [values_of(first), *(values_beside(first, other) for other in others)]
    return rebuild(first, [map_structure(fn, *row) for row in zip(*columns, strict=True)])


def values_beside(first: Nest, other: Nest) -> list[Nest]:
    """Of ``other``, in the order of ``first``; of dicts by key.

    Raises:
        StructureMismatchError: dicts have other keys.
    """
    if not (_is_mapping(type(first)) and _is_mapping(type(other))):
        return values_of(other)
    if first.keys() != other.keys():
        raise StructureMismatchError(
            f"values of one structure were needed; got a {type(first).__name__} with the keys {list(first)} beside one "
            f"with {list(other)}. Give all of them the same keys."
        )
    return [other[key] for key in first]


def map_by_keys(fn: Callable[..., object], value: Nest) -> Nest:
    """`map_structure`, with ``fn`` called for the entries of a dict in the order of their keys: for what replicas do
    together for each leaf. Each may have filled its dict in another order, from a set of names, say."""
    if not is_nested(value):
        return fn(value)
    if not _is_mapping(type(value)):
        return rebuild(value, [map_by_keys(fn, child) for child in value])
    made = {key: map_by_keys(fn, child) for key, child in _sorted(value)}
    return rebuild(value, [made[key] for key in value])


def flatten_by_keys(value: Nest) -> list[object]:
    """The leaves in the order in which `map_by_keys` takes them."""
    if not is_nested(value):
        return [value]
    inner = [child for _, child in _sorted(value)] if _is_mapping(type(value)) else value
    return [leaf for child in inner for leaf in flatten_by_keys(child)]


def _sorted(value: Mapping[Any, Nest]) -> list[tuple[Any, Nest]]:
    entries = list(value.items())
    try:
        return sorted(entries, key=operator.itemgetter(0))
    except TypeError:  # keys of several kinds have no order but their own
        return entries


def leaves(value: Nest) -> Iterator[Any]:
    """The leaves of a nest, depth first, dicts in insertion order."""
    return iter(flatten(value))


def flatten(value: Nest) -> list[object]:
    """The same as a list."""
    if not is_nested(value):
        return [value]
    found: list[object] = []
    _collect(value, found)
    return found


def _collect(container: Nest, found: list[object]) -> None:
    for child in values_of(container):
        if _is_container(type(child)):
            _collect(child, found)
        else:
            found.append(child)
