"""Opening a checkpoint: it is there, complete, and its index is what was written. Or a plain ``state_dict`` file."""

from __future__ import annotations

import sys
from pathlib import Path

from torchstrat.checkpoint.folder import existing
from torchstrat.checkpoint.manifest import check_file, read_manifest
from torchstrat.checkpoint.plain import open_plain
from torchstrat.checkpoint.reading import INDEX, Stored, StoredFolder

__all__ = ["INDEX", "Stored", "open_checkpoint"]


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
