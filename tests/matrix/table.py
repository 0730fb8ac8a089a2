"""What a table of cases is: cells, what each has to come to, and what it came to."""

from __future__ import annotations

import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch

from torchstrat.errors import TorchstratError

Verdict = Literal["right", "refused", "documented", "open"]


class Expected(NamedTuple):
    """What a cell has to come to."""

    verdict: Verdict
    reason: str = ""
    """Why it is not right: what the message says, where it is agreed on, or the number of a known difference."""
    error: type[Exception] | None = None
    says: str = ""
    """A regular expression that the error's, or the warning's, text has to match."""


RIGHT = Expected("right")


def refused(error: type[Exception], says: str, reason: str) -> Expected:
    """An error of ours of this class, whose text matches ``says`` (the thing's name and the remedy)."""
    return Expected("refused", reason, error, says)


def documented(reason: str, warns: str = "") -> Expected:
    """The cell checks the agreed meaning, and a warning that matches ``warns`` says so where it happens."""
    return Expected("documented", reason, says=warns)


def known_wrong(number: str, shows: type[Exception] = AssertionError) -> Expected:
    """A strict expected failure; the table's ``causes`` has the number's cause. It shows as numbers that differ, or as
    an error of this class, and as nothing else: a cell that comes to no end, or breaks, is wrong in another way."""
    return Expected("open", number, shows)


class Outcome(NamedTuple):
    """What a cell came to in one process; it travels between processes."""

    kind: Literal["right", "refused", "different", "failed", "gone"]
    """"gone": the cell itself has ended or stopped the process, by `places.leave`."""
    text: str = ""
    classes: tuple[str, ...] = ()
    """Of the error: its own name and those of its bases."""
    warned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One combination of row, column and place."""

    row: str
    column: str
    place: str
    check: Callable[[], None]
    """Called in every process of the place: returns where it is right, raises AssertionError where numbers differ
    (`assert_close` does), and lets errors of ours through."""
    expected: Expected = RIGHT

    @property
    def id(self) -> str:
        return f"{self.row} | {self.column} | {self.place}"


@dataclass(frozen=True)
class PlantedFault:
    """A rule that is switched off, which at least one of these cells has to notice."""

    name: str
    plant: Callable[[], AbstractContextManager[object]]
    """A context in which the rule is off; entered in every process of the cell's place."""
    cells: Sequence[str]
    """Ids of cells, of which at least one must come to something else than it has to."""


def switched_off(owner: Any, name: str, instead: Any) -> Callable[[], AbstractContextManager[object]]:
    """`PlantedFault.plant` where a rule is one attribute: in the block it is ``instead``."""
    return lambda: patch.object(owner, name, instead)


def cells_at(row: str, column: str, *where: str) -> tuple[str, ...]:
    """`PlantedFault.cells` of one row and column."""
    return tuple(f"{row} | {column} | {place}" for place in where or ("mirrored x2",))


@dataclass(frozen=True)
class Table:
    """All cells of one kind of question."""

    name: str
    question: str
    """The sentence that heads it in the documents."""
    make_cells: Callable[[], Iterable[Cell]]
    causes: Mapping[str, str] = field(default_factory=dict)
    """Number of a known difference → its cause."""
    faults: Sequence[PlantedFault] = ()
    environment: Literal["main", "tpu"] = "main"
    """Which of the two environments its cells run in."""
    bundle: int = 1
    """How many of its cells a place's processes run in one go."""
    leave: Callable[[], None] | None = None
    """Puts away what the cells of a bundle keep for one another; called in each process at its end."""
    sampled: int = 1
    """How many cells of each row, and of each column, are in the sample."""
    always: Sequence[str] = ()
    """Ids of cells in the sample that alone go through some lines of the package."""
    alike: Callable[[str], str] = str
    """Of a place: what its cells have in common with those of other places, where a sample need not have each row, or
    each column, in each of them."""
    in_forks: bool = False
    """Whether each cell runs in forks of processes that have started nothing: what it leaves is of no use."""

    @cached_property
    def cells(self) -> Mapping[str, Cell]:
        """By id, in the order in which they are generated."""
        cells = {cell.id: cell for cell in self.make_cells()}
        unknown = {cell.expected.reason for cell in cells.values() if cell.expected.verdict == "open"} - set(
            self.causes
        )
        if unknown:
            raise ValueError(f"table {self.name}: no cause is given for {sorted(unknown)}")
        return cells

    @cached_property
    def bundles(self) -> Mapping[str, Sequence[str]]:
        """By a cell's id: the ids of those that are run with it, of the same place, and of the sample if it is."""
        alike: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
        for cell in self.cells.values():
            alike[cell.place, cell.id in self.sample].append(cell.id)
        cuts = [ids[start : start + self.bundle] for ids in alike.values() for start in range(0, len(ids), self.bundle)]
        return {cell_id: bundle for bundle in cuts for cell_id in bundle}

    @cached_property
    def sample(self) -> frozenset[str]:
        """Ids of those that are named, of one that notices each planted fault, and of cells that together have each
        place, each row and each column, and each known difference. Of rows and columns, those that are fewer are in
        one of the places that are ``alike`` at least; the others take turns with these."""
        chosen: set[str] = set()
        counts: dict[tuple[str, str, str], int] = {}
        named = [self.cells[name] for name in (*self.always, *(fault.cells[0] for fault in self.faults))]
        for number, cell in enumerate([*named, *self._spread()]):
            place = self.alike(cell.place)
            keys = [
                ("row", cell.row, "" if self._rows_are_more else place),
                ("column", cell.column, place if self._rows_are_more else ""),
                ("place", cell.place, ""),
            ]
            if cell.expected.verdict == "open":
                keys.append(("open", cell.expected.reason, ""))
            if number < len(named) or any(counts.get(key, 0) < self.sampled for key in keys):
                chosen.add(cell.id)
                for key in keys:
                    counts[key] = counts.get(key, 0) + 1
        return frozenset(chosen)

    @cached_property
    def _rows_are_more(self) -> bool:
        cells = self.cells.values()
        return len({cell.row for cell in cells}) >= len({cell.column for cell in cells})

    def _spread(self) -> list[Cell]:
        """The cells in an order that meets other rows with other columns first, so that few of them cover all."""
        cells = self.cells.values()
        rows = {row: index for index, row in enumerate(dict.fromkeys(cell.row for cell in cells))}
        columns = {name: index for index, name in enumerate(dict.fromkeys(cell.column for cell in cells))}
        groups: dict[str, list[str]] = {}
        for place in dict.fromkeys(cell.place for cell in cells):
            groups.setdefault(self.alike(place), []).append(place)
        numbers = {group: index for index, group in enumerate(groups)}

        def distance(cell: Cell) -> tuple[int, int, int, int]:
            # Diagonals, another one for all places that are alike: which combinations are in the sample differs between
            # these, and which of them has a row, and which of those that are alike, differs between rows.
            row, column, group = rows[cell.row], columns[cell.column], self.alike(cell.place)
            diagonal = (row - column + numbers[group]) % max(len(columns), 1)
            turn = (numbers[group] - (row if self._rows_are_more else column)) % len(groups)
            return diagonal, row, turn, (groups[group].index(cell.place) - row) % len(groups[group])

        return sorted(cells, key=distance)


def observe(cell: Cell, fault: PlantedFault | None = None) -> Outcome:
    """Run a cell in this process and say what it came to; with a fault planted, if one is given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with fault.plant() if fault else nullcontext():
                cell.check()
            kind, text, classes = "right", "", tuple[str, ...]()
        except TorchstratError as caught_error:  # before AssertionError: one of ours is both
            kind, text, classes = "refused", str(caught_error), _names(caught_error)
        except AssertionError as caught_error:
            kind, text, classes = "different", str(caught_error) or traceback.format_exc(), _names(caught_error)
        except Exception as caught_error:
            kind, text, classes = "failed", traceback.format_exc(), _names(caught_error)
    return Outcome(kind, text, classes, tuple(str(warning.message) for warning in caught))


def _names(error: Exception) -> tuple[str, ...]:
    """Of its classes. The error itself would keep what the cell has open, such as an iterator's thread."""
    return tuple(base.__name__ for base in type(error).__mro__)


def misses(expected: Expected, outcomes: Sequence[Outcome]) -> str:
    """What is wrong with a cell that came to this in the processes of its place; empty if nothing is."""
    if expected.verdict == "open":
        return _misses_known(expected, outcomes)
    if expected.verdict == "refused":
        return _misses_refusal(expected, outcomes)
    wrong = [f"process {rank}: {o.kind}: {o.text}" for rank, o in enumerate(outcomes) if o.kind != "right"]
    if wrong:
        return "\n".join(wrong)
    said = [text for outcome in outcomes for text in outcome.warned]
    if expected.says and not any(re.search(expected.says, text, re.DOTALL) for text in said):
        return f"right, but no warning says {expected.says!r}; warned: {said}"
    return ""


def _misses_known(expected: Expected, outcomes: Sequence[Outcome]) -> str:
    assert expected.error is not None
    if all(outcome.kind == "right" for outcome in outcomes):
        return f"{expected.reason} no longer shows here: make the cell right"
    others = [
        f"process {rank}: {o.kind}: {o.text}"
        for rank, o in enumerate(outcomes)
        if o.kind != "right" and expected.error.__name__ not in o.classes
    ]
    return "\n".join([f"wrong in another way than {expected.reason}:", *others]) if others else ""


def _misses_refusal(expected: Expected, outcomes: Sequence[Outcome]) -> str:
    assert expected.error is not None
    wrong = [
        f"process {rank}: {o.kind}: {o.text}" for rank, o in enumerate(outcomes) if o.kind not in ("refused", "gone")
    ]
    named = any(
        expected.error.__name__ in outcome.classes and re.search(expected.says, outcome.text, re.DOTALL)
        for outcome in outcomes
    )
    if not named:
        wrong.append(f"no process raised {expected.error.__name__} that says {expected.says!r}:")
        wrong.extend(f"process {rank}: {o.classes[:1]} {o.text}" for rank, o in enumerate(outcomes))
    return "\n".join(wrong)


def assert_close(
    seen: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float = 1e-10
) -> None:
    """Raise AssertionError naming the first of the wanted numbers that is missing or farther away than ``tolerance``.

    Relative to the larger of 1 and the wanted number; NaN equals NaN.
    """
    for name, number in wanted.items():
        assert name in seen, f"{name} is missing; there are {sorted(seen)}"
        torch.testing.assert_close(
            seen[name].detach().cpu(),
            number.detach().cpu(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            check_dtype=False,
            msg=lambda text, name=name: f"{name}: {text}",
        )
