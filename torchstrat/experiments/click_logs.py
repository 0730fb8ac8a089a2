"""Click logs as data sets: rows by number out of a byte range of a file, without reading the file into memory.

A part of a log is a range of bytes, and holds the lines that begin in it. Splitting and sharing are arithmetic on
offsets; only when rows are asked for is the range, and nothing else, searched for line ends, once, without parsing
(about 1 GB a second). Rows by number rather than a stream, because then epochs have a known number of steps, the
strategies share rows by index, and loading processes do not end with a short batch each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from torch.utils.data import Dataset, Sampler

from torchstrat.config import require_positive
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments.click_rows import ClickRow, CollateClicks, parse
from torchstrat.experiments.data import Examples, existing_file, require_fraction
from torchstrat.experiments.scores import ClickMeter

_LINES_PER_ENTRY = 16
"""The index has the offset of every 16th line: half a byte of memory per row, and 4 KB read to find one."""

_CHUNK_BYTES = 4 << 20


class ClickLog(Dataset[ClickRow]):
    """The lines of ``path`` that begin at a byte in ``[begin, end)``; ``end=None`` is the end of the file.

    Cheap to make, copy and send to another process; the file is opened for each request, never kept open.
    """

    def __init__(self, path: Path, begin: int = 0, end: int | None = None) -> None:
        self.path = path
        self.begin = begin
        self.end = path.stat().st_size if end is None else end

    def part(self, first: float, last: float) -> ClickLog:
        """The rows between two fractions of this range, in bytes. Parts that adjoin share no row and lose none."""
        size = self.end - self.begin
        return ClickLog(self.path, self.begin + round(size * first), self.begin + round(size * last))

    def shard(self, num_shards: int, index: int) -> ClickLog:
        """Part ``index`` of ``num_shards`` of about equal size."""
        return self.part(index / num_shards, (index + 1) / num_shards)

    def __len__(self) -> int:
        return self._index.rows

    def __getitem__(self, index: int) -> ClickRow:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[ClickRow]:
        """The rows at ``indices``, in that order; each neighbourhood of the file is read once.

        Raises:
            InvalidArgumentError: a line is malformed; the message names the file and the line.
        """
        entries = self._index
        neighbourhoods: dict[int, list[bytes]] = {}
        rows = []
        with self.path.open("rb", buffering=0) as file:
            for index in indices:
                if not 0 <= index < entries.rows:
                    raise IndexError(
                        f"row {index} of {entries.rows} in bytes {self.begin} to {self.end} of {self.path}"
                    )
                entry, line = divmod(index, _LINES_PER_ENTRY)
                if entry not in neighbourhoods:
                    neighbourhoods[entry] = _read(file, *entries.starts[entry : entry + 2].tolist()).split(b"\n")
                rows.append(self._parse(neighbourhoods[entry][line], index))
        return rows

    def _parse(self, line: bytes, index: int) -> ClickRow:
        try:
            return parse(line.removesuffix(b"\r"))
        except ValueError as error:
            with self.path.open("rb") as file:
                before = sum(chunk.count(b"\n") for _, chunk in _chunks(file, 0, self.begin))
                # A range that begins inside a line does not hold that line.
                before += int(self.begin > 0 and _read(file, self.begin - 1, self.begin) != b"\n")
            raise InvalidArgumentError(f"{self.path}, line {before + index + 1}: {error}.") from error

    @cached_property
    def _index(self) -> _LineIndex:
        with self.path.open("rb", buffering=0) as file:
            return _index_lines(file, self.begin, self.end)


class _LineIndex(NamedTuple):
    rows: int
    starts: npt.NDArray[np.int64]
    """Offsets of lines 0, 16, 32, … and of the end of the last line."""


def _index_lines(file: IO[bytes], begin: int, end: int) -> _LineIndex:
    """The lines that begin in ``[begin, end)``. Line ends one byte before either are what begins them."""
    rows = int(begin == 0 and end > 0)
    starts = [np.zeros(rows, dtype=np.int64)]
    for offset, chunk in _chunks(file, max(begin - 1, 0), end - 1):
        found = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + (offset + 1)
        starts.append(found[-rows % _LINES_PER_ENTRY :: _LINES_PER_ENTRY])
        rows += len(found)
    return _LineIndex(rows, np.concatenate([*starts, [_end_of_line(file, end)]]))


def _end_of_line(file: IO[bytes], end: int) -> int:
    """Where the line ends that holds the byte before ``end``."""
    if end == 0:
        return 0
    file.seek(end - 1)
    while chunk := file.read(_CHUNK_BYTES):
        found = chunk.find(b"\n")
        if found >= 0:
            return file.tell() - len(chunk) + found + 1
    return file.tell()


def _chunks(file: IO[bytes], begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    for offset in range(begin, end, _CHUNK_BYTES):
        yield offset, _read(file, offset, min(offset + _CHUNK_BYTES, end))


def _read(file: IO[bytes], begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


class NearbyOrder(Sampler[int]):
    """A random order of a log's rows that reads the file in long strokes, drawn anew at each pass.

    Runs of adjacent rows come in random order, and the rows of 16 runs at a time are shuffled together. A log of fewer
    than 65,536 rows is shuffled as a whole. A full shuffle of a larger one would jump about a file that memory does not
    hold, for hardly less correlation between the rows of a batch.
    """

    RUN_ROWS = 4096
    RUNS_TOGETHER = 16

    def __init__(self, rows: int, generator: torch.Generator) -> None:
        self._rows = rows
        self._generator = generator

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[int]:
        if not self._rows:
            return
        begins = torch.randperm(-(-self._rows // self.RUN_ROWS), generator=self._generator) * self.RUN_ROWS
        for together in begins.split(self.RUNS_TOGETHER):
            rows = torch.cat(
                [torch.arange(begin, min(begin + self.RUN_ROWS, self._rows)) for begin in together.tolist()]
            )
            yield from rows[torch.randperm(len(rows), generator=self._generator)].tolist()


def load(path: str, test_path: str | None = None, category_rows: int = 1 << 16, test_fraction: float = 0.2) -> Examples:
    """The examples of a log in the format of Criteo's data sets, or of two. Reads the first line of each.

    The end of the log is held out, since a log is in order of time and what has to be predicted is the future.

    Args:
        test_path: A second log with the held-out rows, instead of ``test_fraction``.
        category_rows: Rows of the tables that categories are hashed into, over all 26 fields together.
    """
    require_positive("data.category_rows", category_rows)
    require_fraction(test_fraction)
    log = _open(path, "data.path")
    cut = 1.0 - test_fraction
    train, test = (
        (log.part(0.0, cut), log.part(cut, 1.0)) if test_path is None else (log, _open(test_path, "data.test_path"))
    )
    return Examples(
        train,
        test,
        {"category_rows": category_rows},
        loss=functional.binary_cross_entropy_with_logits,
        meter=ClickMeter,
        collate_fn=CollateClicks(category_rows),
        order=NearbyOrder,
    )


def _open(path: str, setting: str) -> ClickLog:
    file = existing_file(path, setting)
    with file.open("rb") as stream:
        first = stream.readline(1 << 16)
    if not first:
        raise InvalidArgumentError(f"{setting}={path} has no rows.")
    log = ClickLog(file)
    log._parse(first.removesuffix(b"\n"), 0)  # a file of another format is noticed here, before anything is started
    return log
