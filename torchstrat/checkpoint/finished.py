"""The end mark of a training: ``finished.json`` beside its checkpoints, for those who watch them.

``{"step": 1000}``: there will be no checkpoint after step 1000. Written by the training when it is done, taken away by
one that goes on from there.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from torchstrat.checkpoint.manifest import sync_folder
from torchstrat.errors import InvalidArgumentError

NAME = "finished.json"


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
