"""Rows of a click log: 13 counts, 26 categories, and whether there was a click.

The format is that of Criteo's published logs, a line each with tabs between 40 fields: the label (1 or 0), whole
numbers, hexadecimal numbers of 32 bits. An empty field is a missing value.
"""

import numpy as np
import torch
from torch.utils.data import Dataset

INTEGERS = 13
CATEGORIES = 26
MISSING = 1 << 32
"""Not a 32-bit number, hence no category's: that one is missing can tell something."""


class Clicks(Dataset):
    """Row: ``((counts (13,), table rows (26,)), label)``. Counts on a logarithmic scale; categories hashed."""

    def __init__(self, integers, categories, clicked, category_rows):
        logarithms = np.sign(integers) * np.log1p(np.abs(integers))
        self._integers = torch.from_numpy(logarithms.astype(np.float32))
        self._table_rows = torch.from_numpy(hash_categories(categories.astype(np.uint64), category_rows))
        self._clicked = torch.from_numpy(clicked.astype(np.float32))

    def __len__(self):
        return len(self._clicked)

    def __getitem__(self, index):
        return (self._integers[index], self._table_rows[index]), self._clicked[index]


def hash_categories(categories, category_rows):
    """Rows of one table for all fields, ``(…, 26)``; the same number in two fields is two categories.

    The mixer is splitmix64 (Steele, Lea and Flood, 2014): a number's own low bits would send whole families of
    categories to one row.
    """
    fields = np.arange(categories.shape[-1], dtype=np.uint64) << np.uint64(33)  # above MISSING
    mixed = categories + fields + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(category_rows)).astype(np.int64)


def read(path: str, category_rows: int = 1 << 16, test_fraction: float = 0.2):
    """The rows of a log, the last of which are held out: a log is in order of time, and the future is to be foretold.

    All of it is read into memory, 250 bytes a row.
    """
    with open(path, encoding="utf-8") as file:
        rows = [_row(line, f"{path}, line {number}") for number, line in enumerate(file, start=1)]
    clicked, integers, categories = (np.array(column) for column in zip(*rows, strict=True))
    cut = round(len(rows) * (1 - test_fraction))
    return tuple(
        Clicks(integers[part], categories[part], clicked[part], category_rows)
        for part in (slice(None, cut), slice(cut, None))
    )


def _row(line, where):
    fields = line.rstrip("\r\n").split("\t")
    if len(fields) != 1 + INTEGERS + CATEGORIES:
        raise ValueError(f"{where}: {len(fields)} field(s), and 40 with tabs between them are needed.")
    try:
        integers = [int(field or 0) for field in fields[1 : 1 + INTEGERS]]
        categories = [int(field, 16) if field else MISSING for field in fields[1 + INTEGERS :]]
        return ["0", "1"].index(fields[0]), integers, categories
    except ValueError as error:
        raise ValueError(f"{where}: {error}; a label 0 or 1, 13 whole and 26 hexadecimal numbers are needed.") from None


def synthetic(rows: int = 20_000, seed: int = 0, category_rows: int = 1 << 16):
    """Rows that a seeded generator draws, with something in them to learn; a fifth is held out.

    Frequencies of categories follow Zipf's law, so that a few rows of a table are in every batch and most in hardly
    any. A click's chance is a logistic function of a hidden weight for each category and for each count's logarithm.
    """
    rng = np.random.default_rng(seed)
    sizes = np.geomspace(3, 10_000, CATEGORIES).astype(int)
    integers = np.floor(np.exp(rng.normal(scale=1.5, size=(rows, INTEGERS)) + 1.0)).astype(np.int64)
    logits = np.log1p(integers) @ rng.normal(scale=0.15, size=INTEGERS)
    categories = np.empty((rows, CATEGORIES), dtype=np.int64)
    for field, size in enumerate(sizes):
        frequencies = 1 / np.arange(1, size + 1) ** 1.1
        categories[:, field] = rng.choice(size, size=rows, p=frequencies / frequencies.sum())
        logits += rng.normal(scale=0.4, size=size)[categories[:, field]]
    chance = 1 / (1 + np.exp(-(logits - logits.mean() - 1.4)))  # about a quarter of clicks
    clicked = rng.random(rows) < chance
    cut = round(rows * 0.8)
    return tuple(
        Clicks(integers[part], categories[part], clicked[part], category_rows)
        for part in (slice(None, cut), slice(cut, None))
    )
