"""The names in a checkpoint: a path for each value, and pieces of tensors with their place in the whole.

By them a part of it is restored (`Selection`), and told what becomes of names that do not fit. They have dots there:
``model.table`` stands for ``model.table.weight`` and whatever else is below it, and not for ``model.tables``. An item
says which names it can restore by themselves; what is smaller comes with the whole.
"""

from __future__ import annotations

import copy
import difflib
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError

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


_MOST_PROBLEMS = 20
_MOST_NEAR = 3


class SkippedKeys(NamedTuple):
    """What `Checkpoint.restore` has left as it was, by name; all empty where everything fits.

    ``missing_keys``: of the program, and not in the checkpoint. ``unexpected_keys``: the other way round.
    ``mismatched_keys``: of another shape, dtype or kind.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    mismatched_keys: list[str]


class Selection(NamedTuple):
    """The arguments of `Checkpoint.restore`. ``only``: names, sorted; None for everything."""

    only: tuple[str, ...] | None = None
    strict: bool = True

    @classmethod
    def of(cls, only: object, strict: object, objects: Collection[str]) -> Selection:
        """Checked, as far as the names of the ``objects`` tell. Raises `WrongTypeError` and `InvalidArgumentError`."""
        if not isinstance(strict, bool):
            raise WrongTypeError(f"strict must be True or False; got {strict!r:.80}.")
        if only is None:
            return cls(None, strict)
        names = (only,) if isinstance(only, str) else only
        if isinstance(names, Mapping) or not isinstance(names, Iterable):
            raise WrongTypeError(f"only must be names, as ('model.table', 'optimizer'); got {only!r:.80}.")
        names = tuple(names)
        for name in names:
            if not isinstance(name, str):
                raise WrongTypeError(f"only must be names, as ('model.table', 'optimizer'); got {name!r:.80} in it.")
        if not names:
            raise InvalidArgumentError("only=() names nothing to restore; leave it out to restore everything.")
        for name in names:
            if name.partition(".")[0] not in (*objects, OWN):
                raise _not_among(name, list(objects))
        return cls(tuple(sorted(set(names))), strict)

    def __str__(self) -> str:
        """As it is called, equal on ranks that ask for the same."""
        given = [f"only={self.only!r}"] if self.only is not None else []
        return ", ".join(given if self.strict else [*given, "strict=False"])

    def takes(self, key: str) -> bool:
        return self.only is None or any(is_under(key, name) for name in self.only)

    def require_among(self, names: Collection[str]) -> None:
        """Raise for what is asked for and is none of the objects' ``names``, nor above some."""
        for name in self.only or ():
            if any(is_under(one, name) for one in names):
                continue
            whole = next((one for one in names if is_under(name, one)), None)
            if whole is not None:
                raise InvalidArgumentError(f"only= asks for {name!r}, and {whole} is restored as a whole: name that.")
            raise _not_among(name, names)


def is_under(key: str, name: str) -> bool:
    """Whether ``key`` is ``name``, or begins with it and a dot; all keys are under the empty name."""
    return key == name or not name or key.startswith(f"{name}.")


class Comparison:
    """What was found while objects were compared with a checkpoint."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._problems: dict[str, str | None] = {}  # with the name that was sought, and not found
        self._skipped = SkippedKeys([], [], [])

    @property
    def is_strict(self) -> bool:
        return self._selection.strict

    def takes(self, key: str) -> bool:
        return self._selection.takes(key)

    def missing(self, key: str) -> None:
        self._note(key, f"{key} is missing in the checkpoint", self._skipped.missing_keys, key)

    def unexpected(self, key: str) -> None:
        self._note(key, f"{key} is in the checkpoint and not in the program", self._skipped.unexpected_keys)

    def differs(self, key: str, problem: str) -> None:
        self._note(key, problem, self._skipped.mismatched_keys)

    def wrong(self, problem: str) -> None:
        """What cannot be skipped."""
        self._problems[problem] = None

    def _note(self, key: str, problem: str, skipped: list[str], sought: str | None = None) -> None:
        if self._selection.strict:
            self._problems[problem] = sought
        elif key not in skipped:  # shards have one name
            skipped.append(key)

    def skipped(self) -> SkippedKeys:
        return SkippedKeys(*map(sorted, self._skipped))

    def require_fit(self, folder: object, stored: Collection[str]) -> None:
        """``stored``: the names that the checkpoint has."""
        if not self._problems:
            return
        shown = list(self._problems.items())[:_MOST_PROBLEMS]
        lines = "".join(f"\n  {text}{'' if sought is None else _near(sought, stored)}" for text, sought in shown)
        more = f"\n  and {len(self._problems) - _MOST_PROBLEMS} more" if len(self._problems) > _MOST_PROBLEMS else ""
        raise InvalidArgumentError(
            f"{folder} does not fit this program; nothing was changed:{lines}{more}\n"
            "Give Checkpoint the objects under the names, and of the shapes, with which they were saved; or restore a "
            "part of it, restore(path, only=(…)), or what fits, restore(path, strict=False)."
        )


def _not_among(name: str, names: Collection[str]) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"only= asks for {name!r}, which is no name of this checkpoint's objects{_near(name, names)}. Names are those "
        "of ts.Checkpoint(model=…), and below them those of state_dict(): 'model', 'model.table', "
        "'optimizer.state.table.weight'."
    )


def _near(name: str, names: Collection[str]) -> str:
    parts = {".".join(one.split(".")[:count]) for one in names for count in range(1, one.count(".") + 2)}
    found = [one for one in sorted(parts) if one.endswith(f".{name}")]
    found += [one for one in difflib.get_close_matches(name, sorted(parts), _MOST_NEAR) if one not in found]
    return f" (near: {', '.join(found[:_MOST_NEAR])})" if found else ""
