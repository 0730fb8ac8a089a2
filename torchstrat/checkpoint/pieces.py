"""What a checkpoint calls things: a path for each value, and pieces of tensors with their place in the whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

OWN = "torchstrat"
"""The name under which a checkpoint has what is of the job itself, and of the objects beside their values."""

VERSIONS, STRUCTURE = "versions", "structure"
"""Under `OWN`: of modules, what their versions are; of other objects, how their ``state_dict()`` is nested."""

KeyPath = tuple[str | int, ...]
"""Where a value is in the checkpoint's nest: ``("model", "embedding.weight")``,
``("optimizer", "state", "embedding.weight", "exp_avg")``, ``("optimizer", "param_groups", 0, "lr")``."""


def key_of(path: KeyPath) -> str:
    """The flat name under which torch.distributed.checkpoint files it."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Piece:
    """Some rows, from number ``start``, of the tensor that the checkpoint calls ``path``; ``shape`` is the whole's.

    How many rows is said by the tensor it is the piece of. A scalar is a piece of itself.
    """

    path: KeyPath
    shape: tuple[int, ...]
    start: int = 0

    @property
    def key(self) -> str:
        return key_of(self.path)

    def offsets(self, first_row: int = 0) -> tuple[int, ...]:
        """Of the piece's row ``first_row``, in the whole."""
        return (self.start + first_row, *[0] * (len(self.shape) - 1)) if self.shape else ()

    def part(self, start: int) -> Piece:
        """The piece that begins ``start`` rows further down."""
        return Piece(self.path, self.shape, self.start + start)

    def entry(self, name: str, shape: tuple[int, ...] | None = None) -> Piece:
        """Something that is kept beside this tensor, row by row: its optimizer's moments. ``shape``: of the whole."""
        return Piece((*self.path, name), self.shape if shape is None else shape, self.start)


def is_block(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is written as rows of numbers. What is more than its numbers (quantized, sparse, nested) is
    pickled, like any other value."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return not value.is_quantized and not value.is_nested


def goes_by_rows(value: object, rows: int, shape: tuple[int, ...]) -> bool:
    """Whether an entry of an optimizer's state has one row for each of the ``rows`` of a tensor of ``shape``: it is cut
    with the tensor then. Anything else is of the tensor as a whole."""
    return is_block(value) and shape_goes_by_rows(tuple(value.shape), rows, shape)


def shape_goes_by_rows(entry: tuple[int, ...], rows: int, shape: tuple[int, ...]) -> bool:
    """The same by the shape of the ``entry``."""
    return bool(shape and entry) and (entry == shape or (rows > 1 and entry[0] == rows))


def flatten(path: KeyPath, value: object) -> dict[KeyPath, object]:
    """A ``state_dict`` as its leaves. Dictionaries with string keys are opened; everything else is a leaf as it is, so
    that it comes back as what it was."""
    if not _is_opened(value):
        return {path: value}
    return {leaf: found for key, inner in value.items() for leaf, found in flatten((*path, key), inner).items()}


def _is_opened(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(key, str) for key in value)


def is_of_job(path: KeyPath) -> bool:
    """Whether it is the job's own, rather than what objects have beside their values."""
    return path[0] == OWN and path[1] not in (VERSIONS, STRUCTURE)


Structure = tuple[Mapping[str, object], Sequence[tuple[str, Any]]]
"""How a ``state_dict`` that `flatten` has opened is nested: an empty one of its class, and by key the structure of what
is inside, None for a leaf. Plain, so that who has no torchstrat can read it."""


def structure_of(value: object) -> Structure | None:
    """None for a leaf."""
    if not _is_opened(value):
        return None
    inside = tuple((key, structure_of(one)) for key, one in value.items())
    return _empty_like(value), inside


def _empty_like(value: Mapping[str, object]) -> Mapping[str, object]:
    """A plain dict where there is none that pickles."""
    if type(value) is dict:
        return {}
    try:
        empty: Any = copy.copy(value)
        empty.clear()
        pickle.dumps(empty)
    except Exception:  # whatever its class raises
        return {}
    return empty  # type: ignore[no-any-return]


def restructured(structure: Structure | None, value: object) -> Any:
    """``value``, which `unflatten` has made, with the classes and the order of what was flattened."""
    if structure is None or not isinstance(value, Mapping):
        return value
    like, of_keys = structure
    whole: Any = copy.copy(like)
    for key, inside in of_keys:
        if key in value:
            whole[key] = restructured(inside, value[key])
    for key in value:
        if key not in whole:
            whole[key] = value[key]
    return whole


def unflatten(leaves: Mapping[KeyPath, object], depth: int) -> Any:
    """The reverse of `flatten`; the first ``depth`` entries of all paths are left out."""
    root: dict[object, Any] = {}
    for path, value in leaves.items():
        if len(path) == depth:
            return value
        inside = root
        for key in path[depth:-1]:
            inside = inside.setdefault(key, {})
        inside[path[-1]] = value
    return root
