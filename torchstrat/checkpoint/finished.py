"""The end mark of a training: ``finished.json`` beside its checkpoints, for those who watch them.

``{"step": 1000}``: there will be no checkpoint after step 1000. Written by the training when it is done, taken away by
one that goes on from there.

A launcher that runs an evaluator beside a program leaves the mark for it when the program has ended well: the program
cannot know whether it will, and need not say it. `told_directories` is the launcher's side of that, `tell` the
program's.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from torchstrat.checkpoint.manifest import sync_folder
from torchstrat.core.errors import InvalidArgumentError

NAME = "finished.json"
_DIRECTORIES = "TORCHSTRAT_CHECKPOINT_DIRECTORIES"
"""A file of the launcher's, for the directories into which its program writes checkpoints."""


def mark_finished(directory: Path, step: int) -> None:
    """Say that ``step`` was the last one. It is on the disk when this returns, whole or not at all.

    Raises `InvalidArgumentError` where it cannot be written.
    """
    unfinished = directory / f".{NAME}.{uuid.uuid4().hex}"
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            json.dump({"step": step}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(directory / NAME)
        sync_folder(directory)
    except OSError as error:
        raise InvalidArgumentError(f"the end of training cannot be marked in {directory}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def clear_finished(directory: Path) -> None:
    """Training goes on. Nothing happens where there is no mark."""
    try:
        (directory / NAME).unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"{directory / NAME} cannot be removed: {error}") from error


def last_step(directory: Path) -> int | None:
    """The step at which training ended; None while it has not. Raises `InvalidArgumentError` for a mark by others."""
    file = directory / NAME
    try:
        step = json.loads(file.read_text(encoding="utf-8"))["step"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{file} cannot be read as the end mark of a training: {error!r}.") from error
    if isinstance(step, bool) or not isinstance(step, int):
        raise InvalidArgumentError(f"{file} says step={step!r}, which is no number of a step; remove the file.")
    return step


def tell(directory: Path) -> None:
    """This process has become the writer of ``directory``. Nothing happens where nobody wants to know."""
    file = os.environ.get(_DIRECTORIES)
    if file is not None:
        with contextlib.suppress(OSError), open(file, "a", encoding="utf-8") as stream:
            stream.write(f"{directory}\n")


@contextlib.contextmanager
def told_directories() -> Iterator[Callable[[], None]]:
    """Processes that are started in this block tell their directories. Gives the function that marks those."""
    before = os.environ.get(_DIRECTORIES)
    with tempfile.TemporaryDirectory(prefix="torchstrat-") as folder:
        file = Path(folder) / "directories"
        os.environ[_DIRECTORIES] = str(file)
        try:
            yield lambda: _mark_told(file)
        finally:
            if before is None:
                os.environ.pop(_DIRECTORIES, None)
            else:
                os.environ[_DIRECTORIES] = before


def _mark_told(file: Path) -> None:
    from torchstrat.checkpoint.numbered import NumberedCheckpoints

    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for directory in map(Path, dict.fromkeys(lines)):
        with contextlib.suppress(InvalidArgumentError):  # what cannot be marked is waited for, as before
            steps = NumberedCheckpoints(directory).steps()
            if steps and last_step(directory) is None:
                mark_finished(directory, steps[-1])
