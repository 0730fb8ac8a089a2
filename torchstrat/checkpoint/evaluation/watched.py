"""What is in a directory of checkpoints, while a training adds to it and deletes from it. Reads only, and little."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from torchstrat.checkpoint.folder import is_checkpoint
from torchstrat.checkpoint.manifest import NAME as MANIFEST
from torchstrat.core.errors import InvalidArgumentError

_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Found:
    """A checkpoint as it was when it was looked for.

    ``fingerprint``: of its contents, the same after a copy; another one when the step is saved again with other
    values, as a training does that went back to an earlier checkpoint. Empty while the checkpoint is incomplete.
    ``changed``: when something in the folder last came or went, in nanoseconds; tells an incomplete one from the same
    one, further on.
    """

    step: int
    folder: Path
    fingerprint: str
    changed: int


class WatchedDirectory:
    """A directory of folders ``step-00000042``, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[Path, tuple[tuple[int, int], Found]] = {}

    def checkpoints(self) -> list[Found]:
        """All that are there, by step. One that is deleted meanwhile is there or not. Raises `InvalidArgumentError`."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InvalidArgumentError(f"checkpoint_dir={self.path} cannot be read: {error}") from error
        before, self._known = self._known, {}
        for name in names:
            if step := _FOLDER.fullmatch(name):
                self._look_at(int(step[1]), self.path / name, before)
        return sorted((found for _, found in self._known.values()), key=lambda found: found.step)

    def forget(self, folder: Path) -> None:
        """Open this one again at the next look: its files were changed in place."""
        self._known.pop(folder, None)

    def _look_at(self, step: int, folder: Path, before: dict[Path, tuple[tuple[int, int], Found]]) -> None:
        """A folder whose own data is what it was is not opened again: there may be hundreds of them on a slow disk."""
        try:
            stat = folder.stat()
        except OSError:
            return
        identity = (stat.st_ino, stat.st_mtime_ns)
        known = before.get(folder)
        if known is None or known[0] != identity:
            known = identity, Found(step, folder, fingerprint(folder) or "", stat.st_mtime_ns)
        self._known[folder] = known


def fingerprint(folder: Path) -> str | None:
    """Of a checkpoint's contents: of the checksums of its files, so that it costs next to nothing. None where there is
    no complete checkpoint."""
    if not is_checkpoint(folder):
        return None
    for name in (MANIFEST, ".metadata"):  # torch.distributed.checkpoint by itself writes no checksums
        try:
            content = (folder / name).read_bytes()
        except OSError:
            continue
        return f"{zlib.crc32(content):08x}-{len(content)}"
    return None
