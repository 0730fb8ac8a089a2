"""Which part of a checkpoint is restored, and what becomes of names that do not fit.

Names have dots: ``model.table`` stands for ``model.table.weight`` and whatever else is below it, and not for
``model.tables``. An item says which names it can restore by themselves; what is smaller comes with the whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from torchstrat.checkpoint.pieces import OWN
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError

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
