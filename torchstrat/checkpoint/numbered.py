"""The numbered checkpoints in one directory: what is there, deleting one, putting one aside.

The directory is the whole truth: what is there and complete counts, nothing else is kept on the side. A checkpoint that
is to go is first renamed to a name with a dot, in one step, and then deleted; what a killed process has left of that,
and of half-written checkpoints, the next writer sweeps away.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchstrat.checkpoint import disk
from torchstrat.core.errors import InvalidArgumentError

_NAME = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.replaced")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(writing|deleted)-.*")


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
        numbers = {
            int(match[1].removeprefix("step-"))
            for name, match in matches
            if match and is_checkpoint(self.directory / name)
        }
        return sorted(numbers)

    def incomplete(self) -> list[int]:
        """Steps of folders with the name of a checkpoint that have no metadata: a copy that was broken off, a disk
        that lost what was not synced, a program of torch.distributed.checkpoint that was killed."""
        from torchstrat.checkpoint.folder import is_checkpoint

        try:
            matches = [_NAME.fullmatch(name) for name in os.listdir(self.directory)]
        except OSError:  # `steps` tells
            return []
        found = {int(match[1]) for match in matches if match and not is_checkpoint(self.directory / match[0])}
        return sorted(found - set(self.steps()))

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
