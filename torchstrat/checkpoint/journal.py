"""Where results go: ``metrics.jsonl``, and event files for TensorBoard beside it.

The lines of ``metrics.jsonl`` are also what an evaluator remembers when it starts again. One file for both means that
a result and the memory of it cannot come apart, whenever the process is killed::

    {"event": "evaluation", "step": 42, "checkpoint": "step-00000042", "metrics": {"accuracy": 0.93},
     "time": 1760000000.5, "seconds": 2.25, "fingerprint": "9a1b2c3d-512"}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchstrat.checkpoint.folder import WriterLock
from torchstrat.checkpoint.manifest import sync_folder
from torchstrat.core.errors import InvalidArgumentError

NAME = "metrics.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """One checkpoint's results. ``time``: when it was done, in seconds since 1970; ``seconds``: how long it took."""

    step: int
    checkpoint: Path
    metrics: Mapping[str, float]
    time: float
    seconds: float


class Journal:
    """The results so far. Without a ``log_dir`` they are kept in memory only, and without TensorBoard."""

    def __init__(self, log_dir: Path | None, *, tensorboard: bool) -> None:
        self._log_dir = log_dir
        self._lock = None if log_dir is None else WriterLock(log_dir, "SidecarEvaluator")
        self._wants_tensorboard = tensorboard and log_dir is not None
        self._descriptor: int | None = None
        self._writer: Any = None
        self._known: set[tuple[int, str]] = set()
        self.newest_step: int | None = None

    def __len__(self) -> int:
        return len(self._known)

    def has(self, step: int, fingerprint: str) -> bool:
        return (step, fingerprint) in self._known

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Reads what was written before, and keeps other evaluators out.

        Raises `InvalidArgumentError`: the file cannot be written, is another program's, or another evaluator's now.
        """
        try:
            if self._log_dir is not None and self._lock is not None:
                self._lock.take()
                self._open(self._log_dir)
            yield
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            if self._lock is not None:
                self._lock.release()

    def add(self, evaluation: Evaluation, fingerprint: str) -> None:
        """The result is on the disk when this returns."""
        # TensorBoard first: killed between the two, the checkpoint is evaluated again and its points drawn twice, at
        # the same place; the other way round they would be missing.
        self._draw(evaluation)
        line = {
            "event": "evaluation",
            "step": evaluation.step,
            "checkpoint": evaluation.checkpoint.name,
            "metrics": {name: value if math.isfinite(value) else None for name, value in evaluation.metrics.items()},
            "time": evaluation.time,
            "seconds": evaluation.seconds,
            "fingerprint": fingerprint,
        }
        if self._descriptor is not None:
            self._append(json.dumps(line).encode() + b"\n")
        self._remember(evaluation.step, fingerprint)

    def _remember(self, step: int, fingerprint: str) -> None:
        self._known.add((step, fingerprint))
        self.newest_step = step if self.newest_step is None else max(step, self.newest_step)

    def _open(self, log_dir: Path) -> None:
        file = log_dir / NAME
        try:
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            sync_folder(log_dir)
            self._read(self._descriptor, file)
        except OSError as error:
            raise InvalidArgumentError(f"the evaluator cannot write {file}: {error}") from error

    def _read(self, descriptor: int, file: Path) -> None:
        *lines, unfinished = file.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                self._remember(record["step"], record["fingerprint"])
            except (ValueError, KeyError, TypeError):
                raise InvalidArgumentError(
                    f"{file}, line {number}, is not a SidecarEvaluator's: {line[:80]!r}. Give the evaluator a log_dir "
                    "of its own, in which nothing else writes a file of this name."
                ) from None
        if unfinished:  # the power went in the middle of a line: its checkpoint counts as not evaluated
            os.ftruncate(descriptor, sum(len(line) + 1 for line in lines))

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None
        assert self._log_dir is not None
        before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):
                os.ftruncate(self._descriptor, before)
                raise OSError(f"only {written} of {len(line)} bytes could be written; is the disk full?")
            os.fsync(self._descriptor)
        except OSError as error:
            raise InvalidArgumentError(f"the evaluator cannot write {self._log_dir / NAME}: {error}") from error

    def _draw(self, evaluation: Evaluation) -> None:
        if not self._wants_tensorboard:
            return
        if self._writer is None:
            self._writer = self._make_writer()
        if self._writer is not None:
            for name, value in evaluation.metrics.items():
                self._writer.add_scalar(f"evaluation/{name}", value, evaluation.step, walltime=evaluation.time)
            self._writer.flush()

    def _make_writer(self) -> object:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._wants_tensorboard = False
            warnings.warn(
                f"TensorBoard is not installed: results go to {self._log_dir}/{NAME} alone. Install it (pip install "
                "tensorboard), or pass tensorboard=False.",
                RuntimeWarning,
            )
            return None
        return SummaryWriter(str(self._log_dir))
