"""The numbered checkpoints of one training in one directory: what is there, deleting one, putting one aside, and the
mark that there will be no more.

The directory is the whole truth: what is there and complete counts, nothing else is kept on the side. A checkpoint that
is to go is first renamed to a name with a dot, in one step, and then deleted; what a killed process has left of that,
and of half-written checkpoints, the next writer sweeps away.

The mark is ``finished.json``, for those who watch the directory. ``{"step": 1000}``: there will be no checkpoint after
step 1000. It is written by the training when it is done, and taken away by one that goes on from there. A launcher that
runs an evaluator beside a program leaves the mark for it when the program has ended well: the program cannot know
whether it will, and need not say it. `told_directories` is the launcher's side of that, `tell` the program's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from torchstrat.checkpoint import disk
from torchstrat.checkpoint.manifest import sync_folder
from torchstrat.core.errors import InvalidArgumentError

_STEP = r"step-(0\d{7}|[1-9]\d{7,})"
_NAME = re.compile(_STEP, re.ASCII)
_REPLACED = re.compile(rf"\.{_STEP}\.replaced", re.ASCII)
_LEFTOVER = re.compile(rf"\.{_STEP}\.(writing|deleted)-.*", re.ASCII)


def step_of(name: str) -> int | None:
    """The step whose checkpoint has this name in its directory; None for another name: a number has eight digits, or
    as many as it needs."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


class NumberedCheckpoints:
    """``step-00000042`` and so on in ``directory``, which need not be there yet.

    ``complaints``: what could not be deleted. That is no reason for a training to end; somebody should be told.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.complaints: list[str] = []

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Of the complete ones, in order. Looks at names, not at contents."""
        from torchstrat.checkpoint.folder import is_checkpoint

        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InvalidArgumentError(f"the checkpoints in {self.directory} cannot be listed: {error}") from error
        # A killed process may have left a checkpoint under its second name, where restoring looks as well.
        matches = [(name, _NAME.fullmatch(name) or _REPLACED.fullmatch(name)) for name in names]
        numbers = {int(match[1]) for name, match in matches if match and is_checkpoint(self.directory / name)}
        return sorted(numbers)

    def incomplete(self) -> list[int]:
        """Steps of folders with the name of a checkpoint that have no metadata: a copy that was broken off, a disk
        that lost what was not synced, a program of torch.distributed.checkpoint that was killed."""
        from torchstrat.checkpoint.folder import is_checkpoint

        try:
            names = os.listdir(self.directory)
        except OSError:  # `steps` tells
            return []
        steps = {step_of(name) for name in names if not is_checkpoint(self.directory / name)}
        return sorted({step for step in steps if step is not None} - set(self.steps()))

    def sweep(self) -> None:
        """Remove what killed writers have left. Only where there is no other writer, and none of this process's saves
        is under way."""
        for entry in self.directory.iterdir():
            replaced = _REPLACED.fullmatch(entry.name)
            try:
                if replaced and not self.path(int(replaced[1])).exists():
                    disk.rename(entry, self.path(int(replaced[1])))
                elif replaced or _LEFTOVER.fullmatch(entry.name):
                    disk.remove_tree(entry)
            except OSError as error:
                self.complaints.append(f"{entry}, which an earlier process has left, cannot be removed: {error}")

    def delete(self, step: int) -> None:
        """A reader sees all of it or none."""
        from torchstrat.checkpoint.folder import remove_whole

        try:
            remove_whole(self.path(step))
        except OSError as error:
            self.complaints.append(f"the old checkpoint {self.path(step)} cannot be deleted: {error}")

    def put_aside(self, step: int) -> Path | None:
        """Give it a name that is no checkpoint's any more; returns that, None where it is gone already."""
        path, number = self.path(step), 1
        aside = path.with_name(f"{path.name}.aside")
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}.aside-{number}")
        if not path.exists():
            return None
        disk.rename(path, aside)
        disk.sync_folder(self.directory)
        return aside

    def put_back(self, step: int, aside: Path) -> None:
        """Where there is no other of this step by now."""
        path = self.path(step)
        try:
            if not path.exists():
                disk.rename(aside, path)
                disk.sync_folder(self.directory)
        except OSError as error:
            self.complaints.append(f"{aside} cannot be put back as {path}: {error}")


FINISHED = "finished.json"
_DIRECTORIES = "TORCHSTRAT_CHECKPOINT_DIRECTORIES"
"""A file of the launcher's, for the directories into which its program writes checkpoints."""


def mark_finished(directory: Path, step: int) -> None:
    """Say that ``step`` was the last one. It is on the disk when this returns, whole or not at all.

    Raises `InvalidArgumentError` where it cannot be written.
    """
    unfinished = directory / f".{FINISHED}.{uuid.uuid4().hex}"
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            json.dump({"step": step}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(directory / FINISHED)
        sync_folder(directory)
    except OSError as error:
        raise InvalidArgumentError(f"the end of training cannot be marked in {directory}: {error}") from error
    finally:
        with contextlib.suppress(OSError):  # where it could not be written, it may be no place to delete from either
            unfinished.unlink(missing_ok=True)


def clear_finished(directory: Path) -> None:
    """Training goes on. Nothing happens where there is no mark."""
    try:
        (directory / FINISHED).unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"{directory / FINISHED} cannot be removed: {error}") from error


def last_step(directory: Path) -> int | None:
    """The step at which training ended; None while it has not. Raises `InvalidArgumentError` for a mark by others."""
    file = directory / FINISHED
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
            stream.write(f"{json.dumps(str(directory))}\n")  # a name may have line breaks, or be of no encoding


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
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in dict.fromkeys(lines):
        with contextlib.suppress(ValueError):  # what cannot be read or marked is waited for, as before
            directory = Path(json.loads(line))
            steps = NumberedCheckpoints(directory).steps()
            if steps and last_step(directory) is None:
                mark_finished(directory, steps[-1])
