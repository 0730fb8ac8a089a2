"""How cells are judged, and which are in a sample."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.matrix.table import (
    RIGHT,
    Cell,
    Outcome,
    PlantedFault,
    Table,
    assert_close,
    documented,
    known_wrong,
    misses,
    observe,
    refused,
)
from torchstrat.errors import InvalidArgumentError, UnsupportedError


def fails(error: Exception):
    def check() -> None:
        raise error

    return check


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        (lambda: None, "right"),
        (lambda: assert_close({"a": torch.ones(2)}, {"a": torch.zeros(2)}), "different"),
        (lambda: assert_close({}, {"a": torch.zeros(2)}), "different"),
        (fails(InvalidArgumentError("no")), "refused"),
        (fails(RuntimeError("some error of PyTorch's")), "failed"),
    ],
)
def test_what_a_check_comes_to(check, kind):
    assert observe(Cell("row", "column", "place", check)).kind == kind


REFUSAL = refused(UnsupportedError, "no thing; use another", "not possible")
DIFFERENT = Outcome("different", "0 is not 1", ("AssertionError",))
SAYS_SO = Outcome("refused", "no thing; use another", ("UnsupportedError", "TorchstratError"))


@pytest.mark.parametrize(
    ("expected", "outcomes", "holds"),
    [
        (RIGHT, [Outcome("right")], True),
        (RIGHT, [Outcome("right"), Outcome("different", "0 is not 1")], False),
        (RIGHT, [SAYS_SO], False),
        (REFUSAL, [SAYS_SO], True),
        (REFUSAL, [SAYS_SO, Outcome("refused", "a rank has failed", ("LostReplicaError",))], True),
        (REFUSAL, [SAYS_SO, Outcome("right")], False),
        (REFUSAL, [Outcome("refused", "no", ("UnsupportedError",))], False),
        (REFUSAL, [Outcome("failed", "no thing; use another", ("RuntimeError",))], False),
        (REFUSAL, [Outcome("right")], False),
        (documented("by agreement", "is not"), [Outcome("right", warned=("that is not so",))], True),
        (documented("by agreement", "is not"), [Outcome("right")], False),
        (known_wrong("B5"), [Outcome("right"), DIFFERENT], True),
        (known_wrong("B5"), [Outcome("right"), Outcome("right")], False),
        (known_wrong("B5"), [DIFFERENT, Outcome("failed", "no end", ("RuntimeError",))], False),
        (known_wrong("B5"), [SAYS_SO], False),
        (known_wrong("B5", UnsupportedError), [Outcome("right"), SAYS_SO], True),
        (known_wrong("B5", UnsupportedError), [DIFFERENT], False),
    ],
)
def test_verdicts(expected, outcomes, holds):
    assert (not misses(expected, outcomes)) == holds


def table(rows="abc", columns="wxyz", **options) -> Table:
    def cells():
        for row in rows:
            for column in columns:
                for place in ("here", "there"):
                    expected = known_wrong("B5") if (row, column) == ("c", "z") else RIGHT
                    yield Cell(row, column, place, lambda: None, expected)

    return Table("letters", "Which letters?", cells, **options)


def test_a_sample_has_every_row_in_every_place_every_column_as_they_are_more_and_every_known_difference():
    letters = table(causes={"B5": "a cause"})
    sample = [letters.cells[cell_id] for cell_id in letters.sample]
    assert {cell.column for cell in sample} == set("wxyz")
    for place in ("here", "there"):
        assert {cell.row for cell in sample if cell.place == place} == set("abc")
        assert len({cell.column for cell in sample if cell.place == place}) >= 2
    assert any(cell.expected.reason == "B5" for cell in sample)
    assert len(sample) < len(letters.cells)


def test_a_sample_of_places_that_are_alike_has_every_row_and_column_once_and_each_place():
    in_each = table("abcd", causes={"B5": "a cause"}).sample
    of_both = table("abcd", causes={"B5": "a cause"}, alike=lambda _: "anywhere")
    sample = [of_both.cells[cell_id] for cell_id in of_both.sample]
    assert {cell.row for cell in sample} == set("abcd")
    assert {cell.column for cell in sample} == set("wxyz")
    assert {cell.place for cell in sample} == {"here", "there"}
    assert len(sample) < len(in_each)


def test_rows_that_are_more_than_columns_take_turns_with_the_places():
    long = table("abcdef", "xz", causes={"B5": "a cause"})
    sample = [long.cells[cell_id] for cell_id in long.sample]
    assert {cell.row for cell in sample} == set("abcdef")
    for place in ("here", "there"):
        assert {cell.column for cell in sample if cell.place == place} == set("xz")
        assert len({cell.row for cell in sample if cell.place == place}) >= 3


def test_a_sample_has_one_of_the_cells_that_notice_each_planted_fault():
    cells = ("b | w | there", "b | x | here")
    assert cells[0] not in table(causes={"B5": "a cause"}).sample
    assert (
        cells[0] in table(causes={"B5": "a cause"}, faults=(PlantedFault("a rule is off", nullcontext, cells),)).sample
    )


def test_a_known_difference_needs_its_cause():
    with pytest.raises(ValueError, match="B5"):
        _ = table().cells


def test_warnings_are_recorded():
    import warnings

    assert observe(Cell("row", "column", "place", lambda: warnings.warn("look"))).warned == ("look",)
