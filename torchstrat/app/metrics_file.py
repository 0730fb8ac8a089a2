"""``metrics.jsonl``: the record of a run, a JSON object a line, which one run after the other may add to."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"

Record = dict[str, Any]
"""With an ``event``; `torchstrat.app.report` says which there are, and what each has."""


class MetricsFile:
    """Adds to the file in ``folder``, a line at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def begin(self, kept: list[Record]) -> None:
        """Start with these records, in place of what is there. However it ends, the file is the old or the new one."""
        part = self._path.with_name(f".{NAME}.part")
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        self.close()
        part.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """Return when all of it is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(folder: Path) -> list[Record]:
    """Of the run in ``folder``, in order; empty where there are none. One that was killed may have left half a line."""
    records: list[Record] = []
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / NAME).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return records


def records_until(folder: Path, step: int, epoch: int) -> list[Record]:
    """What the run in ``folder`` had recorded when it saved after ``step`` steps, in ``epoch``.

    What comes after the steps themselves, such as the evaluation of the epoch that the step ended, is done again by
    who goes on in that epoch; who goes on at the beginning of the next one does not.
    """
    return [
        record
        for record in read_records(folder)
        if record.get("step", step) < step
        or (record.get("step") == step and (record["event"] == "step" or record.get("epoch", epoch) < epoch))
    ]


def read_metrics(folder: Path, event: str) -> list[Record]:
    """The records of one kind, without their ``event``."""
    return [record for record in read_records(folder) if record.pop("event") == event]
