"""Is a checkpoint what was written? Asked when restoring it has failed: does an older one help?"""

from __future__ import annotations

import json
from pathlib import Path

from torchstrat.checkpoint.manifest import FORMAT, NAME, check_file, read_manifest
from torchstrat.checkpoint.stored import open_checkpoint
from torchstrat.core.errors import InvalidArgumentError


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
