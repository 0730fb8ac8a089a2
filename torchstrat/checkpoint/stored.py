"""Opening a checkpoint: it is there, complete, and its index is what was written. Or a plain ``state_dict`` file.

Where restoring has failed, `damage_of` tells whether the checkpoint is what was written, or an older one may help.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torchstrat.checkpoint.folder import existing
from torchstrat.checkpoint.manifest import FORMAT, NAME, check_file, read_manifest
from torchstrat.checkpoint.plain import open_plain
from torchstrat.checkpoint.reading import INDEX, Stored, StoredFolder
from torchstrat.core.errors import InvalidArgumentError

__all__ = ["INDEX", "Stored", "damage_of", "open_checkpoint"]


def open_checkpoint(path: Path) -> Stored:
    """Reads the index; tensors stay where they are. Raises `InvalidArgumentError` for an incomplete checkpoint."""
    if path.is_file():
        return open_plain(path)
    folder = existing(path)
    manifest = read_manifest(folder)
    files = {} if manifest is None else manifest["files"]
    if INDEX in files:
        check_file(folder / INDEX, files[INDEX])
    if manifest is not None and manifest["format"] > 1 and manifest["byteorder"] == sys.byteorder:
        return StoredFolder(folder, files)
    # Imported here: what torchstrat writes now is read without it.
    from torchstrat.checkpoint.torch_folder import open_torch_folder

    return open_torch_folder(folder, files)


def damage_of(path: Path) -> str | None:
    """What is wrong with the checkpoint at ``path``, with the name of the file; None where nothing is. Reads all of it.

    One that a later version of torchstrat has written is not damaged. Of one without checksums (another program's) only
    the index can be told to be readable.
    """
    if _is_of_later_version(path):
        return None
    try:
        folder = open_checkpoint(path).folder
        manifest = read_manifest(folder)
        for name, check in manifest["files"].items() if manifest is not None else ():
            check_file(folder / name, check)
    except InvalidArgumentError as error:
        return str(error)
    return None


def _is_of_later_version(path: Path) -> bool:
    try:
        version = json.loads((path / NAME).read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(version, int) and version > FORMAT
