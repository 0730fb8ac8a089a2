"""Opening a checkpoint: it is there, complete, and its index is what was written."""

from __future__ import annotations

from pathlib import Path

from torchstrat.checkpoint.files import Stored, open_stored
from torchstrat.checkpoint.folder import existing
from torchstrat.checkpoint.manifest import check_file, read_manifest

INDEX = ".metadata"


def open_checkpoint(path: Path) -> Stored:
    """Reads the index; tensors stay where they are. Raises `InvalidArgumentError` for an incomplete checkpoint."""
    folder = existing(path)
    manifest = read_manifest(folder)
    files = manifest["files"] if manifest is not None else {}
    if INDEX in files:
        check_file(folder / INDEX, files[INDEX])
    return open_stored(folder, files)
