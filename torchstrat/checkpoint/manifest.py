"""What torchstrat notes of a checkpoint beside torch's own metadata: a checksum per file, and who wrote it.

``torchstrat.json``, written last. A folder without one is read too, if torch.distributed.checkpoint wrote it: its files
are then taken as they are.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchstrat.errors import InvalidArgumentError

NAME = "torchstrat.json"
FORMAT = 1
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileCheck:
    bytes: int
    crc32: int


def checked(file: Path) -> FileCheck:
    """Of the file as it is now. Raises `OSError`."""
    crc = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return FileCheck(size, crc)


def check_file(file: Path, expected: FileCheck) -> None:
    """Raise `InvalidArgumentError` where the file is not what was written."""
    try:
        found = checked(file)
    except OSError as error:
        raise InvalidArgumentError(f"{file}, a part of the checkpoint, cannot be read: {error}") from error
    if found.bytes != expected.bytes:
        raise InvalidArgumentError(
            f"{file} is damaged: it has {found.bytes:,} bytes, and {expected.bytes:,} were written."
        )
    if found != expected:
        raise InvalidArgumentError(
            f"{file} is damaged: its contents are not what was written (CRC-32 {found.crc32:08x}, not "
            f"{expected.crc32:08x})."
        )


def write_manifest(folder: Path, files: Mapping[str, FileCheck], written_by: Mapping[str, Any]) -> None:
    """``written_by``: plain data about the job, for people and for later."""
    content = {
        "format": FORMAT,
        "torch": torch.__version__,
        "files": {name: asdict(check) for name, check in files.items()},
        **written_by,
    }
    with (folder / NAME).open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None where there is none. Raises `InvalidArgumentError` for one that is damaged, or of a later format."""
    try:
        content: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
        version = content["format"]
        content["files"] = {name: FileCheck(**check) for name, check in content["files"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(f"{folder / NAME} is damaged: {error!r}.") from error
    if version != FORMAT:
        raise InvalidArgumentError(
            f"{folder} was written in format {version} of torchstrat's checkpoints, and this version reads format "
            f"{FORMAT}. Use the torchstrat that wrote it, or a later one."
        )
    return content


def sync_folder(folder: Path) -> None:
    """The names in a folder, too, are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
