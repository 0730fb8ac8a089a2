"""Files that settings name."""

from __future__ import annotations

from pathlib import Path

from torchstrat.errors import InvalidArgumentError


def existing_file(path: str, setting: str) -> Path:
    """The file at ``path``, which ``setting`` names. Raises `InvalidArgumentError` when there is none."""
    file = Path(path).expanduser()
    if not file.is_file():
        found = "is a folder" if file.is_dir() else "does not exist"
        raise InvalidArgumentError(f"{setting}={path} {found} (looked in {file.resolve().parent}); name a file.")
    return file
