"""One line of a click log: 40 fields with tabs between them, and what a model gets to see of them.

The format is that of Criteo's published logs: the label (1: clicked, 0: not), 13 integers, 26 categories as hexadecimal
32-bit numbers. An empty field is a missing value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

INTEGERS = 13
CATEGORIES = 26
FIELDS = 1 + INTEGERS + CATEGORIES

MISSING_CATEGORY = 1 << 32
"""Not a 32-bit number, hence no category's. A missing category is hashed like any other: that it is missing can tell
something."""

_INTEGER = rb"(?:-?\d{1,18})?"
_CATEGORY = rb"[0-9a-fA-F]{0,8}"
_LINE = re.compile(rb"[01](?:\t%b){%d}(?:\t%b){%d}" % (_INTEGER, INTEGERS, _CATEGORY, CATEGORIES))

ClickInputs = tuple[torch.Tensor, torch.Tensor]
"""Integers after `log_transform` ``(batch, 13)`` float32, and rows of the tables ``(batch, 26)`` int64."""


class ClickRow(NamedTuple):
    """An impression. Missing integers are 0, missing categories `MISSING_CATEGORY`."""

    clicked: bool
    integers: tuple[float, ...]
    categories: tuple[int, ...]


def parse(line: bytes) -> ClickRow:
    """The row in a line without its end. Raises `ValueError` saying what is wrong with the line."""
    if _LINE.fullmatch(line) is None:
        raise ValueError(_what_is_wrong(line))
    fields = line.split(b"\t")
    return ClickRow(
        clicked=fields[0] == b"1",
        integers=tuple([float(field or 0) for field in fields[1 : 1 + INTEGERS]]),
        categories=tuple([int(field, 16) if field else MISSING_CATEGORY for field in fields[1 + INTEGERS :]]),
    )


def _what_is_wrong(line: bytes) -> str:
    fields = line.split(b"\t")
    if len(fields) != FIELDS:
        return (
            f"{len(fields)} field(s), and {FIELDS} with tabs between them are needed: the label, {INTEGERS} integers, "
            f"{CATEGORIES} categories"
        )
    if fields[0] not in (b"0", b"1"):
        return f"the label is {_show(fields[0])}, and 1 (clicked) or 0 is needed"
    for number, field in enumerate(fields[1 : 1 + INTEGERS], start=1):
        if re.fullmatch(_INTEGER, field) is None:
            return f"integer {number} is {_show(field)}, and a whole number or nothing is needed"
    for number, field in enumerate(fields[1 + INTEGERS :], start=1):
        if re.fullmatch(_CATEGORY, field) is None:
            return f"category {number} is {_show(field)}, and at most 8 hexadecimal digits are needed"
    raise AssertionError(f"nothing is wrong with {line!r}")


def _show(field: bytes) -> str:
    text = field.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


@dataclass(frozen=True)
class CollateClicks:
    """Rows → a batch ``((integers, table_rows), labels)``, labels ``(batch,)`` float32."""

    category_rows: int

    def __call__(self, rows: list[ClickRow]) -> tuple[ClickInputs, torch.Tensor]:
        integers = log_transform(np.array([row.integers for row in rows]))
        table_rows = hash_categories(np.array([row.categories for row in rows], dtype=np.uint64), self.category_rows)
        labels = torch.tensor([row.clicked for row in rows], dtype=torch.float32)
        return (torch.from_numpy(integers), torch.from_numpy(table_rows)), labels


def log_transform(integers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """``sign(x) log(1 + |x|)``: counts span six orders of magnitude, and a few columns go below 0."""
    return (np.sign(integers) * np.log1p(np.abs(integers))).astype(np.float32)


def hash_categories(categories: npt.NDArray[np.uint64], category_rows: int) -> npt.NDArray[np.int64]:
    """Table rows in ``[0, category_rows)`` for categories ``(…, 26)``; the same number in two fields is two categories.

    All fields share the rows, so that a field of three categories takes three and one of millions the rest; sizing a
    table for each field would need their counts, which means reading the log. The mixer is splitmix64 (Steele, Lea and
    Flood, "Fast Splittable Pseudorandom Number Generators", 2014): a category's own low bits, taken modulo the rows,
    would send whole families of categories to one row.
    """
    fields = np.arange(categories.shape[-1], dtype=np.uint64) << np.uint64(33)  # above MISSING_CATEGORY
    mixed = categories + fields + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    table_rows: npt.NDArray[np.int64] = (mixed % np.uint64(category_rows)).astype(np.int64)
    return table_rows
